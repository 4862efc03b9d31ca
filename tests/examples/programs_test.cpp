// Tests of the example programs: output, results, errors, interrupts and resuming.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <thread>

#include "core/io/nifti.h"
#include "core/io/safetensors.h"
#include "examples/common/output.h"
#include "tests/examples/programs.h"

namespace voxgrad {
namespace {

const std::string kTiny = "superres --phantom --device cpu --batch 1 --patch 8 --channels 4 --layers 1 ";

TEST_F(Programs, ProfilesStepsAfterTheWarmUp) {
  const Result result = run(kTiny + "--steps 8 --out out --profile");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_NE(result.output.find("conv_backward_weight"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("trace of 5 steps in trace.json"), std::string::npos) << result.output;
  EXPECT_NE(read(folder_ / "trace.json").find("SuperResolution."), std::string::npos);
  EXPECT_EQ(run("kernelbench --device cpu --model 77 --steps 3 --profile own.json").code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "own.json"));
  expect_failure("kernelbench --profile", 2, "--profile needs one --model");
}

TEST_F(Programs, QuickstartReducesTheLoss) {
  EXPECT_TRUE(run("quickstart --help").output.starts_with("Usage: quickstart"));
  EXPECT_FALSE(fs::exists(folder_ / "decoder.safetensors"));
  const Result result = run("quickstart");
  EXPECT_EQ(result.code, 0) << result.output;
  double first = 0, last = 0;
  const char* text = result.output.c_str();
  EXPECT_EQ(std::sscanf(text, "step 0  loss %lf", &first), 1);
  EXPECT_EQ(std::sscanf(result.output.substr(result.output.rfind("step")).c_str(), "step 100  loss %lf", &last), 1);
  EXPECT_LT(last, first / 10);
  EXPECT_TRUE(load_safetensors(folder_ / "decoder.safetensors").contains("up.weight"));
}

TEST_F(Programs, KernelbenchRunsAllModels) {
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

TEST_F(Programs, SuperresWritesItsResults) {
  const Result result = run(kTiny + "--steps 3 --out results");
  ASSERT_EQ(result.code, 0) << result.output;
  const fs::path out = folder_ / "results";
  EXPECT_NE(result.output.find("This is a phantom"), std::string::npos);
  EXPECT_NE(read(out / "report.md").find("phantom"), std::string::npos);
  EXPECT_NE(read(out / "report.md").find("(losses.png)"), std::string::npos);
  for (const char* picture : {"held-out.png", "losses.png"}) EXPECT_EQ(read(out / picture).substr(1, 3), "PNG");
  const std::string losses = read(out / "losses.csv");
  EXPECT_EQ(std::count(losses.begin(), losses.end(), '\n'), 4);
  EXPECT_EQ(load_nifti(out / "phantom-superres.nii.gz").data.shape(), (Shape{128, 128, 128}));
  EXPECT_FALSE(load_safetensors(out / "model.safetensors").empty());
}

TEST_F(Programs, SuperresResumesBitwise) { expect_same_bits_resumed(kTiny, "model.safetensors", "losses.csv"); }

TEST_F(Programs, SuperresResumesBitwiseInMixedPrecision) {
  expect_same_bits_resumed(kTiny + "--precision f16 ", "model.safetensors", "losses.csv");
  const TensorMap whole = load_safetensors(folder_ / "whole/checkpoint.safetensors"),
                  parts = load_safetensors(folder_ / "parts/checkpoint.safetensors");
  EXPECT_EQ(whole.at("scaler.scale").item(), parts.at("scaler.scale").item());
  EXPECT_EQ(whole.at("scaler.growth_tracker").item(), parts.at("scaler.growth_tracker").item());
  EXPECT_GT(whole.at("scaler.growth_tracker").item(), 20);  // steps without an overflow
}

// Mixed precision changes the losses only slightly, and the output names the precision.
TEST_F(Programs, SuperresTrainsInMixedPrecision) {
  const auto losses = [&](const std::string& precision) {
    const Result result = run(kTiny + "--steps 3 --precision " + precision + " --out " + precision);
    EXPECT_EQ(result.code, 0) << result.output;
    const bool half = precision != "highest";
    const std::string precision_text = half ? "in " + precision + " (autocast)" : "in float32";
    EXPECT_NE(result.output.find(precision_text), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find(" in " + precision + "  ") != std::string::npos, half) << result.output;
    EXPECT_NE(read(folder_ / precision / "report.md").find(precision_text), std::string::npos);
    std::array<double, 3> values{};
    const std::string text = read(folder_ / precision / "losses.csv");
    EXPECT_EQ(std::sscanf(text.c_str(), "step,loss,learning_rate\n1,%lf,%*f\n2,%lf,%*f\n3,%lf", &values[0], &values[1],
                          &values[2]),
              3)
        << text;
    return values;
  };
  const std::array<double, 3> exact = losses("highest");
  for (const char* precision : {"bf16", "f16"}) {
    const std::array<double, 3> rounded = losses(precision);
    EXPECT_NE(rounded, exact) << precision;
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(rounded[i], exact[i], 0.05 * exact[i]) << precision;
  }
}

TEST_F(Programs, KernelbenchTrainsInMixedPrecision) {
  for (const std::string precision : {"bf16", "f16"}) {
    const Result result = run("kernelbench --device cpu --model 61 --steps 2 --precision " + precision);
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(result.output.find(precision + " (autocast) on cpu"), 0u) << result.output;
    double first = 0, last = 0;
    const size_t line = result.output.find("\n61 ");
    ASSERT_NE(line, std::string::npos) << result.output;
    EXPECT_EQ(std::sscanf(result.output.c_str() + line, " 61 [1, 64, 16, 16, 16] %*f %*f %*f %lf > %lf", &first, &last),
              2)
        << result.output;
    EXPECT_LT(last, first);
  }
}

TEST_F(Programs, ResumedSuperresDoesNotExceedItsSteps) {
  ASSERT_EQ(run(kTiny + "--steps 3 --out out").code, 0);
  const std::string model = read(folder_ / "out/model.safetensors"), losses = read(folder_ / "out/losses.csv"),
                    checkpoint = read(folder_ / "out/checkpoint.safetensors");
  const Result again = run(kTiny + "--steps 3 --out out --resume");
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("the checkpoint already has all 3 steps"), std::string::npos) << again.output;
  EXPECT_EQ(read(folder_ / "out/model.safetensors"), model);
  EXPECT_EQ(read(folder_ / "out/losses.csv"), losses);
  EXPECT_EQ(read(folder_ / "out/checkpoint.safetensors"), checkpoint);

  expect_failure(kTiny + "--steps 3 --out out --resume --precision f16", 1,
                 "was written with precision = highest, but this run has precision = f16");
  std::ofstream(folder_ / "out/losses.csv") << losses.substr(0, losses.find("\n2,") + 1);
  const Result some = run(kTiny + "--steps 3 --out out --resume");
  EXPECT_NE(some.output.find("holds the losses of 1 of the 3 steps"), std::string::npos) << some.output;
}

TEST_F(Programs, WritesTensorBoardEventFiles) {
  const auto events = [&](const char* folder) {  // the contents of all files in the folder
    std::string text;
    for (const auto& entry : fs::directory_iterator(folder_ / folder)) text += read(entry.path());
    return text;
  };
  ASSERT_EQ(run(kTiny + "--steps 3 --out out --tensorboard tb/superres").code, 0);
  for (const char* tag : {"loss", "learning rate", "held-out/PSNR", "PNG"})
    EXPECT_NE(events("tb/superres").find(tag), std::string::npos) << tag;
  ASSERT_EQ(run("kernelbench --model 72 --device cpu --steps 1 --size reduced --tensorboard tb/bench").code, 0);
  for (const char* tag : {"model 72/loss", "model 72/backward ms"})
    EXPECT_NE(events("tb/bench").find(tag), std::string::npos) << tag;
  expect_failure(kTiny + "--steps 3 --out out --tensorboard log", 1, "cannot create the folder 'log'");
}

TEST_F(Programs, SuperresRejectsAFolderInUse) {
  fs::create_directory(folder_ / "shared");
  const int lock = open((folder_ / "shared").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  expect_failure(kTiny + "--steps 1 --out shared", 1, "'shared' is in use by another run");
  close(lock);
  EXPECT_EQ(run(kTiny + "--steps 1 --out shared").code, 0);
}

TEST_F(Programs, RemovingFilesKeepsTheFolderLocked) {
  const fs::path shared = folder_ / "shared";
  {
    const examples::OutputFolder first(shared);
    EXPECT_THROW(examples::OutputFolder{shared}, Error);
    for (const auto& entry : fs::directory_iterator(shared)) fs::remove_all(entry);
    fs::remove(shared / ".lock");
    EXPECT_THROW(examples::OutputFolder{shared}, Error);
    EXPECT_THROW(examples::OutputFolder{folder_ / "shared/../shared"}, Error);
    const examples::OutputFolder other(folder_ / "other");
  }
  EXPECT_NO_THROW(examples::OutputFolder{shared});
}

TEST_F(Programs, FailsIfOutputCannotBeWritten) {
  for (const char* command : {"superres --help", "kernelbench --device cpu --model 73 --steps 1", "quickstart"}) {
    const Result result = run(command, ">/dev/full 2>log");
    EXPECT_EQ(result.code, 1) << command;
    EXPECT_EQ(result.output, "standard output could not be written\n") << command;
  }
}

// The program writes to a full pipe that is never read. The program must still train, and one signal must end it. The
// number of steps, 2^40, also checks that the program does not store a permutation of all patches.
TEST_F(Programs, SuperresStopsWhileItsOutputIsNotRead) {
  const std::string command = "cd '" + folder_.string() +
                              "' && echo $$ >pid && head -c 65536 /dev/zero && exec '" EXAMPLES_DIR "/'" + kTiny +
                              "--steps 1099511627776 --out out 2>log";
  FILE* unread = popen(command.c_str(), "r");
  ASSERT_NE(unread, nullptr);
  const auto within = [](int seconds, const auto& condition) {
    for (int i = 0; i < 100 * seconds && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return condition();
  };
  EXPECT_TRUE(within(60, [&] { return fs::exists(folder_ / "out/checkpoint.safetensors"); }));
  const pid_t process = std::stoi(read(folder_ / "pid"));
  kill(process, SIGTERM);
  int status = 0;
  pid_t ended = 0;
  EXPECT_TRUE(within(120, [&] { return ended != 0 || (ended = waitpid(process, &status, WNOHANG)) != 0; }));
  if (ended == 0) kill(process, SIGKILL);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << status << read(folder_ / "log");
  pclose(unread);
}

TEST_F(Programs, InvalidOptionsExitWith2) {
  for (const char* program : {"superres", "kernelbench"}) {
    expect_failure(std::string(program) + " --no-such-option", 2, "--no-such-option");
    const Result help = run(std::string(program) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.output.find("--device"), std::string::npos);
  }
  expect_failure("superres --steps 0", 2, "--steps");
  expect_failure("superres --phantom --gpus 2 --profile trace.json", 2, "--profile needs a single GPU, got --gpus 2");
  expect_failure("superres --phantom --gpus 1 --device cuda:1", 2,
                 "--gpus 1 uses the first GPUs, so --device must be auto or cuda, got cuda:1");
  expect_failure("superres --steps many", 2, "--steps");
  expect_failure("superres --phantom --steps 4294967296 --batch 4294967296", 2, "--batch");
  expect_failure("superres --steps 18446744073709551617", 2, "--steps");
  for (const char* seed : {"-1", "18446744073709551616", "1e3", "010"})
    expect_failure(std::string("superres --seed ") + seed, 2, "is not a whole number from 0 to 2^64 - 1");
  for (const char* option : {"--volume", "--test-volume", "--out"})
    expect_failure(std::string("superres ") + option + " ''", 2, std::string(option) + ": must not be empty");
  for (const char* program : {"superres", "kernelbench"})
    expect_failure(std::string(program) + " --device gpu", 2, "expected cpu, cuda or cuda:N, got 'gpu'");
  for (const char* rate : {"nan", "inf", "0", "11", "1e-3x"})
    expect_failure(std::string("superres --lr ") + rate, 2,
                   std::string("--lr: ") + rate + " is not a number from 1e-09 to 10");
  expect_failure("superres --channels 6", 2, "multiple of 4");
  expect_failure("superres --phantom --volume x.nii", 2, "exclude each other");
  expect_failure("kernelbench --model 99", 2, "--model");
  expect_failure("kernelbench --dtype i32", 2, "--dtype");
  expect_failure("kernelbench --precision low", 2, "--precision");
  expect_failure("superres --precision tf32", 2, "--precision");
  expect_failure("kernelbench --precision bf16 --dtype f64", 2, "--precision bf16 needs --dtype f32");
}

TEST_F(Programs, FailuresExitWith1) {
  expect_failure("superres --volume missing.nii", 1, "missing.nii");
  expect_failure("superres --volume .", 1, "directory");
  expect_failure("superres --phantom --device cuda:63", 1, "cuda:63 is not available: ");
  expect_failure("kernelbench --device cuda:63", 1, "cuda:63 is not available: ");
  expect_failure("kernelbench --device cpu --cuda-graph", 1, "--cuda-graph needs a GPU, but the device is cpu");
  expect_failure(kTiny + "--out empty --resume", 1, "checkpoint.safetensors");
  std::ofstream(folder_ / "file") << "in the way";
  expect_failure(kTiny + "--steps 1 --out file", 1, "superres: ");
  fs::create_directories(folder_ / "blocked/report.md");
  expect_failure(kTiny + "--steps 1 --out blocked", 1, "report.md': it is a directory");
  EXPECT_FALSE(fs::exists(folder_ / "blocked/model.safetensors"));
  std::ofstream(folder_ / "broken.nii") << "this is no volume";
  expect_failure("superres --volume broken.nii", 1, "broken.nii");
}

}  // namespace
}  // namespace voxgrad
