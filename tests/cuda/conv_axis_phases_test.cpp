// Tests how axes of CUDA convolutions are split into phases, as cuda/conv/plan/axis_phases.h defines them. Needs no
// GPU.
#include "cuda/conv/plan/axis_phases.h"

#include <map>
#include <set>
#include <tuple>

#include "ops/detail/conv_geometry.h"
#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

using namespace cuda;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Maps (output position, tap) to the input position that is read.
using Reads = std::map<std::pair<int64_t, int64_t>, int64_t>;

/// Returns the reads of all phases. Checks the counts and spans that the phases store.
Reads reads_of_phases(const AxisPhases& axis, int64_t out_size) {
  Reads found;
  int count = 0, span = 0;
  for (int i = 0; i < axis.phases; ++i) {
    const AxisPhase& part = axis.phase[i];
    count = std::max(count, part.count);
    span = std::max(span, part.span);
    for (int64_t q = 0; q < part.count; ++q)
      for (int64_t t = 0; t < part.taps; ++t) {
        const int64_t out = part.first + q * axis.out_step, tap = part.tap_first + t * part.tap_step;
        const int64_t row = q * axis.fold + part.start + t * part.step;
        EXPECT_TRUE(out >= 0 && out < out_size && tap >= 0 && tap < axis.kernel);
        EXPECT_TRUE(found.insert({{out, tap}, row * axis.in_step + part.residue}).second) << "computed twice";
        const int64_t in_span = floor_div(row, axis.fold) - q - part.low;
        EXPECT_TRUE(in_span >= 0 && in_span < part.span);
      }
  }
  EXPECT_EQ(std::tie(axis.count, axis.max_span), std::tie(count, span));
  return found;
}

void check_axis(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  SCOPED_TRACE(
      concat("size ", size, ", kernel ", kernel, ", stride ", stride, ", padding ", padding, ", dilation ", dilation));
  if (const int64_t y = conv_output_size(size, kernel, stride, padding, dilation); y > 0) {
    Reads expected;
    for (int64_t o = 0; o < y; ++o)
      for (int64_t k = 0; k < kernel; ++k) expected[{o, k}] = o * stride + k * dilation - padding;
    for (const bool fold : {false, true}) {
      const auto axis = fprop_phases(size, y, kernel, stride, padding, dilation, fold);
      ASSERT_TRUE(axis && axis->complete);
      EXPECT_EQ(reads_of_phases(*axis, y), expected) << "fold " << fold;
    }
  }
  for (const int64_t output_padding : {int64_t{0}, stride - 1}) {
    const int64_t x = conv_transpose_output_size(size, kernel, stride, padding, 0, dilation) + output_padding;
    if (x <= 0) continue;
    Reads expected;
    std::set<int64_t> reached;
    for (int64_t i = 0; i < x; ++i)
      for (int64_t k = 0; k < kernel; ++k)
        if ((i + padding - k * dilation) % stride == 0) {
          expected[{i, k}] = (i + padding - k * dilation) / stride;
          reached.insert(i);
        }
    const auto axis = dgrad_phases(size, x, kernel, stride, padding, dilation);
    ASSERT_TRUE(axis);
    EXPECT_EQ(reads_of_phases(*axis, x), expected) << "transposed";
    EXPECT_EQ(axis->complete, static_cast<int64_t>(reached.size()) == x);
  }
}

TEST(ConvAxisPhases, CoverEachOutputAndTapOnce) {
  for (int64_t stride = 1; stride <= 8; ++stride)
    for (int64_t dilation = 1; dilation <= 5; ++dilation)
      for (const int64_t kernel : {1, 2, 3, 4, 7})
        for (const int64_t padding : {0, 1, 2, 5, 11})
          for (const int64_t size : {1, 2, 5, 9}) {
            check_axis(size, kernel, stride, padding, dilation);
            if (HasFailure()) return;
          }
}

TEST(ConvAxisPhases, RejectAxesBeyondTheKernelLimits) {
  EXPECT_TRUE(dgrad_phases(9, 100, 8, 9, 0, 1));
  EXPECT_FALSE(dgrad_phases(9, 100, 9, 9, 0, 1));  // nine phases exceed the limit
  EXPECT_FALSE(fprop_phases(100, 9, 9, 9, 0, 1, false));
  EXPECT_TRUE(fprop_phases(100, 9, 9, 9, 0, 1, true));
  constexpr int64_t kLarge = int64_t{1} << 40;
  EXPECT_FALSE(fprop_phases(kLarge, kLarge, 3, 1, 1, 1, true));
  EXPECT_FALSE(dgrad_phases(8, 8, 3, 1, kLarge, 1));
  EXPECT_FALSE(dgrad_phases(8, 8, 3, 1, 1, kLarge));
}

}  // namespace
}  // namespace voxgrad::cudatest
