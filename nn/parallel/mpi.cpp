// The communicator of CPU tensors, on MPI's nonblocking collectives: waiting is a loop of MPI_Test, which a timeout
// ends.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "core/autograd.h"
#include "nn/parallel/communicator.h"
#include "nn/parallel/environment.h"

namespace voxgrad::parallel {
namespace {

using Clock = std::chrono::steady_clock;

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(call, text);
}

/// What MPI has no type for: halves travel as whole numbers of 16 bits.
template <class Half, ReduceOp op>
void reduce_halves(void* in, void* result, int* count, MPI_Datatype*) {
  const auto* a = static_cast<const Half*>(in);
  auto* b = static_cast<Half*>(result);
  for (int i = 0; i < *count; ++i) {
    const float x = a[i], y = b[i];
    b[i] = Half(op == ReduceOp::sum ? x + y : op == ReduceOp::max ? std::max(x, y) : std::min(x, y));
  }
}

/// MPI's type for elements that are only moved.
MPI_Datatype moved_type(DType dtype) {
  switch (item_size(dtype)) {
    case 1:
      return MPI_UINT8_T;
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    default:
      return MPI_UINT64_T;
  }
}

MPI_Datatype reduced_type(DType dtype, const char* op) {
  switch (dtype) {
    case f32:
      return MPI_FLOAT;
    case f64:
      return MPI_DOUBLE;
    case bf16:
    case f16:
      return MPI_UINT16_T;
    case i64:
      return MPI_INT64_T;
    default:
      fail(op, "ranks reduce f32, f64, bf16, f16 and i64, not ", dtype);
  }
}

/// Throws unless MPI takes the tensor.
void check_tensor(const char* op, const Tensor& tensor) {
  check(tensor.defined(), op, "the tensor is undefined");
  check(tensor.device() == Device::cpu(), op, "MPI takes tensors on the CPU, got ", describe(tensor),
        "; those of GPUs take NCCL: parallel::run(f, Device::cuda())");
}

int count_of(const char* op, const Tensor& tensor) {
  check(tensor.numel() <= std::numeric_limits<int>::max(), op, "a tensor has at most 2^31 - 1 elements here, got ",
        describe(tensor));
  return static_cast<int>(tensor.numel());
}

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator();
  ~MpiCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  Device device() const override { return Device::cpu(); }
  void set_timeout(double seconds) override;

  std::unique_ptr<Work> all_reduce_async(const Tensor& tensor, ReduceOp op) override;
  void broadcast(const Tensor& tensor, int root) override;
  std::unique_ptr<Work> send_receive_async(const std::vector<Message>& sends,
                                           const std::vector<Message>& receives) override;
  Tensor all_gather(const Tensor& tensor) override;
  Tensor reduce_scatter(const Tensor& tensor, ReduceOp op) override;
  void barrier() override;
  void abort(int code) override { MPI_Abort(MPI_COMM_WORLD, code); }

 private:
  friend class MpiWork;
  MPI_Op operation(ReduceOp op, DType dtype) const;
  bool alarm_rings() const;
  [[noreturn]] void give_up(const char* op);

  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Comm alarm_ = MPI_COMM_NULL;  // on which ranks that waited too long find each other
  int rank_ = 0, size_ = 1, local_rank_ = 0;
  double timeout_ = 600;                               // seconds
  std::array<std::array<MPI_Op, 3>, 2> halves_ops_{};  // of bf16 and f16, by ReduceOp
};

class MpiWork : public Work {
 public:
  MpiWork(MpiCommunicator& group, const char* op, Tensors tensors)
      : group_(group), op_(op), tensors_(std::move(tensors)) {}
  /// MPI cannot take a collective back: the memory of one that was given up stays.
  ~MpiWork() override {
    if (std::ranges::any_of(requests, [](MPI_Request r) { return r != MPI_REQUEST_NULL; }))
      static_cast<void>(new Tensors(std::move(tensors_)));
  }
  MpiWork(const MpiWork&) = delete;
  MpiWork& operator=(const MpiWork&) = delete;

  bool test() override {
    int over = 0;
    check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &over, MPI_STATUSES_IGNORE), op_);
    return over != 0;
  }
  void wait() override {
    const Clock::time_point start = Clock::now();
    Clock::time_point look = start + std::chrono::milliseconds(50);
    while (!test()) {
      std::this_thread::yield();
      const Clock::time_point now = Clock::now();
      if (now < look) continue;
      look = now + std::chrono::milliseconds(50);
      if (now - start > std::chrono::duration<double>(group_.timeout_) || group_.alarm_rings()) group_.give_up(op_);
    }
  }

  std::vector<MPI_Request> requests{MPI_REQUEST_NULL};

 private:
  MpiCommunicator& group_;
  const char* op_;
  Tensors tensors_;
};

