// Copies from the host's pageable memory that do not wait for the GPU. Private to cuda/.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace voxgrad::cuda {

/// Queues a copy of `bytes` bytes from the host to `to` on `device`; `from` may be reused on return. The bytes pass
/// through a ring of page-locked buffers: the call waits only if earlier copies fill the ring, 16 MiB.
void upload(void* to, const void* from, size_t bytes, int device, cudaStream_t stream);

}  // namespace voxgrad::cuda
