// Implements calls of NCCL's all-reduce without voxgrad.
#include "bench/scaling/raw_nccl.h"

#ifdef SCALING_NCCL
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>

#include "cuda/cuda.h"
#include "ops/create.h"
#endif

namespace scaling {
namespace vg = voxgrad;

#ifdef SCALING_NCCL
namespace {

void check_nccl(ncclResult_t code) {
  vg::check(code == ncclSuccess, "scaling", "NCCL: ", ncclGetErrorString(code), "; ", ncclGetLastError(nullptr));
}

class Raw final : public RawNccl {
 public:
  explicit Raw(vg::distributed::Communicator& world) : stream_(world.device().index) {
    ncclUniqueId id{};
    if (world.rank() == 0) check_nccl(ncclGetUniqueId(&id));
    const vg::Tensor bytes = vg::zeros({sizeof id.internal}, {.dtype = vg::u8});
    auto* shared = reinterpret_cast<char*>(bytes.mutable_data<uint8_t>());
    std::copy(std::begin(id.internal), std::end(id.internal), shared);
    world.broadcast(bytes);
    std::copy_n(reinterpret_cast<const char*>(bytes.data<uint8_t>()), sizeof id.internal, id.internal);
    vg::check(cudaSetDevice(world.device().index) == cudaSuccess, "scaling", "cudaSetDevice failed");
    check_nccl(ncclCommInitRank(&comm_, world.size(), id, world.rank()));
  }
  /// Waits for the stream. Does not destroy the NCCL communicator, because this can cause a deadlock: one thread of
  /// NCCL destroys the communicators of all ranks of a process and waits for their GPUs, which may wait for other
  /// ranks.
  ~Raw() override { cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.handle())); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  void all_reduce(const vg::Tensor& from, const vg::Tensor& to) override {
    check_nccl(ncclAllReduce(from.raw_data(), to.mutable_raw_data(), static_cast<size_t>(from.numel()),
                             from.dtype() == vg::bf16 ? ncclBfloat16 : ncclFloat32, ncclSum, comm_,
                             static_cast<cudaStream_t>(stream_.handle())));
  }

 private:
  vg::cuda::Stream stream_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<RawNccl> RawNccl::make(vg::distributed::Communicator& world) { return std::make_unique<Raw>(world); }
#else
std::unique_ptr<RawNccl> RawNccl::make(vg::distributed::Communicator&) { return nullptr; }
#endif

}  // namespace scaling
