// The communicator of GPUs. Collectives are queued in a stream of their own, so that they overlap what is computed.
#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/autograd.h"
#include "core/capture.h"
#include "core/profiler.h"
#include "core/random.h"
#include "cuda/cuda.h"
#include "cuda/launch.h"
#include "nn/parallel/communicator.h"
#include "nn/parallel/environment.h"
#include "nn/parallel/guarded.h"
#include "nn/parallel/rendezvous.h"
#include "nn/parallel/run.h"
#include "ops/create.h"

namespace voxgrad::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::DeviceGuard, cuda::Event;
constexpr double kRendezvousSeconds = 60;

void check_nccl(ncclResult_t code, const char* call) {
  if (code != ncclSuccess && code != ncclInProgress)
    fail(call, "NCCL: ", ncclGetErrorString(code), "; ", ncclGetLastError(nullptr));
}

ncclRedOp_t operation(ReduceOp op) { return op == ReduceOp::sum ? ncclSum : op == ReduceOp::max ? ncclMax : ncclMin; }

ncclDataType_t reduced_type(DType dtype, const char* op) {
  switch (dtype) {
    case f32:
      return ncclFloat32;
    case f64:
      return ncclFloat64;
    case bf16:
      return ncclBfloat16;
    case f16:
      return ncclFloat16;
    case i64:
      return ncclInt64;
    default:
      fail(op, "ranks reduce f32, f64, bf16, f16 and i64, not ", dtype);
  }
}

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.numel() * item_size(t.dtype())); }

class NcclCommunicator : public Communicator {
 public:
  /// `rendezvous`, whose message is NCCL's id, is empty for one rank alone.
  NcclCommunicator(int rank, int size, int local_rank, int device, std::unique_ptr<Rendezvous> rendezvous);
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  Device device() const override { return Device::cuda(device_); }
  void set_timeout(double seconds) override;

  std::unique_ptr<Work> all_reduce_async(const Tensor& tensor, ReduceOp op) override;
  void broadcast(const Tensor& tensor, int root) override;
  std::unique_ptr<Work> send_receive_async(const std::vector<Message>& sends,
                                           const std::vector<Message>& receives) override;
  Tensor all_gather(const Tensor& tensor) override;
  Tensor reduce_scatter(const Tensor& tensor, ReduceOp op) override;
  void barrier() override;
  void abort(int code) override {
    if (rendezvous_) rendezvous_->end_others();
    std::_Exit(code);
  }

 private:
  class NcclWork;
  struct Pending {
    const char* op;
    std::shared_ptr<Event> over;
    Clock::time_point begun;
  };
  /// The tensor itself, or of one on the CPU a copy.
  Tensor here(const char* op, const Tensor& tensor) const;
  template <class F>
  std::unique_ptr<NcclWork> queue(const char* op, const Tensors& tensors, const F& call);
  Progress progress();

  const int rank_, size_, local_rank_, device_;
  ncclComm_t comm_ = nullptr;
  std::optional<cuda::Stream> stream_;
  std::mutex mutex_;  // of what the watching thread sees:
  std::deque<Pending> pending_;
  int64_t collectives_ = 0;
  double timeout_ = 600;  // seconds
  std::unique_ptr<Rendezvous> rendezvous_;
};

