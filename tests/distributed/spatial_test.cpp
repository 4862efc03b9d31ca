// Tests of SpatialParallel, which splits a volume among the ranks, and of synchronized batch norms. The part of a rank
// is a slab, a range of planes along D. Convolutions exchange halos, the planes of a neighboring slab that they read.
// Each rank also computes the reference results with the whole volume or batch.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/random.h"
#include "nn/distributed/data_parallel.h"
#include "nn/layers.h"
#include "nn/norm_layers.h"
#include "nn/sequential.h"
#include "nn/unet.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/fused.h"
#include "ops/grid_sample.h"
#include "ops/interpolate.h"
#include "ops/loss.h"
#include "ops/norm.h"
#include "ops/pad.h"
#include "ops/pool.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "ops/spatial.h"
#include "tests/distributed/ranks.h"

namespace voxgrad {
namespace {

using distributed::SpatialParallel;

/// Returns integers in [-4, 4], whose sums of products are exact in float32. The result is the same on all ranks.
Tensor whole_numbers(const Shape& shape, uint64_t seed) {
  Generator random(seed);
  return clamp(randn(shape, {}, &random) * 2, -4, 4).to(i64).to(f32);
}
/// Returns normally distributed numbers. The result is the same on all ranks.
Tensor normal(const Shape& shape, uint64_t seed) {
  Generator random(seed);
  return randn(shape, {}, &random);
}

void expect_close(const Tensor& got, const Tensor& wanted, double tolerance, const std::string& context) {
  ASSERT_EQ(got.shape(), wanted.shape()) << context;
  const Tensor a = got.detach().to(Device::cpu()).to(f64), b = wanted.detach().to(Device::cpu()).to(f64);
  EXPECT_LE(abs(a - b).amax().item(), tolerance * std::max(1e-30, abs(b).amax().item())) << context;
}

TensorMap parameters_of(const nn::Module& module) {
  const auto list = module.named_parameters();
  return {list.begin(), list.end()};
}

class SpatialRanks : public Ranks {
 protected:
  Tensor here(const Tensor& t) const { return t.to(world_->device()); }
  Tensor leaf(const Tensor& t) const { return here(t).detach().clone().requires_grad_(); }
  /// Returns the sum of t over all ranks.
  Tensor total(const Tensor& t) const {
    const Tensor sum = t.detach().clone();
    world_->all_reduce(sum);
    return sum;
  }

