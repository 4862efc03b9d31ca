// Implements ConvProblem, the description of a convolution for the planners.
#include <algorithm>
#include <atomic>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

std::atomic<ConvChoice> forced_choice{};

/// Returns true if the inputs do not fit into the caches and each input element is used in fewer than `little`
/// products. The convolution is then memory-bound, and a copy would triple the traffic of the inputs.
bool is_used_little(const ConvProblem& p, double little) {
  if (p.pass != ConvPass::fprop) return false;
  double inputs = 1, results = 1, taps = 1;  // voxels
  for (int a = 0; a < 3; ++a) {
    inputs *= static_cast<double>(p.in_size[a]);
    results *= static_cast<double>(p.out_size[a]);
    taps *= static_cast<double>(p.kernel[a]);
  }
  const double bytes = inputs * static_cast<double>(p.batch * p.groups * p.in_channels * item_size(p.dtype));
  return 4 * results <= inputs && bytes >= (128 << 20) &&
         taps * results / inputs * static_cast<double>(p.out_channels) < little;
}

bool has_channels_innermost(const View& view) {
  bool innermost = view.size[1] == 1 || view.stride[1] == 1;
  for (int a = 0; a < 5; ++a)
    if (a != 1 && view.size[a] > 1) innermost &= view.stride[a] >= view.size[1];
  return innermost;
}

/// Returns true if the view is channels-last without gaps between voxels.
bool is_dense_channels_last(const View& view) {
  int64_t step = 1;
  for (const int axis : {1, 4, 3, 2, 0}) {
    if (view.size[axis] > 1 && view.stride[axis] != step) return false;
    step *= view.size[axis];
  }
  return true;
}

}  // namespace

// wgmma is slow with few columns, because a product reads 64 rows of A for any number of columns. Three products read A
// three times. A copy of the inputs does not pay if the channels of a voxel fill at most 8 bytes, or if each element is
// used in few products. The bounds of this number were fitted to measurements.
bool pays_to_copy(const ConvProblem& p) {
  const bool three = three_products(p);
  const int64_t few = three ? 16 : 8;
  const double little = !three ? 200 : p.in_channels_last ? 100 : p.out_channels <= 32 ? 600 : 300;
  return p.out_channels > few && p.in_channels > 2 * elements_of(p) && !is_used_little(p, little);
}

const char* name(ConvArithmetic arithmetic) {
  constexpr const char* kNames[] = {"TF32", "3xTF32", "bf16", "f16"};
  return kNames[static_cast<int>(arithmetic)];
}

bool is_tma_tensor(const View& view) {
  const int64_t wide = 16 / item_size(view.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && (view.size[1] == 1 || view.stride[1] == 1);
  for (int a = 0; a < 5; ++a)
    if (a != 1 && view.size[a] > 1) aligned &= view.stride[a] > 0 && view.stride[a] % wide == 0;
  return aligned;
}

void force_conv_choice(ConvChoice choice) { forced_choice.store(choice); }

void set_layout(ConvProblem& problem, const View& in, const View& out, const View& w) {
  for (int a = 0; a < 3; ++a) {
    problem.in_stride[a] = in.stride[a + 2];
    problem.out_stride[a] = out.stride[a + 2];
  }
  problem.in_channel_stride = in.stride[1];
  problem.out_channel_stride = out.stride[1];
  problem.out_sample_stride = out.stride[0];
  problem.in_channels_last = has_channels_innermost(in);
  problem.out_channels_last = has_channels_innermost(out);
  problem.in_aligned = is_tma_tensor(in);
  problem.out_aligned = is_tma_tensor(out);
  problem.in_dense = is_dense_channels_last(in);
  problem.out_dense = is_dense_channels_last(out);
  problem.weight_rows = weight_row_stride(w) > 0;
  problem.weight_channels_last = has_channels_innermost(w) && w.stride[4] == w.size[1];
}

int64_t weight_row_stride(const View& w) {
  int axes[] = {1, 2, 3, 4};
  std::ranges::sort(axes, {}, [&](int axis) { return w.stride[axis]; });
  int64_t step = 0, next = 0;
  for (const int axis : axes) {
    if (w.size[axis] == 1) continue;
    if (step == 0) step = next = w.stride[axis];
    if (step <= 0 || w.stride[axis] != next) return 0;
    next *= w.size[axis];
  }
  return std::max<int64_t>(step, 1);
}

ConvProblem conv_problem(ConvPass pass, const View& in, const View& out, const View& w, const ConvGeometry& geometry) {
  ConvProblem problem{.pass = pass,
                      .dtype = w.dtype,
                      .precision = float32_precision(),
                      .batch = in.size[0],
                      .groups = geometry.groups,
                      .in_channels = in.size[1] / geometry.groups,
                      .out_channels = out.size[1] / geometry.groups,
                      .geometry = geometry,
                      .choice = forced_choice.load()};
  for (int a = 0; a < 3; ++a) {
    problem.in_size[a] = in.size[a + 2];
    problem.out_size[a] = out.size[a + 2];
    problem.kernel[a] = w.size[a + 2];
  }
  set_layout(problem, in, out, w);
  describe_device(problem, w.device);
  return problem;
}

ConvArithmetic arithmetic_of(const ConvProblem& p) {
  if (p.dtype == DType::bf16) return ConvArithmetic::bf16;
  if (p.dtype == DType::f16) return ConvArithmetic::f16;
  return p.precision == Float32Precision::highest ? ConvArithmetic::tf32x3 : ConvArithmetic::tf32;
}

std::optional<AxisPhases> phases_of(const ConvProblem& p, int a, bool fold) {
  const ConvGeometry& g = p.geometry;
  return p.pass == ConvPass::dgrad
             ? dgrad_phases(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a])
             : fprop_phases(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a], fold);
}

int64_t read_size(const ConvProblem& p, int axis) {
  const ConvGeometry& g = p.geometry;
  const int64_t last =
      (p.out_size[axis] - 1) * g.stride[axis] - g.padding[axis] + (p.kernel[axis] - 1) * g.dilation[axis];
  return std::clamp<int64_t>(last + 1, 0, p.in_size[axis]);
}

bool may_use_wgmma(const ConvProblem& p) { return p.wgmma && !p.choice.mma_sync; }

std::vector<int> box_widths(int count, int most) {
  std::vector<int> result;
  for (int width = std::min(count, most); width > 0; --width) {
    const int pieces = divide_up(count, width);
    width = divide_up(count, pieces);
    result.push_back(width);
  }
  return result;
}

}  // namespace voxgrad::cuda
