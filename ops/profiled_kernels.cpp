// The kernel tables that are used while the profiler is active. Each entry runs the kernel of the device and records
// its name, shapes, bytes and arithmetic.
#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ops/detail/conv_geometry.h"
#include "ops/detail/kernels.h"
#include "ops/detail/scalar_ops.h"

namespace voxgrad {
namespace {

constexpr size_t kMaxShapes = 8;  // maximum number of shapes recorded per call

/// The information about a kernel call that the profiler needs, collected from the arguments of the call.
struct Call {
  const char* name;
  std::vector<const View*> views{};  // in the order of the arguments; null for an optional view that is not given
  double bytes = 0;
  double param_bytes = 0;  // size of all parameters of an optimizer step
  const ConvGeometry* geometry = nullptr;

  const View& view(size_t i) const { return *views[i]; }
  /// Returns the index of the GPU, or -1 for the CPU.
  int device() const {
    const auto first = std::ranges::find_if(views, [](const View* view) { return view != nullptr; });
    return first == views.end() ? -1 : (*first)->device;
  }

  /// Returns the bytes of a view. An expanded axis counts as one element.
  static double bytes_of(const View& view) {
    auto count = static_cast<double>(item_size(view.dtype));
    for (int i = 0; i < view.rank; ++i)
      if (view.stride[i] != 0 || view.size[i] == 0) count *= static_cast<double>(view.size[i]);
    return count;
  }
  /// Adds a view that the kernel reads or writes `times` times.
  void add(const View& view, int times = 1) {
    views.push_back(&view);
    bytes += bytes_of(view) * times;
  }
  void add(const View* view) {
    if (view)
      add(*view);
    else
      views.push_back(nullptr);
  }
  void add(const ConvEpilogue& epilogue) { add(epilogue.bias); }
  void add(const ConvGeometry& g) { geometry = &g; }
  void add(const GroupNormGradients& out) {
    add(out.dx);
    for (const View* view : {out.dgamma, out.dbeta, out.sums}) add(view);
  }
  /// Adds the views of an optimizer step. Parameters and gradients count as read; states count as read and written.
  void add(std::span<const StepViews> params) {
    for (const StepViews& p : params) {
      add(p.param);
      add(p.grad);
      for (const View& state : p.state)
        if (state.data) add(state, 2);
      param_bytes += bytes_of(p.param);
    }
  }
  /// Adds the bytes of the parameters that an optimizer step writes.
  void add(const AnyStep& step) {
    const UnscaleStep* const unscale = std::get_if<UnscaleStep>(&step);
    const bool reads_only = std::holds_alternative<EmaStep>(step) || (unscale && !unscale->write);
    if (!reads_only) bytes += param_bytes;
  }
  void add(UnaryOp op) { name = voxgrad::name(op); }
  void add(BinaryOp op) { name = voxgrad::name(op); }
  void add(ReduceOp op) { name = voxgrad::name(op); }
  void add(const char* op) { name = op; }
  template <class Option>
  void add(const Option&) {}
};

struct Work {
  double flop = 0;
  double floor = 0;  // shortest possible time in seconds; 0 if unknown
};

/// Returns the memory bandwidth in bytes per second that the planner of convolutions assumes; 0 if unknown.
double byte_rate(int device) {
  if (device < 0) return 0;
  thread_local std::map<int, double> rates;  // by GPU
  const auto [entry, is_new] = rates.try_emplace(device, 0);
  if (is_new) {
    View one{.device = device, .rank = 5};
    std::fill_n(one.size, 5, 1);
    std::fill_n(one.stride, 5, 1);
    entry->second = explain_conv(ConvPass::fprop, one, one, one, {}).byte_rate;
  }
  return entry->second;
}

/// Estimates the work of a convolution. `x`, `w` and `y` are the positions of these operands in call.views.
Work convolution(ConvPass pass, const Call& call, size_t x, size_t w, size_t y) {
  const double flop = conv_flop(call.view(x), call.view(w), call.view(y), *call.geometry);
  const ConvExplanation e = explain_conv(pass, call.view(x), call.view(w), call.view(y), *call.geometry);
  if (e.flop_rate <= 0 || e.byte_rate <= 0) return {flop, 0};
  return {flop, std::max(flop / e.flop_rate, call.bytes / e.byte_rate)};
}

/// Estimates the work of a call of the kernel `name`. Counts the arithmetic of matrix products and convolutions.
/// Assumes that the memory bandwidth limits all other kernels.
Work estimate_work(std::string_view name, const Call& call) {
  if (name == "conv_forward") return convolution(ConvPass::fprop, call, 1, 2, 0);
  if (name == "conv_backward_data") return convolution(ConvPass::dgrad, call, 0, 2, 1);
  if (name == "conv_backward_weight") return convolution(ConvPass::wgrad, call, 1, 0, 2);
  if (name == "matmul") {
    const View &c = call.view(0), &a = call.view(1);
    return {2 * static_cast<double>(c.numel()) * static_cast<double>(a.size[a.rank - 1])};
  }
  const double rate = byte_rate(call.device());
  return {0, rate > 0 ? call.bytes / rate : 0};
}

/// Runs a kernel of the table `real()` and records the call. `name`, the name of the kernel, is recorded if no argument
/// contains the name of the operator. The first `outputs` views are the results, whose memory is attributed to the
/// operator.
template <const Kernels& (*real)(), auto kernel, class... Args>
void run(const char* name, size_t outputs, const Args&... args) {
  const auto run_kernel = real().*kernel;
  if (!profiler::active()) return run_kernel(args...);  // recording has stopped since kernels() chose this table
  Call call{name};
  (call.add(args), ...);
  const Device device = call.device() < 0 ? Device::cpu() : Device::cuda(call.device());
  const Work work = estimate_work(name, call);
  std::vector<Shape> shapes;
  for (const View* view : call.views)
    if (view && shapes.size() < kMaxShapes) shapes.emplace_back(std::span(view->size, static_cast<size_t>(view->rank)));

  const profiler::Scope scope(profiler::Kind::op, call.name, nullptr, device);
  profiler::Event* const event = scope.event();
  if (!event) return run_kernel(args...);
  event->shapes = std::move(shapes);
  event->bytes = call.bytes;
  event->flop = work.flop;
  event->floor = work.floor;
  for (size_t i = 0; i < std::min(outputs, call.views.size()); ++i)
    if (call.views[i]) profiler::detail::claim(call.views[i]->data);
  run_kernel(args...);
}

template <const Kernels& (*real)()>
constexpr Kernels kProfiled{
#define VG_KERNEL(name, outputs, parameters) \
  .name = [](auto... args) { run<real, &Kernels::name>(#name, outputs, args...); },
#include "ops/detail/kernels.def"
    .explain_conv = nullptr,  // explain_conv() never calls this table
};

}  // namespace

const Kernels& profiled_kernels(Device device) {
  return device.is_cuda() ? kProfiled<cuda_kernels> : kProfiled<cpu_kernels>;
}

}  // namespace voxgrad
