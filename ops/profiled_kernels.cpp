// The kernel tables as the profiler sees them: each entry calls the device's own, and notes name, shapes and work.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "core/memory_snapshot.h"
#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad {
namespace {

constexpr size_t kMaxShapes = 8;  // of a call that are noted

/// What the arguments of a call tell.
struct Call {
  const char* name;
  std::vector<const View*> views{};  // in the order of the arguments
  double bytes = 0;
  const ConvGeometry* geometry = nullptr;

  /// An expanded axis counts once.
  void add(const View& view, int times = 1) {
    views.push_back(&view);
    double count = static_cast<double>(item_size(view.dtype)) * times;
    for (int i = 0; i < view.rank; ++i)
      if (view.stride[i] != 0 || view.size[i] == 0) count *= static_cast<double>(view.size[i]);
    bytes += count;
  }
  void add(const View* view) {
    if (view) add(*view);
  }
  void add(const ConvEpilogue& epilogue) { add(epilogue.bias); }
  void add(const ConvGeometry& g) { geometry = &g; }
  void add(const GroupNormGradients& out) {
    add(out.dx);
    for (const View* view : {out.dgamma, out.dbeta, out.sums}) add(view);
  }
  void add(std::span<const StepViews> params) {  // all but the gradient are read and written
    for (const StepViews& p : params) {
      add(p.param, 2);
      add(p.grad);
      for (const View& state : p.state)
        if (state.data) add(state, 2);
    }
  }
  void add(UnaryOp op) { name = voxgrad::name(op); }
  void add(BinaryOp op) { name = voxgrad::name(op); }
  void add(ReduceOp op) {
    constexpr const char* kNames[] = {"sum", "mean", "amax", "amin"};
    name = kNames[static_cast<size_t>(op)];
  }
  void add(const char* op) { name = op; }
  template <class Option>
  void add(const Option&) {}
};

struct Work {
  double flop = 0;
  double floor = 0;  // seconds; 0: not known
};

Work product(const Kernels&, const Call& call) {
  const View &c = *call.views[0], &a = *call.views[1];
  return {2 * static_cast<double>(c.numel()) * static_cast<double>(a.size[a.rank - 1])};
}

/// x, w and y: the places of these operands among the views.
template <ConvPass pass, int x, int w, int y>
Work convolution(const Kernels& table, const Call& call) {
  const auto view = [&](int i) -> const View& { return *call.views[static_cast<size_t>(i)]; };
  const double flop = conv_flop(view(x), view(w), view(y), *call.geometry);
  const ConvExplanation e = table.explain_conv(pass, view(x), view(w), view(y), *call.geometry);
  if (e.flop_rate <= 0 || e.byte_rate <= 0) return {flop, 0};
  return {flop, std::max(flop / e.flop_rate, call.bytes / e.byte_rate)};
}

/// An entry: its name where no argument has a better one, how many of the views are results, and what is known of its
/// work beside the bytes.
struct Entry {
  const char* name;
  size_t results;
  Work (*work)(const Kernels& table, const Call& call) = nullptr;
};

/// Bytes a second that the device reaches at best: of any convolution. 0: not known.
template <const Kernels& (*real)()>
double byte_rate(int device) {
  static const double rate = [device] {
    View one{.device = device, .rank = 5};
    std::fill_n(one.size, 5, 1);
    std::fill_n(one.stride, 5, 1);
    return real().explain_conv(ConvPass::fprop, one, one, one, {}).byte_rate;
  }();
  return rate;
}

template <const Kernels& (*real)(), class F, class... Args>
void run(F kernel, const Entry& entry, const Args&... args) {
  if (!profiler::active()) return kernel(args...);  // no longer
  Call call{entry.name};
  (call.add(args), ...);
  const int index = call.views.empty() ? -1 : call.views[0]->device;
  const Device device = index < 0 ? Device::cpu() : Device::cuda(index);
  Work work;
  if (entry.work)
    work = entry.work(real(), call);
  else if (const double rate = byte_rate<real>(index); rate > 0)
    work.floor = call.bytes / rate;
  std::vector<Shape> shapes;
  for (size_t i = 0; i < std::min(call.views.size(), kMaxShapes); ++i)
    shapes.emplace_back(std::span(call.views[i]->size, static_cast<size_t>(call.views[i]->rank)));

  const profiler::Scope scope(profiler::Kind::op, call.name, nullptr, device);
  profiler::Event* const event = scope.event();
  if (!event) return kernel(args...);
  event->shapes = std::move(shapes);
  event->bytes = call.bytes;
  event->flop = work.flop;
  event->floor = work.floor;
  for (size_t i = 0; i < std::min(entry.results, call.views.size()); ++i)
    memory::detail::claim(device, call.views[i]->data);
  kernel(args...);
}

// clang-format off
/// The entries but explain_conv: name, number of results, work.
#define VG_KERNELS(ROW)                                                                                          \
  ROW(copy, 1) ROW(fill, 1) ROW(arange, 1) ROW(unary, 1) ROW(binary, 1) ROW(where, 1) ROW(uniform, 1)            \
  ROW(normal, 1) ROW(reduce, 1) ROW(softmax, 1) ROW(cumsum, 1) ROW(argmax, 1) ROW(sort, 1)                       \
  ROW(matmul, 1, product)                                                                                        \
  ROW(conv_forward, 1, convolution<ConvPass::fprop, 1, 2, 0>)                                                    \
  ROW(conv_backward_data, 1, convolution<ConvPass::dgrad, 0, 2, 1>)                                              \
  ROW(conv_backward_weight, 1, convolution<ConvPass::wgrad, 1, 0, 2>)                                            \
  ROW(class_sums, 1) ROW(class_sums_backward, 1) ROW(group_norm, 3) ROW(normalize, 1) ROW(group_norm_backward, 4) \
  ROW(track_statistics, 2) ROW(prelu, 1) ROW(prelu_backward, 2)                                                  \
  ROW(relu_bias_backward, 2) ROW(max_pool, 2) ROW(max_pool_backward, 1) ROW(resample, 1) ROW(grid_sample, 1)     \
  ROW(grid_sample_backward, 2) ROW(gather, 1) ROW(scatter_add, 1) ROW(step, 0)                     \
  ROW(sum_of_squares, 1)
// clang-format on

template <const Kernels& (*real)()>
Kernels profiled() {
  Kernels table = real();
#define VG_PROFILED(entry, ...) \
  table.entry = [](auto... args) { run<real>(real().entry, Entry{#entry, __VA_ARGS__}, args...); };
  VG_KERNELS(VG_PROFILED)
#undef VG_PROFILED
  return table;
}

}  // namespace

const Kernels& profiled_kernels(Device device) {
  static const Kernels on_cpu = profiled<cpu_kernels>(), on_cuda = profiled<cuda_kernels>();
  return device.is_cuda() ? on_cuda : on_cpu;
}

}  // namespace voxgrad
