#include <algorithm>
#include <atomic>

#include "cuda/conv/plan_common.h"

namespace voxgrad::cuda {
namespace {

constexpr int kMaxTaps = 1024, kMaxClasses = 64;
constexpr int kKWords = 8;

std::atomic<ConvChoice> forced_choice{};

int k_block_channels(const ConvProblem& p) { return kKWords * (p.dtype == DType::f32 ? 1 : 2); }

bool choose_axes(const ConvProblem& p, ImplicitGemmPlan& plan) {
  const bool transposed = p.pass == ConvPass::dgrad;
  plan.classes = 1;
  int all_taps = 1;
  for (int a = 0; a < 3; ++a) {
    const ConvGeometry& g = p.geometry;
    const auto axis =
        transposed
            ? dgrad_phases(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a])
            : fprop_phases(p.in_size[a], p.out_size[a], p.kernel[a], g.stride[a], g.padding[a], g.dilation[a], a == 2);
    if (!axis || axis->kernel > kMaxTaps) return false;
    plan.axis[a] = *axis;
    plan.classes *= axis->phases;
    all_taps *= axis->kernel;
    if (all_taps > kMaxTaps) return false;
  }
  return plan.classes <= kMaxClasses;
}

/// Whether more inputs than caches hold are read by few results each: to pack them is a third trip to memory.
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

bool takes_wgmma(const ConvProblem& p) {
  if (!may_use_wgmma(p)) return false;
  if (p.choice.width > 0) return asked_width(p, implicit_gemm_widths(arithmetic_of(p), true)).has_value();
  return pays_to_pack(p);
}

int choose_columns(const ConvProblem& p) {  // of mma.sync
  const auto compiled = implicit_gemm_widths(arithmetic_of(p), false);
  if (const auto asked = asked_width(p, compiled)) return *asked;
  int best = compiled.front();
  for (const int columns : compiled) {
    const auto computed = [&](int64_t c) {
      return (p.out_channels + c - 1) / c * (c + 12);
    };  // 12: what a tile costs by itself
    if (computed(columns) < computed(best)) best = columns;
  }
  return best;
}

}  // namespace

/// Few columns are no work for wgmma: 64 rows of A are read for each 8 words, however few, and three times for three
/// products. And to pack the inputs costs more than it saves where they fill no more than a quarter of what they are
/// packed to, or are used little (by three products more is little; of few columns, more yet).
bool pays_to_pack(const ConvProblem& p) {
  const bool three = three_products(p);
  const int64_t few = three ? 16 : 8;
  const double little = !three ? 200 : p.out_channels <= 32 ? 600 : 300;
  return p.out_channels > few && 4 * p.in_channels > k_block_channels(p) && !is_used_little(p, little);
}

const char* name(ConvArithmetic arithmetic) {
  constexpr const char* kNames[] = {"TF32", "3xTF32", "bf16", "f16"};
  return kNames[static_cast<int>(arithmetic)];
}

namespace {

bool has_channels_innermost(const View& view) {
  bool innermost = view.size[1] == 1 || view.stride[1] == 1;
  for (int a = 0; a < 5; ++a)
    if (a != 1 && view.size[a] > 1) innermost &= view.stride[a] >= view.size[1];
  return innermost;
}

}  // namespace

void force_conv_choice(ConvChoice choice) { forced_choice.store(choice); }

ConvProblem conv_problem(ConvPass pass, const View& in, const View& out, const View& w, const ConvGeometry& geometry) {
  ConvProblem problem{.pass = pass,
                      .dtype = w.dtype,
                      .precision = float32_precision(),
                      .batch = in.size[0],
                      .groups = geometry.groups,
                      .in_channels = in.size[1] / geometry.groups,
                      .out_channels = out.size[1] / geometry.groups,
                      .geometry = geometry,
                      .in_channels_last = has_channels_innermost(in),
                      .out_channels_last = has_channels_innermost(out),
                      .weight_channels_last = has_channels_innermost(w) && w.stride[4] == w.size[1],
                      .choice = forced_choice.load()};
  for (int a = 0; a < 3; ++a) {
    problem.in_size[a] = in.size[a + 2];
    problem.out_size[a] = out.size[a + 2];
    problem.kernel[a] = w.size[a + 2];
    problem.in_stride[a] = in.stride[a + 2];
    problem.out_stride[a] = out.stride[a + 2];
  }
  return problem;
}

ConvArithmetic arithmetic_of(const ConvProblem& p) {
  if (p.dtype == DType::bf16) return ConvArithmetic::bf16;
  if (p.dtype == DType::f16) return ConvArithmetic::f16;
  return p.precision == Float32Precision::highest ? ConvArithmetic::tf32x3 : ConvArithmetic::tf32;
}

bool may_use_wgmma(const ConvProblem& p) { return p.wgmma && !p.choice.mma_sync; }

