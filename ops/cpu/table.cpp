// The table of the CPU kernels.
#include "ops/cpu/kernels.h"

namespace voxgrad {

const Kernels& cpu_kernels() {
  static constexpr Kernels table{
#define VG_KERNEL(name, outputs, parameters) .name = cpu::name,
#include "ops/detail/kernels.def"
  };
  return table;
}

}  // namespace voxgrad
