// The table of the CUDA kernels.
#include "cuda/detail/kernels.h"

namespace voxgrad {

const Kernels& cuda_kernels() {
  static constexpr Kernels table{
#define VG_KERNEL(name, outputs, parameters) .name = cuda::kernel::name,
#include "ops/detail/kernels.def"
      .explain_conv = cuda::kernel::explain_conv,
  };
  return table;
}

}  // namespace voxgrad
