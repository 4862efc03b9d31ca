// The table of the CPU kernels. CMake compiles this folder once for each CPU capability (ops/cpu_capability.cpp) and
// defines VG_CPU_TABLE as the name of the function below. The linker sees no
// other name of the folder, so the capabilities do not collide.
#include "ops/cpu/kernels.h"

extern "C" const voxgrad::Kernels* VG_CPU_TABLE() {
  using namespace voxgrad;
  static constexpr Kernels table{
#define VG_KERNEL(name, outputs, parameters) .name = cpu::name,
#include "ops/detail/kernels.def"
      .explain_conv = cpu::explain_conv,
  };
  return &table;
}
