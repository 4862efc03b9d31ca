// The table of the CPU kernels. CMake compiles this folder once for each CPU capability (ops/cpu_capability.cpp). The
// macro VG_CPU_TABLE is the name of the function below, which differs between capabilities. All other symbols of the
// folder are local, so the capabilities do not collide.
#include "ops/cpu/loops.h"

extern "C" const voxgrad::Kernels* VG_CPU_TABLE() {
  using namespace voxgrad;
  static constexpr Kernels table{
#define VG_KERNEL(name, outputs, parameters) .name = cpu::name,
#include "ops/detail/kernels.def"
      .explain_conv = cpu::explain_conv,
  };
  return &table;
}
