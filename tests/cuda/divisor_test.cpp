// Tests integer division by multiplication (cuda/detail/divisor.h) on the host.
#include "cuda/detail/divisor.h"

#include <gtest/gtest.h>

#include "tests/cuda/random_view.h"

namespace voxgrad::cudatest {
namespace {

TEST(ConvDivisor, DividesNumbersBelow2To31) {
  constexpr int kLast = INT32_MAX;
  const auto check = [](int divisor, int x) {
    const cuda::Divisor fast(divisor);
    int quotient = x;
    const int remainder = fast.take_digit(quotient);
    ASSERT_EQ(quotient, x / divisor) << x << " by " << divisor;
    ASSERT_EQ(remainder, x % divisor) << x << " by " << divisor;
  };
  Random random(1);
  for (int i = 0; i < 20000 && !testing::Test::HasFailure(); ++i) {
    const int bits = static_cast<int>(random.integer(0, 30));
    const auto divisor = static_cast<int>(random.integer(1, (int64_t{2} << bits) - 1));
    const int multiple = kLast / divisor * divisor;
    for (const int x :
         {0, divisor - 1, divisor, multiple - 1, multiple, kLast, static_cast<int>(random.integer(0, kLast))})
      check(divisor, x);
  }
  for (int shift = 0; shift < 31; ++shift)
    for (const int x : {0, 1, 1 << shift, kLast}) check(1 << shift, x);
}

}  // namespace
}  // namespace voxgrad::cudatest
