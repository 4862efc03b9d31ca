// docs/ops.md names what the public headers declare, and nothing else.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {
namespace fs = std::filesystem;
using Names = std::set<std::string>;

const fs::path kRoot = fs::path(TESTS_DIR).parent_path();

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// What each match has in its first group.
Names all(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern, std::regex::ECMAScript | std::regex::multiline);
  Names names;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match)
    if ((*match)[1].matched) names.insert((*match)[1]);
  return names;
}

/// A header of ours and those that it includes, without comments and namespaces for details.
void append(const fs::path& header, Names& seen, std::string& text) {
  if (!seen.insert(header.string()).second) return;
  std::string own = read(kRoot / header);
  EXPECT_FALSE(own.empty()) << header;
  const std::string root = "@voxgrad_folder@";  // of the includes of nn/voxgrad.h.in; others are relative
  for (const std::string& other : all(own, "^#include \"(.*)\""))
    append(other.starts_with(root) ? fs::path(other.substr(root.size()))
                                   : (header.parent_path() / other).lexically_normal(),
           seen, text);
  for (size_t begin; (begin = own.find("\nnamespace detail {")) != std::string::npos;)
    own.erase(begin, own.find("\n}  // namespace detail", begin) - begin);
  text += std::regex_replace(own, std::regex("//[^\n]*"), "");
}

const std::string& headers() {
  static const std::string text = [] {
    Names seen;
    std::string whole;
    append("nn/voxgrad.h.in", seen, whole);
    return whole;
  }();
  return text;
}

/// Those in backticks in the first cell of each row of a table, without namespaces.
Names documented() {
  Names names;
  for (const std::string& cell : all(read(kRoot / "docs/ops.md"), "^\\| (`[^|]*) \\|"))
    names.merge(all(cell, "`(?:\\w+::)*(\\w+)`"));
  return names;
}

TEST(OpsPage, NamesAllThatIsPublic) {
  const std::string& text = headers();
  Names wanted = all(text, "^(?:inline )?(?:const )?(?:Tensors?&?|Selection|\\w+Result) (?!operator)(\\w+)\\(");
  for (const std::string& name :
       all(text, "^class (\\w+) : public (?:Layer|Optimizer|Schedule|StepSchedule|Dataset|Sampler) ")) {
    Names forms = all(text, "^using (\\w+) = " + name + "<");  // Conv3d = Conv<3>, rather than Conv
    wanted.merge(forms.empty() ? Names{name} : forms);
  }
  EXPECT_GT(wanted.size(), 150u);
  const Names named = documented();
  for (const std::string& name : wanted) EXPECT_TRUE(named.contains(name)) << "docs/ops.md does not name " << name;
}

TEST(OpsPage, NamesNothingThatIsNotThere) {
  const std::string& text = headers();
  Names known = all(text, "(\\w+)\\(");
  known.merge(all(text, "(?:class|struct|using) (\\w+)"));
  EXPECT_GT(documented().size(), 150u);
  for (const std::string& name : documented()) EXPECT_TRUE(known.contains(name)) << "there is no " << name;
}

}  // namespace
