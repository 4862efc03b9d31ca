// Wgrad of channels-last float32 tensors with mma.sync: a multistage implicit GEMM with split-K,
//
//   w[cy][tap][cx] = sum over samples n and voxels o of  y[n][o][cy] * x[n][o * stride + tap * dilation - padding][cx]
//
//   A: rows (output channels) x 8 voxels
//   B: 8 voxels x columns, which are pairs (tap, input channel)
//
// A stage of shared memory holds the rows and the columns of 32 voxels, as [voxel][channel], which is the order of the
// tensors. cp.async copies vectors of 4 channels, and zeros for taps in the padding. The order of the rows within a
// product is arbitrary, if store_sums() uses the same order. Two neighboring output channels are therefore rows of the
// same lane, which reads them with one instruction. The kernel needs no copies of the operands, so it suits
// memory-bound problems; wgmma (sm90/wgrad) computes faster, but needs scaled copies of float32 operands.
//
// Split-K: the ranges of voxels depend on the shape alone. reduce_wgrad_splits() adds their sums in a fixed order.
#include "cuda/conv/common/arithmetic.cuh"
#include "cuda/conv/common/concepts.h"
#include "cuda/conv/common/wgrad_splits.h"
#include "cuda/conv/dispatch.h"
#include "cuda/conv/plan/instances.h"
#include "cuda/detail/divisor.h"

namespace voxgrad::cuda {
namespace {

constexpr int kStages = MultistageWgradPlan::kStages, kVoxels = MultistageWgradPlan::kVoxels,
              kPadding = MultistageWgradPlan::kPadding;

/// The parameters of multistage_wgrad.
struct MultistageWgradParams {
  const float* x;
  const float* y;
  float* partial;    ///< (range, group, output channel, tap, input channel)
  int64_t x_sample;  ///< elements from one sample to the next
  int64_t y_sample;
  int x_stride[3];  ///< depth, height, width
  int y_stride[3];
  int in_channels;   ///< per group
  int out_channels;  ///< per group
  int columns;       ///< taps * in_channels
  int groups;
  Divisor column_tiles;
  Divisor row_tiles;
  Divisor out_size[3];  ///< voxels of y: width, height, depth
  int in_size[3];       ///< depth, height, width
  int stride[3];
  int padding[3];
  int dilation[3];
  int kernel[3];
  int voxels;           ///< of y, in all samples
  int voxels_of_range;  ///< a multiple of kVoxels
};

/// The tile of a CTA. kWarpRows warps divide its rows, and kWarpColumns warps divide its columns.
template <class Arithmetic_, int kRows_, int kColumns_>
struct MultistageWgradCta {
  using Arithmetic = Arithmetic_;
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kThreads = 128, kWarpRows = 2, kWarpColumns = 2;
  static constexpr int kM16 = kRows / kWarpRows / 16, kN8 = kColumns / kWarpColumns / 8;  // of a warp
  static constexpr int kCtas = ctas_per_sm({kRows, kColumns}, Arithmetic::kParts == 2);
  static constexpr int kRowPitch = kRows + kPadding, kColumnPitch = kColumns + kPadding;  // words
  static_assert(kRowPitch % 32 == 8 && kColumnPitch % 32 == 8, "a warp must read without bank conflicts");
};

/// The stages of shared memory.
template <class Cta>
struct SharedStorage {
  float y[kStages][kVoxels][Cta::kRowPitch];
  float x[kStages][kVoxels][Cta::kColumnPitch];
};

/// The part of the result that a CTA computes. Column tiles vary fastest in the 1-D grid, followed by row tiles, groups
/// and ranges.
template <class Cta>
struct CtaCoord {
  int first_row;
  int first_column;
  int group;
  int range;

  __device__ explicit CtaCoord(const MultistageWgradParams& p) {
    int rest = static_cast<int>(blockIdx.x);
    first_column = p.column_tiles.take_digit(rest) * Cta::kColumns;
    first_row = p.row_tiles.take_digit(rest) * Cta::kRows;
    range = rest / p.groups;
    group = rest - range * p.groups;
  }
};

/// Copies the operands of 32 voxels to a stage. Eight lanes copy the channels of one voxel.
template <class Cta>
class Producer {
 public:
  __device__ Producer(const MultistageWgradParams& params, const CtaCoord<Cta>& tile, SharedStorage<Cta>& shared)
      : p_(params), shared_(shared) {
    y_ = p_.y + int64_t{tile.group} * p_.out_channels + tile.first_row + lane_ * 4;
    y_channels_ = p_.out_channels - tile.first_row - lane_ * 4;
    x_ = p_.x + int64_t{tile.group} * p_.in_channels;
#pragma unroll
    for (int i = 0; i < kColumnVectors; ++i) {
      const int column = tile.first_column + (i * kLanes + lane_) * 4;
      int tap = column / p_.in_channels;
      vector_[i].offset = column - tap * p_.in_channels;
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        vector_[i].position[a] = take_digit(tap, p_.kernel[a]) * p_.dilation[a];
        vector_[i].offset += vector_[i].position[a] * p_.x_stride[a];
      }
      if (column >= p_.columns) vector_[i].position[0] = INT32_MAX / 2;  // outside of every tensor
    }
  }

