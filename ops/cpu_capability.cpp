// Chooses the CPU kernels for the processor. The table of each CPU capability is compiled from ops/cpu.
#include "ops/cpu_capability.h"

#include <cstdlib>
#include <string_view>

#include "ops/detail/kernels.h"

extern "C" {
#define VG_CPU_CAPABILITY(name) const voxgrad::Kernels* vg_cpu_kernels_##name();
VG_CPU_CAPABILITIES
#undef VG_CPU_CAPABILITY
}

namespace voxgrad {
namespace {

struct Capability {
  const char* name;
  const Kernels* (*kernels)();
};

// In descending order of preference.
constexpr Capability kCapabilities[] = {
#define VG_CPU_CAPABILITY(name) {#name, vg_cpu_kernels_##name},
    VG_CPU_CAPABILITIES
#undef VG_CPU_CAPABILITY
};

/// Returns whether the processor supports the instructions of the capability `name`. The builtins also check that the
/// operating system saves the vector registers.
bool is_supported(std::string_view name) {
#ifdef __x86_64__
  if (name == "avx512")
    return is_supported("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  if (name == "avx2")  // processors with these instructions have the rest of x86-64-v3, too
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#endif
  return true;
}

const Capability& choose(const char* requested) {
  std::string names;
  for (const Capability& capability : kCapabilities) {
    const bool supported = is_supported(capability.name);
    if (requested ? std::string_view(requested) == capability.name : supported) {
      check(supported, "cpu_capability", "the processor does not support the instructions of \"", requested, '"');
      return capability;
    }
    names += concat(names.empty() ? "" : ", ", capability.name);
  }
  fail("cpu_capability", "voxgrad has no CPU kernels for \"", requested,
       "\" (VOXGRAD_CPU_CAPABILITY), only for: ", names);
}

const Capability& chosen() {
  static const Capability& capability = choose(std::getenv("VOXGRAD_CPU_CAPABILITY"));
  return capability;
}

}  // namespace

std::string cpu_capability() { return chosen().name; }
const Kernels& cpu_kernels() {
  static const Kernels& kernels = *chosen().kernels();
  return kernels;
}
const Kernels& cpu_kernels_for(const char* capability) { return *choose(capability).kernels(); }

}  // namespace voxgrad
