// The normal distribution, for GELU in bf16 and f16.
#pragma once

#include <cmath>

namespace voxgrad::cuda {

/// The normal distribution function at x, and e^(-x^2 / 2), for GELU in bf16 and f16. With erff(), the GELU kernels
/// would be bound by arithmetic instead of memory. In exact arithmetic, the approximation of the distribution has an
/// absolute error of at most 7.5e-8 (M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 1964, 7.1.26).
/// For negative x, the distribution is computed without a subtraction from 1, which would cancel digits. In bfloat16,
/// the error of x * distribution is therefore at most one unit in the last place for x >= -6.5.
struct Normal {
  float distribution;  ///< P(X <= x)
  float exponential;   ///< e^(-x^2 / 2)

  __device__ explicit Normal(float x) {
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1 + 0.231641888f * fabsf(x)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * x * -0.721347520f));
    const float polynomial =
        t * (0.127414796f + t * (-0.142248368f + t * (0.710706871f + t * (-0.726576014f + t * 0.530702715f))));
    distribution = x < 0 ? polynomial * exponential : 1 - polynomial * exponential;
  }
};

}  // namespace voxgrad::cuda
