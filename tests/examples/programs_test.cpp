// The example programs, run as a user runs them: what they print and leave behind, how they refuse, stop and resume.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/nifti.h"
#include "core/safetensors.h"

namespace voxgrad {
namespace {
namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class Programs : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "voxgrad-examples-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  struct Result {
    int code;
    std::string output;  // both streams
  };

  /// Runs a program in the test's folder.
  Result run(const std::string& command) const {
    const fs::path log = folder_ / "log";
    const std::string line = "cd '" + folder_.string() + "' && '" EXAMPLES_DIR "/'" + command + " >log 2>&1 </dev/null";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(log)};
  }

  void expect_refused(const std::string& command, int code, const std::string& fragment) const {
    const Result result = run(command);
    EXPECT_EQ(result.code, code) << command << '\n' << result.output;
    EXPECT_NE(result.output.find(fragment), std::string::npos) << command << '\n' << result.output;
  }

  fs::path folder_;
};

const std::string kTiny = "superres --phantom --device cpu --batch 1 --patch 8 --channels 4 --layers 1 ";

TEST_F(Programs, QuickstartLearns) {
  const Result result = run("quickstart");
  EXPECT_EQ(result.code, 0) << result.output;
  double first = 0, last = 0;
  const char* text = result.output.c_str();
  EXPECT_EQ(std::sscanf(text, "step 0  loss %lf", &first), 1);
  EXPECT_EQ(std::sscanf(result.output.substr(result.output.rfind("step")).c_str(), "step 100  loss %lf", &last), 1);
  EXPECT_LT(last, first / 10);
  EXPECT_TRUE(load_safetensors(folder_ / "decoder.safetensors").contains("up.weight"));
}

TEST_F(Programs, KernelbenchRunsAllModelsReduced) {
  const Result result = run("kernelbench --device cpu --steps 1");
  EXPECT_EQ(result.code, 0) << result.output;
  for (const char* name : {"58 ", "61 ", "70 ", "72 ", "73 ", "77 "})
    EXPECT_NE(result.output.find(std::string("\n") + name), std::string::npos) << result.output;
  double forward = 0, backward = 0, step = 0, first = 0, last = 0, peak = 0;
  const std::string line = result.output.substr(result.output.find("\n61 "));
  EXPECT_EQ(std::sscanf(line.c_str(), " 61 [1, 64, 16, 16, 16] %lf %lf %lf %lf > %lf %lf", &forward, &backward, &step,
                        &first, &last, &peak),
            6)
      << line;
  EXPECT_GT(std::min({forward, backward, step, first, last, peak}), 0) << line;
}

TEST_F(Programs, SuperresLeavesItsResults) {
  const Result result = run(kTiny + "--steps 3 --out results");
  ASSERT_EQ(result.code, 0) << result.output;
  const fs::path out = folder_ / "results";
  EXPECT_NE(result.output.find("This is a phantom"), std::string::npos);
  EXPECT_NE(read(out / "report.md").find("phantom"), std::string::npos);
  EXPECT_EQ(read(out / "held-out.png").substr(1, 3), "PNG");
  const std::string losses = read(out / "losses.csv");
  EXPECT_EQ(std::count(losses.begin(), losses.end(), '\n'), 4);
  EXPECT_EQ(load_nifti(out / "phantom-superres.nii.gz").data.shape(), (Shape{128, 128, 128}));
  EXPECT_FALSE(load_safetensors(out / "model.safetensors").empty());
}