  using Function = std::function<Tensor(const Tensors&)>;
  /// Expects that f(slab of x, parameters) on each rank equals the rank's slab of f(x, parameters), and that the
  /// gradients of a weighted sum of f agree as well.
  void expect_slabs_match_whole(const Function& f, const Tensor& x, const Tensors& parameters, double tolerance,
                                MemoryFormat format, const std::string& context) const {
    Tensors whole{leaf(x.contiguous(format))}, parts;
    for (const Tensor& p : parameters) whole.push_back(leaf(p));
    const Tensor y = f(whole);
    const Tensor weights = here(whole_numbers(y.shape(), 99)).to(y.dtype());
    sum(y * weights).backward();
    {
      const SpatialParallel spatial(*world_);
      parts.push_back(leaf(spatial.slab(whole[0].detach())));
      for (const Tensor& p : parameters) parts.push_back(leaf(p));
      const Tensor part = f(parts);
      expect_close(part, spatial.slab(y.detach()), tolerance, context + ", result");
      sum(part * spatial.slab(weights)).backward();
      expect_close(parts[0].grad(), spatial.slab(whole[0].grad()), tolerance, context + ", gradient of the input");
      EXPECT_EQ(parts[0].grad().suggest_memory_format(), whole[0].grad().suggest_memory_format()) << context;
    }
    for (size_t i = 1; i < whole.size(); ++i)
      expect_close(total(parts[i].grad()), whole[i].grad(), tolerance, concat(context, ", gradient of parameter ", i));
  }
};

TEST_F(SpatialRanks, SendsAndReceivesInARing) {
  const int next = (rank_ + 1) % size_, previous = (rank_ + size_ - 1) % size_;
  const auto self = [&] { world_->send_receive_async({{here(zeros({2})), rank_}}, {}); };
  EXPECT_ERROR(self(), "the peer must be a rank in [0, ");
  if (size_ == 1) return;
  for (const DType dtype : {f32, f64, bf16, i64, u8}) {
    const Tensor own =
        full({1, 2, 3, 4, 5}, rank_ + 1, {dtype, world_->device()}).contiguous(MemoryFormat::channels_last);
    const Tensor from_previous = zeros_like(own), from_next = zeros_like(own);
    world_->send_receive_async({{own, next}, {own, previous}}, {{from_previous, previous}, {from_next, next}})->wait();
    if (size_ > 2) {
      EXPECT_EQ(from_previous.to(Device::cpu()).to_vector(), std::vector<double>(120, previous + 1)) << dtype;
    }
    EXPECT_EQ(from_next.to(Device::cpu()).to_vector(), std::vector<double>(120, next + 1)) << dtype;
  }
  const Tensor strided = here(zeros({4, 4})).slice(1, 0, 4, 2);
  EXPECT_ERROR(world_->send_receive_async({{strided, next}}, {}), "is not dense");
}

TEST_F(SpatialRanks, GatherReassemblesTheSlabs) {
  const SpatialParallel spatial(*world_);
  for (const Shape& shape : {Shape{2, 3, 4 * size_, 3, 2}, Shape{2, 4 * size_, 3, 2}}) {
    const Tensor whole = here(normal(shape, 1)), slab = spatial.slab(whole);
    EXPECT_EQ(slab.size(-3), 4);
    EXPECT_EQ(spatial.gather(slab).to(Device::cpu()).to_vector(), whole.to(Device::cpu()).to_vector());
  }
  if (size_ > 1)
    EXPECT_ERROR(spatial.slab(here(zeros({1, 1, 4 * size_ + 1, 2, 2}))), "cannot be divided equally among");
  EXPECT_ERROR(spatial.slab(zeros({2, 2})), "the volume must be (..., D, H, W)");
}

struct ConvCase {
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;
  int64_t groups;
  int64_t output_padding = 0;
};

TEST_F(SpatialRanks, ConvolutionsExchangeHalos) {
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
    for (const auto& [kernel, stride, padding, dilation, groups, _] : {ConvCase{3, 1, 1, 1, 1},
                                                                       {1, 1, 0, 1, 1},
                                                                       {5, 1, 2, 1, 1},
                                                                       {3, 1, 2, 2, 1},
                                                                       {3, 2, 1, 1, 1},
                                                                       {2, 2, 0, 1, 1},
                                                                       {4, 2, 1, 1, 2},
                                                                       {3, 1, 1, 1, 4},
                                                                       {5, 4, 1, 1, 1},
                                                                       {7, 2, 3, 1, 1}}) {
      const Tensor x = whole_numbers({2, 8, 8 * size_, 5, 6}, 1);
      const Tensors parameters{whole_numbers({4, 8 / groups, kernel, kernel, kernel}, 2), whole_numbers({4}, 3)};
      const ConvOptions<3> options{.stride = stride, .padding = padding, .dilation = dilation, .groups = groups};
      const std::string context = concat("conv3d, kernel ", kernel, ", stride ", stride, ", padding ", padding,
                                         ", dilation ", dilation, ", groups ", groups);
      expect_slabs_match_whole([&](const Tensors& t) { return conv3d(t[0], t[1], t[2], options); }, x, parameters, 0,
                               format, context);
      expect_slabs_match_whole(
          [&](const Tensors& t) {
            return conv_norm_activation(t[0], t[1], t[2], options, {.activation = {ActivationKind::relu}});
          },
          x, parameters, 0, format, context + " and ReLU");
    }
}

TEST_F(SpatialRanks, TransposedConvolutionsExchangeHalos) {
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
    for (const auto& [kernel, stride, padding, dilation, groups, output_padding] : {ConvCase{2, 2, 0, 1, 1},
                                                                                    {4, 2, 1, 1, 1},
                                                                                    {3, 2, 1, 1, 1, 1},
                                                                                    {3, 1, 1, 1, 1},
                                                                                    {5, 1, 2, 1, 2},
                                                                                    {6, 2, 2, 1, 1},
                                                                                    {3, 1, 2, 2, 1},
                                                                                    {5, 3, 1, 1, 1},
                                                                                    {8, 4, 2, 1, 1},
                                                                                    {3, 4, 0, 1, 1, 1}}) {
      const Tensor x = whole_numbers({2, 8, 4 * size_, 3, 4}, 1);
      const Tensors parameters{whole_numbers({8, 4 / groups, kernel, kernel, kernel}, 2), whole_numbers({4}, 3)};
      const ConvTransposeOptions<3> options{.stride = stride,
                                            .padding = padding,
                                            .output_padding = output_padding,
                                            .groups = groups,
                                            .dilation = dilation};
      const std::string context = concat("conv_transpose3d, kernel ", kernel, ", stride ", stride, ", padding ",
                                         padding, ", dilation ", dilation, ", groups ", groups);
      expect_slabs_match_whole([&](const Tensors& t) { return conv_transpose3d(t[0], t[1], t[2], options); }, x,
                               parameters, 0, format, context);
    }
}

TEST_F(SpatialRanks, NormsUseStatisticsOfTheWholeVolume) {
  const Tensor x = normal({2, 8, 4 * size_, 3, 5}, 1) + 3.0;
  const Tensors affine{normal({8}, 2), normal({8}, 3)};
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
    for (const DType dtype : {f32, f64})
      for (const NormKind kind : {NormKind::group, NormKind::instance, NormKind::batch}) {
        Tensors parameters;
        for (const Tensor& p : affine) parameters.push_back(p.to(dtype));
        const ActivationArguments leaky{ActivationKind::leaky_relu, 0.1};
        for (const bool first : {false, true})
          expect_slabs_match_whole(
              [&](const Tensors& t) {
                return norm_activation(t[0], {.norm = {.kind = kind, .weight = t[1], .bias = t[2], .num_groups = 4},
                                              .activation = leaky,
                                              .activation_first = first});
              },
              x.to(dtype), parameters, dtype == f64 ? 1e-12 : 2e-5, format,
              concat("norm ", static_cast<int>(kind), ' ', dtype));
      }
}

TEST_F(SpatialRanks, PoolsAndInterpolatesWithinSlabs) {
  const Tensor x = whole_numbers({2, 4, 4 * size_, 4, 6}, 1);
  const std::vector<std::pair<const char*, Function>> cases{
      {"max", [](const Tensors& t) { return max_pool3d(t[0], {.kernel_size = 2}); }},
      {"avg", [](const Tensors& t) { return avg_pool3d(t[0], {.kernel_size = 2}); }},
      {"plane",
       [](const Tensors& t) {
         return avg_pool3d(t[0], {.kernel_size = {1, 2, 2}});
       }},
      {"nearest", [](const Tensors& t) { return interpolate(t[0], {.scale_factor = 2.0}); }}};
  for (const auto& [name, f] : cases) expect_slabs_match_whole(f, x, {}, 1e-6, MemoryFormat::channels_last, name);
}

TEST_F(SpatialRanks, RejectsOperationsAcrossSlabs) {
  if (size_ == 1) GTEST_SKIP() << "needs several ranks";
  const SpatialParallel spatial(*world_);
  const Tensor x = here(zeros({1, 2, 4, 4, 4}));
  const char* across = "reads across the boundary of a slab along D";
  EXPECT_ERROR(max_pool3d(x, {.kernel_size = 3, .stride = 2, .padding = 1}), across);
  EXPECT_ERROR(avg_pool3d(x, {.kernel_size = 3}), across);
  EXPECT_ERROR(adaptive_avg_pool3d(x, 1), across);
  EXPECT_ERROR(adaptive_max_pool3d(x, 1), across);
  EXPECT_ERROR(interpolate(x, {.scale_factor = ScaleFactor{1.2, 1.0, 1.0}}), across);
  EXPECT_ERROR(interpolate(x, {.scale_factor = 2.0, .mode = InterpolateMode::trilinear}), across);
  EXPECT_ERROR(pad(x, {0, 0, 0, 0, 1, 1}), across);
  EXPECT_ERROR(pad(x, {0, 0, 0, 0, 1, 1}, PadMode::replicate), across);
  EXPECT_ERROR(pad(x[0], {0, 0, 0, 0, 1, 1}), across);
  EXPECT_ERROR(grid_sample(x, here(zeros({1, 2, 2, 2, 3}))), across);
  pad(x, {1, 1, 1, 1, 0, 0});
  const Tensor w = here(zeros({2, 2, 3, 3, 3}));
  EXPECT_ERROR(conv3d(x, w), "must divide its depth by exactly the stride; a slab of depth 4 gives depth 2");
  EXPECT_ERROR(conv3d(x, w, {}, {.stride = 3, .padding = 1}), "must divide its depth by exactly the stride");
  EXPECT_ERROR(conv_transpose3d(x, w),
               "must multiply its depth by exactly the stride; a slab of depth 4 gives depth 6");
  EXPECT_ERROR(conv3d(x, w, {}, {.padding = 5, .dilation = 5}),
               "depends on a halo of depth 5, but the neighboring slab has depth 4");
  const Tensor input = leaf(ones({1, 2, 4, 4, 4}));
  const Tensor y = sum(conv3d(input, w, {}, {.padding = 1}));
  EXPECT_ERROR(grad({y}, {input}, {}, true, true), "cannot be differentiated again");
}

/// Compares the deep supervision loss and the gradients of one backward pass with those of the whole volume.
TEST_F(SpatialRanks, UNetGradientsMatchTheWholeVolume) {
  nn::UNetOptions options{.num_classes = 3, .stages = {{8}, {12, 3, 2}, {16, 3, 2}}};
  const int64_t depth = 8 * size_;
  const Tensor volume = here(normal({2, 1, depth, 8, 8}, 1));
  const Tensor labels = here(clamp(normal({2, depth, 8, 8}, 2) + 1.5, 0, 2).to(i64));
  const auto loss_of = [](const nn::UNet& model, const Tensor& x, const Tensor& target, bool batch) {
    return deep_supervision_loss(model.levels(x), target, {.dice = {.batch = batch, .include_background = false}});
  };
  for (const bool recompute : {false, true})
    for (const bool batch : {false, true})
      for (const bool residual : {false, true}) {
        options.recompute = recompute;
        options.residual = residual;
        manual_seed(3);
        nn::UNet whole(options), model(options);
        model.to(world_->device());
        if (batch) model.to(MemoryFormat::channels_last);
        const nn::DataParallel parallel(model, *world_, {.bucket_cap_mb = 0.01});
        whole.to(world_->device());
        whole.load_state_dict(model.state_dict());
        const Tensor wanted = loss_of(whole, volume, labels, batch);
        wanted.backward();
        Tensor loss;
        {
          const SpatialParallel spatial(*world_);
          loss = loss_of(model, spatial.slab(volume), spatial.slab(labels), batch);
        }
        loss.backward();
        expect_close(loss, wanted, 1e-5, "loss");
        const TensorMap expected = parameters_of(whole);
        for (const auto& [name, p] : model.named_parameters()) {
          const Tensor reference = expected.at(name);
          if (!reference.grad().defined()) {
            EXPECT_FALSE(p.grad().defined() && abs(p.grad()).amax().item() > 0) << name;
            continue;
          }
          // The gradient of a bias before a norm is zero up to rounding, so the scale has a minimum.
          const double scale = std::max(abs(reference.grad()).amax().item(), 1e-3);
          EXPECT_LE(abs(p.grad() - reference.grad()).amax().item(), 2e-4 * scale) << name;
        }
      }
}

/// A strided convolution needs a halo on one side only, so the first rank receives no halo. All ranks must still
/// exchange their messages in the same order when recompute() runs the convolutions again.
TEST_F(SpatialRanks, RecomputeKeepsTheOrderOfMessages) {
  const Tensor x = whole_numbers({1, 2, 8 * size_, 6, 6}, 1);
  const Tensors weights{whole_numbers({4, 2, 3, 3, 3}, 2), whole_numbers({2, 4, 3, 3, 3}, 3)};
  expect_slabs_match_whole(
      [](const Tensors& t) {
        const auto two = [](const Tensors& s) {
          return Tensors{conv3d(conv3d(s[0], s[1], {}, {.padding = 1}), s[2], {}, {.stride = 2, .padding = 1})};
        };
        return autograd::recompute(two, t)[0];
      },
      x, weights, 0, MemoryFormat::contiguous, "recomputed convolutions");
}

TEST_F(SpatialRanks, CrossEntropyMatchesTheWholeVolume) {
  const Tensor logits = here(normal({2, 4, 2 * size_, 3, 3}, 1));
  const Tensor labels = here(clamp(normal({2, 2 * size_, 3, 3}, 2) + 1.5, 0, 3).to(i64));
  const Tensor weight = here(from_span<float>(std::vector<float>{1, 2, 0.5, 3}, {4}));
  const CrossEntropyOptions options{.weight = weight, .ignore_index = 1};
  const Tensor wanted = cross_entropy(logits, labels, options);
  const Tensor many = cat({logits, logits, logits, logits}, 1), of_many = cross_entropy(many, labels);
  std::vector<std::pair<Reduction, Tensor>> wanted_sums;
  for (const Reduction reduction : {Reduction::sum, Reduction::batchmean})
    wanted_sums.emplace_back(reduction, cross_entropy(many, labels, reduction));
  const SpatialParallel spatial(*world_);
  expect_close(cross_entropy(spatial.slab(logits), spatial.slab(labels), options), wanted, 1e-6, "few classes");
  expect_close(cross_entropy(spatial.slab(many), spatial.slab(labels)), of_many, 1e-6, "many classes");
  for (const auto& [reduction, sums] : wanted_sums)
    expect_close(cross_entropy(spatial.slab(many), spatial.slab(labels), reduction), sums, 1e-6, "many classes, sum");
}

TEST_F(SpatialRanks, LossesOfProbabilitiesMatchTheWholeVolume) {
  const Tensor logits = here(normal({2, 3, 2 * size_, 3, 3}, 1)), targets = softmax(here(normal(logits.shape(), 2)), 1);
  const Tensor wanted = dice_ce_loss(logits, targets);
  const SpatialParallel spatial(*world_);
  expect_close(dice_ce_loss(spatial.slab(logits), spatial.slab(targets)), wanted, 1e-6, "dice_ce_loss");
}

/// SpatialParallel does not apply to operators that a hook calls during the backward pass. The convolution in the hook
/// treats its input as a whole volume.
TEST_F(SpatialRanks, HooksComputeWithWholeVolumes) {
  const Tensor x = leaf(ones({1, 1, 4, 4, 4})), w = here(ones({1, 1, 3, 3, 3}));
  const SpatialParallel spatial(*world_);
  Tensor convolved;
  const Tensor y = x * 2.0;
  y.register_hook([&](const Tensor& g) {
    convolved = conv3d(g, w);
    return Tensor();
  });
  sum(y).backward();
  EXPECT_EQ(convolved.to(Device::cpu()).to_vector(), std::vector<double>(8, 27));
}

TEST_F(SpatialRanks, SyncBatchNormMatchesTheWholeBatch) {
  manual_seed(0);
  const auto make = [] {
    return std::make_unique<nn::Sequential>(nn::Conv3d(2, 4, 3), nn::BatchNorm3d(4), nn::ReLU(), nn::Conv3d(4, 3, 1),
                                            nn::BatchNorm3d(3));
  };
  const auto whole = make(), model = make();
  model->to(world_->device());
  nn::convert_sync_batchnorm(*model, *world_);
  const nn::DataParallel parallel(*model, *world_);
  whole->to(world_->device());
  whole->load_state_dict(model->state_dict());
  const Tensor x = here(normal({2 * size_, 2, 5, 5, 5}, 1) + 1.0);
  const Tensor y = (*whole)(x), weights = here(normal(y.shape(), 2));
  mean(y * weights).backward();
  const Tensor own = (*model)(x.narrow(0, 2 * rank_, 2));
  expect_close(own, y.detach().narrow(0, 2 * rank_, 2), 1e-5, "result");
  mean(own * weights.narrow(0, 2 * rank_, 2)).backward();
  const TensorMap expected = parameters_of(*whole);
  for (const auto& [name, p] : model->named_parameters())
    if (name.ends_with("weight")) expect_close(p.grad(), expected.at(name).grad(), 1e-4, name);
  for (const auto& [name, buffer] : whole->state_dict()) expect_close(model->state_dict().at(name), buffer, 1e-5, name);
  whole->eval();
  model->eval();
  expect_close((*model)(x.narrow(0, 2 * rank_, 2)), (*whole)(x).narrow(0, 2 * rank_, 2), 1e-5, "in evaluation");
}

TEST_F(SpatialRanks, SyncBatchNormCombinesTwoAndFourElements) {
  if (size_ != 2) GTEST_SKIP() << "the expected values hold for two ranks";
  nn::BatchNorm1d norm(1, {.momentum = 1.0});
  norm.to(world_->device());
  nn::convert_sync_batchnorm(norm, *world_);
  const std::vector<float> own = rank_ == 0 ? std::vector<float>{0, 2} : std::vector<float>{1, 1, 5, 5};
  norm(here(from_span<float>(own, {std::ssize(own), 1})));
  EXPECT_NEAR(norm.running_mean.item(), 14.0 / 6, 1e-6);
  EXPECT_NEAR(norm.running_var.item(), 14.0 / 3, 1e-5);
}

/// Ranks 0 to 3 have 2, 5, 0 and 1 samples. The loss is the sum of the losses of all ranks.
TEST_F(SpatialRanks, SyncBatchNormWeightsRanksByTheirElements) {
  const std::array<int64_t, 4> samples{2, 5, 0, 1};
  int64_t first = 0, total = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank < rank_) first += samples[static_cast<size_t>(rank % 4)];
    total += samples[static_cast<size_t>(rank % 4)];
  }
  const int64_t count = samples[static_cast<size_t>(rank_ % 4)];
  const auto expect_whole = [&]<class Norm>(const Shape& shape, MemoryFormat format, DType dtype) {
    const double tolerance = dtype == f64 ? 1e-12 : 2e-5;
    const std::string context = concat("BatchNorm of ", shape, ' ', dtype);
    Norm whole(3, {.momentum = 0.25}), synchronized(3, {.momentum = 0.25});
    for (Norm* norm : {&whole, &synchronized}) {
      norm->weight.detach().copy_(normal({3}, 5));
      norm->to(world_->device());
      norm->to(dtype);
    }
    nn::convert_sync_batchnorm(synchronized, *world_);
    const Tensor x = leaf(normal(shape, 1).to(dtype).contiguous(format) + 3.0);
    const Tensor weights = here(normal(shape, 2).to(dtype));
    const Tensor y = whole(x);
    sum(y * weights).backward();
    const Tensor own = leaf(x.detach().narrow(0, first, count).contiguous(format)), result = synchronized(own);
    sum(result * weights.narrow(0, first, count)).backward();
    if (count > 0) {
      expect_close(result, y.detach().narrow(0, first, count), tolerance, context + ", result");
      expect_close(own.grad(), x.grad().narrow(0, first, count), tolerance, context + ", gradient of the input");
    }
    expect_close(this->total(synchronized.weight.grad()), whole.weight.grad(), tolerance,
                 context + ", gradient of weight");
    expect_close(this->total(synchronized.bias.grad()), whole.bias.grad(), tolerance, context + ", gradient of bias");
    expect_close(synchronized.running_mean, whole.running_mean, tolerance, context + ", running_mean");
    expect_close(synchronized.running_var, whole.running_var, tolerance, context + ", running_var");
  };
  for (const DType dtype : {f32, f64}) {
    expect_whole.template operator()<nn::BatchNorm1d>({total, 3}, MemoryFormat::contiguous, dtype);
    for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
      expect_whole.template operator()<nn::BatchNorm3d>({total, 3, 2, 3, 2}, format, dtype);
  }
}

}  // namespace
}  // namespace voxgrad
