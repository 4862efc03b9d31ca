// Tests of distributed::environment(), which reads the variables that a launcher sets.
#include "nn/distributed/environment.h"

#include <stdlib.h>

#include <map>

#include "tests/support.h"

namespace voxgrad {
namespace {

using Variables = std::map<std::string, std::string>;

class EnvironmentTest : public testing::Test {
 protected:
  void SetUp() override { set({}); }
  void TearDown() override { set({}); }

  /// Sets these variables and removes the others.
  void set(const Variables& variables) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VOXGRAD_TOKEN"})
      unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }

  const Variables good_{
      {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};
};

TEST_F(EnvironmentTest, ReadsTheVariables) {
  EXPECT_FALSE(distributed::environment().has_value());
  set({{"MASTER_ADDR", "node0"}});  // a cluster may set MASTER_ADDR without starting ranks
  EXPECT_FALSE(distributed::environment().has_value());
  set(good_);
  const distributed::Environment e = distributed::environment().value();
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.world_size, 4);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.master_addr, "node0");
  EXPECT_EQ(e.master_port, 29500);
  EXPECT_EQ(e.token, "");
  Variables with_token = good_;
  with_token["VOXGRAD_TOKEN"] = "secret";
  set(with_token);
  EXPECT_EQ(distributed::environment()->token, "secret");
}

TEST_F(EnvironmentTest, RejectsMissingVariables) {
  for (const auto& [name, value] : good_) {
    Variables rest = good_;
    rest.erase(name);
    set(rest);
    EXPECT_ERROR(distributed::environment(), name + " is not set");
    rest[name] = "";
    set(rest);
    EXPECT_ERROR(distributed::environment(), name + " is not set");
  }
}

TEST_F(EnvironmentTest, RejectsInvalidValues) {
  const std::vector<std::pair<std::string, std::string>> bad{{"RANK", "4"},
                                                             {"RANK", "-1"},
                                                             {"RANK", "one"},
                                                             {"RANK", "1.5"},
                                                             {"RANK", " 1"},
                                                             {"WORLD_SIZE", "0"},
                                                             {"WORLD_SIZE", "-4"},
                                                             {"WORLD_SIZE", "4 "},
                                                             {"LOCAL_RANK", "4"},
                                                             {"LOCAL_RANK", "-1"},
                                                             {"MASTER_PORT", "0"},
                                                             {"MASTER_PORT", "http"},
                                                             {"MASTER_PORT", "65536"},
                                                             {"WORLD_SIZE", "99999999999"}};
  for (const auto& [name, value] : bad) {
    Variables variables = good_;
    variables[name] = value;
    set(variables);
    EXPECT_ERROR(distributed::environment(), name + " must be a whole number in [");
    EXPECT_ERROR(distributed::environment(), "got '" + value + "'");
  }
}

}  // namespace
}  // namespace voxgrad