  __device__ void stage(int first_voxel, int last_voxel, int stage) const {
#pragma unroll
    for (int row = 0; row < kVoxels; row += Cta::kThreads / kLanes) copy_voxel(first_voxel, last_voxel, stage, row);
  }

 private:
  static constexpr int kLanes = 8, kRowVectors = Cta::kRows / 4 / kLanes, kColumnVectors = Cta::kColumns / 4 / kLanes;

  /// The vector of 4 columns that a lane copies, relative to the first position of a kernel window.
  struct Vector {
    int position[3];
    int offset;  ///< elements
  };

  __device__ void copy_voxel(int first_voxel, int last_voxel, int stage, int row) const {
    row += static_cast<int>(threadIdx.x) / kLanes;
    const bool inside = first_voxel + row < last_voxel;
    int sample = inside ? first_voxel + row : first_voxel;
    int position[3], x_offset = 0, y_offset = 0;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int at = p_.out_size[2 - a].take_digit(sample);
      position[a] = at * p_.stride[a] - p_.padding[a];
      y_offset += at * p_.y_stride[a];
      x_offset += position[a] * p_.x_stride[a];
    }
    const float* const y = y_ + sample * p_.y_sample + y_offset;
    const float* const x = x_ + sample * p_.x_sample;
    float* to = &shared_.y[stage][row][lane_ * 4];
#pragma unroll
    for (int i = 0; i < kRowVectors; ++i)
      cp_async(to + i * kLanes * 4, y + i * kLanes * 4, inside && i * kLanes * 4 < y_channels_);
    to = &shared_.x[stage][row][lane_ * 4];
#pragma unroll
    for (int i = 0; i < kColumnVectors; ++i) {
      bool read = inside;
#pragma unroll
      for (int a = 0; a < 3; ++a)
        read &= static_cast<unsigned>(position[a] + vector_[i].position[a]) < static_cast<unsigned>(p_.in_size[a]);
      cp_async(to + i * kLanes * 4, x + (x_offset + vector_[i].offset), read);
    }
  }

  const MultistageWgradParams& p_;
  SharedStorage<Cta>& shared_;
  const int lane_ = static_cast<int>(threadIdx.x) % kLanes;
  const float* y_;
  const float* x_;
  int y_channels_;  ///< channels of y from this lane's first channel to the end of the group
  Vector vector_[kColumnVectors];
};

/// Multiplies a stage. `y` and `x` point to the first row and column of the warp. Row g of a fragment (mma.cuh) is
/// channel 2g of the tile, and row g + 8 is channel 2g + 1, so that a lane loads both with one instruction.
template <class Cta>
__device__ void multiply_stage(const float* y, const float* x, Accumulator (&sum)[Cta::kM16][Cta::kN8]) {
  using Arithmetic = typename Cta::Arithmetic;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  y += t * Cta::kRowPitch + 2 * g;
  x += t * Cta::kColumnPitch + g;
#pragma unroll
  for (int k = 0; k < kVoxels; k += 8) {
    uint32_t a[Cta::kM16][4], b[Cta::kN8][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < Cta::kM16; ++m) {
        const auto pair = *reinterpret_cast<const float2*>(y + (k + 4 * half) * Cta::kRowPitch + 16 * m);
        a[m][2 * half] = Arithmetic::word({pair.x});
        a[m][2 * half + 1] = Arithmetic::word({pair.y});
      }
#pragma unroll
      for (int n = 0; n < Cta::kN8; ++n) b[n][half] = Arithmetic::word({x[(k + 4 * half) * Cta::kColumnPitch + 8 * n]});
    }
    Arithmetic::multiply_words(sum, a, b);
  }
}

