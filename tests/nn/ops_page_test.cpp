// Tests that docs/ops.md lists every public function and class, and no name that does not exist.
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

/// Returns the first group of each match of `pattern`.
Names all(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern, std::regex::ECMAScript | std::regex::multiline);
  Names names;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match)
    if ((*match)[1].matched) names.insert((*match)[1]);
  return names;
}

/// Appends a header and the project headers that it includes to `text`, without comments and detail namespaces.
void append(const fs::path& header, Names& seen, std::string& text) {
  if (!seen.insert(header.string()).second) return;
  std::string own = read(kRoot / header);
  EXPECT_FALSE(own.empty()) << header;
  const fs::path folder = header.extension() == ".in" ? "" : header.parent_path();
  for (const std::string& other : all(own, "^#include \"(?:@voxgrad_folder@)?(.*)\""))
    append((folder / other).lexically_normal(), seen, text);
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

/// Returns the names at the beginning of each entry of the page, without namespaces. An entry is a list item that
/// begins with names in backticks, separated by commas. Its lines after the first are indented.
Names documented() {
  const std::string page = std::regex_replace(read(kRoot / "docs/ops.md"), std::regex("\n  "), " ");
  Names names;
  for (const std::string& entry : all(page, "^- (`[^`]*`(?:, `[^`]*`)*)"))
    names.merge(all(entry, "`(?:\\w+::)*(\\w+)`"));
  return names;
}

TEST(OpsPage, ListsEveryPublicName) {
  const std::string& text = headers();
  Names wanted = all(text, "^(?:inline )?(?:const )?(?:Tensors?&?|Selection|\\w+Result) (?!operator)(\\w+)\\(");
  for (const std::string& name :
       all(text, "^class (\\w+) : public (?:Layer|Optimizer|Schedule|StepSchedule|Dataset|Sampler) ")) {
    Names forms = all(text, "^using (\\w+) = " + name + "<");  // list Conv3d = Conv<3> instead of Conv
    wanted.merge(forms.empty() ? Names{name} : forms);
  }
  EXPECT_GT(wanted.size(), 150u);
  const Names named = documented();
  for (const std::string& name : wanted) EXPECT_TRUE(named.contains(name)) << "docs/ops.md does not name " << name;
}

TEST(OpsPage, ListsOnlyExistingNames) {
  const std::string& text = headers();
  Names known = all(text, "(\\w+)\\(");
  known.merge(all(text, "(?:class|struct|using) (\\w+)"));
  EXPECT_GT(documented().size(), 150u);
  for (const std::string& name : documented())
    EXPECT_TRUE(known.contains(name)) << "docs/ops.md names " << name << ", which does not exist";
}

}  // namespace
