// Launches of kernels.
#include <map>
#include <mutex>
#include <utility>

#include "cuda/conv/plan/problem.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

/// Raises the dynamic shared memory limit of `kernel` on the device to at least `bytes`. Never lowers the limit, so
/// that threads that launch the same kernel do not interfere.
void allow_shared(int device, const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> allowed;
  const std::lock_guard lock(mutex);
  int& max_bytes = allowed[{device, kernel}];
  if (bytes <= max_bytes) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
  max_bytes = bytes;
}

/// Returns whether kernels on the device wait for earlier kernels themselves. Kernels that were compiled for older GPUs
/// do not. CUDA graphs represent early starts since CUDA 12.3.
bool starts_early(int device) {
  static const int driver = [] {
    int version = 0;
    check_cuda(cudaDriverGetVersion(&version), "launch");
    return version;
  }();
  return driver >= 12030 && has_wgmma(device);
}

}  // namespace

void launch_kernel(const char* op, const void* kernel, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   void** arguments, unsigned cluster) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  if (shared_bytes > 0) allow_shared(device, kernel, shared_bytes);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (cluster > 1) add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster, 1, 1};
  if (starts_early(device))
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments), op);
}

bool has_wgmma(int device) {
#ifdef VOXGRAD_SM90A
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "launch");
  return major == 9;
#else
  static_cast<void>(device);
  return false;
#endif
}

}  // namespace voxgrad::cuda
