// Tests of the profiler: counts, traces, threads, the memory at the peak, and unchanged results.
#include "core/profiler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "core/random.h"
#include "cuda/cuda.h"
#include "nn/layers.h"
#include "nn/optim/optimizers.h"
#include "nn/recompute.h"
#include "nn/sequential.h"
#include "ops/create.h"
#include "ops/detail/kernels.h"
#include "ops/elementwise.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {

struct ProfiledNet : nn::Module {
  nn::Conv3d first{{.in_channels = 2, .out_channels = 3, .kernel_size = 3, .padding = 1}};
  nn::Sequential rest{nn::Conv3d({.in_channels = 3, .out_channels = 4, .kernel_size = 1}), nn::ReLU()};
  VG_MODULE(first, rest)

  Tensor forward(const Tensor& x) { return rest(relu(first(x))); }
};

struct ThrowingNet : nn::Module {
  nn::ReLU relu;
  VG_MODULE(relu)
  Tensor forward(const Tensor& x) { return relu(x).reshape({-7}); }
};

namespace {

using profiler::GroupBy;
using profiler::Kind;
using profiler::Row;
using profiler::Session;

std::optional<Row> find(const std::vector<Row>& rows, const std::string& name, const std::string& pass) {
  for (const Row& row : rows)
    if (row.name == name && row.pass == pass) return row;
  return {};
}

/// Trains one step with fixed seeds. Returns the parameters and their gradients.
Tensors step(Device device = Device::cpu()) {
  manual_seed(3);
  ProfiledNet net;
  net.to(device);
  optim::SGD optimizer(net.parameters(), {.lr = 0.1});
  const Tensor x = randn({2, 2, 4, 4, 4}, {.device = device});
  mean(net(x)).backward();
  optimizer.step();
  Tensors results;
  for (const Tensor& p : net.parameters()) {
    results.push_back(p.detach());
    results.push_back(p.grad());
  }
  return results;
}

/// Expects that the events of a trace are sorted by start time. Two spans on the track of a thread must be nested or
/// disjoint. Two spans on the track of a stream must be disjoint.
void expect_valid_trace(const std::string& text) {
  const nlohmann::json trace = nlohmann::json::parse(text);
  constexpr double kRounding = 1e-4;  // microseconds; timestamps are nanoseconds / 1000
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> open;
  double last = 0;
  size_t spans = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "M") continue;
    const double begin = event.at("ts");
    EXPECT_GE(begin, last);
    last = begin;
    if (event.at("ph") == "C") {
      EXPECT_GE(event.at("args").at("bytes").get<int64_t>(), 0);
      continue;
    }
    ASSERT_EQ(event.at("ph"), "X");
    ++spans;
    const double end = begin + event.at("dur").get<double>();
    auto& outer = open[{event.at("pid"), event.at("tid")}];
    while (!outer.empty() && outer.back().second <= begin + kRounding) outer.pop_back();
    if (!outer.empty()) {
      EXPECT_LE(end, outer.back().second + kRounding) << event;
      EXPECT_EQ(event.at("pid"), 0) << "overlap in a stream: " << event;
    }
    outer.emplace_back(begin, end);
  }
  EXPECT_GT(spans, 0u);
}

TEST(Profiler, CountsTheOperatorsOfAProgram) {
  Session profile;
  step();
  profile.stop();
  const std::vector<Row> rows = profile.rows();
  const auto calls = [&](const char* name, const char* pass) {
    const auto row = find(rows, name, pass);
    return row ? row->calls : 0;
  };
  EXPECT_EQ(calls("conv_forward", "forward"), 2) << profile.table();
  EXPECT_EQ(calls("relu", "forward"), 1) << "the other ReLU is fused with a convolution\n" << profile.table();
  EXPECT_EQ(calls("mean", "forward"), 1);
  EXPECT_EQ(calls("sgd_step", "forward"), 1);
  EXPECT_EQ(calls("conv_backward_weight", "backward of conv"), 2);
  EXPECT_EQ(calls("conv_backward_data", "backward of conv"), 1) << "x needs no gradient";
  EXPECT_EQ(calls("relu_grad", "backward of relu"), 2);
  double all_ms = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    all_ms += rows[i].ms();
    EXPECT_EQ(rows[i].device_ms, 0);
    EXPECT_LE(rows[i].ms(), rows[i > 0 ? i - 1 : 0].ms());
  }
  EXPECT_GT(all_ms, 0);
  EXPECT_NE(profile.table().find("conv_backward_weight"), std::string::npos);
  EXPECT_NE(profile.table(GroupBy::op, 2).find("rows omitted: "), std::string::npos);
}