/// What is queued behind wait() comes after the collective; the host does not wait.
class NcclCommunicator::NcclWork : public Work {
 public:
  NcclWork(std::shared_ptr<Event> over, Tensors tensors) : over_(std::move(over)), tensors_(std::move(tensors)) {}
  ~NcclWork() override {  // before the tensors' memory goes back to the current stream
    try {
      wait();
    } catch (const Error&) {  // the device is lost
    }
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;

  bool test() override { return false; }  // it goes on by itself
  void wait() override {
    if (const auto over = std::exchange(over_, nullptr)) over->wait();
  }

 private:
  std::shared_ptr<Event> over_;
  Tensors tensors_;
};

NcclCommunicator::NcclCommunicator(int rank, int size, int local_rank, int device,
                                   std::unique_ptr<Rendezvous> rendezvous)
    : rank_(rank), size_(size), local_rank_(local_rank), device_(device), rendezvous_(std::move(rendezvous)) {
  cuda_runtime().require(device);
  const DeviceGuard guard(device);
  stream_.emplace(device);
  ncclUniqueId id;
  if (rendezvous_)
    rendezvous_->message().copy(id.internal, sizeof id.internal);
  else
    check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  check_nccl(ncclCommInitRank(&comm_, size, id, rank), "ncclCommInitRank");
  if (rendezvous_) rendezvous_->watch([this] { return progress(); });
}

NcclCommunicator::~NcclCommunicator() {
  try {
    barrier();
  } catch (const Error&) {  // the device is lost
  }
  rendezvous_.reset();
  ncclCommDestroy(comm_);
}

void NcclCommunicator::set_timeout(double seconds) {
  check(seconds > 0, "set_timeout", "the time must be positive, got ", seconds, " s");
  const std::lock_guard lock(mutex_);
  timeout_ = seconds;
}

/// Called by the watching thread.
Progress NcclCommunicator::progress() {
  const std::lock_guard lock(mutex_);
  try {
    while (!pending_.empty() && pending_.front().over->query()) pending_.pop_front();
  } catch (const Error&) {  // the device is lost, as the thread that uses it will say
  }
  Progress result{.collectives = collectives_};
  if (!pending_.empty() && Clock::now() - pending_.front().begun > std::chrono::duration<double>(timeout_))
    result.late = concat(pending_.front().op, " within ", timeout_, " s");
  ncclResult_t error = ncclSuccess;
  if (ncclCommGetAsyncError(comm_, &error) == ncclSuccess && error != ncclSuccess && error != ncclInProgress)
    result.error = concat("NCCL: ", ncclGetErrorString(error), "; ", ncclGetLastError(comm_));
  return result;
}

Tensor NcclCommunicator::here(const char* op, const Tensor& tensor) const {
  check(tensor.defined(), op, "the tensor is undefined");
  check(tensor.device() == device() || tensor.device().is_cpu(), op, "this rank's tensors lie on ", device(), ", got ",
        describe(tensor));
  return tensor.detach().to(device());
}

/// Calls `call` with the collectives' stream.
template <class F>
std::unique_ptr<NcclCommunicator::NcclWork> NcclCommunicator::queue(const char* op, const Tensors& tensors,
                                                                    const F& call) {
  const DeviceGuard guard(device_);
  Event ready(device_, false);
  const auto over = std::make_shared<Event>(device_, false);
  ready.record();
  {  // in the profiler's trace the collectives' stream is a track beside that of what they overlap
    const cuda::StreamGuard stream(*stream_);
    ready.wait();
    const profiler::Scope scope(profiler::Kind::op, op, nullptr, device());
    if (profiler::Event* event = scope.event())
      for (const Tensor& tensor : tensors) event->bytes += static_cast<double>(bytes_of(tensor));
    check_nccl(call(static_cast<cudaStream_t>(stream_->handle())), op);
    over->record();
  }
  const std::lock_guard lock(mutex_);
  ++collectives_;
  if (rendezvous_ && !Capture::current()) pending_.push_back({op, over, Clock::now()});
  return std::make_unique<NcclWork>(over, tensors);
}

std::unique_ptr<Work> NcclCommunicator::all_reduce_async(const Tensor& tensor, ReduceOp op) {
  constexpr const char* kOp = "all_reduce";
  const Tensor values = here(kOp, tensor);
  check(values.is_contiguous(), kOp, "the tensor is not contiguous: ", describe(tensor), " with strides ",
        tensor.strides());
  auto work = queue(kOp, {values}, [&](cudaStream_t stream) {
    return ncclAllReduce(values.raw_data(), values.mutable_raw_data(), static_cast<size_t>(values.numel()),
                         reduced_type(values.dtype(), kOp), operation(op), comm_, stream);
  });
  if (tensor.device().is_cpu()) {
    work->wait();
    tensor.detach().copy_(values);
  }
  return work;
}

void NcclCommunicator::broadcast(const Tensor& tensor, int root) {
  constexpr const char* kOp = "broadcast";
  check(root >= 0 && root < size_, kOp, "there is no rank ", root, " among ", size_);
  check_in_place(kOp, tensor);
  const Tensor values = tensor.detach(), dense = here(kOp, values).contiguous();
  queue(kOp, {dense}, [&](cudaStream_t stream) {
    return ncclBroadcast(dense.raw_data(), dense.mutable_raw_data(), bytes_of(dense), ncclUint8, root, comm_, stream);
  })->wait();
  if (dense.raw_data() != values.raw_data()) values.copy_(dense);
}

std::unique_ptr<Work> NcclCommunicator::send_receive_async(const std::vector<Message>& sends,
                                                           const std::vector<Message>& receives) {
  constexpr const char* kOp = "send_receive";
  return queue(kOp, checked(kOp, sends, receives), [&](cudaStream_t stream) {
    ncclResult_t result = ncclGroupStart();
    const auto keep = [&result](ncclResult_t code) { result = result == ncclSuccess ? code : result; };
    for (const auto& [tensor, peer] : sends)
      keep(ncclSend(tensor.raw_data(), bytes_of(tensor), ncclUint8, peer, comm_, stream));
    for (const auto& [tensor, peer] : receives)
      keep(ncclRecv(tensor.mutable_raw_data(), bytes_of(tensor), ncclUint8, peer, comm_, stream));
    keep(ncclGroupEnd());
    return result;
  });
}

Tensor NcclCommunicator::all_gather(const Tensor& tensor) {
  constexpr const char* kOp = "all_gather";
  const Tensor dense = here(kOp, tensor).contiguous();
  Shape shape{size_};
  for (const int64_t length : dense.shape()) shape.push_back(length);
  const Tensor all = empty(shape, dense.options());
  queue(kOp, {dense, all}, [&](cudaStream_t stream) {
    return ncclAllGather(dense.raw_data(), all.mutable_raw_data(), bytes_of(dense), ncclUint8, comm_, stream);
  })->wait();
  return all.to(tensor.device());
}

Tensor NcclCommunicator::reduce_scatter(const Tensor& tensor, ReduceOp op) {
  constexpr const char* kOp = "reduce_scatter";
  const Tensor dense = here(kOp, tensor).contiguous();
  check(dense.dim() > 0 && dense.size(0) == size_, kOp, "the first axis must have ", size_,
        " rows, one for each rank; the tensor is ", describe(tensor));
  const Tensor own = empty(dense.select(0, 0).shape(), dense.options());
  queue(kOp, {dense, own}, [&](cudaStream_t stream) {
    return ncclReduceScatter(dense.raw_data(), own.mutable_raw_data(), static_cast<size_t>(own.numel()),
                             reduced_type(own.dtype(), kOp), operation(op), comm_, stream);
  })->wait();
  return own.to(tensor.device());
}

void NcclCommunicator::barrier() {
  const Tensor one = zeros({1}, {.device = device()});
  queue("barrier", {one}, [&](cudaStream_t stream) {
    return ncclAllReduce(one.raw_data(), one.mutable_raw_data(), 1, ncclFloat32, ncclSum, comm_, stream);
  })->wait();
  synchronize(device());
}

std::string new_id() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return std::string(id.internal, sizeof id.internal);
}

