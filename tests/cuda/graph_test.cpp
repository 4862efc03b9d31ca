// Tests CUDA graphs: replayed training matches eager training bitwise, and operations that cannot be captured throw.
#include <functional>
#include <memory>

#include "core/autograd.h"
#include "nn/layers.h"
#include "nn/optim/clip.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/linalg.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

TEST(CudaDevices, RejectsGraphOnMissingDevice) {
  EXPECT_ERROR(cuda::CUDAGraph(cuda::device_count()), "is not available: ");
  EXPECT_ERROR(cuda::CUDAGraph(-1), "cuda:-1 is not available: ");
}

class CudaGraph : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  }
};

const TensorOptions kGpu{f32, Device::cuda()};
MemoryStats stats() { return memory::stats(Device::cuda()); }

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const Tensors&)>;

template <class Optimizer, class Options>
MakeOptimizer with(const Options& options) {
  return [=](const Tensors& params) { return std::make_unique<Optimizer>(params, options); };
}

/// A small model with its optimizer and the tensors that a captured step reads.
struct Training {
  explicit Training(const MakeOptimizer& make, DType dtype = f32) {
    model.to(Device::cuda());
    model.to(dtype);
    optimizer = make(model.parameters());
    x = empty({2, 4, 5, 4, 6}, {dtype, Device::cuda()});
    target = empty({2, 2, 9, 7, 11}, {dtype, Device::cuda()});
  }
  void load(uint64_t batch) {
    Generator random(100 + batch);
    x.copy_(randn(x.shape(), x.options(), &random));
    target.copy_(randn(target.shape(), target.options(), &random));
  }
  void step() {
    optimizer->zero_grad();
    loss = mse_loss(model(x), target);
    loss.backward();
    if (clips) optim::clip_grad_norm_(model.parameters(), 0.5);
    optimizer->step();
  }
  /// Returns all values that a step changes.
  std::vector<std::vector<double>> values() const {
    std::vector<std::vector<double>> all{loss.to_vector()};
    for (const Tensor& p : model.parameters()) all.push_back(p.to_vector());
    for (const auto& [name, tensor] : optimizer->state_dict()) all.push_back(tensor.to_vector());
    return all;
  }

  // The initializer of this member sets the seed for the model's parameters, so the member precedes the model.
  const int seed = [] {
    manual_seed(11);
    return 11;
  }();
  nn::Sequential model{
      nn::Conv3d{{.in_channels = 4, .out_channels = 8, .kernel_size = 3, .padding = 1}}, nn::ReLU{},
      nn::GroupNorm{2, 8},
      nn::ConvTranspose3d{{.in_channels = 8, .out_channels = 2, .kernel_size = 3, .stride = 2, .padding = 1}}};
  std::unique_ptr<optim::Optimizer> optimizer;
  Tensor x;
  Tensor target;
  Tensor loss;
  bool clips = true;
};

const std::vector<std::pair<const char*, MakeOptimizer>>& optimizers() {
  using namespace optim;
  static const std::vector<std::pair<const char*, MakeOptimizer>> table{
      {"SGD", with<SGD>(SgdOptions{.lr = 0.05})},
      {"SGD with momentum", with<SGD>(SgdOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true})},
      {"Adam", with<Adam>(AdamOptions{.lr = 0.01})},
      {"AdamW", with<AdamW>(AdamWOptions{.lr = 0.01, .amsgrad = true})},
      {"RMSprop", with<RMSprop>(RmspropOptions{.lr = 0.01, .momentum = 0.5, .centered = true})},
  };
  return table;
}

TEST_F(CudaGraph, ReplayedTrainingMatchesEagerTrainingBitwise) {
  for (const auto& [name, make] : optimizers())
    for (const DType dtype : {f32, f64}) {
      SCOPED_TRACE(concat(name, ' ', dtype));
      Training eager(make, dtype), replayed(make, dtype);
      for (Training* t : {&eager, &replayed})
        for (uint64_t batch = 0; batch < 2; ++batch) {
          t->load(batch);
          t->step();
        }
      cuda::CUDAGraph graph;
      const auto before = replayed.values();
      graph.capture([&] { replayed.step(); });
      const auto after = replayed.values();  // element 0 is the loss, which only a replay computes
      EXPECT_EQ(std::vector(after.begin() + 1, after.end()), std::vector(before.begin() + 1, before.end()))
          << "the capture changed values";
      for (uint64_t batch = 2; batch < 12; ++batch) {
        for (Training* t : {&eager, &replayed}) {
          t->optimizer->set_lr(0.02 / static_cast<double>(batch));  // a learning-rate schedule
          t->load(batch);
        }
        eager.step();
        graph.replay();
        ASSERT_EQ(replayed.values(), eager.values()) << "step " << batch;
      }
      eager.load(20);  // eager steps continue from the replayed state
      eager.step();
      replayed.load(20);
      replayed.step();
      EXPECT_EQ(replayed.values(), eager.values());
    }
}

