// The precision of float32 convolutions and matrix products on GPUs.
#pragma once

#include <atomic>

namespace voxgrad {

/// The precision of float32 convolutions and matrix products, with the names that torch.set_float32_matmul_precision
/// uses. On CUDA:
/// - highest: float32 accuracy (error-compensated TF32 on tensor cores);
/// - high: TF32, with operands rounded to 10 fraction bits and sums in float32.
///
/// The precision affects neither f64 nor the CPU.
enum class Float32Precision : unsigned char { highest, high };

namespace detail {
inline std::atomic<Float32Precision> current_precision{Float32Precision::highest};
}  // namespace detail

/// Sets the precision for all threads. The default is highest. A backward pass uses the value that is set when the pass
/// runs.
inline void set_float32_precision(Float32Precision precision) {
  detail::current_precision.store(precision, std::memory_order_relaxed);
}
/// Returns the precision.
inline Float32Precision float32_precision() { return detail::current_precision.load(std::memory_order_relaxed); }

}  // namespace voxgrad
