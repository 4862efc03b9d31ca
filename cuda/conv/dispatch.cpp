// Host functions that all kernel families share.
#include "cuda/conv/dispatch.h"

#include <vector>

#include "cuda/cuda.h"
#include "cuda/detail/kernels.h"

namespace voxgrad::cuda {
namespace {

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "conv");
  return value;
}

ConvGpu describe_gpu(int device) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "conv");
  const double bytes = attribute(device, cudaDevAttrGlobalMemoryBusWidth) / 8.0;
  return {properties.name, properties.major * 10 + properties.minor, properties.multiProcessorCount,
          1e3 * attribute(device, cudaDevAttrClockRate), 2e3 * attribute(device, cudaDevAttrMemoryClockRate) * bytes};
}

}  // namespace

void fill_bias(const View& out, const ConvEpilogue& epilogue, const Launch& launch) {
  if (!epilogue.bias) return kernel::fill(out, 0);
  View values = *epilogue.bias;
  const Workspace rectified(launch, epilogue.relu ? sizeof(float) * static_cast<size_t>(values.size[0]) : 0);
  if (epilogue.relu) {  // applies ReLU to a float copy of the bias
    values.data = rectified.as<void>();
    values.dtype = DType::f32;
    values.stride[0] = 1;
    kernel::copy(values, *epilogue.bias);
    kernel::unary(UnaryOp::relu, values, values, 0, 0);
  }
  View broadcast = out;
  broadcast.data = values.data;
  broadcast.dtype = values.dtype;
  for (int a = 0; a < out.rank; ++a) broadcast.stride[a] = a == 1 ? values.stride[0] : 0;
  kernel::copy(out, broadcast);
}

ConvGpu conv_gpu(int device) {
  static const std::vector<ConvGpu> gpus = [] {  // cached, because a query takes a millisecond
    std::vector<ConvGpu> all;
    for (int i = 0; i < device_count(); ++i) all.push_back(describe_gpu(i));
    return all;
  }();
  return device < 0 || device >= device_count() ? ConvGpu{} : gpus[static_cast<size_t>(device)];
}

void describe_device(ConvProblem& problem, int device) {
  if (device < 0 || device >= device_count()) return;
  problem.shared_limit = attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  problem.multiprocessors = attribute(device, cudaDevAttrMultiProcessorCount);
  problem.wgmma = has_wgmma(device);
}

}  // namespace voxgrad::cuda