TEST_F(CudaGraph, ReplaysReadNewInputValues) {
  const Tensor x = ones({3, 4}, kGpu), w = full({4, 2}, 2, kGpu);
  matmul(x, w);
  Tensor y;
  cuda::CUDAGraph graph;
  graph.capture([&] { y = matmul(x, w) + 1.0; });
  graph.replay();
  EXPECT_EQ(y.to_vector(), std::vector<double>(6, 9));
  x.fill_(3);
  graph.replay();
  EXPECT_EQ(y.to_vector(), std::vector<double>(6, 25));
  const cuda::Stream stream;  // for a replay on a stream other than the default stream
  synchronize(Device::cuda());
  {
    const cuda::StreamGuard guard(stream);
    x.fill_(1);
    graph.replay();
  }
  stream.synchronize();
  EXPECT_EQ(y.to_vector(), std::vector<double>(6, 9));
}

// A replay overwrites a tensor that an autograd graph has saved, so the backward pass must throw.
TEST_F(CudaGraph, ReplaysCountAsInPlaceWrites) {
  const Tensor x = rand({4}, kGpu), w = rand({4}, kGpu).requires_grad_();
  Tensor y;
  cuda::CUDAGraph graph;
  graph.capture([&] {
    NoGradGuard no_grad;
    y = x * 2.0;
  });
  graph.replay();
  sum(y * w).backward();
  const Tensor loss = sum(y * w);
  graph.replay();
  EXPECT_ERROR(loss.backward(), "was written to in place");
}

TEST_F(CudaGraph, TrainingAllocatesNothingAfterTheFirstSteps) {
  Training training(with<optim::Adam>(optim::AdamOptions{}));
  training.load(0);
  for (int i = 0; i < 3; ++i) training.step();
  const MemoryStats before = stats();
  for (int i = 0; i < 5; ++i) training.step();
  const MemoryStats after = stats();
  EXPECT_EQ(after.device_allocations, before.device_allocations);
  EXPECT_EQ(after.current, before.current);
  EXPECT_EQ(after.peak, before.peak);
}

TEST_F(CudaGraph, ReplaysAllocateNothing) {
  Training training(with<optim::Adam>(optim::AdamOptions{}));
  training.load(0);
  training.step();
  cuda::CUDAGraph graph;
  graph.capture([&] { training.step(); });
  const MemoryStats before = stats();
  for (int i = 0; i < 5; ++i) graph.replay();
  const MemoryStats after = stats();
  EXPECT_EQ(after.allocations, before.allocations);
  EXPECT_EQ(after.device_allocations, before.device_allocations);
  EXPECT_EQ(after.reserved, before.reserved);
  EXPECT_EQ(after.peak, before.peak);
}

// Other allocations must not reuse the memory of a graph.
TEST_F(CudaGraph, MemoryIsExclusiveUntilReset) {
  const Tensor x = rand({1 << 18}, kGpu);
  memory::empty_cache(Device::cuda());
  const int64_t reserved = stats().reserved;
  Tensor y;
  cuda::CUDAGraph graph;
  const auto work = [&] {
    const Tensor a = x * 2.0, b = a + x;
    y = exp(b) * a;
  };
  work();
  const std::vector<double> expected = y.to_vector();
  graph.capture(work);
  memory::empty_cache(Device::cuda());
  for (int round = 0; round < 3; ++round) {
    Tensors others;
    for (int i = 0; i < 30; ++i) others.push_back(full({1 << 18}, -7, kGpu));
    graph.replay();
    EXPECT_EQ(y.to_vector(), expected);
    for (const Tensor& other : others) ASSERT_EQ(amax(abs(other + 7.0)).item(), 0);
  }
  graph.reset();
  EXPECT_EQ(y.to_vector(), expected) << "reset() changed a result of the graph";
  y = {};
  memory::empty_cache(Device::cuda());
  EXPECT_EQ(stats().reserved, reserved);
  EXPECT_ERROR(graph.replay(), "CUDAGraph: no graph was captured");
}

