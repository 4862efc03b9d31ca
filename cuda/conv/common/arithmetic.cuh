// Converts the arithmetic and the tile width of a plan to template arguments of kernels.
#pragma once

#include "cuda/conv/common/mma.cuh"
#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

/// Calls body.operator()<Arithmetic>() with the class of an arithmetic: Tf32, Tf32x3, Bf16 or F16.
template <class Body>
void with_arithmetic(ConvArithmetic arithmetic, const Body& body) {
  switch (arithmetic) {
    case ConvArithmetic::tf32:
      return body.template operator()<Tf32>();
    case ConvArithmetic::tf32x3:
      return body.template operator()<Tf32x3>();
    case ConvArithmetic::bf16:
      return body.template operator()<Bf16>();
    case ConvArithmetic::f16:
      return body.template operator()<F16>();
  }
}

/// Calls body.operator()<Arithmetic, Element, arithmetic>() for kernels that multiply halves in TF32, for example
/// <Tf32, BFloat16, ConvArithmetic::bf16>.
template <class Body>
void with_float_arithmetic(ConvArithmetic arithmetic, const Body& body) {
  switch (arithmetic) {
    case ConvArithmetic::tf32:
      return body.template operator()<Tf32, float, ConvArithmetic::tf32>();
    case ConvArithmetic::tf32x3:
      return body.template operator()<Tf32x3, float, ConvArithmetic::tf32x3>();
    case ConvArithmetic::bf16:
      return body.template operator()<Tf32, BFloat16, ConvArithmetic::bf16>();
    case ConvArithmetic::f16:
      return body.template operator()<Tf32, Float16, ConvArithmetic::f16>();
  }
}

/// Calls body.operator()<width>() if `width` is one of kWidths.
template <int... kWidths, class Body>
void with_width(int width, const Body& body) {
  static_cast<void>(((width == kWidths && (body.template operator()<kWidths>(), true)) || ...));
}

}  // namespace voxgrad::cuda
