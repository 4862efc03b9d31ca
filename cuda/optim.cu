// The steps of optimizers (ops/detail/optim_step.h), in one pass over the parameters and their state. The argument of a
// kernel is a table of up to kMaxParams parameters, so that small models need one launch. The file also contains the
// sum of the squares of several tensors, from which the norm of the gradients is computed.
#include "core/detail/divide.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/reduce.cuh"
#include "ops/detail/optim_step.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Elements of a piece, which is the part of a parameter that a CTA processes at a time.
constexpr int64_t kPiece = 8192;
/// Maximum number of parameters in a table. The table stays below the limit of 4 KB for kernel arguments.
constexpr int kMaxParams = 64;

/// Parameters with their gradients and kStates state tensors each. Parameters are divided into pieces of kPiece
/// elements.
template <class T, int kStates>
struct Table {
  using C = compute_t<T>;
  int params = 0;  ///< number of parameters
  T* param[kMaxParams];
  const T* grad[kMaxParams];
  C* state[kMaxParams][kStates > 0 ? kStates : 1];
  int64_t count[kMaxParams];                  ///< elements of a parameter
  int64_t first_piece[kMaxParams + 1] = {0};  ///< index of a parameter's first piece

  void add(const StepViews& views) {
    param[params] = views.param.as<T>();
    grad[params] = views.grad.as<const T>();
    for (int k = 0; k < kStates; ++k) state[params][k] = views.state[k].template as<C>();
    count[params] = views.param.numel();
    first_piece[params + 1] = first_piece[params] + divide_up(count[params], kPiece);
    ++params;
  }
  /// Returns the parameter to which a piece belongs.
  __device__ int param_of(int64_t piece) const {
    int i = 0;
    while (piece >= first_piece[i + 1]) ++i;
    return i;
  }
};
static_assert(sizeof(Table<double, 3>) <= 4000);

/// Updates `width` elements of a parameter and its state, starting at element `at`.
template <int width, int kStates, class Update, class T, class C>
__device__ void update_vector(const Update& update, C unscale, T* param, const T* grad, C* const* state, int64_t at) {
  using V = Vector<T, width>;
  V p = load_vector<T, width>(param + at);
  const V g = load_vector<T, width>(grad + at);
  Vector<C, width> s[kStates > 0 ? kStates : 1];
  if constexpr (kStates > 0)
#pragma unroll
    for (int k = 0; k < kStates; ++k) s[k] = load_vector<C, width>(state[k] + at);
  [&]<size_t... k>(std::index_sequence<k...>) {
#pragma unroll
    for (int j = 0; j < width; ++j) update_element(update, unscale, p.v[j], g.v[j], s[k].v[j]...);
  }
  (std::make_index_sequence<kStates>());
  if constexpr (!reads_only<Update>) store_vector(param + at, p);
  if constexpr (kStates > 0)
#pragma unroll
    for (int k = 0; k < kStates; ++k) store_vector(state[k] + at, s[k]);
}

/// Applies an update to all parameters of a table. The update is `*live` if `live` is not null, otherwise `given`.
/// `live` is used in captured graphs, and if skipped steps are counted on the GPU. Does nothing if gate.found_inf is
/// set, that is, if a gradient is not finite. Launch: one CTA per piece in a 1-D grid-stride loop, kBlock threads per
/// CTA. No shared memory.
template <class Update, class T, int kStates>
__global__ void __launch_bounds__(kBlock)
    step_kernel(Update given, const Update* live, StepGate gate, const __grid_constant__ Table<T, kStates> table) {
  wait_for_previous_kernels();
  if (gate.found_inf && *gate.found_inf) return;
  const Update update = live ? *live : given;
  const auto unscale = static_cast<compute_t<T>>(inverse_scale(gate.scale));
  // The state of bf16 and f16 parameters is in float. All vectors of a parameter with state therefore have the
  // number of elements of a state vector.
  constexpr int width = kStates > 0 ? kVectorWidth<compute_t<T>> : kVectorWidth<T>;
  for (int64_t piece = blockIdx.x; piece < table.first_piece[table.params]; piece += gridDim.x) {
    const int i = table.param_of(piece);
    const int64_t begin = (piece - table.first_piece[i]) * kPiece, end = min(begin + kPiece, table.count[i]);
    uintptr_t addresses = reinterpret_cast<uintptr_t>(table.param[i]) | reinterpret_cast<uintptr_t>(table.grad[i]);
#pragma unroll
    for (int k = 0; k < kStates; ++k) addresses |= reinterpret_cast<uintptr_t>(table.state[i][k]);
    int64_t done = begin;
    if (addresses % 16 == 0) {
      done = end - (end - begin) % width;
      for (int64_t at = begin + threadIdx.x * width; at < done; at += kBlock * width)
        update_vector<width, kStates>(update, unscale, table.param[i], table.grad[i], table.state[i], at);
    }
    for (int64_t at = done + threadIdx.x; at < end; at += kBlock)
      update_vector<1, kStates>(update, unscale, table.param[i], table.grad[i], table.state[i], at);
  }
}

/// Stores a kernel argument to GPU memory. Launch: one thread.
template <class Number>
__global__ void store_kernel(Number number, Number* live) {
  wait_for_previous_kernels();
  *live = number;
}