TEST_F(Programs, SuperresStoppedAndResumedGivesTheSameBits) {
  ASSERT_EQ(run(kTiny + "--steps 40 --out whole").code, 0);
  // A stop in the middle, as Ctrl-C makes it: the program gets its SIGINT once it has begun to print steps,
  // not once the log of the run before it is found.
  const std::string start = "sh -c 'rm log; \"" EXAMPLES_DIR
                            "/superres\" --phantom --device cpu --batch 1 --patch 8 "
                            "--channels 4 --layers 1 --steps 40 --out parts >log & "
                            "until grep -qs \"^step\" log; do sleep 0.01; done; kill -INT $!; wait $!'";
  const int status = std::system(("cd '" + folder_.string() + "' && " + start).c_str());
  const std::string log = read(folder_ / "log");
  if (WEXITSTATUS(status) != 0) {  // 0: it had finished before the signal came
    EXPECT_EQ(WEXITSTATUS(status), 130) << log;
    EXPECT_NE(log.find("--resume goes on"), std::string::npos) << log;
    expect_refused(kTiny + "--steps 41 --out parts --resume", 1, "was made with steps 40, now it is 41");
    const Result resumed = run(kTiny + "--steps 40 --out parts --resume");
    EXPECT_EQ(resumed.code, 0) << resumed.output;
  }
  EXPECT_EQ(read(folder_ / "whole/model.safetensors"), read(folder_ / "parts/model.safetensors"));
  EXPECT_EQ(read(folder_ / "whole/losses.csv"), read(folder_ / "parts/losses.csv"));
}

TEST_F(Programs, SuperresResumedAfterItsLastStepTakesNoMore) {
  ASSERT_EQ(run(kTiny + "--steps 3 --out out").code, 0);
  const std::string model = read(folder_ / "out/model.safetensors"), losses = read(folder_ / "out/losses.csv"),
                    checkpoint = read(folder_ / "out/checkpoint.safetensors");
  const Result again = run(kTiny + "--steps 3 --out out --resume");
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("all 3 steps were taken before"), std::string::npos) << again.output;
  EXPECT_EQ(read(folder_ / "out/model.safetensors"), model);
  EXPECT_EQ(read(folder_ / "out/losses.csv"), losses);
  EXPECT_EQ(read(folder_ / "out/checkpoint.safetensors"), checkpoint);

  std::ofstream(folder_ / "out/losses.csv") << losses.substr(0, losses.find("\n2,") + 1);
  const Result some = run(kTiny + "--steps 3 --out out --resume");
  EXPECT_NE(some.output.find("holds the losses of 1 of the 3 steps"), std::string::npos) << some.output;
}

TEST_F(Programs, MisuseExitsWith2) {
  for (const char* program : {"superres", "kernelbench"}) {
    expect_refused(std::string(program) + " --no-such-option", 2, "--no-such-option");
    const Result help = run(std::string(program) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.output.find("--device"), std::string::npos);
  }
  expect_refused("superres --steps 0", 2, "--steps");
  expect_refused("superres --steps many", 2, "--steps");
  expect_refused("superres --lr nan", 2, "--lr");
  expect_refused("superres --channels 6", 2, "multiple of 4");
  expect_refused("superres --phantom --volume x.nii", 2, "exclude each other");
  expect_refused("kernelbench --model 99", 2, "--model");
  expect_refused("kernelbench --dtype i32", 2, "--dtype");
  expect_refused("kernelbench --precision low", 2, "--precision");
  expect_refused("superres --precision tf32", 2, "--precision");
}

TEST_F(Programs, FailuresExitWith1) {
  expect_refused("superres --volume missing.nii", 1, "missing.nii");
  expect_refused("superres --volume .", 1, "directory");
  expect_refused("superres --phantom --device tpu", 1, "expected cpu, cuda or cuda:N, got 'tpu'");
  expect_refused("superres --phantom --device cuda:63", 1, "device cuda:63 asked for: ");
  expect_refused("kernelbench --device cuda:63", 1, "device cuda:63 asked for: ");
  expect_refused("kernelbench --device cpu --cuda-graph", 1, "--cuda-graph needs a GPU, the device is cpu");
  expect_refused("superres --phantom --device cpu --cuda-graph", 1, "--cuda-graph needs a GPU, the device is cpu");
  expect_refused(kTiny + "--out empty --resume", 1, "checkpoint.safetensors");
  std::ofstream(folder_ / "file") << "in the way";
  expect_refused(kTiny + "--steps 1 --out file", 1, "superres: ");
  std::ofstream(folder_ / "broken.nii") << "this is no volume";
  expect_refused("superres --volume broken.nii", 1, "broken.nii");
}

}  // namespace
}  // namespace voxgrad
