// The communicator for GPUs. Collectives are queued on a separate stream and overlap with computation. The first group
// loads NCCL.
#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/capture.h"
#include "core/detail/shared_library.h"
#include "core/profiler.h"
#include "core/random.h"
#include "cuda/cuda.h"
#include "nn/distributed/communicator.h"
#include "nn/distributed/detail/rendezvous.h"
#include "nn/distributed/environment.h"
#include "nn/distributed/run.h"
#include "ops/create.h"

namespace voxgrad::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::DeviceGuard, cuda::Event;
constexpr double kRendezvousSeconds = 60;

/// The functions of NCCL. CMake defines VG_NCCL_FOLDER, the folder of the library that it found.
struct Nccl : SharedLibrary {
  Nccl()
      : SharedLibrary("distributed", concat("libnccl.so.", NCCL_MAJOR), VG_NCCL_FOLDER,
                      concat("NCCL ", NCCL_MAJOR, " (NVIDIA's package libnccl", NCCL_MAJOR, ")")) {}
  VG_LIBRARY_FUNCTION(ncclAllGather);
  VG_LIBRARY_FUNCTION(ncclAllReduce);
  VG_LIBRARY_FUNCTION(ncclBroadcast);
  VG_LIBRARY_FUNCTION(ncclCommDestroy);
  VG_LIBRARY_FUNCTION(ncclCommGetAsyncError);
  VG_LIBRARY_FUNCTION(ncclCommInitRank);
  VG_LIBRARY_FUNCTION(ncclGetErrorString);
  VG_LIBRARY_FUNCTION(ncclGetLastError);
  VG_LIBRARY_FUNCTION(ncclGetUniqueId);
  VG_LIBRARY_FUNCTION(ncclGroupEnd);
  VG_LIBRARY_FUNCTION(ncclGroupStart);
  VG_LIBRARY_FUNCTION(ncclRecv);
  VG_LIBRARY_FUNCTION(ncclSend);
};

const Nccl& nccl() {
  static const auto* functions = new Nccl;
  return *functions;
}

/// Throws Error if GPU `device` does not exist or NCCL cannot be loaded.
void require_gpu_and_nccl(int device) {
  cuda_runtime().require(device);
  nccl();
}

void check_nccl(ncclResult_t code, const char* call) {
  if (code != ncclSuccess && code != ncclInProgress)
    fail(call, "NCCL: ", nccl().ncclGetErrorString(code), "; ", nccl().ncclGetLastError(nullptr));
}

ncclRedOp_t operation(ReduceOp op) { return op == ReduceOp::sum ? ncclSum : op == ReduceOp::max ? ncclMax : ncclMin; }

ncclDataType_t reduced_type(DType dtype) {
  constexpr std::array types{ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat16, ncclInt64};  // in the order of DType
  return types.at(static_cast<size_t>(dtype));
}

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.numel() * item_size(t.dtype())); }

/// Returns a new NCCL id as bytes.
std::string new_id() {
  ncclUniqueId id;
  check_nccl(nccl().ncclGetUniqueId(&id), "ncclGetUniqueId");
  return std::string(id.internal, sizeof id.internal);
}

class NcclCommunicator : public Communicator {
 public:
  /// Joins the group whose NCCL id is rendezvous->message(), with the GPU `local_rank`. `rendezvous` is null for a
  /// single rank.
  NcclCommunicator(int rank, int size, int local_rank, std::unique_ptr<Rendezvous> rendezvous)
      : Communicator(rank, size, local_rank, Device::cuda(local_rank)), rendezvous_(std::move(rendezvous)) {
    require_gpu_and_nccl(local_rank);
    const DeviceGuard guard(local_rank);
    stream_.emplace(local_rank);
    ncclUniqueId id;
    (rendezvous_ ? rendezvous_->message() : new_id()).copy(id.internal, sizeof id.internal);
    check_nccl(nccl().ncclCommInitRank(&comm_, size, id, rank), "ncclCommInitRank");
    if (rendezvous_) rendezvous_->watch([this] { return progress(); });
  }

  ~NcclCommunicator() override {
    try {
      barrier();
    } catch (const Error&) {  // the device is lost
    }
    rendezvous_.reset();
    nccl().ncclCommDestroy(comm_);
  }

  std::unique_ptr<Work> start(const Collective& collective) override;
  void abort(int code) override {
    if (rendezvous_) rendezvous_->end_others();
    std::_Exit(code);
  }

 private:
  class NcclWork;
  /// A collective that has not completed.
  struct Pending {
    const char* op;
    int64_t number;               // index of the call, from 1
    std::shared_ptr<Event> over;  // recorded after the collective
    Clock::time_point begun;      // when the host queued the collective
  };

