// Implements ConvProblem, the description of a convolution for the planners.
#include <algorithm>
#include <atomic>

#include "core/detail/divide.h"
#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

std::atomic<ConvChoice> forced_choice{};

/// Returns whether the voxels of each channel are contiguous and consist of whole, aligned vectors of 16 bytes.
bool has_planes(const View& view) {
  const int64_t width = 16 / item_size(view.dtype);
  bool planes = is_dense(view, {4, 3, 2}) && view.size[2] * view.size[3] * view.size[4] % width == 0 &&
                reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int a = 0; a < 2; ++a) planes &= view.size[a] == 1 || view.stride[a] % width == 0;
  return planes;
}

}  // namespace

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

bool has_channels_innermost(const View& view) {
  bool innermost = view.size[1] == 1 || view.stride[1] == 1;
  for (int a = 0; a < 5; ++a)
    if (a != 1 && view.size[a] > 1) innermost &= view.stride[a] >= view.size[1];
  return innermost;
}

void set_in_layout(ConvProblem& problem, const View& in) {
  for (int a = 0; a < 3; ++a) problem.in_stride[a] = in.stride[a + 2];
  problem.in_channel_stride = in.stride[1];
  problem.in_channels_last = has_channels_innermost(in);
  problem.in_aligned = is_tma_tensor(in);
  problem.in_dense = is_dense(in, {1, 4, 3, 2, 0});
  problem.in_planes = has_planes(in);
}

void set_out_layout(ConvProblem& problem, const View& out) {
  for (int a = 0; a < 3; ++a) problem.out_stride[a] = out.stride[a + 2];
  problem.out_channel_stride = out.stride[1];
  problem.out_sample_stride = out.stride[0];
  problem.out_channels_last = has_channels_innermost(out);
  problem.out_aligned = is_tma_tensor(out);
  problem.out_dense = is_dense(out, {1, 4, 3, 2, 0});
  problem.out_planes = has_planes(out);
}

void set_weight_layout(ConvProblem& problem, const View& w) {
  problem.weight_rows = weight_row_stride(w) > 0;
  problem.weight_channels_last = has_channels_innermost(w) && w.stride[4] == w.size[1];
}

int64_t lay_out(View& view, const std::array<int, 5>& axes) {
  const int64_t wide = 16 / item_size(view.dtype);
  int64_t stride = 1;
  for (const int axis : axes) {
    view.stride[axis] = stride;
    stride = axis == axes[0] ? round_up(view.size[axis], wide) : stride * view.size[axis];
  }
  return stride;
}

bool is_dense(const View& view, std::initializer_list<int> axes, int64_t stride) {
  for (const int axis : axes) {
    if (view.size[axis] > 1 && view.stride[axis] != stride) return false;
    stride *= view.size[axis];
  }
  return true;
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
  set_in_layout(problem, in);
  set_out_layout(problem, out);
  set_weight_layout(problem, w);
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

int set_axes(const ConvProblem& p, AxisPhases (&axes)[3], bool tma, int64_t most_taps, int64_t most_phases) {
  int64_t taps = 1, phases = 1;
  for (int a = 0; a < 3; ++a) {
    const auto axis = phases_of(p, a, !tma && a == 2);
    if (!axis || (tma && (axis->in_step > kMaxStep || !has_short_offsets(*axis)))) return 0;
    axes[a] = *axis;
    taps *= axis->kernel;
    phases *= axis->phases;
    if (taps > most_taps || phases > most_phases) return 0;
  }
  return static_cast<int>(phases);
}

int64_t read_size(const ConvProblem& p, int axis) {
  const ConvGeometry& g = p.geometry;
  const int64_t last =
      (p.out_size[axis] - 1) * g.stride[axis] - g.padding[axis] + (p.kernel[axis] - 1) * g.dilation[axis];
  return std::clamp<int64_t>(last + 1, 0, p.in_size[axis]);
}

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
