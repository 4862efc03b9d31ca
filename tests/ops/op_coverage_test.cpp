// Tests that the operator table has a case for each public function of ops/ that returns tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

/// Functions whose cases have names that do not begin with the name of the function.
const std::map<std::string, std::string> kCaseNames = {
    {"binary_cross_entropy_with_logits", "bce_with_logits"},
    {"conv_norm_activation", "conv3d_groups_relu_group_norm"},
    {"dice_ce_loss", "dice_ce"},
    {"dice_loss", "dice"},
    {"max_pool3d_with_indices", "max_pool3d_indices"},
    {"norm_activation", "relu_group_norm"},
    {"scaled_dot_product_attention", "attention"},
};

/// Functions that other tests cover: from_span creates the inputs of all cases, and the result of randperm is on the
/// CPU and has no dtype.
const std::set<std::string> kWithoutCase = {"from_span", "randperm"};

TEST(OpTableCases, CoverEveryPublicFunction) {
  const std::regex declaration("(?:^|\n)(?:inline )?(?:Tensors?|\\w+Result|Selection) (\\w+)\\(");
  std::set<std::string> functions;
  for (const auto& file : std::filesystem::directory_iterator(OPS_DIR)) {
    if (file.path().extension() != ".h") continue;
    std::ostringstream text;
    text << std::ifstream(file.path()).rdbuf();
    const std::string header = text.str();
    for (std::sregex_iterator match(header.begin(), header.end(), declaration), end; match != end; ++match)
      if ((*match)[1] != "operator") functions.insert((*match)[1]);
  }
  EXPECT_GT(functions.size(), 140u);
  for (const std::string& function : functions) {
    const auto known = kCaseNames.find(function);
    const std::string& name = known == kCaseNames.end() ? function : known->second;
    const bool covered = std::ranges::any_of(
        op_cases(), [&](const OpCase& c) { return c.name == name || c.name.starts_with(name + '_'); });
    EXPECT_TRUE(covered || kWithoutCase.contains(function)) << function << " has no case in tests/ops/op_cases_*.cpp";
  }
}

}  // namespace
}  // namespace voxgrad::optest