  /// Queues a collective on `stream`. Returns the status of NCCL.
  ncclResult_t queue(const Collective& c, cudaStream_t stream) const {
    using enum Collective::Kind;
    if (c.kind == send_receive) {
      ncclResult_t result = nccl().ncclGroupStart();
      const auto keep = [&result](ncclResult_t code) { result = result == ncclSuccess ? code : result; };
      for (const auto& [tensor, peer] : c.sends)
        keep(nccl().ncclSend(tensor.raw_data(), bytes_of(tensor), ncclUint8, peer, comm_, stream));
      for (const auto& [tensor, peer] : c.receives)
        keep(nccl().ncclRecv(tensor.mutable_raw_data(), bytes_of(tensor), ncclUint8, peer, comm_, stream));
      keep(nccl().ncclGroupEnd());
      return result;
    }
    const void* const in = c.in.raw_data();
    void* const out = c.out.mutable_raw_data();
    if (c.kind == all_reduce)
      return nccl().ncclAllReduce(in, out, static_cast<size_t>(c.in.numel()), reduced_type(c.in.dtype()),
                                  operation(c.op), comm_, stream);
    if (c.kind == broadcast) return nccl().ncclBroadcast(in, out, bytes_of(c.in), ncclUint8, c.root, comm_, stream);
    return nccl().ncclAllGather(in, out, bytes_of(c.in), ncclUint8, comm_, stream);
  }

  /// Returns the state of this rank's collectives. Called by the monitoring thread.
  Progress progress() {
    const std::lock_guard lock(mutex_);
    try {
      while (!pending_.empty() && pending_.front().over->query()) pending_.pop_front();
    } catch (const Error&) {  // the device is lost; the thread that uses it reports the error
    }
    Progress result;
    if (!pending_.empty() && Clock::now() - pending_.front().begun > std::chrono::duration<double>(timeout())) {
      result.late = concat(pending_.front().op, " within ", timeout(), " s");
      result.late_call = pending_.front().number;
    }
    ncclResult_t error = ncclSuccess;
    if (nccl().ncclCommGetAsyncError(comm_, &error) == ncclSuccess && error != ncclSuccess && error != ncclInProgress)
      result.error = concat("NCCL: ", nccl().ncclGetErrorString(error), "; ", nccl().ncclGetLastError(comm_));
    return result;
  }

  ncclComm_t comm_ = nullptr;
  std::optional<cuda::Stream> stream_;
  int64_t calls_ = 0;
  std::mutex mutex_;  // guards pending_, which the monitoring thread reads
  std::deque<Pending> pending_;
  std::unique_ptr<Rendezvous> rendezvous_;
};

/// A collective on the stream of the communicator. wait() makes the current stream wait for the collective; the host
/// does not wait.
class NcclCommunicator::NcclWork : public Work {
 public:
  NcclWork(std::shared_ptr<Event> over, Tensors tensors) : over_(std::move(over)), tensors_(std::move(tensors)) {}
  ~NcclWork() override {  // the current stream must wait before it reuses the memory of the tensors
    try {
      wait();
    } catch (const Error&) {  // the device is lost
    }
  }

  bool test() override { return false; }  // always false under NCCL; see Work::test()
  void wait() override {
    if (const auto over = std::exchange(over_, nullptr)) over->wait();
  }

 private:
  std::shared_ptr<Event> over_;
  Tensors tensors_;
};

std::unique_ptr<Work> NcclCommunicator::start(const Collective& collective) {
  // Record the call before NCCL is called, because NCCL may not return if the ranks' calls differ.
  ++calls_;
  if (rendezvous_) rendezvous_->add_call(collective.call(rank()));
  const DeviceGuard guard(device().index);
  const Tensors tensors = collective.tensors();
  Event ready(device().index, /*enable_timing=*/false);
  const auto over = std::make_shared<Event>(device().index, /*enable_timing=*/false);
  ready.record();
  {  // collectives have their own stream, which is a separate track of the profiler's trace
    const cuda::StreamGuard stream(*stream_);
    ready.wait();
    const profiler::Scope scope(profiler::Kind::op, collective.name, nullptr, device());
    if (profiler::Event* event = scope.event())
      for (const Tensor& tensor : tensors) event->bytes += static_cast<double>(bytes_of(tensor));
    check_nccl(queue(collective, static_cast<cudaStream_t>(stream_->handle())), collective.name);
    over->record();
  }
  const std::lock_guard lock(mutex_);
  if (rendezvous_ && !Capture::current()) pending_.push_back({collective.name, calls_, over, Clock::now()});
  return std::make_unique<NcclWork>(over, tensors);
}

