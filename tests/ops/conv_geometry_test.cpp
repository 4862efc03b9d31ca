// Tests ops/detail/conv_geometry.h. The gather form of a convolution divides the outputs into phases. A phase consists
// of evenly spaced outputs and the kernel taps that they use. The gather form must contain the same products as the
// definition of the convolution: position i of x, position o of y and tap k form a product if
// i + padding = o * stride + k * dilation. Also tests the output sizes.
#include "ops/detail/conv_geometry.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "ops/conv.h"

namespace voxgrad {
namespace {

/// The products of a convolution along one axis, as (x position, y position, tap).
using Products = std::set<std::tuple<int64_t, int64_t, int64_t>>;

Products products_by_definition(const ConvAxis& a) {
  Products found;
  for (int64_t i = 0; i < a.x_size; ++i)
    for (int64_t o = 0; o < a.y_size; ++o)
      for (int64_t k = 0; k < a.kernel; ++k)
        if (i + a.padding == o * a.stride + k * a.dilation) found.insert({i, o, k});
  return found;
}

/// Returns the products that the phases compute. Expects that each output belongs to at most one phase.
Products products_of_phases(const ConvGather& gather, bool transposed) {
  Products found;
  std::set<int64_t> outputs;
  for (const ConvPhase& phase : gather.phases) {
    EXPECT_GT(phase.count, 0);
    EXPECT_FALSE(phase.taps.empty());
    for (int64_t q = 0; q < phase.count; ++q) {
      const int64_t out = phase.first + q * gather.out_step;
      EXPECT_TRUE(out >= 0 && out < gather.out_size && outputs.insert(out).second) << out;
    }
    for (const ConvTap& tap : phase.taps) {
      const ConvRange range = tap_range(gather, phase, tap);
      for (int64_t q = 0; q < phase.count; ++q) {
        const int64_t out = phase.first + q * gather.out_step, in = q * gather.in_step + tap.offset;
        const bool inside = in >= 0 && in < gather.in_size;
        EXPECT_EQ(inside, q >= range.begin && q < range.end);
        if (inside) found.insert(transposed ? std::tuple(out, in, tap.index) : std::tuple(in, out, tap.index));
      }
    }
  }
  EXPECT_EQ(gather.covers_all(), static_cast<int64_t>(outputs.size()) == gather.out_size);
  return found;
}

TEST(ConvGeometry, GatherFormHasTheProductsOfTheDefinition) {
  for (int64_t stride = 1; stride <= 5; ++stride)
    for (int64_t dilation = 1; dilation <= 6; ++dilation)
      for (int64_t kernel = 1; kernel <= 4; ++kernel)
        for (int64_t padding : {int64_t{0}, int64_t{1}, (kernel - 1) * dilation, (kernel - 1) * dilation + 3})
          for (int64_t size : {1, 2, 7, 12}) {
            ConvAxis axis{size, 0, kernel, stride, padding, dilation};
            axis.y_size = conv_output_size(size, kernel, stride, padding, dilation);
            SCOPED_TRACE(testing::Message()
                         << "x " << size << ", y " << axis.y_size << ", kernel " << kernel << ", stride " << stride
                         << ", padding " << padding << ", dilation " << dilation);
            const Products expected = products_by_definition(axis);
            EXPECT_EQ(products_of_phases(gather_forward(axis), false), expected);
            EXPECT_EQ(products_of_phases(gather_transposed(axis), true), expected);
          }
}

TEST(ConvGeometry, PhasesUseEachTapOnce) {
  // With kernel 3 and stride 2, an axis has one phase with 1 tap and one phase with 2 taps.
  std::multiset<size_t> taps;
  for (const ConvPhase& phase : gather_transposed({9, 5, 3, 2, 1, 1}).phases) taps.insert(phase.taps.size());
  EXPECT_EQ(taps, (std::multiset<size_t>{1, 2}));
  // Together, the phases contain each tap of the kernel exactly once.
  for (int64_t stride = 1; stride <= 6; ++stride)
    for (int64_t dilation = 1; dilation <= 6; ++dilation) {
      std::multiset<int64_t> indices;
      const std::vector<ConvPhase> phases = gather_transposed({40, 9, 7, stride, 2, dilation}).phases;
      for (const ConvPhase& phase : phases)
        for (const ConvTap& tap : phase.taps) indices.insert(tap.index);
      EXPECT_EQ(indices, (std::multiset<int64_t>{0, 1, 2, 3, 4, 5, 6}));
      EXPECT_EQ(phases.size(), static_cast<size_t>(stride / std::gcd(stride, dilation)));
    }
}

TEST(ConvGeometry, HugeStrideHasFewPhases) {
  const int64_t stride = int64_t{1} << 30;
  const ConvGather gather = gather_transposed({4 * stride, 4, 3, stride, 1, 5});
  ASSERT_EQ(gather.phases.size(), 3U);
  EXPECT_EQ(gather.phases[0].first, 4);  // tap k adds input 0 to output 5 k - 1
  EXPECT_EQ(gather.phases[1].first, 9);
  EXPECT_EQ(gather.phases[2].first, stride - 1);
  EXPECT_EQ(gather.phases[2].count, 4);
  EXPECT_EQ(gather.phases[2].taps[0].offset, 1);
  EXPECT_FALSE(gather.covers_all());
}

TEST(ConvGeometry, PhasesAreConvolutionsWithStrideOne) {
  const ConvGather gather = gather_transposed({100, 30, 6, 6, 5, 4});  // g = gcd(stride, dilation) = 2
  EXPECT_EQ(gather.in_step, 1);
  EXPECT_EQ(gather.out_step, 6);
  EXPECT_EQ(gather.steps(), 17);
  for (const ConvPhase& phase : gather.phases)
    for (size_t i = 1; i < phase.taps.size(); ++i) {
      EXPECT_EQ(phase.taps[i].index - phase.taps[i - 1].index, 3);    // stride / g
      EXPECT_EQ(phase.taps[i - 1].offset - phase.taps[i].offset, 2);  // dilation / g
    }
}

TEST(ConvGeometry, ComputesOutputSizes) {
  EXPECT_EQ(conv_output_size(5, 3, 1, 0, 1), 3);
  EXPECT_EQ(conv_output_size(5, 3, 2, 1, 1), 3);
  EXPECT_EQ(conv_output_size(6, 3, 2, 1, 1), 3);
  EXPECT_EQ(conv_output_size(2, 3, 1, 0, 1), 0);
  EXPECT_EQ(conv_output_size(2, 4, 5, 0, 3), -1);  // -8 / 5 must round down, not toward zero
  EXPECT_EQ(conv_transpose_output_size(16, 4, 2, 1, 0, 1), 32);
  EXPECT_EQ(conv_transpose_output_size(12, 3, 2, 1, 1, 1), 24);
  EXPECT_EQ(conv_transpose_output_size(16, 3, 2, 1, 0, 2), 33);
  EXPECT_EQ(conv_transpose_output_size(1, 1, 1, 3, 0, 1), -5);
}

TEST(ConvGeometry, ThrowsOnlyIfTheOutputSizeExceeds64Bits) {
  const int64_t huge = int64_t{1} << 62;
  EXPECT_THROW(conv_transpose_output_size(huge, 3, 4, 0, 0, 1), Error);
  EXPECT_THROW(conv_output_size(huge, 1, 1, huge, 1), Error);
  EXPECT_EQ(conv_output_size(huge, huge, 1, 0, 2), 2 - huge);  // dilation * kernel alone exceeds 64 bits
  const std::string text = explain_conv3d({huge, 1, 1, 1, 1}, {1, 1, 1, 1, 1});
  EXPECT_NE(text.find("3.69e+04 PB"), std::string::npos) << text;  // the number of bytes exceeds 64 bits too
}

}  // namespace
}  // namespace voxgrad