TEST(Profiler, ReportsBytesFlopAndMemory) {
  const Tensor x = rand({2, 3, 4, 5, 6}), w = rand({7, 3, 3, 3, 3}), bias = rand({7});
  const Tensor a = rand({3, 5, 8}), b = rand({3, 8, 9});
  Session profile;
  const Tensor y = conv3d(x, w, bias, {.padding = 1});
  const Tensor transposed = conv_transpose3d(y, w, {}, {.padding = 1});
  matmul(a, b);
  const Tensor expanded = rand({1, 9}).expand({1000, 9}) + 1.0;
  profile.stop();
  const Row conv = *find(profile.rows(), "conv_forward", "forward");
  EXPECT_EQ(conv.bytes, 4.0 * static_cast<double>(x.numel() + w.numel() + bias.numel() + y.numel()));
  // Along an axis of n voxels, a kernel of size 3 with padding 1 reads 3 n - 2 voxels.
  EXPECT_EQ(conv.flop, 2.0 * 2 * 7 * 3 * (3 * 4 - 2) * (3 * 5 - 2) * (3 * 6 - 2));
  EXPECT_GE(conv.memory, 4 * y.numel()) << "memory includes the result and the workspaces";
  EXPECT_EQ(find(profile.rows(), "matmul", "forward")->memory, 4 * 3 * 5 * 9);
  EXPECT_EQ(find(profile.rows(), "affine", "forward")->memory, 4 * 9000);
  EXPECT_EQ(find(profile.rows(), "conv_backward_data", "forward")->flop, conv.flop);
  EXPECT_EQ(find(profile.rows(), "matmul", "forward")->flop, 2.0 * 3 * 5 * 8 * 9);
  EXPECT_EQ(find(profile.rows(), "affine", "forward")->bytes, 4.0 * (9 + 9000)) << "an expanded axis is read once";
  bool found = false;
  for (const Row& row : profile.rows(GroupBy::shape))
    found |= row.name == "conv_forward" && row.shapes == "[2, 7, 4, 5, 6] [2, 3, 4, 5, 6] [7, 3, 3, 3, 3] [7]";
  EXPECT_TRUE(found) << profile.table(GroupBy::shape);
}

TEST(Profiler, ReportsModulesForwardAndBackward) {
  Session profile;
  step();
  profile.stop();
  const std::vector<Row> rows = profile.rows(GroupBy::module);
  for (const char* module : {"ProfiledNet.first", "ProfiledNet.rest.0"})
    for (const char* pass : {"forward", "backward"})
      EXPECT_TRUE(find(rows, module, pass)) << module << ' ' << pass << '\n' << profile.table(GroupBy::module);
  EXPECT_TRUE(find(rows, "ProfiledNet", "forward")) << "the ReLU between the two modules belongs to their parent";
  EXPECT_TRUE(find(rows, "(outside of modules)", "forward"));
}

TEST(Profiler, ReportsModulesThatAreRecomputed) {
  ProfiledNet net;
  Session profile;
  mean(nn::recompute(net, rand({1, 2, 4, 4, 4}))).backward();
  profile.stop();
  const auto again = find(profile.rows(), "conv_forward", "forward");
  EXPECT_EQ(again->calls, 2);
  int seen = 0;
  for (const profiler::Event& event : profile.events())
    seen += event.kind == Kind::op && *event.name == "conv_forward" && event.place.node &&
            *event.place.module == "ProfiledNet.first";
  EXPECT_EQ(seen, 1) << profile.table();
}

TEST(Profiler, WritesAValidTrace) {
  Session profile;
  {
    const profiler::RecordFunction range("a \"step\"\xff");
    step();
  }
  profile.stop();
  expect_valid_trace(profile.trace());
  const std::string path = (std::filesystem::temp_directory_path() / "voxgrad-profiler-trace.json").string();
  profile.save_trace(path);
  const nlohmann::json trace = nlohmann::json::parse(std::ifstream(path));
  std::map<std::string, int> kinds;
  int samples = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.contains("cat")) ++kinds[event.at("cat")];
    samples += event.at("ph") == "C";
  }
  EXPECT_EQ(kinds["range"], 1);
  EXPECT_GE(kinds["module"], 4);
  EXPECT_GE(kinds["backward"], 4);
  EXPECT_GE(kinds["op"], 10);
  EXPECT_GT(samples, 10);
  std::filesystem::remove(path);
}

