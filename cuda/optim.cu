// The optimizers' steps (ops/optim_step.h), one pass over the parameters and their state. A launch takes a table of
// parameters as its argument: a model of some dozens is one launch.
#include <array>

#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/optim_step.h"

namespace voxgrad::cuda::kernel {
namespace {

/// Elements that a block works on.
constexpr int64_t kPiece = 8192;
/// Parameters of a launch: the table stays below the 4 KB that the arguments of a kernel may have.
constexpr int kMostParams = 64;

template <class T, int kStates>
struct Table {
  int params = 0;
  T* param[kMostParams];
  const T* grad[kMostParams];
  T* state[kMostParams][kStates > 0 ? kStates : 1];
  int64_t count[kMostParams];
  int64_t first_piece[kMostParams + 1] = {0};

  void add(const StepViews& views, const std::array<int, kStates>& states) {
    param[params] = views.param.as<T>();
    grad[params] = views.grad.as<const T>();
    for (size_t k = 0; k < states.size(); ++k) state[params][k] = views.state[states[k]].template as<T>();
    count[params] = views.param.numel();
    first_piece[params + 1] = first_piece[params] + (count[params] + kPiece - 1) / kPiece;
    ++params;
  }
};
static_assert(sizeof(Table<double, 3>) <= 4000);

/// `width` elements of a parameter.
template <int width, int kStates, class Update, class T>
__device__ void update_vector(const Update& update, T* param, const T* grad, T* const* state, int64_t at) {
  using V = Vector<T, width>;
  V p = load_vector<T, width>(param + at);
  const V g = load_vector<T, width>(grad + at);
  V s[kStates > 0 ? kStates : 1];
#pragma unroll
  for (int k = 0; k < kStates; ++k) s[k] = load_vector<T, width>(state[k] + at);
#pragma unroll
  for (int j = 0; j < width; ++j) {
    if constexpr (kStates == 0) update_element(update, p.v[j], g.v[j]);
    if constexpr (kStates == 1) update_element(update, p.v[j], g.v[j], s[0].v[j]);
    if constexpr (kStates == 2) update_element(update, p.v[j], g.v[j], s[0].v[j], s[1].v[j]);
    if constexpr (kStates == 3) update_element(update, p.v[j], g.v[j], s[0].v[j], s[1].v[j], s[2].v[j]);
  }
  store_vector(param + at, p);
#pragma unroll
  for (int k = 0; k < kStates; ++k) store_vector(state[k] + at, s[k]);
}

template <class Update, class T, int kStates>
__global__ void __launch_bounds__(kBlock)
    step_kernel(Update given, const Update* live, const __grid_constant__ Table<T, kStates> table) {
  const Update update = live ? *live : given;
  constexpr int width = kVectorWidth<T>;
  for (int64_t piece = blockIdx.x; piece < table.first_piece[table.params]; piece += gridDim.x) {
    int i = 0;
    while (piece >= table.first_piece[i + 1]) ++i;
    const int64_t begin = (piece - table.first_piece[i]) * kPiece, end = min(begin + kPiece, table.count[i]);
    uintptr_t places = reinterpret_cast<uintptr_t>(table.param[i]) | reinterpret_cast<uintptr_t>(table.grad[i]);
#pragma unroll
    for (int k = 0; k < kStates; ++k) places |= reinterpret_cast<uintptr_t>(table.state[i][k]);
    int64_t done = begin;
    if (places % sizeof(Vector<T, width>) == 0) {
      done = end - (end - begin) % width;
      for (int64_t at = begin + threadIdx.x * width; at < done; at += kBlock * width)
        update_vector<width, kStates>(update, table.param[i], table.grad[i], table.state[i], at);
    }
    for (int64_t at = done + threadIdx.x; at < end; at += kBlock)
      update_vector<1, kStates>(update, table.param[i], table.grad[i], table.state[i], at);
  }
}

template <class Update>
__global__ void store_kernel(Update update, Update* live) {
  *live = update;
}

/// Steps all parameters; states[k]: which of StepViews::state is the update's k-th.
template <class T, class Update, size_t kStates>
void step_all(const char* op, std::span<const StepViews> params, const Update& update,
              const std::array<int, kStates>& states) {
  using Params = Table<T, static_cast<int>(kStates)>;
  const Launch launch(params.front().param);
  const ReplayNumbers numbers = replay_numbers(sizeof(Update));
  auto* live = static_cast<Update*>(numbers.data);
  if (numbers.refresh) {
    store_kernel<<<1, 1, 0, launch.stream>>>(update, live);
    return check_launch(op);
  }
  Params table;
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].param.numel() > 0) table.add(params[i], states);
    if (table.params == 0 || (table.params < kMostParams && i + 1 < params.size())) continue;
    const unsigned grid = grid_size(table.first_piece[table.params], 1);
    step_kernel<Update, T, static_cast<int>(kStates)><<<grid, kBlock, 0, launch.stream>>>(update, live, table);
    check_launch(op);
    table = Params();
  }
}

/// Steps all parameters, of whatever type.
template <class Step>
void dispatch_step(const char* op, std::span<const StepViews> params, const Step& step) {
  if (params.empty()) return;
  dispatch_cuda(Floats(), params.front().param.dtype, op, [&]<class T>() {
    with_update<compute_t<T>>(step,
                              [&](const auto& update, const auto& states) { step_all<T>(op, params, update, states); });
  });
}

}  // namespace

void sgd(std::span<const StepViews> params, const SgdStep& step) { dispatch_step("sgd", params, step); }
void adam(std::span<const StepViews> params, const AdamStep& step) { dispatch_step("adam", params, step); }
void rmsprop(std::span<const StepViews> params, const RmspropStep& step) { dispatch_step("rmsprop", params, step); }

}  // namespace voxgrad::cuda::kernel