MpiCommunicator::MpiCommunicator() {
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &alarm_), "MPI_Comm_dup");
  for (MPI_Comm comm : {comm_, MPI_COMM_WORLD}) MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);  // to be thrown
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine), "MPI_Comm_split_type");
  MPI_Comm_rank(machine, &local_rank_);
  MPI_Comm_free(&machine);
  using enum ReduceOp;
  const auto make = [](MPI_User_function* function) {
    MPI_Op op = MPI_OP_NULL;
    check_mpi(MPI_Op_create(function, 1, &op), "MPI_Op_create");
    return op;
  };
  halves_ops_ = {
      {{make(reduce_halves<BFloat16, sum>), make(reduce_halves<BFloat16, max>), make(reduce_halves<BFloat16, min>)},
       {make(reduce_halves<Float16, sum>), make(reduce_halves<Float16, max>), make(reduce_halves<Float16, min>)}}};
}

MpiCommunicator::~MpiCommunicator() {
  for (auto& ops : halves_ops_)
    for (MPI_Op& op : ops) MPI_Op_free(&op);
  MPI_Comm_free(&alarm_);
  MPI_Comm_free(&comm_);
}

void MpiCommunicator::set_timeout(double seconds) {
  check(seconds > 0, "set_timeout", "the time must be positive, got ", seconds, " s");
  timeout_ = seconds;
}

MPI_Op MpiCommunicator::operation(ReduceOp op, DType dtype) const {
  const auto number = static_cast<size_t>(op);
  if (dtype == bf16 || dtype == f16) return halves_ops_[dtype == f16][number];
  return std::array{MPI_SUM, MPI_MAX, MPI_MIN}[number];
}

bool MpiCommunicator::alarm_rings() const {
  int rings = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, 0, alarm_, &rings, MPI_STATUS_IGNORE);
  return rings != 0;
}

/// Ranks that wait tell each other so; those of which nothing is heard are the ones that are missing.
void MpiCommunicator::give_up(const char* op) {
  std::vector<bool> waiting(static_cast<size_t>(size_), false);
  waiting[static_cast<size_t>(rank_)] = true;
  for (int other = 0; other < size_; ++other) {
    MPI_Request request;
    if (other == rank_) continue;
    MPI_Isend(nullptr, 0, MPI_BYTE, other, 0, alarm_, &request);
    MPI_Request_free(&request);
  }
  const Clock::time_point end = Clock::now() + std::chrono::seconds(1);
  while (Clock::now() < end) {
    int rings = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, 0, alarm_, &rings, &status);
    if (!rings) {
      std::this_thread::yield();
      continue;
    }
    MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, 0, alarm_, MPI_STATUS_IGNORE);
    waiting[static_cast<size_t>(status.MPI_SOURCE)] = true;
  }
  std::string missing;
  for (int other = 0; other < size_; ++other)
    if (!waiting[static_cast<size_t>(other)]) missing += concat(missing.empty() ? "rank " : ", ", other);
  if (missing.empty()) missing = "all ranks wait, in different collectives: no other rank";
  const auto first = std::find(waiting.begin(), waiting.end(), true);
  throw CollectiveError(static_cast<int>(first - waiting.begin()),
                        concat(op, ": ", missing, " did not come within ", timeout_, " s"));
}

std::unique_ptr<Work> MpiCommunicator::all_reduce_async(const Tensor& tensor, ReduceOp op) {
  constexpr const char* kOp = "all_reduce";
  check_tensor(kOp, tensor);
  check(tensor.is_contiguous(), kOp, "the tensor is not contiguous: ", describe(tensor), " with strides ",
        tensor.strides());
  const MPI_Datatype type = reduced_type(tensor.dtype(), kOp);
  auto work = std::make_unique<MpiWork>(*this, kOp, Tensors{tensor});
  check_mpi(MPI_Iallreduce(MPI_IN_PLACE, tensor.mutable_raw_data(), count_of(kOp, tensor), type,
                           operation(op, tensor.dtype()), comm_, &work->requests[0]),
            kOp);
  return work;
}

void MpiCommunicator::broadcast(const Tensor& tensor, int root) {
  constexpr const char* kOp = "broadcast";
  check_tensor(kOp, tensor);
  check(root >= 0 && root < size_, kOp, "there is no rank ", root, " among ", size_);
  check_in_place(kOp, tensor);
  const Tensor values = tensor.detach(), dense = values.contiguous();
  MpiWork work(*this, kOp, {dense});
  check_mpi(MPI_Ibcast(dense.mutable_raw_data(), count_of(kOp, dense), moved_type(dense.dtype()), root, comm_,
                       &work.requests[0]),
            kOp);
  work.wait();
  if (!dense.is_same(values)) values.copy_(dense);
}