TEST(Profiler, RecordsNothingWhenOff) {
  step();
  EXPECT_FALSE(profiler::active());
  Session profile;
  EXPECT_TRUE(profiler::active());
  profile.stop();
  profile.stop();
  EXPECT_FALSE(profiler::active());
  step();
  EXPECT_TRUE(profile.events().empty());
  EXPECT_TRUE(profile.rows().empty());
  EXPECT_NE(profile.table().find("all"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(profile.trace()).at("traceEvents").size(), 1u);
}

TEST(Profiler, SessionsNestAndOverlap) {
  const Tensor x = rand({10});
  Session outer;
  exp(x);
  std::optional<Session> inner(std::in_place);
  exp(x);
  inner->stop();
  exp(x);
  std::optional<Session> dropped(std::in_place);
  exp(x);
  Session overlapping;
  exp(x);
  dropped.reset();
  outer.stop();
  exp(x);
  overlapping.stop();
  const auto calls = [](const Session& s) { return find(s.rows(), "exp", "forward")->calls; };
  EXPECT_EQ(calls(outer), 5);
  EXPECT_EQ(calls(*inner), 1);
  EXPECT_EQ(calls(overlapping), 2);
  EXPECT_FALSE(profiler::active());
}

TEST(Profiler, MemoryBelongsToTheInnermostOperator) {
  Session profile;
  {
    const profiler::Scope outer(profiler::Kind::op, "outer");
    { const profiler::Scope inner(profiler::Kind::op, "inner"), sibling(profiler::Kind::op, "sibling"); }
    const Storage block(1000, Device::cpu());
  }
  profile.stop();
  EXPECT_EQ(find(profile.rows(), "outer", "forward")->memory, 1000);
  EXPECT_EQ(find(profile.rows(), "inner", "forward")->memory, 0);
}

TEST(Profiler, RejectsReportsWhileRecording) {
  const Session profile;
  EXPECT_ERROR(profile.table(), "call stop()");
  EXPECT_ERROR(profile.events(), "call stop()");
}

TEST(Profiler, ExceptionsEndScopes) {
  ThrowingNet net;
  const Tensor x = rand({10}), integers = zeros({10}, {.dtype = i64});
  Session profile;
  EXPECT_ERROR(net(x), "reshape");
  EXPECT_ERROR(kernels(Device::cpu()).unary(UnaryOp::exp, integers.view_out(), integers.view_in(), 0, 0), "exp");
  EXPECT_EQ(profiler::place(), profiler::Place());
  exp(x);
  profile.stop();
  EXPECT_EQ(find(profile.rows(), "exp", "forward")->calls, 2);
  EXPECT_EQ(find(profile.rows(GroupBy::module), "(outside of modules)", "forward")->calls, 2);
  expect_valid_trace(profile.trace());
  {
    Session abandoned;
    const profiler::RecordFunction open("open");
    EXPECT_ERROR(net(x), "reshape");
  }
  EXPECT_FALSE(profiler::active());
}

TEST(Profiler, RecordsAllThreads) {
  constexpr int kThreads = 4, kRounds = 20;
  const Tensor w = ones({100}).requires_grad_();
  Session profile;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        sum(exp(w)).backward();
        Session nested;
        exp(w.detach());
        nested.stop();
        EXPECT_GE(find(nested.rows(), "exp", "forward")->calls, 1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  profile.stop();
  EXPECT_EQ(find(profile.rows(), "exp", "forward")->calls, 2 * kThreads * kRounds);
  EXPECT_EQ(find(profile.rows(), "mul", "backward of exp")->calls, kThreads * kRounds);
  std::map<int, int> ops_per_thread;
  for (const profiler::Event& event : profile.events()) ops_per_thread[event.thread] += event.kind == Kind::op;
  EXPECT_EQ(std::count_if(ops_per_thread.begin(), ops_per_thread.end(), [](auto& t) { return t.second > 0; }),
            kThreads);
  expect_valid_trace(profile.trace());
}

TEST(Profiler, ResultsAreBitwiseEqual) {
  const Tensors plain = step();
  Session profile;
  const Tensors profiled = step();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(plain[i].to_vector(), profiled[i].to_vector()) << i;
}

TEST(Profiler, RecordsAllKernels) {
  Session profile;
  using Entry = void (*)();
  constexpr size_t kEntries = sizeof(Kernels) / sizeof(Entry);
  Entry plain[kEntries], profiled[kEntries];
  std::memcpy(plain, &cpu_kernels(), sizeof plain);
  std::memcpy(profiled, &kernels(Device::cpu()), sizeof profiled);
  size_t same = 0;
  for (size_t i = 0; i < kEntries; ++i) same += plain[i] == profiled[i];
  EXPECT_EQ(same, 0u);
}

/// Returns the rows of a table that contain `text`.
std::vector<std::string> rows_with(const std::string& table, const std::string& text) {
  std::vector<std::string> rows;
  std::istringstream lines(table);
  for (std::string row; std::getline(lines, row);)
    if (row.find(text) != std::string::npos) rows.push_back(row);
  return rows;
}

TEST(MemoryTable, ListsTheLiveBlocksByOperatorAndModule) {
  ProfiledNet net;
  const Tensor x = rand({2, 2, 8, 8, 8});
  memory::reset_peak();
  Session profile;
  mean(net(x)).backward();
  profile.stop();
  const std::string table = profile.memory_table();
  EXPECT_TRUE(table.starts_with(concat("live on cpu at the peak of ", memory::stats().peak, " bytes\n"))) << table;
  const std::vector<std::string> conv = rows_with(table, "conv_forward ");
  ASSERT_EQ(conv.size(), 1u) << table;
  EXPECT_TRUE(conv[0].ends_with("  ProfiledNet.rest.0")) << table;
  EXPECT_NE(conv[0].find(" 0.016 "), std::string::npos) << "the result has 2 * 4 * 512 floats (0.016 MiB)\n" << table;
  EXPECT_FALSE(rows_with(table, "(before the session)").empty()) << table;
  EXPECT_FALSE(profiler::active());
}

TEST(Memory, OperatorsAllocateOnlyTheResult) {
  const Tensor x = rand({100, 10}), y = rand({100, 10});
  const auto allocations = [](const auto& work) {
    const int64_t before = memory::stats().allocations;
    work();
    return memory::stats().allocations - before;
  };
  EXPECT_EQ(allocations([&] { maximum(x, y); }), 1);
  EXPECT_EQ(allocations([&] { lt(x, y); }), 1);
  EXPECT_EQ(allocations([&] { isfinite(x); }), 1);
  EXPECT_EQ(allocations([&] { x.clone(); }), 1);
  EXPECT_EQ(allocations([&] { x.to(f64); }), 1);
}

TEST(Profiler, ReportsDeviceTimesOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU";
  const Tensors plain = step(Device::cuda());
  Session profile;
  const Tensors profiled = step(Device::cuda());
  const cuda::Stream stream;
  {
    const cuda::StreamGuard guard(stream);
    exp(rand({1000}, {.device = Device::cuda()}));
  }
  profile.stop();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(plain[i].to_vector(), profiled[i].to_vector()) << i;
  const Row conv = *find(profile.rows(), "conv_forward", "forward");
  EXPECT_GT(conv.device_ms, 0);
  EXPECT_GT(conv.floor_ms, 0);
  EXPECT_LE(conv.floor_ms, conv.floored_ms);
  expect_valid_trace(profile.trace());
  EXPECT_NE(profile.trace().find("cuda:0"), std::string::npos);
}

TEST(Profiler, CountsDeviceTimeInReplaysNotInCapturesOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU";
  const Tensor x = ones({1000}, {.device = Device::cuda()});
  Tensor y;
  Session profile;
  cuda::CUDAGraph graph;
  graph.capture([&] { y = exp(x); });
  graph.replay();
  profile.stop();
  const std::vector<Row> rows = profile.rows();
  EXPECT_EQ(find(rows, "exp", "forward")->device_ms, 0);
  EXPECT_GT(find(rows, "cuda_graph_replay", "forward")->device_ms, 0);
  EXPECT_NEAR(y.at({0}), 2.7182818, 1e-6);
}

TEST(MemoryTable, NamesThePeakOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "no GPU";
  const Device device = Device::cuda();
  step(device);
  memory::reset_peak(device);
  Session profile;
  step(device);
  profile.stop();
  const std::string peak = concat("live on cuda:0 at the peak of ", memory::stats(device).peak, " bytes\n");
  EXPECT_TRUE(profile.memory_table(device).starts_with(peak)) << profile.memory_table(device);
}

}  // namespace
}  // namespace voxgrad
