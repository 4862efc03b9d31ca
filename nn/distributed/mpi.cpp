// The communicator for CPU tensors. The communicator uses MPI's nonblocking collectives and waits in a loop of
// MPI_Test, so that a timeout can end the wait.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nn/distributed/communicator.h"
#include "nn/distributed/environment.h"

namespace voxgrad::distributed {
namespace {

using Clock = std::chrono::steady_clock;

/// Throws Error if `code` is an error of MPI, and stores the error message in `failure`.
void check_mpi(int code, const char* call, std::string* failure = nullptr) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  if (failure) *failure = text;
  fail(call, text);
}

/// Reduces bf16 or f16 elements. The elements are sent as 16-bit integers, because MPI has no type for bf16 and f16.
template <class Half, ReduceOp op>
void reduce_halves(void* in, void* result, int* count, MPI_Datatype*) {
  const auto* a = static_cast<const Half*>(in);
  auto* b = static_cast<Half*>(result);
  for (int i = 0; i < *count; ++i) {
    const float x = a[i], y = b[i];
    b[i] = Half(op == ReduceOp::sum ? x + y : op == ReduceOp::max ? std::max(x, y) : std::min(x, y));
  }
}

/// Returns MPI's type for elements that are copied and not reduced.
MPI_Datatype moved_type(DType dtype) {
  const int64_t bytes = item_size(dtype);
  return bytes == 1 ? MPI_UINT8_T : bytes == 2 ? MPI_UINT16_T : bytes == 4 ? MPI_UINT32_T : MPI_UINT64_T;
}

/// Returns MPI's type for elements that are reduced. bf16 and f16 elements are sent as integers.
MPI_Datatype reduced_type(DType dtype) {
  return dtype == f32 ? MPI_FLOAT : dtype == f64 ? MPI_DOUBLE : dtype == i64 ? MPI_INT64_T : MPI_UINT16_T;
}

int count_of(const Tensor& tensor) { return static_cast<int>(tensor.numel()); }

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int world_size() {
  int size = 1;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
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

/// A Call as bytes of a fixed size, which MPI sends to the other ranks.
struct FixedCall {
  Signature signature{};
  std::array<char, 240> text{};  ///< the beginning of the description, null-terminated
};

/// A running collective. Its Work shares the ownership of this object with the communicator, which releases the object
/// after the collective has completed.
struct Operation {
  const char* name;
  Tensors tensors;
  std::vector<MPI_Request> requests;
  bool is_over = false;
  // The comparison of the ranks' calls:
  FixedCall own_call{};
  std::vector<FixedCall> calls{};  // by rank; the text is empty until the rank's call arrives
  std::vector<MPI_Request> comparison{};
  bool is_compared = false;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator() : Communicator(rank_in(MPI_COMM_WORLD), world_size(), rank_on_machine(), Device::cpu()) {
    for (MPI_Comm* comm : {&comm_, &calls_}) check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, comm), "MPI_Comm_dup");
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

  /// Must be called after finish() has returned.
  ~MpiCommunicator() override {
    for (auto& ops : halves_ops_)
      for (MPI_Op& op : ops) MPI_Op_free(&op);
    for (MPI_Comm* comm : {&calls_, &comm_}) MPI_Comm_free(comm);
  }

  std::unique_ptr<Work> start(const Collective& collective) override;
  void abort(int code) override { MPI_Abort(MPI_COMM_WORLD, code); }

  /// Makes progress without blocking. Returns true once the operation has completed and the calls of all ranks agree.
  bool advance(Operation& operation) {
    compare_calls();
    int over = 0;
    const int code =
        MPI_Testall(static_cast<int>(operation.requests.size()), operation.requests.data(), &over, MPI_STATUSES_IGNORE);
    // If the ranks' calls differ, MPI may also report an error ("message truncated"). The comparison of the calls then
    // throws a clearer error.
    if (code != MPI_SUCCESS)
      for (const auto end = Clock::now() + std::chrono::seconds(1); !operation.is_compared && Clock::now() < end;)
        compare_calls();
    check_mpi(code, operation.name, &failure_);
    operation.is_over = over && operation.is_compared;
    if (operation.is_over) operation.tensors.clear();
    return operation.is_over;
  }

  void wait(Operation& operation) {
    const Clock::time_point start = Clock::now();
    Clock::time_point next_check = start + std::chrono::milliseconds(50);
    while (!advance(operation)) {
      std::this_thread::yield();
      const Clock::time_point now = Clock::now();
      if (now < next_check) continue;
      next_check = now + std::chrono::milliseconds(50);
      if (now - start > std::chrono::duration<double>(timeout())) give_up(operation);
    }
  }

  /// Waits for all operations, including those whose Work was destroyed.
  void finish() {
    check(failure_.empty(), "distributed::mpi_finalize", "the group failed earlier: ", failure_);
    for (const auto& operation : operations_)
      if (!operation->is_over) wait(*operation);
    operations_.clear();
  }

 private:
  MPI_Op reduction(ReduceOp op, DType dtype) const {
    const auto number = static_cast<size_t>(op);
    if (dtype == bf16 || dtype == f16) return halves_ops_[dtype == f16][number];
    return std::array{MPI_SUM, MPI_MAX, MPI_MIN}[number];
  }

  /// Makes progress with the comparisons, in order, so that all ranks detect the same difference.
  void compare_calls() {
    for (const auto& operation : operations_) {
      if (operation->is_compared) continue;
      int over = 0;
      check_mpi(MPI_Testall(static_cast<int>(operation->comparison.size()), operation->comparison.data(), &over,
                            MPI_STATUSES_IGNORE),
                operation->name, &failure_);
      if (!over) return;
      std::vector<Call> calls;
      for (const FixedCall& call : operation->calls) calls.push_back({call.signature, call.text.data()});
      if (const std::string difference = describe_disagreement(calls); !difference.empty()) {
        failure_ = concat(operation->name, ": ", difference);
        throw CollectiveError(0, failure_);
      }
      operation->is_compared = true;
    }
  }

  /// Throws an error that names the ranks whose calls have not arrived.
  [[noreturn]] void give_up(const Operation& operation) {
    std::vector<int> missing, waiting;
    for (int other = 0; other < size(); ++other)
      (operation.calls[static_cast<size_t>(other)].text[0] == '\0' ? missing : waiting).push_back(other);
    failure_ = concat(operation.name, ": ",
                      missing.empty() ? "all ranks joined, but the collective did not complete"
                                      : list_ranks(missing) + " did not join",
                      " within ", timeout(), " s");
    throw CollectiveError(waiting[0], failure_);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Comm calls_ = MPI_COMM_NULL;  // for comparisons, which must work even if the calls on comm_ differ
  std::array<std::array<MPI_Op, 3>, 2> halves_ops_{};   // [bf16, f16][sum, max, min]
  std::vector<std::shared_ptr<Operation>> operations_;  // running, in the order of their start
  std::string failure_;                                 // the first error, after which the group cannot be used
};

class MpiWork : public Work {
 public:
  MpiWork(MpiCommunicator& group, std::shared_ptr<Operation> operation)
      : group_(group), operation_(std::move(operation)) {}

  // A Work may outlive its group. finish() completes all operations before the group is destroyed.
  bool test() override { return operation_->is_over || group_.advance(*operation_); }
  void wait() override {
    if (!operation_->is_over) group_.wait(*operation_);
  }

 private:
  MpiCommunicator& group_;
  std::shared_ptr<Operation> operation_;
};

std::unique_ptr<Work> MpiCommunicator::start(const Collective& c) {
  using enum Collective::Kind;
  check(failure_.empty(), c.name, "the group failed earlier: ", failure_);
  for (const auto& own : operations_)
    if (own.use_count() == 1 && !own->is_over) advance(*own);
  std::erase_if(operations_, [](const auto& own) { return own->is_over; });
  const auto operation = std::make_shared<Operation>(
      Operation{.name = c.name,
                .tensors = c.tensors(),
                .requests = std::vector(std::max<size_t>(1, c.sends.size() + c.receives.size()), MPI_REQUEST_NULL)});
  operations_.push_back(operation);
  const auto started = [&](int code) { check_mpi(code, c.name, &failure_); };
  const Call own = c.call(rank());
  operation->own_call.signature = own.signature;
  own.description.copy(operation->own_call.text.data(), operation->own_call.text.size() - 1);
  operation->calls.resize(static_cast<size_t>(size()));
  operation->calls[static_cast<size_t>(rank())] = operation->own_call;
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    const auto add = [&](auto function, FixedCall& one) {
      started(function(&one, sizeof one, MPI_BYTE, other, 0, calls_,
                       &operation->comparison.emplace_back(MPI_REQUEST_NULL)));
    };
    add(MPI_Irecv, operation->calls[static_cast<size_t>(other)]);
    add(MPI_Isend, operation->own_call);
  }
  auto work = std::make_unique<MpiWork>(*this, operation);
  MPI_Request* request = operation->requests.data();
  if (c.kind == send_receive) {
    for (const auto& [t, peer] : c.receives)
      started(MPI_Irecv(t.mutable_raw_data(), count_of(t), moved_type(t.dtype()), peer, 0, comm_, request++));
    for (const auto& [t, peer] : c.sends)
      started(MPI_Isend(t.raw_data(), count_of(t), moved_type(t.dtype()), peer, 0, comm_, request++));
    return work;
  }
  const void* const in = c.in.raw_data();
  void* const out = c.out.mutable_raw_data();
  const int count = count_of(c.in);
  const MPI_Datatype moved = moved_type(c.in.dtype());
  if (c.kind == all_reduce)
    started(MPI_Iallreduce(MPI_IN_PLACE, out, count, reduced_type(c.in.dtype()), reduction(c.op, c.in.dtype()), comm_,
                           request));
  else if (c.kind == broadcast)
    started(MPI_Ibcast(out, count, moved, c.root, comm_, request));
  else
    started(MPI_Iallgather(in, count, moved, out, count, moved, comm_, request));
  return work;
}

MpiCommunicator* world = nullptr;  // deleted by mpi_finalize(), because MPI must not be called at exit
bool started_here = false;

/// Throws if the launcher and MPI disagree about the number of ranks. Without this check, each process could form a
/// separate group. The processes would then train separate models and overwrite each other's files.
void check_launch(int rank, int size) {
  constexpr const char* kOp = "distributed::mpi_world";
  if (const auto env = environment()) {
    check(env->world_size == size, kOp, "WORLD_SIZE is ", env->world_size, ", but MPI has ", size,
          size == 1 ? " rank" : " ranks", "; on CPUs, start the ranks with mpirun or srun instead of torchrun");
    check(env->rank == rank, kOp, "RANK is ", env->rank, ", but MPI's rank is ", rank);
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* text = std::getenv(name))
      check(std::atoi(text) == size, kOp, "the launcher set ", name, " to ", text, ", but MPI has ", size,
            size == 1 ? " rank" : " ranks",
            "; the launcher belongs to an MPI library other than the one that voxgrad was built with");
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  check(!tasks || std::getenv("OMPI_COMM_WORLD_SIZE") || size > 1 || std::atoi(tasks) <= 1, kOp, "srun started ", tasks,
        " tasks that cannot connect to each other; try srun --mpi=pmix");
}

}  // namespace

bool mpi_available() { return true; }

Communicator& mpi_world() {
  if (world) return *world;
  environment();  // throws before MPI starts if the environment is inconsistent
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    int threads = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads), "MPI_Init_thread");
    started_here = true;
  }
  // With this error handler, MPI returns error codes instead of aborting, and check_mpi() throws. Copies of the
  // communicator inherit the handler.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  check_launch(rank_in(MPI_COMM_WORLD), world_size());
  world = new MpiCommunicator;
  return *world;
}

void mpi_finalize() {
  if (world) world->finish();
  delete std::exchange(world, nullptr);
  if (std::exchange(started_here, false)) MPI_Finalize();
}

}  // namespace voxgrad::distributed
