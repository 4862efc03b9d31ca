// Host side of wgrad.cuh: the tables of units, the launch, and the second kernel of split-K.
#include "cuda/conv/direct/small_channel/wgrad.cuh"

#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/wgrad_reduce.cuh"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/common.h"

namespace voxgrad::cuda {
namespace {

/// The parameters of wgrad_reduce() (common/wgrad_reduce.cuh).
struct WgradReduction {
  const float* partial;
  void* weight;
  int64_t row_stride;
  int64_t channel_stride;
  int64_t tap_stride[3];
  int in_channels;
  int out_channels;
  int columns;
  int octets;
  int units;
  int kernel[3];
  int64_t elements;  // per range
  int64_t ranges;

  __device__ int64_t offset(int64_t element) const {
    const int64_t column = take_digit(element, columns), channel = take_digit(element, 8);
    int64_t unit = take_digit(element, units);
    const int64_t octet = take_digit(unit, octets), w = take_digit(unit, kernel[2]), h = take_digit(unit, kernel[1]);
    if (column >= out_channels || octet * 8 + channel >= in_channels) return kNoWeight;
    return (element * out_channels + column) * row_stride + (octet * 8 + channel) * channel_stride +
           unit * tap_stride[0] + h * tap_stride[1] + w * tap_stride[2];
  }
};

/// Lists the plane and the offset that each unit reads. The order of the units is (tap along depth, height, width, 8
/// channels).
void list_units(SmallChannelWgradParams& p, const SmallChannelWgradPlan& plan, const ConvProblem& problem) {
  const SmallChannelHalo& halo = plan.x;
  int unit = 0;
  const auto dilated = [&](int axis, int tap) { return tap * static_cast<int>(problem.geometry.dilation[axis]); };
  for (int d = 0; d < problem.kernel[0]; ++d)
    for (int h = 0; h < problem.kernel[1]; ++h)
      for (int w = 0; w < problem.kernel[2]; ++w)
        for (int octet = 0; octet < plan.octets; ++octet, ++unit) {
          p.unit_plane[unit] = dilated(0, d);
          p.unit_offset[unit] = (halo.offset(dilated(1, h), dilated(2, w)) + octet * 8 * halo.pitch) * 4;
        }
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const SmallChannelWgradPlan& plan,
              const Launch& launch) {
  const View &w = call.w, &x = call.in, &y = call.out;
  SmallChannelWgradParams p{};
  p.x = describe_input(x, static_cast<int>(problem.in_channels), plan.x);
  p.y = describe_input(y, static_cast<int>(problem.out_channels), plan.y);
  for (int a = 0; a < 3; ++a)  // treats voxels that no tap reads as zero
    p.x.size[a] = static_cast<int>(read_size(problem, a));
  std::copy_n(plan.tile, 3, p.tiles.tile);
  std::copy_n(plan.tiles, 3, p.tiles.tiles);
  p.tiles.count = plan.axis[0].count;
  p.tiles.groups = static_cast<int>(problem.groups);
  p.units = plan.units;
  p.splits = plan.splits;
  p.line_octs = Divisor(plan.y.line / 8);
  p.octs = plan.tile[1] * p.line_octs.value();
  list_units(p, plan, problem);
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  p.partial = partial.as<float>();

  WgradReduction sum{.partial = p.partial,
                     .weight = w.data,
                     .row_stride = w.stride[0],
                     .channel_stride = w.stride[1],
                     .tap_stride = {w.stride[2], w.stride[3], w.stride[4]},
                     .in_channels = p.x.channels,
                     .out_channels = p.y.channels,
                     .columns = plan.columns,
                     .octets = plan.octets,
                     .units = plan.units,
                     .kernel = {static_cast<int>(w.size[2]), static_cast<int>(w.size[3]), static_cast<int>(w.size[4])},
                     .elements = problem.groups * plan.units * 8 * plan.columns,
                     .ranges = plan.ranges};
  const int64_t blocks = plan.ranges * problem.groups;
  with_float_arithmetic(arithmetic_of(problem), [&]<class Arithmetic, class Element, ConvArithmetic kKind>() {
    const auto queue = [&]<int kN8>() {
      launch_wgrad_small_channel<SmallChannelWgradTile<Arithmetic, Element, kKind, kN8>>(p, blocks, plan.shared_bytes,
                                                                                         launch.stream);
    };
    plan.columns == 8 ? queue.template operator()<1>() : queue.template operator()<2>();
    reduce_ranges<Element>(sum, launch.stream);
  });
}

}  // namespace voxgrad::cuda
