// How float32 convolutions and matrix products are rounded on GPUs.
#pragma once

namespace voxgrad {

/// As torch.set_float32_matmul_precision. On CUDA:
///   highest: float32 accuracy (error-compensated TF32 on tensor cores);
///   high:    TF32: inputs rounded to 10 bits after the point, sums in float32.
/// f64 and the CPU know no difference.
enum class Float32Precision : unsigned char { highest, high };

/// Of the whole program; highest at first. Backward passes use what is set when they run.
void set_float32_precision(Float32Precision precision);
Float32Precision float32_precision();

}  // namespace voxgrad