/// Stores the partial sums of a warp. See multiply_stage() for the order of the rows.
template <class Cta>
__device__ void store_sums(const MultistageWgradParams& p, const CtaCoord<Cta>& tile, int first_row, int first_column,
                           const Accumulator (&sum)[Cta::kM16][Cta::kN8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  float* const out = p.partial + (int64_t{tile.range} * p.groups + tile.group) * p.out_channels * p.columns;
#pragma unroll
  for (int m = 0; m < Cta::kM16; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.first_row + first_row + 16 * m + 2 * g + i;
      if (row >= p.out_channels) continue;
#pragma unroll
      for (int n = 0; n < Cta::kN8; ++n) {
        const int column = tile.first_column + first_column + 8 * n + 2 * t;
        if (column >= p.columns) continue;
        *reinterpret_cast<float2*>(out + int64_t{row} * p.columns + column) =
            make_float2(sum[m][n][2 * i], sum[m][n][2 * i + 1]);
      }
    }
}

/// The parts of multistage_wgrad().
template <class Cta>
concept MultistageWgradKernelTile = KernelTile<Cta> && StageProducer<Producer<Cta>>;

/// Computes partial sums of the weight gradient. Launch: one CTA per CtaCoord in a 1-D grid. Dynamic shared memory: a
/// SharedStorage.
template <MultistageWgradKernelTile Cta>
__global__ void __launch_bounds__(Cta::kThreads, Cta::kCtas)
    multistage_wgrad(const __grid_constant__ MultistageWgradParams p) {
  wait_for_previous_kernels();
  extern __shared__ uint4 dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedStorage<Cta>*>(dynamic_shared);
  const CtaCoord<Cta> tile(p);
  const Producer<Cta> producer(p, tile, shared);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = warp / Cta::kWarpColumns * 16 * Cta::kM16,
            first_column = warp % Cta::kWarpColumns * 8 * Cta::kN8;
  const int begin = tile.range * p.voxels_of_range;
  const int end = static_cast<int>(min(int64_t{begin} + p.voxels_of_range, int64_t{p.voxels}));

  Accumulator sum[Cta::kM16][Cta::kN8] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage * kVoxels < end - begin) producer.stage(begin + stage * kVoxels, end, stage);
    cp_async_commit();
  }
  int stage = 0, next = kStages - 1;
  for (int left = end - begin; left > 0; left -= kVoxels) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the stage is complete, and no warp reads the stage that is overwritten next
    const int ahead = (kStages - 1) * kVoxels;
    if (left > ahead) producer.stage(end - left + ahead, end, next);
    cp_async_commit();
    multiply_stage<Cta>(&shared.y[stage][0][first_row], &shared.x[stage][0][first_column], sum);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
  }
  store_sums<Cta>(p, tile, first_row, first_column, sum);
}

void launch_tile(const MultistageWgradParams& p, ConvArithmetic arithmetic, const MultistageWgradPlan& plan,
                 unsigned blocks, cudaStream_t stream) {
  const auto launch = [&]<class Cta>() {
    ++multistage_instance<Cta>.launches;
    launch_kernel("conv weight gradient", multistage_wgrad<Cta>, blocks, Cta::kThreads, plan.shared_bytes(), stream, p);
  };
  if (arithmetic == ConvArithmetic::tf32x3) return launch.operator()<MultistageWgradCta<Tf32x3, 64, 64>>();
  if (plan.cta.rows == 128) return launch.operator()<MultistageWgradCta<Tf32, 128, 128>>();
  if (plan.cta.columns == 128) return launch.operator()<MultistageWgradCta<Tf32, 64, 128>>();
  launch.operator()<MultistageWgradCta<Tf32, 64, 64>>();
}

}  // namespace

void run_plan(const ConvCall& call, const ConvProblem& problem, const MultistageWgradPlan& plan, const Launch& launch) {
  const View &x = call.in, &y = call.out;
  const int64_t taps = problem.kernel[0] * problem.kernel[1] * problem.kernel[2];
  const Workspace partial(launch, static_cast<size_t>(workspace_bytes(problem, plan)));
  MultistageWgradParams p{};
  p.x = static_cast<const float*>(x.data);
  p.y = static_cast<const float*>(y.data);
  p.partial = partial.as<float>();
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.columns = static_cast<int>(taps * problem.in_channels);
  p.groups = static_cast<int>(problem.groups);
  p.column_tiles = Divisor(plan.column_tiles);
  p.row_tiles = Divisor(plan.row_tiles);
  p.x_sample = x.stride[0];
  p.y_sample = y.stride[0];
  for (int a = 0; a < 3; ++a) {
    p.x_stride[a] = static_cast<int>(x.stride[a + 2]);
    p.y_stride[a] = static_cast<int>(y.stride[a + 2]);
    p.out_size[2 - a] = Divisor(problem.out_size[a]);
    p.in_size[a] = static_cast<int>(problem.in_size[a]);
    p.stride[a] = static_cast<int>(problem.geometry.stride[a]);
    p.padding[a] = static_cast<int>(problem.geometry.padding[a]);
    p.dilation[a] = static_cast<int>(problem.geometry.dilation[a]);
    p.kernel[a] = static_cast<int>(problem.kernel[a]);
  }
  p.voxels = static_cast<int>(plan.voxels);
  p.voxels_of_range = plan.voxels_of_range;
  const int64_t blocks = int64_t{plan.row_tiles} * plan.column_tiles * problem.groups * plan.ranges;
  launch_tile(p, arithmetic_of(problem), plan, static_cast<unsigned>(blocks), launch.stream);
  reduce_wgrad_splits(call.w,
                      {.partial = p.partial,
                       .split_stride = problem.groups * problem.out_channels * taps * problem.in_channels,
                       .splits = plan.ranges,
                       .in_channels = p.in_channels,
                       .out_channels = p.out_channels},
                      launch.stream);
}

}  // namespace voxgrad::cuda
