// Tests of complete training runs on up to 4 ranks, with MPI and with NCCL: results, resuming from checkpoints, and
// failures.
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "core/io/safetensors.h"
#include "cuda/cuda.h"
#include "nn/distributed/communicator.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

namespace fs = std::filesystem;

class Launch : public testing::Test {
 protected:
  void SetUp() override {
    if (!distributed::mpi_available()) GTEST_SKIP() << "built without MPI";
    make_folder();
  }
  void make_folder() {
    std::string pattern = (fs::temp_directory_path() / "voxgrad-parallel-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  struct Result {
    int code;
    double seconds;
    std::string output;  // stdout and stderr
  };

  /// Runs a shell command in the test's temporary folder.
  Result run_line(const std::string& line) const {
    const auto start = std::chrono::steady_clock::now();
    const int status = std::system(("cd '" + folder_.string() + "' && { " + line + "; } >log 2>&1 </dev/null").c_str());
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::ifstream file(folder_ / "log");
    std::ostringstream text;
    text << file.rdbuf();
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, time.count(), text.str()};
  }
  /// Runs the test program on `ranks` ranks under mpirun.
  Result run(int ranks, const std::string& options, const std::string& environment = "") const {
    return run_line(environment + concat(" '" MPIEXEC "' -n ", ranks, " '" PROGRAM "' ") + options);
  }

  /// Trains on `ranks` ranks, expects success, and returns the results that the program saved.
  TensorMap train(int ranks, const std::string& options = "") const {
    const Result result = run(ranks, options + " out=out.safetensors");
    EXPECT_EQ(result.code, 0) << result.output;
    return load_safetensors(folder_ / "out.safetensors");
  }

  /// Expects that the run failed within 20 seconds and that its output contains `words` exactly once.
  void expect_failure(const Result& result, const std::string& words) const {
    EXPECT_NE(result.code, 0) << result.output;
    EXPECT_LT(result.seconds, 20) << result.output;
    const size_t place = result.output.find(words);
    EXPECT_NE(place, std::string::npos) << words << "\nis missing in\n" << result.output;
    EXPECT_EQ(result.output.find(words, place + 1), std::string::npos) << words << "\noccurs twice in\n"
                                                                       << result.output;
  }

  fs::path folder_;
};

double difference(const Tensor& a, const Tensor& b) { return abs(a - b).amax().item() / abs(b).amax().item(); }

void expect_close(const TensorMap& a, const TensorMap& b, double tolerance) {
  for (const auto& [name, tensor] : b) EXPECT_LE(difference(a.at(name), tensor), tolerance) << name;
}

void expect_equal(const TensorMap& a, const TensorMap& b) {
  for (const auto& [name, tensor] : b) EXPECT_EQ(a.at(name).to_vector(), tensor.to_vector()) << name;
}

TEST_F(Launch, OneTwoAndFourRanksGiveTheSameResults) {
  const TensorMap one = train(1), two = train(2), four = train(4);
  EXPECT_EQ(one.at("losses").numel(), 50);
  EXPECT_LT(one.at("losses").at({-1}), 0.8 * one.at("losses").at({0}));
  for (const TensorMap& more : {two, four}) {
    expect_close(more, one, 2e-5);
    EXPECT_EQ(more.at("samples").to_vector(), one.at("samples").to_vector());
    // The order of summation depends on the number of ranks, so the results are not bitwise equal.
    EXPECT_GT(difference(more.at("first.weight"), one.at("first.weight")), 0);
  }
  expect_equal(train(2), two);
  expect_equal(train(4), four);
}

TEST_F(Launch, ResumesWithinAnEpochOnADifferentNumberOfRanks) {
  const TensorMap whole = train(1);
  train(2, "checkpoint=run steps=13");
  const TensorMap rest = train(4, "checkpoint=run");
  EXPECT_EQ(rest.at("samples").to_vector(), whole.at("samples").slice(0, 13 * 8, 50 * 8).to_vector());
  EXPECT_LE(difference(rest.at("losses"), whole.at("losses").slice(0, 13, 50)), 2e-5);
  EXPECT_LE(difference(rest.at("first.weight"), whole.at("first.weight")), 2e-5);
}

