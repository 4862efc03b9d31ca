// Implements the kernels that split float32 tensors into two TF32 parts.
#include "core/detail/divide.h"
#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/common/tensor_map.h"
#include "cuda/detail/kernels.h"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {

/// Splits x into two TF32 numbers. If rounding a finite x would give infinity, the high part is truncated instead.
__device__ void split(float x, float& high, float& low) {
  const uint32_t bits = __float_as_uint(x);
  high = __uint_as_float((bits + 0x1000u) & 0xffffe000u);
  if (!(fabsf(high) < INFINITY)) high = fabsf(x) < INFINITY ? __uint_as_float(bits & 0xffffe000u) : 0;
  low = __uint_as_float(round_tf32(x - high));
}

/// Splits rows of 4 * vectors elements. In `from`, which may be `high`, rows begin every from_row elements. `elements`
/// is the number of elements of `high`; the low parts follow them.
__global__ void __launch_bounds__(kBlock)
    split_rows(const float* from, int64_t from_row, float* high, int64_t elements, int64_t vectors) {
  wait_for_previous_kernels();
  for (int64_t i = thread_index(); i < elements / 4; i += thread_count()) {
    const int64_t row = i / vectors;
    float x[4], parts[2][4];
    load_values<4>(from + row * from_row + (i - row * vectors) * 4, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) split(x[j], parts[0][j], parts[1][j]);
    store_values<4>(high + 4 * i, parts[0]);
    store_values<4>(high + elements + 4 * i, parts[1]);
  }
}

/// Returns the distance in elements between rows along axes[0] if rows of vectors of 4 lie at equal distances in the
/// order of `axes`. Otherwise returns 0.
int64_t row_stride(const View& view, const std::array<int, 5>& axes) {
  if (axes[0] != 1 || !is_tma_tensor(view) || view.size[1] % 4 != 0) return 0;
  int64_t stride = 1;  // of the innermost axis with several rows; a single row may have any stride
  for (size_t i = 4; i > 0; --i)
    if (view.size[axes[i]] > 1) stride = view.stride[axes[i]];
  return is_dense(view, {axes[1], axes[2], axes[3], axes[4]}, stride) ? stride : 0;
}

}  // namespace

View split_copy(const View& view, const std::array<int, 5>& axes, std::optional<Workspace>& memory,
                const Launch& launch) {
  View high = view;
  const int64_t elements = lay_out(high, axes), row = high.stride[axes[1]];
  memory.emplace(launch, 2 * static_cast<size_t>(elements) * sizeof(float));
  high.data = memory->as<void>();
  const int64_t from_row = row_stride(view, axes);
  if (from_row == 0) kernel::copy(high, view);
  launch_kernel("conv: high and low parts", split_rows, grid_size(elements / 4), kBlock, 0, launch.stream,
                from_row > 0 ? view.as<float>() : high.as<float>(), from_row > 0 ? from_row : row, high.as<float>(),
                elements, row / 4);
  high.size[axes[4]] *= 2;
  return high;
}

}  // namespace voxgrad::cuda