/// Returns the GPU memory from which a captured kernel reads `number`, or null outside of a capture. Before a replay,
/// queues a write of the number and sets `*refreshed`.
template <class Number>
const Number* live_number(const char* op, const Launch& launch, const Number& number, bool* refreshed) {
  const ReplayNumbers numbers = replay_numbers(sizeof(Number), typeid(Number));
  auto* live = static_cast<Number*>(numbers.data);
  if (numbers.refresh) launch_kernel(op, store_kernel<Number>, 1, 1, 0, launch.stream, number, live);
  *refreshed = numbers.refresh;
  return live;
}

/// Computes *update. The step is `*live` if `live` is not null, otherwise `given`. The step number of the update is
/// reduced by *skipped, the number of skipped steps. Launch: one thread.
template <class Step, class Update>
__global__ void count_kernel(Step given, const Step* live, const int64_t* skipped, Update* update) {
  wait_for_previous_kernels();
  Step step = live ? *live : given;
  step.step -= *skipped;
  *update = Update{step};
}

/// Calls run(table) for tables that together hold the parameters views(0), ..., views(count - 1).
template <class T, int kStates, class Views, class F>
void for_each_table(size_t count, const Views& views, const F& run) {
  Table<T, kStates> table;
  for (size_t i = 0; i < count; ++i) {
    const StepViews next = views(i);
    if (next.param.numel() > 0) table.add(next);
    if (table.params == 0 || (table.params < kMaxParams && i + 1 < count)) continue;
    run(table);
    table = {};
  }
}

/// Launches step_kernel for all parameters.
template <class T, int kStates, class Update>
void launch_all(const char* op, const Launch& launch, std::span<const StepViews> params, const Update& update,
                const Update* live, const StepGate& gate) {
  for_each_table<T, kStates>(
      params.size(), [&](size_t i) { return params[i]; },
      [&](const Table<T, kStates>& table) {
        const unsigned grid = grid_size(table.first_piece[table.params], 1);
        launch_kernel(op, step_kernel<Update, T, kStates>, grid, kBlock, 0, launch.stream, update, live, gate, table);
      });
}

/// Runs one step. In a captured graph, the kernels read the numbers of the step, such as the learning rate, from GPU
/// memory. The call before a replay only writes these numbers.
template <class T, int kStates, class Step, class Update>
void step_all(const char* op, std::span<const StepViews> params, const Step& step, const Update& update,
              const StepGate& gate) {
  const Launch launch(params.front().param);
  bool refreshed = false;
  if constexpr (requires { step.step; })
    if (gate.skipped) {
      const Step* live = live_number(op, launch, step, &refreshed);
      if (refreshed) return;
      const Workspace counted(launch, sizeof(Update));
      launch_kernel(op, count_kernel<Step, Update>, 1, 1, 0, launch.stream, step, live, gate.skipped,
                    counted.as<Update>());
      return launch_all<T, kStates>(op, launch, params, update, counted.as<const Update>(), gate);
    }
  const Update* live = live_number(op, launch, update, &refreshed);
  if (refreshed) return;
  launch_all<T, kStates>(op, launch, params, update, live, gate);
}

/// Computes partial[piece] = the sum of the squares of the elements of a piece. Launch: one CTA per piece, kBlock
/// threads per CTA. Static shared memory: kBlock doubles.
template <class T>
__global__ void __launch_bounds__(kBlock) squares_kernel(const __grid_constant__ Table<T, 0> table, double* partial) {
  wait_for_previous_kernels();
  __shared__ double shared[kBlock];
  const int64_t piece = blockIdx.x;
  const int i = table.param_of(piece);
  const int64_t begin = (piece - table.first_piece[i]) * kPiece, end = min(begin + kPiece, table.count[i]);
  double sum = 0;
#pragma unroll 8
  for (int64_t at = begin + threadIdx.x; at < end; at += kBlock) {
    const auto x = convert<double>(table.param[i][at]);
    sum += x * x;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[piece] = sum;
}

}  // namespace

void step(const char* op, std::span<const StepViews> params, const AnyStep& step, const StepGate& gate) {
  if (params.empty()) return;
  const auto run = [&](const auto& taken) {
    dispatch_cuda(Floats(), params.front().param.dtype, op, [&]<class T>() {
      with_update<compute_t<T>>(taken, [&]<size_t states>(const auto& update) {
        step_all<T, static_cast<int>(states)>(op, params, taken, update, gate);
      });
    });
  };
  std::visit(run, step);
}

void sum_of_squares(const View& out, std::span<const View> list) {
  constexpr const char* kOp = "sum_of_squares";
  const Launch launch(out);
  int64_t pieces = 0;
  for (const View& view : list) pieces += divide_up(view.numel(), kPiece);
  const Workspace partial(launch, static_cast<size_t>(pieces) * sizeof(double));
  auto* sums = partial.as<double>();
  dispatch_cuda(Floats(), list.front().dtype, kOp, [&]<class T>() {
    for_each_table<T, 0>(
        list.size(),
        [&](size_t i) {
          return StepViews{list[i], list[i], {}};
        },
        [&](const Table<T, 0>& table) {
          const int64_t table_pieces = table.first_piece[table.params];
          launch_kernel(kOp, squares_kernel<T>, static_cast<unsigned>(table_pieces), kBlock, 0, launch.stream, table,
                        sums);
          sums += table_pieces;
        });
  });
  const auto vector = [&](double* data, int64_t size) { return View{data, f64, out.device, 1, {size}, {1}}; };
  reduce(ReduceOp::sum, vector(out.as<double>(), 1), vector(partial.as<double>(), pieces));
}

}  // namespace voxgrad::cuda::kernel