TEST_F(Launch, ResumesBitwiseAfterARankWasKilled) {
  const TensorMap whole = train(2);
  for (const int rank : {1, 0}) {
    fs::remove(folder_ / "run");
    const Result killed = run(2, concat("checkpoint=run every=5 fail=kill at=23 rank=", rank));
    EXPECT_NE(killed.code, 0) << killed.output;
    EXPECT_LT(killed.seconds, 20) << killed.output;
    const TensorMap rest = train(2, "checkpoint=run");
    EXPECT_EQ(rest.at("losses").to_vector(), whole.at("losses").slice(0, 20, 50).to_vector());
    EXPECT_EQ(rest.at("first.weight").to_vector(), whole.at("first.weight").to_vector());
  }
}

TEST_F(Launch, AnExceptionOnOneRankEndsAllRanks) {
  for (const int rank : {0, 1, 3}) {
    const Result result = run(4, concat("checkpoint=run every=1 fail=throw rank=", rank));
    expect_failure(result, concat("rank ", rank, " of 4 on host "));
    expect_failure(result, ": program: thrown on demand\n");
    // The checkpoint is complete. The step of the checkpoint is 3, or 2 if rank 0 was stopped before step 3 was saved.
    Metadata metadata;
    load_safetensors(folder_ / "run", Device::cpu(), &metadata);
    EXPECT_GE(std::stoi(metadata.at("step")), 2);
    fs::remove(folder_ / "run");
  }
}

TEST_F(Launch, TimeoutNamesTheRankThatHangs) {
  const Result result = run(4, "timeout=1 fail=hang rank=2");
  expect_failure(result, "rank 0 of 4 on host ");
  expect_failure(result, "rank 2 did not join within 1 s");
}

TEST_F(Launch, ARankThatExitsEndsAllRanks) {
  const Result result = run(2, "fail=exit");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_LT(result.seconds, 20) << result.output;
}

