// The communicator of CPU tensors, on MPI's nonblocking collectives: waiting is a loop of MPI_Test, which a timeout
// ends.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

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

MPI_Datatype reduced_type(DType dtype) {
  switch (dtype) {
    case f32:
      return MPI_FLOAT;
    case f64:
      return MPI_DOUBLE;
    case i64:
      return MPI_INT64_T;
    default:
      return MPI_UINT16_T;  // halves
  }
}

int count_of(const Tensor& tensor) { return static_cast<int>(tensor.numel()); }

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

int rank_on_machine() {
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  const int rank = rank_in(machine);
  MPI_Comm_free(&machine);
  return rank;
}

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator();
  ~MpiCommunicator() override;

  std::unique_ptr<Work> start(const Collective& collective) override;
  void abort(int code) override { MPI_Abort(MPI_COMM_WORLD, code); }

 private:
  friend class MpiWork;
  MPI_Op operation(ReduceOp op, DType dtype) const;
  bool alarm_rings() const;
  [[noreturn]] void give_up(const char* op);

  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Comm alarm_ = MPI_COMM_NULL;                     // on which ranks that waited too long find each other
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
      if (now - start > std::chrono::duration<double>(group_.timeout()) || group_.alarm_rings()) group_.give_up(op_);
    }
  }

  std::vector<MPI_Request> requests{MPI_REQUEST_NULL};

 private:
  MpiCommunicator& group_;
  const char* op_;
  Tensors tensors_;
};

MpiCommunicator::MpiCommunicator()
    : Communicator(rank_in(MPI_COMM_WORLD), size_of(MPI_COMM_WORLD), rank_on_machine(), Device::cpu()) {
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &alarm_), "MPI_Comm_dup");
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
  std::vector<bool> waiting(static_cast<size_t>(size()), false);
  waiting[static_cast<size_t>(rank())] = true;
  for (int other = 0; other < size(); ++other) {
    MPI_Request request;
    if (other == rank()) continue;
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
  for (int other = 0; other < size(); ++other)
    if (!waiting[static_cast<size_t>(other)]) missing += concat(missing.empty() ? "rank " : ", ", other);
  if (missing.empty()) missing = "all ranks wait, in different collectives: no other rank";
  const auto first = std::find(waiting.begin(), waiting.end(), true);
  throw CollectiveError(static_cast<int>(first - waiting.begin()),
                        concat(op, ": ", missing, " did not come within ", timeout(), " s"));
}

std::unique_ptr<Work> MpiCommunicator::start(const Collective& c) {
  using enum Collective::Kind;
  auto work = std::make_unique<MpiWork>(*this, c.name, c.tensors());
  work->requests.assign(std::max<size_t>(1, c.sends.size() + c.receives.size()), MPI_REQUEST_NULL);
  MPI_Request* request = work->requests.data();
  if (c.kind == send_receive) {
    for (const auto& [t, peer] : c.receives)
      check_mpi(MPI_Irecv(t.mutable_raw_data(), count_of(t), moved_type(t.dtype()), peer, 0, comm_, request++), c.name);
    for (const auto& [t, peer] : c.sends)
      check_mpi(MPI_Isend(t.raw_data(), count_of(t), moved_type(t.dtype()), peer, 0, comm_, request++), c.name);
    return work;
  }
  const void* const in = c.in.raw_data();
  void* const out = c.out.mutable_raw_data();
  const int count = count_of(c.in);
  const MPI_Datatype moved = moved_type(c.in.dtype()), reduced = reduced_type(c.in.dtype());
  const MPI_Op op = operation(c.op, c.in.dtype());
  const auto call = [&] {
    switch (c.kind) {
      case all_reduce:
        return MPI_Iallreduce(MPI_IN_PLACE, out, count, reduced, op, comm_, request);
      case broadcast:
        return MPI_Ibcast(out, count, moved, c.root, comm_, request);
      case all_gather:
        return MPI_Iallgather(in, count, moved, out, count, moved, comm_, request);
      default:
        return MPI_Ireduce_scatter_block(in, out, count_of(c.out), reduced, op, comm_, request);
    }
  };
  check_mpi(call(), c.name);
  return work;
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
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);  // to be thrown; its copies have the same
  check_launch(rank_in(MPI_COMM_WORLD), size_of(MPI_COMM_WORLD));
  world = std::make_unique<MpiCommunicator>();
  return *world;
}

void mpi_finalize() {
  world.reset();
  if (std::exchange(started_here, false)) MPI_Finalize();
}

}  // namespace voxgrad::parallel
