// Checks that the tests of this program launch every kernel of the convolutions. The linker replaces the functions by
// which the program registers and launches kernels with the functions of this file (tests/CMakeLists.txt), so that the
// kernels need no code for it.
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <regex>
#include <string>

#include "cuda/conv/plan/problem.h"
#include "cuda/cuda.h"

namespace voxgrad::cudatest {
namespace {

/// The kernels of the program with the numbers of their launches.
class KernelLaunches {
 public:
  static KernelLaunches& of_program() {
    static auto* launches = new KernelLaunches;
    return *launches;
  }
  /// Adds a kernel. `function` is the host function that represents the kernel.
  void add_kernel(const void* function, const char* mangled_name) {
    int status = 0;
    char* const name = abi::__cxa_demangle(mangled_name, nullptr, nullptr, &status);
    const std::lock_guard lock(mutex_);
    kernels_[function].name = status == 0 ? name : mangled_name;
    std::free(name);
  }
  /// Adds the handle of a kernel.
  void add_handle(const void* handle, const void* function) {
    const std::lock_guard lock(mutex_);
    functions_[handle] = function;
  }
  /// Counts a launch. `kernel` is the host function or the handle.
  void count(const void* kernel) {
    const std::lock_guard lock(mutex_);
    const auto handle = functions_.find(kernel);
    const auto found = kernels_.find(handle == functions_.end() ? kernel : handle->second);
    if (found != kernels_.end()) ++found->second.launches;
  }
  /// Calls f(name, launches) for each kernel of the convolutions.
  template <class F>
  void each_convolution(const F& f) const {
    static const std::regex kConvolution(
        "fprop|dgrad|wgrad|depthwise|pointwise|reduce_splits|reduce_in_order|find_maxima|scale_to_halves|"
        "scale_slices|ScaleChannel|pack_weights|split_rows");
    for (const auto& [function, kernel] : kernels_)
      if (std::regex_search(kernel.name.substr(0, kernel.name.rfind('(')), kConvolution))
        f(kernel.name, kernel.launches);
  }

 private:
  struct Kernel {
    std::string name;
    int64_t launches = 0;
  };
  std::mutex mutex_;
  std::map<const void*, Kernel> kernels_;
  std::map<const void*, const void*> functions_;
};

/// Returns whether this run of the program includes all tests of the convolutions.
bool includes_all_convolutions() {
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *program.GetTestSuite(i);
    const bool is_convolution = std::string(suite.name()).find("CudaConv") != std::string::npos;
    if (is_convolution && suite.test_to_run_count() < suite.total_test_count()) return false;
  }
  return true;
}

/// After all tests, expects that each kernel of the convolutions was launched, unless some tests were excluded or
/// failed.
class LaunchesOfConvolutions : public testing::Environment {
 public:
  void TearDown() override {
    if (!includes_all_convolutions() || testing::UnitTest::GetInstance()->Failed()) return;
    if (!cuda::is_available() || !cuda::has_wgmma(0)) return;
    KernelLaunches::of_program().each_convolution(
        [](const std::string& name, int64_t launches) { EXPECT_GT(launches, 0) << "no test launches " << name; });
  }
};
[[maybe_unused]] testing::Environment* const environment =
    testing::AddGlobalTestEnvironment(new LaunchesOfConvolutions);

TEST(ConvKernelLaunches, ListsTheKernelsOfTheConvolutions) {
  int kernels = 0;
  KernelLaunches::of_program().each_convolution([&](const std::string&, int64_t) { ++kernels; });
  EXPECT_GT(kernels, 200);
}

}  // namespace

// With --wrap, the linker binds calls of f to __wrap_f, and calls of __real_f to f. Compilers before CUDA 13 call
// cudaLaunchKernel() instead of __cudaGetKernel() and __cudaLaunchKernel().
extern "C" {

void __real___cudaRegisterFunction(void** module, const char* function, char* device_function, const char* name,
                                   int thread_limit, uint3* tid, uint3* bid, dim3* block, dim3* grid, int* warp_size);
void __wrap___cudaRegisterFunction(void** module, const char* function, char* device_function, const char* name,
                                   int thread_limit, uint3* tid, uint3* bid, dim3* block, dim3* grid, int* warp_size) {
  KernelLaunches::of_program().add_kernel(function, name);
  __real___cudaRegisterFunction(module, function, device_function, name, thread_limit, tid, bid, block, grid,
                                warp_size);
}

[[gnu::weak]] cudaError_t __real___cudaGetKernel(cudaKernel_t* handle, const void* function);
cudaError_t __wrap___cudaGetKernel(cudaKernel_t* handle, const void* function) {
  const cudaError_t status = __real___cudaGetKernel(handle, function);
  if (status == cudaSuccess) KernelLaunches::of_program().add_handle(*handle, function);
  return status;
}

[[gnu::weak]] cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                                    size_t shared_bytes, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                      cudaStream_t stream) {
  KernelLaunches::of_program().count(kernel);
  return __real___cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t __real_cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                    cudaStream_t stream);
cudaError_t __wrap_cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                    cudaStream_t stream) {
  KernelLaunches::of_program().count(function);
  return __real_cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  KernelLaunches::of_program().count(function);
  return __real_cudaLaunchKernelExC(config, function, arguments);
}
}

}  // namespace voxgrad::cudatest