TEST_F(Launch, ReportsDifferentModelsOnce) {
  const Result result = run(3, "fail=model out=out.safetensors");
  expect_failure(result,
                 "DataParallel: the ranks' models differ: rank 1 has parameter first.weight, [8, 1, 3, 3, 3] f32, "
                 "where rank 0 has parameter first.weight, [4, 1, 3, 3, 3] f32");
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

TEST_F(Launch, ReportsDifferentCalls) {
  expect_failure(run(4, "fail=operation"),
                 "all_reduce: the ranks' calls differ: ranks 0, 2, 3 call all_reduce (sum) of [3] f32; rank 1 calls "
                 "all_reduce (max) of [3] f32\n");
  expect_failure(
      run(2, "fail=shape"),
      "the ranks' calls differ: rank 0 calls all_reduce (max) of [3] f32; rank 1 calls all_reduce (max) of [5] f32\n");
  expect_failure(
      run(2, "fail=kind"),
      "the ranks' calls differ: rank 0 calls all_reduce (sum) of [3] f32; rank 1 calls broadcast of [3] f32 from "
      "rank 1\n");
  expect_failure(
      run(2, "fail=slab"),
      "send_receive: the ranks' calls differ: rank 0 calls send_receive of planes of [1, 1, 4, 4, 4], 64 bytes to "
      "rank 1, 64 bytes from rank 1; rank 1 calls send_receive of planes of [1, 1, 5, 4, 4]");
}

TEST_F(Launch, CompletesAReductionWithoutWait) {
  for (const int ranks : {1, 2, 4}) {
    const Result result = run(ranks, "fail=drop steps=1");
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

TEST_F(Launch, RejectsInvalidEnvironments) {
  const std::string good = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 ";
  const auto expect_rejected = [&](const Result& result, const std::string& words) {
    EXPECT_NE(result.code, 0) << result.output;
    EXPECT_LT(result.seconds, 20) << result.output;
    EXPECT_NE(result.output.find(words), std::string::npos) << result.output;
  };
  expect_rejected(run_line(good + "'" PROGRAM "'"), "WORLD_SIZE is 2, but MPI has 1 rank;");
  expect_rejected(run(2, "", good), "RANK is 0, but MPI's rank is 1");
  expect_rejected(run(2, "", good + "WORLD_SIZE=3"), "WORLD_SIZE is 3, but MPI has 2");
  expect_rejected(run(2, "", good + "MASTER_ADDR="), "MASTER_ADDR is not set");
  expect_rejected(run_line("RANK=0 '" PROGRAM "'"), "WORLD_SIZE is not set");
  expect_rejected(run_line("PMI_SIZE=2 '" PROGRAM "'"), "the launcher set PMI_SIZE to 2, but MPI has 1 rank;");
  expect_rejected(run_line("SLURM_STEP_NUM_TASKS=2 '" PROGRAM "'"), "try srun --mpi=pmix");
  EXPECT_EQ(run_line("SLURM_STEP_NUM_TASKS=1 '" PROGRAM "' steps=1").code, 0);
}

/// Runs the program on two ranks with NCCL and the environment variables of torchrun. On a machine with one GPU, both
/// ranks use this GPU. NCCL accepts this because the ranks have different values of NCCL_HOSTID, as if they ran on two
/// machines.
class LaunchOnGpu : public Launch {
 protected:
  void SetUp() override {
    if (!distributed::nccl_available()) GTEST_SKIP() << "built without NCCL";
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
    make_folder();
  }
  Result run_two(const std::string& options) {
    const bool two_gpus = cuda::device_count() > 1;
    return run_line(
        concat("export WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=", ++port_, " NCCL_SOCKET_IFNAME=lo; ",
               two_gpus ? "RANK=1 LOCAL_RANK=1 '" : "RANK=1 LOCAL_RANK=0 NCCL_HOSTID=b '", PROGRAM "' device=cuda ",
               options, " & RANK=0 LOCAL_RANK=0 ", two_gpus ? "'" : "NCCL_HOSTID=a '", PROGRAM "' device=cuda ",
               options, "; a=$?; wait $!; exit $((a + $?))"));
  }
  TensorMap train_two(const std::string& options = "") {
    const Result result = run_two(options + " out=out.safetensors");
    EXPECT_EQ(result.code, 0) << result.output;
    return load_safetensors(folder_ / "out.safetensors");
  }

 private:
  int port_ = 20000 + 10 * (::getpid() % 3000);
};

TEST_F(LaunchOnGpu, OneAndTwoRanksGiveTheSameResults) {
  EXPECT_EQ(run_line("'" PROGRAM "' launch=1 out=out.safetensors").code, 0);
  const TensorMap one = load_safetensors(folder_ / "out.safetensors"), two = train_two();
  EXPECT_LT(one.at("losses").at({-1}), 0.8 * one.at("losses").at({0}));
  expect_close(two, one, 2e-5);
  EXPECT_EQ(two.at("samples").to_vector(), one.at("samples").to_vector());
  expect_equal(train_two(), two);
  if (cuda::device_count() < 2) return;
  const Result threads = run_line("'" PROGRAM "' launch=2 out=out.safetensors");
  EXPECT_EQ(threads.code, 0) << threads.output;
  expect_equal(load_safetensors(folder_ / "out.safetensors"), two);
}

TEST_F(LaunchOnGpu, ResumesBitwiseAfterARankWasKilled) {
  const TensorMap whole = train_two();
  const Result killed = run_two("checkpoint=run every=5 fail=kill at=23");
  expect_failure(killed, "rank 0 of 2 on host ");
  expect_failure(killed, "rank 1: its process ended");
  const TensorMap rest = train_two("checkpoint=run");
  EXPECT_EQ(rest.at("losses").to_vector(), whole.at("losses").slice(0, 20, 50).to_vector());
  EXPECT_EQ(rest.at("first.weight").to_vector(), whole.at("first.weight").to_vector());
}

TEST_F(LaunchOnGpu, ReportsTheRankThatFails) {
  expect_failure(run_two("fail=throw"), ": program: thrown on demand\n");
  expect_failure(run_two("fail=exit"), "rank 1: its process ended");
  expect_failure(run_two("timeout=2 fail=hang"), "rank 1 did not join ");
  expect_failure(run_two("fail=model"), "DataParallel: the ranks' models differ: rank 1 has parameter first.weight");
  expect_failure(
      run_two("fail=operation"),
      "the ranks' calls differ: rank 0 calls all_reduce (sum) of [3] f32; rank 1 calls all_reduce (max) of [3] f32\n");
  expect_failure(run_two("fail=shape"),
                 "the ranks' calls differ: rank 0 calls all_reduce (max) of [3] f32; rank 1 calls");
  const Result dropped = run_two("fail=drop steps=1");
  EXPECT_EQ(dropped.code, 0) << dropped.output;
}

}  // namespace
}  // namespace voxgrad