TEST_F(CudaGraph, KeepsMemoryOfDestroyedModel) {
  auto training = std::make_unique<Training>(with<optim::SGD>(optim::SgdOptions{}));
  training->load(0);
  const Tensor x = training->x;
  Tensor y;
  std::vector<double> expected;
  cuda::CUDAGraph graph;
  {
    NoGradGuard no_grad;
    expected = training->model(x).to_vector();
    graph.capture([&] { y = training->model(x); });
  }
  training.reset();
  Tensors others;
  for (int i = 0; i < 200; ++i) others.push_back(full({int64_t{1} << (i % 14)}, 1e30, kGpu));
  graph.replay();
  EXPECT_EQ(y.to_vector(), expected);
}

TEST_F(CudaGraph, ReplayRejectsReplacedOptimizerState) {
  Training training(with<optim::Adam>(optim::AdamOptions{}));
  training.load(0);
  cuda::CUDAGraph graph;
  EXPECT_ERROR(graph.capture([&] { training.step(); }), "Adam: the first step allocates the optimizer's state");
  training.step();
  graph.capture([&] { training.step(); });
  graph.replay();
  training.optimizer->load_state_dict(training.optimizer->state_dict());
  EXPECT_ERROR(graph.replay(), "Adam: parameters or state were replaced since the step was captured");
  graph.capture([&] { training.step(); });
  graph.replay();
  training.optimizer.reset();
  EXPECT_ERROR(graph.replay(), "Adam: the optimizer was destroyed after its step was captured");
}

TEST_F(CudaGraph, RejectsUncapturableOperationsAndRecovers) {
  const Tensor x = rand({64}, kGpu), host = rand({64});
  cuda::CUDAGraph graph, other;
  Tensor y;
  other.capture([&] { y = x * 2.0; });
  const struct {
    std::function<void()> function;
    const char* message;
  } cases[] = {
      {[&] { sum(x).item(); }, "copy: results cannot be read by the CPU (item(), to(cpu), printing) while"},
      {[&] { x.to_vector(); }, "copy: results cannot be read by the CPU"},
      {[&] { x.copy_(host); }, "copy: data cannot be copied between devices while a CUDA graph"},
      {[&] { host.to(Device::cuda()); }, "copy: data cannot be copied between devices"},
      {[&] { synchronize(Device::cuda()); }, "synchronize: cannot wait for the device while"},
      {[&] { memory::empty_cache(Device::cuda()); }, "empty_cache: cannot wait for the device while"},
      {[&] { dropout(x, 0.5, true); }, "uniform: random numbers, which replays would repeat, cannot be drawn while"},
      {[&] { randn({4}, kGpu); }, "normal: random numbers"},
      {[&] { other.replay(); }, "CUDAGraph: a replay cannot be captured, but this thread is capturing a graph"},
      {[&] { other.capture([] {}); }, "CUDAGraph: this thread is already capturing a graph"},
      {[&] { fail("function", "custom error"); }, "function: custom error"},
  };
  for (const auto& c : cases) {
    EXPECT_ERROR(graph.capture([&] {
      const Tensor before = x + 1.0;  // the graph already contains a kernel
      c.function();
    }),
                 c.message);
    EXPECT_ERROR(graph.replay(), "CUDAGraph: no graph was captured");
    EXPECT_EQ((x * 0.0).to_vector(), std::vector<double>(64, 0));
  }
  EXPECT_ERROR(graph.capture({}), "CUDAGraph: the function is empty");
  other.replay();
  EXPECT_EQ((y - x * 2.0).to_vector(), std::vector<double>(64, 0));
  graph.capture([&] { y = x * 3.0; });
  graph.replay();
  EXPECT_EQ((y - x * 3.0).to_vector(), std::vector<double>(64, 0));
}

// Replays of a captured optimizer_step() use the options of the captured call.
TEST_F(CudaGraph, StepFunctionKeepsItsOptions) {
  const Tensor p = ones({8}, kGpu), g = ones({8}, kGpu);
  cuda::CUDAGraph graph;
  graph.capture([&] { optimizer_step(std::span(&p, 1), std::span(&g, 1), {}, SgdStep{.lr = 0.25}); });
  EXPECT_EQ(p.to_vector(), std::vector<double>(8, 1));
  graph.replay();
  graph.replay();
  EXPECT_EQ(p.to_vector(), std::vector<double>(8, 0.5));
}

}  // namespace
}  // namespace voxgrad