/// Connects the ranks. Rank 0 waits at the listener for the other ranks. A single rank needs neither a listener nor an
/// address.
std::unique_ptr<Communicator> connect_ranks(const Environment& e, const std::optional<Listener>& listener = {}) {
  std::unique_ptr<Rendezvous> rendezvous;
  if (e.rank == 0 && e.world_size > 1)
    rendezvous = std::make_unique<Rendezvous>(*listener, e.world_size, new_id(), kRendezvousSeconds);
  else if (e.world_size > 1)
    rendezvous =
        std::make_unique<Rendezvous>(e.rank, e.world_size, e.master_addr, e.master_port, e.token, kRendezvousSeconds);
  return std::make_unique<NcclCommunicator>(e.rank, e.world_size, e.local_rank, std::move(rendezvous));
}

/// Connects the ranks that torchrun or a script started.
std::unique_ptr<Communicator> from_environment(Environment e) {
  require_gpu_and_nccl(e.local_rank);
  // The agent of torchrun listens on MASTER_PORT, so the rendezvous uses the next port.
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  e.master_port += agent && agent == std::string("True") ? 1 : 0;
  std::optional<Listener> listener;
  if (e.rank == 0 && e.world_size > 1) listener.emplace(e.master_addr, e.master_port, e.token);
  return connect_ranks(e, listener);
}

/// Connects the ranks that MPI started. Rank 0 broadcasts the address of the rendezvous and a random token by MPI. The
/// host is 127.0.0.1 if all ranks are on one machine, otherwise rank 0's host name.
std::unique_ptr<Communicator> from_mpi() {
  Communicator& world = mpi_world();
  require_gpu_and_nccl(world.local_rank());
  const Tensor on_one_machine = full({}, world.local_rank() == world.rank(), {.dtype = i64});
  world.all_reduce(on_one_machine, ReduceOp::min);
  std::optional<Listener> listener;
  const Tensor message = zeros({512}, {.dtype = u8});  // port, token and host, separated by line ends
  auto* const text = reinterpret_cast<char*>(message.mutable_data<uint8_t>());
  if (world.rank() == 0) {
    const std::string host = on_one_machine.item() != 0 ? "127.0.0.1" : host_name();
    listener.emplace(host, 0, random_token());
    concat(listener->port(), '\n', listener->token(), '\n', host).copy(text, 511);
  }
  world.broadcast(message, 0);
  std::istringstream words(text);
  Environment e{.rank = world.rank(), .world_size = world.size(), .local_rank = world.local_rank()};
  words >> e.master_port >> e.token >> e.master_addr;
  return connect_ranks(e, listener);
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
  // NCCL does not guarantee that sums in NVLink switches have the same order in two runs.
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  // With CUDA's default of eight hardware queues, a queue that waits for an event delays launches on other queues. With
  // one to four queues, this delay was not observed; see docs/how-distributed-works.md.
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
    world = connect_ranks({});
  // If the program does not call nccl_finalize(), leave the group before the static objects of NCCL are destroyed. They
  // are newer than `world`, because NCCL was loaded later, and would be destroyed first.
  [[maybe_unused]] static const int registered = std::atexit([] { world.reset(); });
  return *world;
}

void nccl_finalize() {
  world.reset();
  if (mpi_available()) mpi_finalize();
}

int launch(int ranks, const std::function<void(Communicator& world)>& f) {
  constexpr const char* kOp = "distributed::launch";
  check(static_cast<bool>(f), kOp, "the function is empty");
  set_environment();
  require_gpu_and_nccl(0);
  check(ranks > 0 && ranks <= cuda::device_count(), kOp, "the number of ranks must be positive and at most ",
        cuda::device_count(), ", the number of GPUs; got ", ranks);
  Environment e{.world_size = ranks, .master_addr = "127.0.0.1", .token = random_token()};
  std::optional<Listener> listener;
  if (ranks > 1) e.master_port = listener.emplace(e.master_addr, 0, e.token).port();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    e.rank = e.local_rank = rank;
    threads.emplace_back([&, e, generator = default_generator()]() mutable {
      const GeneratorGuard guard(generator);
      std::unique_ptr<Communicator> group;
      try {
        group = connect_ranks(e, listener);
      } catch (const std::exception& error) {
        print_failure(e.rank, ranks, error.what());
        std::_Exit(1);
      }
      run_guarded(*group, f);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace voxgrad::distributed
