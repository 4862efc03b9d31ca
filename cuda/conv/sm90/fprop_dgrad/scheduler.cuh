// Static persistent tile scheduler: the work units of a CTA, and the k-blocks of a work unit.
#pragma once

#include "cuda/conv/sm90/fprop_dgrad/params.h"

namespace voxgrad::cuda::implicit_gemm {

/// The results that a CTA computes at a time: a CTA tile of voxels and output channels (or all output channels), in one
/// stride phase (or all phases), for one split of K.
struct WorkUnit {
  int column;  // index of the (current) tile along the output channels
  int split;
  int phase;
  int group;
  Coordinates at;  // corner of the tile, in results of the phase
  int plane = 0;   // sliding: current plane of inputs
  int planes = 1;  // sliding: number of planes of inputs
  int first_load = 0;
  int loads = 0;  // boxes of the current GEMM for each chunk

  /// `number` is the number of the cluster's unit.
  __device__ WorkUnit(const Params& p, int number) {
    phase = number;
    number = p.phase_units.take_digit(phase);
    column = p.columns.take_digit(number) * p.unit_columns;
    split = p.split.take_digit(number);
    if (p.cluster > 1) number = 2 * number + static_cast<int>(blockIdx.x) % 2;
    for (int a = 3; a >= 0; --a) at[a] = p.tiles[a].take_digit(number) * p.unit[a];
    group = number;
  }
  /// Sets the boxes of a GEMM. Omits those outside of the inputs along the depth, except for the last box, whose zeros
  /// lead to results.
  __device__ void select_boxes(const Params& p, const Phase& of) {
    first_load = of.first_load;
    loads = of.loads;
    if (of.depth_loads == 0) return;
    const auto is_outside = [&](int load) {
      const int first = at[1] * p.in_step[0] + p.load[load].offset[0];
      return first >= p.in_depth || first + p.box_depth <= 0;
    };
    for (; loads > of.depth_loads && is_outside(first_load); loads -= of.depth_loads) first_load += of.depth_loads;
    for (; loads > of.depth_loads && is_outside(first_load + loads - 1);) loads -= of.depth_loads;
  }
  /// Returns false if the tile lies outside of the results of this phase. Phases may have different sizes.
  __device__ bool has_results(const Phase& of) const {
    return at[1] < of.count[0] && at[2] < of.count[1] && at[3] < of.count[2];
  }
};

/// Calls f(unit, phase, false) for each plane of inputs of a sliding unit, alternating between the runs of the two
/// warpgroups. unit.at[1] is then the plane of results whose first plane of inputs is the current plane.
template <int kSlide, class F>
__device__ void for_each_plane(const Params& p, WorkUnit unit, const F& f) {
  const int corner = unit.at[1];
  unit.select_boxes(p, p.phase_of[0]);
  unit.planes = min(p.run, p.phase_of[0].count[0] - corner) + kSlide - 1;
  for (; unit.plane < unit.planes; ++unit.plane)
    for (int run = 0; run < 2; ++run) {
      unit.at[1] = corner + run * p.run + unit.plane;
      f(unit, p.phase_of[0], false);
    }
}

/// Calls f(unit, phase, first) for the implicit GEMMs of this CTA. `first` is true for the first GEMM of a unit. The
/// first units have the largest K. Each round assigns units to the clusters in the opposite order of the previous
/// round, so that the total K of all clusters is similar. The CTAs of a cluster compute the same GEMMs, even if a
/// tile of one of them lies outside of the results.
template <int kSlide, class F>
__device__ void for_each_gemm(const Params& p, const F& f) {
  const int clusters = static_cast<int>(gridDim.x) / p.cluster;
  for (int begin = 0, turn = static_cast<int>(blockIdx.x) / p.cluster; begin < p.units;
       begin += clusters, turn = clusters - 1 - turn) {
    if (begin + turn >= p.units) continue;
    WorkUnit unit(p, begin + turn);
    if constexpr (kSlide > 1) {
      for_each_plane<kSlide>(p, unit, f);
    } else {
      const int end = p.merged ? p.phases : unit.phase + 1;
      bool first = true;
      for (int phase = unit.phase; phase < end; ++phase) {
        if (p.cluster == 1 && !unit.has_results(p.phase_of[phase])) continue;
        unit.select_boxes(p, p.phase_of[phase]);
        for (int column = 0; column < p.unit_columns; ++column, ++unit.column, first = false)
          f(unit, p.phase_of[phase], first);
        unit.column -= p.unit_columns;
      }
    }
  }
}

/// Iterates over the k-blocks of a GEMM that belong to one split. A k-block is a box of inputs for one chunk of
/// channels. With tf32x3, each of the three products has its own chunks.
struct KBlocks {
  int load;   // index of the current box among the boxes of the phase
  int chunk;  // current chunk of channels
  int left;   // k-blocks from the current k-block on
  const int first_load;
  const int loads;

  __device__ KBlocks(const Params& p, const WorkUnit& unit) : first_load(unit.first_load), loads(unit.loads) {
    load = chunk = 0;
    left = p.chunks * loads;
    if (p.splits == 1) return;  // avoids the divisions, which take about 30 instructions each
    const int begin = left * unit.split / p.splits;
    left = left * (unit.split + 1) / p.splits - begin;
    chunk = begin / loads;
    load = begin - chunk * loads;
  }
  __device__ const Load& box(const Params& p) const { return p.load[first_load + load]; }
  __device__ void next() {
    --left;
    if (++load == loads) load = 0, ++chunk;
  }
};

/// The operands of a k-block: a chunk of channels, and for tf32x3 the parts of inputs and weights. The order of the
/// products is low x high, high x low, high x high, so that the small products are added first.
struct ChunkOperands {
  int chunk;
  bool low_input = false;   // the product reads the low part of the inputs
  bool low_weight = false;  // the product reads the low part of the weights

  template <bool kThree>
  static __device__ ChunkOperands of(const Params& p, int chunk) {
    if constexpr (!kThree) return {chunk};
    int product = chunk;
    chunk = p.product_chunks.take_digit(product);
    return {chunk, product == 0, product == 1};
  }
};

}  // namespace voxgrad::cuda::implicit_gemm