std::optional<int> asked_width(const ConvProblem& p, std::span<const int> widths) {
  const bool compiled = std::find(widths.begin(), widths.end(), p.choice.width) != widths.end();
  return compiled ? std::optional<int>(p.choice.width) : std::nullopt;
}

std::span<const int> implicit_gemm_widths(ConvArithmetic arithmetic, bool wgmma) {
  static constexpr int kWidths[] = {8, 16, 24, 32, 48, 64, 128};
  // Three products: the sums of a step stand in registers beside the accumulators.
  const bool three = arithmetic == ConvArithmetic::tf32x3;
  const std::span<const int> all(kWidths);
  return wgmma ? all.subspan(1, three ? 5 : 6) : all.first(three ? 4 : 6);
}

std::vector<int> box_widths(int count, int most) {
  std::vector<int> result;
  for (int width = std::min(count, most); width > 0; --width) {
    const int pieces = (count + width - 1) / width;
    width = (count + pieces - 1) / pieces;
    result.push_back(width);
  }
  return result;
}

bool finish(const ConvProblem& p, ImplicitGemmPlan& plan) {
  plan.halo_voxels = 1;
  double blocks = static_cast<double>(p.batch * p.groups) * (plan.merged ? 1 : plan.column_tiles);
  if (p.pass == ConvPass::dgrad && !plan.merged) blocks *= plan.classes / plan.tile_phases;
  double reach = 0, spread = 0;  // of a halo and of a tile, in elements: offsets in it are 32-bit and not negative
  for (int a = 0; a < 3; ++a) {
    plan.extent[a] = (plan.tile[a] - 1 + plan.axis[a].max_span) * plan.axis[a].fold;
    const int pitch = a == 0 ? plan.range : plan.tile[a];  // of tiles
    plan.tiles[a] = (plan.axis[a].count + pitch - 1) / pitch;
    plan.halo_voxels *= plan.extent[a];
    blocks *= plan.tiles[a];
    if (p.in_stride[a] < 0 || p.out_stride[a] < 0) return false;
    reach += static_cast<double>(p.in_stride[a]) * plan.axis[a].in_step * plan.extent[a];
    spread += static_cast<double>(p.out_stride[a]) * plan.axis[a].out_step * (plan.tile[a] + 1);
  }
  return blocks < 2147483647.0 && reach < (1 << 29) && spread < (1 << 30);
}

std::optional<ImplicitGemmPlan> plan_implicit_gemm(const ConvProblem& p) {
  ImplicitGemmPlan plan{};
  if (p.dtype == DType::f64 || p.choice.plain || !choose_axes(p, plan) || plan.classes == 0) return std::nullopt;
  plan.k_blocks = static_cast<int>((p.in_channels + k_block_channels(p) - 1) / k_block_channels(p));
  plan.tile_phases = plan.stage_k_blocks = plan.slide = 1;
  plan.wgmma = takes_wgmma(p);
  if (plan.wgmma)
    if (const auto found = plan_implicit_gemm_wgmma(p, plan)) return found;
  plan.wgmma = false;
  plan.columns = choose_columns(p);
  plan.column_tiles = static_cast<int>((p.out_channels + plan.columns - 1) / plan.columns);
  return plan_implicit_gemm_mma_sync(p, plan);
}

int64_t read_step(const ConvProblem& p, int axis) { return p.pass == ConvPass::dgrad ? 1 : p.geometry.stride[axis]; }

int64_t read_size(const ConvProblem& p, int axis) {
  const ConvGeometry& g = p.geometry;
  const int64_t in_size = p.in_size[axis];
  if (p.pass == ConvPass::dgrad) return in_size;
  const int64_t last =
      (p.out_size[axis] - 1) * g.stride[axis] - g.padding[axis] + (p.kernel[axis] - 1) * g.dilation[axis];
  return std::min(std::max<int64_t>(last + 1, 1), in_size);
}

int64_t packed_voxels(const ConvProblem& p) {
  const int64_t step = read_step(p, 2), line = divide_up(read_size(p, 2), step) * step;
  return parts(p) * read_size(p, 0) * read_size(p, 1) * line;
}

int64_t input_bytes(const ConvProblem& p) {
  return p.groups * divide_up(p.in_channels, k_block_channels(p)) * 2 * kVoxelBytes * packed_voxels(p);
}

int64_t workspace_bytes(const ConvProblem& p, const ImplicitGemmPlan& plan) {
  int64_t words = p.groups * plan.column_tiles * plan.columns * plan.slide * plan.k_blocks * kKWords;
  for (const AxisPhases& axis : plan.axis) {
    int64_t taps = 0;
    for (int i = 0; i < axis.phases; ++i) taps += axis.phase[i].taps;
    words *= taps;
  }
  return words * (arithmetic_of(p) == ConvArithmetic::tf32x3 ? 2 : 1) * static_cast<int64_t>(sizeof(uint32_t)) +
         (plan.wgmma ? plan.samples * input_bytes(p) : 0);
}

}  // namespace voxgrad::cuda