/// Rank 0 waits for the others, which come to address and port.
std::unique_ptr<Rendezvous> meet(int rank, int size, const Listener* listener, const std::string& address, int port) {
  if (rank == 0) return std::make_unique<Rendezvous>(*listener, size, new_id(), kRendezvousSeconds);
  return std::make_unique<Rendezvous>(rank, size, address, port, kRendezvousSeconds);
}

std::unique_ptr<Communicator> from_environment(const Environment& e) {
  cuda_runtime().require(e.local_rank);
  // torchrun's agent listens on MASTER_PORT itself.
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const int port = e.master_port + (agent && agent == std::string("True") ? 1 : 0);
  std::optional<Listener> listener;
  if (e.rank == 0) listener.emplace(port);
  return std::make_unique<NcclCommunicator>(
      e.rank, e.world_size, e.local_rank, e.local_rank,
      meet(e.rank, e.world_size, listener ? &*listener : nullptr, e.master_addr, port));
}

/// MPI tells the ranks where rank 0 waits.
std::unique_ptr<Communicator> from_mpi() {
  Communicator& world = mpi_world();
  cuda_runtime().require(world.local_rank());
  std::optional<Listener> listener;
  if (world.rank() == 0) listener.emplace(0);
  const Tensor place = zeros({257}, {.dtype = i64});  // port, and the characters of the host's name
  int64_t* values = place.mutable_data<int64_t>();
  if (listener) {
    const std::string host = host_name();
    values[0] = listener->port();
    std::copy(host.begin(), host.end(), values + 1);
  }
  world.broadcast(place, 0);
  std::string host;
  for (const int64_t* c = values + 1; *c != 0; ++c) host += static_cast<char>(*c);
  return std::make_unique<NcclCommunicator>(
      world.rank(), world.size(), world.local_rank(), world.local_rank(),
      meet(world.rank(), world.size(), listener ? &*listener : nullptr, host, static_cast<int>(values[0])));
}

bool started_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* text = std::getenv(name); text && std::atoi(text) > 1) return true;
  return false;
}

std::unique_ptr<Communicator> world;

}  // namespace

bool nccl_available() { return true; }

void set_environment() {
  // Sums in the switches' own order are not said to be the same in two runs.
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  // Of eight hardware queues those that wait for an event slow the others' launches down: docs/scaling.md.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4", 0);
}

Communicator& nccl_world() {
  if (world) return *world;
  set_environment();
  if (const auto e = environment())
    world = from_environment(*e);
  else if (started_by_mpi())
    world = from_mpi();
  else
    world = std::make_unique<NcclCommunicator>(0, 1, 0, 0, nullptr);
  return *world;
}

void nccl_finalize() {
  world.reset();
  if (mpi_available()) mpi_finalize();
}

int launch(int ranks, const std::function<void(Communicator& world)>& f) {
  constexpr const char* kOp = "parallel::launch";
  check(static_cast<bool>(f), kOp, "the function is empty");
  set_environment();
  check(ranks > 0 && ranks <= cuda::device_count(), kOp, "there are ", cuda::device_count(), " GPUs for ", ranks,
        " ranks");
  const Listener listener(0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank, generator = default_generator()]() mutable {
      const GeneratorGuard guard(generator);
      std::unique_ptr<Communicator> group;
      try {
        group = std::make_unique<NcclCommunicator>(rank, ranks, rank, rank,
                                                   meet(rank, ranks, &listener, "localhost", listener.port()));
      } catch (const std::exception& error) {
        print_failure(rank, ranks, error.what());
        std::_Exit(1);
      }
      run_guarded(*group, f);
    });
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace voxgrad::parallel
