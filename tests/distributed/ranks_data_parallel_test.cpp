// Tests of nn::DataParallel on one or more ranks.
#include <cmath>
#include <memory>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/random.h"
#include "cuda/cuda.h"
#include "nn/distributed/data_parallel.h"
#include "nn/layers.h"
#include "nn/optim/clip.h"
#include "nn/optim/ema.h"
#include "nn/optim/grad_scaler.h"
#include "nn/optim/optimizers.h"
#include "nn/recompute.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/distributed/ranks.h"
#include "tests/distributed/ranks_model.h"

namespace voxgrad {
namespace {

void expect_close(const Tensor& a, const Tensor& b, double tolerance, const std::string& context) {
  ASSERT_TRUE(a.defined() && b.defined()) << context;
  const double scale = abs(b).amax().item() + 1e-12;
  EXPECT_LE(abs(a - b).amax().item(), tolerance * scale) << context;
}

TEST_F(Ranks, AveragesGradientsOverTheWholeBatch) {
  const Tensor x = [] {
    Generator random(1);
    return randn({kBatch, 6}, {}, &random);
  }();
  const Tensor own = x.narrow(0, rank_ * kBatch / size_, kBatch / size_);
  for (const DType wire : {f32, bf16})
    for (const double cap : {25.0, 1e-6}) {  // one bucket for all gradients, then one bucket per gradient
      manual_seed(static_cast<uint64_t>(rank_));
      Model model;
      model.buffer.fill_(rank_ + 1);
      model.frozen.requires_grad_(false);
      nn::DataParallel parallel(model, *world_, {.reduce_dtype = wire, .bucket_cap_mb = cap});
      EXPECT_EQ(model.buffer.to_vector(), std::vector<double>(2, 1));
      for (const Tensor& parameter : model.parameters()) expect_same_everywhere(parameter.detach());

      Model whole;
      whole.load_state_dict(model.state_dict());
      loss_of(whole, x).backward();
      loss_of(model, own).backward();
      const double tolerance = wire == f32 ? 1e-6 : 0.02;
      expect_close(model.first.weight.grad(), whole.first.weight.grad(), tolerance, "first.weight");
      expect_close(model.second.bias.grad(), whole.second.bias.grad(), tolerance, "second.bias");
      EXPECT_FALSE(model.spare.weight.grad().defined());
      expect_same_everywhere(model.first.weight.grad());
      loss_of(model, own).backward();  // adds to the existing gradients
      expect_close(model.first.weight.grad(), 2 * whole.first.weight.grad(), tolerance, "first.weight twice");
      optim::clip_grad_norm_(model.parameters(), 0.01);
      expect_same_everywhere(model.first.weight.grad());
    }
}

TEST_F(Ranks, AveragesGradientsOfEachDtypeAndLayout) {
  for (const DType dtype : {f64, bf16, f32}) {
    manual_seed(0);
    nn::Conv3d conv({.in_channels = 2, .out_channels = 3, .kernel_size = 3});
    conv.to(dtype);
    conv.to(MemoryFormat::channels_last);
    nn::DataParallel parallel(conv, *world_);
    const Tensor x = randn({1, 2, 4, 4, 4}).to(dtype);
    const Tensor alone = grad({sum(conv(x))}, {conv.weight})[0];
    sum(conv(x) * (rank_ + 1)).backward();
    EXPECT_EQ(conv.weight.grad().dtype(), dtype);
    const double tolerance = dtype == f64 ? 1e-14 : dtype == f32 ? 1e-6 : 0.02;
    expect_close(conv.weight.grad().to(f64), alone.to(f64) * ((size_ + 1) / 2.0), tolerance, name(dtype));
  }
}

TEST_F(Ranks, ParametersUsedOnOneRankGetGradientsOnAllRanks) {
  manual_seed(0);
  Model model;
  nn::DataParallel parallel(model, *world_, {.bucket_cap_mb = 1e-6});
  const Tensor x = ones({2, 6});
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    const int user = step % size_;  // the only rank that uses `spare`
    loss_of(model, x, rank_ == user).backward();
    Model alone;
    alone.load_state_dict(model.state_dict());
    loss_of(alone, x, true).backward();
    expect_close(model.spare.weight.grad(), alone.spare.weight.grad() * (1.0 / size_), 1e-6, "spare");
    expect_same_everywhere(model.spare.weight.grad());
    EXPECT_FALSE(model.never.weight.grad().defined());
    EXPECT_FALSE(model.frozen.grad().defined());
  }
}

TEST_F(Ranks, NoSyncAccumulatesOnEachRank) {
  manual_seed(0);
  Model model;
  nn::DataParallel parallel(model, *world_);
  Model alone;
  alone.load_state_dict(model.state_dict());
  Generator random(static_cast<uint64_t>(rank_ + 7));
  const Tensor a = randn({2, 6}, {}, &random), b = randn({2, 6}, {}, &random);
  {
    using NoSync = nn::DataParallel::NoSync;
    auto earlier = std::unique_ptr<NoSync>(new NoSync(parallel.no_sync()));
    const auto guard = parallel.no_sync();
    earlier.reset();
    loss_of(model, a, true).backward();  // the only backward pass that uses `spare`
  }
  loss_of(alone, a, true).backward();
  EXPECT_EQ(model.first.weight.grad().to_vector(), alone.first.weight.grad().to_vector());
  loss_of(model, b).backward();
  loss_of(alone, b).backward();
  for (const auto& [mine, local] :
       {std::pair(model.first.weight, alone.first.weight), std::pair(model.spare.weight, alone.spare.weight)}) {
    const Tensor mean_grad = local.grad().clone();
    world_->all_reduce(mean_grad);
    expect_close(mine.grad(), mean_grad * (1.0 / size_), 1e-6, "accumulated");
  }
  expect_same_everywhere(model.spare.weight.grad());
}

TEST_F(Ranks, GradientsArriveDuringTheBackwardPass) {
  manual_seed(0);
  Model model;
  nn::DataParallel parallel(model, *world_, {.bucket_cap_mb = 1e-6});
  const Tensor hidden = tanh(model.first(ones({2, 6})));
  bool only_second = false;
  hidden.register_hook([&](const Tensor&) {
    // The backward pass has reached second.weight, but not yet first.weight.
    only_second = model.second.weight.grad().defined() && !model.first.weight.grad().defined();
    return Tensor();
  });
  sum(model.second(hidden)).backward();
  EXPECT_TRUE(only_second);
}

/// Forwards every call to another communicator and counts all_reduce operations.
class CountingCommunicator : public distributed::Communicator {
 public:
  explicit CountingCommunicator(Communicator& real)
      : Communicator(real.rank(), real.size(), real.local_rank(), real.device()), real_(real) {}
  std::unique_ptr<distributed::Work> start(const distributed::Collective& collective) override {
    reductions += collective.kind == distributed::Collective::Kind::all_reduce;
    return real_.start(collective);
  }
  void abort(int code) override { real_.abort(code); }