std::unique_ptr<Work> MpiCommunicator::send_receive_async(const std::vector<Message>& sends,
                                                          const std::vector<Message>& receives) {
  constexpr const char* kOp = "send_receive";
  auto work = std::make_unique<MpiWork>(*this, kOp, checked(kOp, sends, receives));
  work->requests.assign(sends.size() + receives.size(), MPI_REQUEST_NULL);
  MPI_Request* request = work->requests.data();
  for (const auto& [tensor, peer] : receives)
    check_mpi(MPI_Irecv(tensor.mutable_raw_data(), count_of(kOp, tensor), moved_type(tensor.dtype()), peer, 0, comm_,
                        request++),
              kOp);
  for (const auto& [tensor, peer] : sends)
    check_mpi(
        MPI_Isend(tensor.raw_data(), count_of(kOp, tensor), moved_type(tensor.dtype()), peer, 0, comm_, request++),
        kOp);
  return work;
}

Tensor MpiCommunicator::all_gather(const Tensor& tensor) {
  constexpr const char* kOp = "all_gather";
  check_tensor(kOp, tensor);
  const Tensor dense = tensor.detach().contiguous();
  Shape shape{size_};
  for (const int64_t length : dense.shape()) shape.push_back(length);
  const Tensor all = empty(shape, dense.options());
  const int count = count_of(kOp, dense);
  const MPI_Datatype type = moved_type(dense.dtype());
  MpiWork work(*this, kOp, {dense, all});
  check_mpi(
      MPI_Iallgather(dense.raw_data(), count, type, all.mutable_raw_data(), count, type, comm_, &work.requests[0]),
      kOp);
  work.wait();
  return all;
}

Tensor MpiCommunicator::reduce_scatter(const Tensor& tensor, ReduceOp op) {
  constexpr const char* kOp = "reduce_scatter";
  check_tensor(kOp, tensor);
  check(tensor.dim() > 0 && tensor.size(0) == size_, kOp, "the first axis must have ", size_,
        " rows, one for each rank; the tensor is ", describe(tensor));
  const Tensor dense = tensor.detach().contiguous();
  const Tensor own = empty(dense.select(0, 0).shape(), dense.options());
  MpiWork work(*this, kOp, {dense, own});
  check_mpi(
      MPI_Ireduce_scatter_block(dense.raw_data(), own.mutable_raw_data(), count_of(kOp, own),
                                reduced_type(own.dtype(), kOp), operation(op, own.dtype()), comm_, &work.requests[0]),
      kOp);
  work.wait();
  return own;
}

void MpiCommunicator::barrier() {
  MpiWork work(*this, "barrier", {});
  check_mpi(MPI_Ibarrier(comm_, &work.requests[0]), "barrier");
  work.wait();
}

std::unique_ptr<MpiCommunicator> world;
bool started_here = false;

/// Programs that are started past MPI are a group each: two would train two models, and overwrite each other's files.
void check_launch(int rank, int size) {
  constexpr const char* kOp = "parallel::mpi_world";
  if (const auto given = environment()) {
    check(given->world_size == size, kOp, "WORLD_SIZE says ", given->world_size, " ranks, MPI has ", size,
          "; on CPUs the ranks are started by mpirun or srun, not by torchrun");
    check(given->rank == rank, kOp, "RANK says ", given->rank, ", for MPI this is rank ", rank);
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* text = std::getenv(name))
      check(std::atoi(text) == size, kOp, "the launcher started ", text, " ranks (", name, "), MPI has ", size,
            ": the launcher is that of another MPI than voxgrad was built with");
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  check(!tasks || std::getenv("OMPI_COMM_WORLD_SIZE") || size > 1 || std::atoi(tasks) <= 1, kOp, "srun started ", tasks,
        " tasks that do not find each other: try srun --mpi=pmix");
}

}  // namespace

bool mpi_available() { return true; }

Communicator& mpi_world() {
  if (world) return *world;
  environment();  // what is wrong with it needs no MPI
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    int threads = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads), "MPI_Init_thread");
    started_here = true;
  }
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  check_launch(rank, size);
  world = std::make_unique<MpiCommunicator>();
  return *world;
}

void mpi_finalize() {
  world.reset();
  if (std::exchange(started_here, false)) MPI_Finalize();
}

}  // namespace voxgrad::parallel
