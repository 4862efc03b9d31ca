// The instructions that the CPU kernels use.
#pragma once

#include <string>

namespace voxgrad {

/// Returns the instructions that the CPU kernels use: "avx512" (x86-64-v4), "avx2" (x86-64-v3), "default" (all
/// processors of the architecture), or "native" if voxgrad was compiled for the processor of the build machine
/// (VOXGRAD_NATIVE). Corresponds to torch.backends.cpu.get_cpu_capability().
///
/// The first operation on the CPU chooses the instructions that the environment variable VOXGRAD_CPU_CAPABILITY names.
/// If the variable is not set, the operation chooses the best instructions that the processor supports. Throws Error if
/// this variable names instructions for which voxgrad was not compiled, or which the processor does not support.
std::string cpu_capability();

}  // namespace voxgrad