  int reductions = 0;

 private:
  Communicator& real_;
};

TEST_F(Ranks, UnusedParametersDoNotDelayBuckets) {
  if (size_ == 1) GTEST_SKIP() << "needs several ranks";
  manual_seed(0);
  Model model;  // the backward pass below does not reach the last parameters, whose buckets come first
  CountingCommunicator counting(*world_);
  nn::DataParallel parallel(model, counting, {.bucket_cap_mb = 1e-6});
  const Tensor hidden = tanh(model.first(ones({2, 6})));
  int started = 0;
  hidden.register_hook([&](const Tensor&) {
    started = counting.reductions;
    return Tensor();
  });
  sum(model.second(hidden)).backward();
  // Before the hook runs, six reductions must have started: one for the flags that mark used parameters, and five for
  // `frozen` and the parameters of `never` and `spare`, each of which has its own bucket. Reductions of `second` may
  // have started as well.
  EXPECT_GE(started, 6);
  EXPECT_EQ(counting.reductions, 10);
}

TEST_F(Ranks, RemovesHooksOnDestructionAndRejectsCreateGraph) {
  manual_seed(0);
  Model model;
  const Tensor x = full({2, 6}, rank_ + 1);
  {
    nn::DataParallel parallel(model, *world_);
    const Tensor loss = loss_of(model, x);
    if (size_ > 1) EXPECT_ERROR(loss.backward({}, true, true), "in a backward pass with create_graph = true");
    model.zero_grad();
    loss_of(model, x).backward();  // succeeds, because the failed pass had not started to communicate
    expect_same_everywhere(model.first.weight.grad());
  }
  model.zero_grad();
  loss_of(model, x).backward();
  const Tensor gathered = world_->all_gather(model.first.weight.grad());
  for (int other = 1; other < size_; ++other)
    EXPECT_NE(gathered[other].to_vector(), gathered[0].to_vector()) << "rank " << other;
}

TEST_F(Ranks, RejectsBackwardAfterAFailureDuringReduction) {
  if (size_ == 1) GTEST_SKIP() << "needs several ranks";
  manual_seed(0);
  Model model;
  const nn::DataParallel parallel(model, *world_);
  const Tensor hidden = tanh(model.first(ones({2, 6})));
  hidden.register_hook([](const Tensor&) -> Tensor { fail("hook", "fails"); });
  EXPECT_ERROR(sum(model.second(hidden)).backward(), "hook: fails");
  model.zero_grad();
  EXPECT_ERROR(loss_of(model, ones({2, 6})).backward(), "the previous backward pass failed during its reductions");
}

TEST_F(Ranks, DividesF16GradientsInF32) {
  nn::Linear layer(1, 1, {.bias = false});
  layer.to(f16);
  const nn::DataParallel parallel(layer, *world_);
  const Tensor x = full({1, 1}, 0x1p-24, {.dtype = f16});  // the smallest positive f16 number; half of it rounds to 0
  sum(layer(x)).backward();
  EXPECT_EQ(layer.weight.grad().item(), 0x1p-24);
}

struct Transposed : nn::Module {
  nn::Parameter odd{ones({3, 2}).transpose(0, 1)};
  VG_MODULE(odd)
};

TEST_F(Ranks, RejectsParametersWithUnsupportedStrides) {
  Transposed module;
  EXPECT_ERROR(nn::DataParallel(module, *world_), "parameter odd is neither contiguous nor channels_last: [2, 3] f32");
}

/// Compares training on all ranks with training on the whole batch, for both reduce dtypes.
TEST_F(Ranks, StepsMatchTheWholeBatch) {
  for (const DType reduce_dtype : {f32, bf16}) {
    manual_seed(1);
    const Device device = world_->device();
    Model model, whole;
    whole.load_state_dict(model.state_dict());
    model.to(device);
    const nn::DataParallel parallel(model, *world_, {.reduce_dtype = reduce_dtype, .bucket_cap_mb = 1e-4});
    whole.load_state_dict(model.state_dict());
    optim::SGD optimizer(model.parameters(), {.lr = 0.1, .momentum = 0.9}),
        of_whole(whole.parameters(), {.lr = 0.1, .momentum = 0.9});
    for (int step = 0; step < 5; ++step) {
      Generator random(static_cast<uint64_t>(step));
      const Tensor x = randn({kBatch, 6}, {}, &random);
      const Tensor own = x.narrow(0, rank_ * kBatch / size_, kBatch / size_).to(device);
      optimizer.zero_grad();
      loss_of(model, own).backward();
      optim::clip_grad_norm_(model.parameters(), 0.5);
      optimizer.step();
      of_whole.zero_grad();
      loss_of(whole, x).backward();
      optim::clip_grad_norm_(whole.parameters(), 0.5);
      of_whole.step();
    }
    for (const auto& [name, tensor] : whole.state_dict()) {
      const Tensor got = model.state_dict().at(name);
      expect_close(got.to(Device::cpu()), tensor, reduce_dtype == f32 ? 2e-6 : 1e-2, name);
      expect_same_everywhere(got.to(Device::cpu()));
    }
  }
}

/// Combines f16 autocast, gradient scaling, recompute, clipping and an exponential moving average of the model. In step
/// 2, the gradients of the last rank overflow, and all ranks must skip the step.
TEST_F(Ranks, F16StepsWithScalerMatchTheWholeBatch) {
  const Device device = world_->device();
  Model model, whole;
  model.to(device);
  whole.to(device);
  const nn::DataParallel parallel(model, *world_, {.bucket_cap_mb = 1e-4});
  whole.load_state_dict(model.state_dict());
  struct Training {
    Model& model;
    optim::AdamW optimizer{model.parameters(), {.lr = 0.01}};
    optim::GradScaler scaler{{.init_scale = 256}};
    optim::ExponentialMovingAverage average{model, {.decay = 0.5}};

    void step(const Tensor& x) {
      optimizer.zero_grad();
      {
        const autocast guard(f16);
        scaler.scale(nn::recompute([this](const Tensor& t) { return loss_of(model, t); }, x)).backward();
      }
      scaler.unscale_(optimizer);
      optim::clip_grad_norm_(model.parameters(), 0.5);
      scaler.step(optimizer);
      scaler.update();
      average.update();
    }
  } shared{model}, alone{whole};
  for (int step = 0; step < 4; ++step) {
    Generator random(static_cast<uint64_t>(step));
    const Tensor x = randn({kBatch, 6}, {}, &random);
    if (step == 2) x.set({kBatch - 1, 0}, 1e30);  // a sample of the last rank
    alone.step(x.to(device));
    shared.step(x.narrow(0, rank_ * kBatch / size_, kBatch / size_).to(device));
    EXPECT_EQ(shared.scaler.get_scale(), step < 2 ? 256 : 128) << step;
  }
  for (const auto& [state, wanted] :
       {std::pair(model.state_dict(), whole.state_dict()), std::pair(shared.average.values(), alone.average.values())})
    for (const auto& [name, tensor] : wanted) {
      expect_close(state.at(name).to(Device::cpu()), tensor.to(Device::cpu()), 2e-2, name);
      expect_same_everywhere(state.at(name).to(Device::cpu()));
    }
}

TEST_F(Ranks, CapturesStepsInACudaGraph) {
  const Device device = world_->device();
  if (!device.is_cuda()) GTEST_SKIP() << "needs GPUs";
  manual_seed(1);
  Model eager, captured;
  for (Model* model : {&eager, &captured}) model->to(device);
  const nn::DataParallel of_eager(eager, *world_), of_captured(captured, *world_);
  captured.load_state_dict(eager.state_dict());
  optim::SGD first(eager.parameters(), {.lr = 0.1, .momentum = 0.9}),
      second(captured.parameters(), {.lr = 0.1, .momentum = 0.9});
  const Tensor x = zeros({4, 6}, {.device = device});
  const auto step = [&](Model& model, optim::SGD& optimizer) {
    optimizer.zero_grad();
    loss_of(model, x, rank_ == size_ - 1).backward();  // only the last rank uses `spare`; no rank uses `never`
    optimizer.step();
  };
  cuda::CUDAGraph graph(device.index);
  for (int i = 0; i < 6; ++i) {
    Generator random(static_cast<uint64_t>(100 * rank_ + i));
    x.copy_(randn({4, 6}, {}, &random));
    step(eager, first);
    if (i < 2) step(captured, second);
    if (i == 1) graph.capture([&] { step(captured, second); });
    if (i >= 2) graph.replay();
  }
  for (const auto& [name, tensor] : eager.state_dict())
    EXPECT_EQ(captured.state_dict().at(name).to(Device::cpu()).to_vector(), tensor.to(Device::cpu()).to_vector())
        << name;
}

TEST_F(Ranks, RejectsDifferentModels) {
  const int odd = size_ - 1;
  nn::Linear wide(4, rank_ == odd ? 3 : 2);
  const auto attach = [&](const nn::Module& module, nn::DataParallelOptions options = {}) {
    nn::DataParallel parallel(module, *world_, options);
  };
  if (size_ == 1) return attach(wide);
  EXPECT_ERROR(attach(wide), concat("rank ", odd,
                                    " has parameter weight, [3, 4] f32, where rank 0 has parameter "
                                    "weight, [2, 4] f32"));
  nn::Linear other(4, 2);
  if (rank_ == odd) other.to(f64);
  EXPECT_ERROR(attach(other), "has parameter weight, [2, 4] f64, where rank 0 has parameter weight, [2, 4] f32");
  nn::Linear unbiased(4, 2, {.bias = rank_ != odd});
  EXPECT_ERROR(attach(unbiased), "has no more tensors, where rank 0 has parameter bias, [2] f32");
  nn::Linear biased(4, 2, {.bias = rank_ == odd});
  EXPECT_ERROR(attach(biased), "has parameter bias, [2] f32, where rank 0 has no more tensors");
  nn::Linear half_frozen(4, 2);
  half_frozen.bias.requires_grad_(rank_ != odd);
  EXPECT_ERROR(attach(half_frozen), "has parameter bias, [2] f32, frozen, where");
  nn::Linear same(4, 2);
  EXPECT_ERROR(attach(same, {.reduce_dtype = rank_ == odd ? bf16 : f32}), "has options reduce_dtype bf16");
  EXPECT_ERROR(attach(same, {.reduce_dtype = f16}), "reduce_dtype must be f32 or bf16, got f16");
  EXPECT_ERROR(attach(same, {.bucket_cap_mb = 0}), "bucket_cap_mb must be positive");
  attach(same);
}

}  // namespace
}  // namespace voxgrad
