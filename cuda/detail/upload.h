// Copies from the host's pageable memory that do not wait for the GPU. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace voxgrad::cuda {

/// Queues a copy of `bytes` bytes from the host to `to` on `device`; `from` may be reused on return. The bytes pass
/// through the stream's ring of page-locked buffers: the call waits only if the stream's earlier copies fill it, 16
/// MiB.
void upload(void* to, const void* from, size_t bytes, int device, cudaStream_t stream);

}  // namespace voxgrad::cuda
