// Copies from pageable host memory that do not wait for the GPU. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace voxgrad::cuda {

/// Queues a copy of `bytes` bytes from host memory to `to` on `device`. `from` may be reused when the call returns. The
/// bytes pass through page-locked buffers, 16 MiB per stream. The call waits only if earlier copies of the stream still
/// occupy all buffers.
void upload(void* to, const void* from, size_t bytes, int device, cudaStream_t stream);

}  // namespace voxgrad::cuda
