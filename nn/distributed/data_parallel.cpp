// Implements data-parallel training: buckets of gradients, hooks and reductions.
#include "nn/distributed/data_parallel.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/autograd.h"
#include "core/capture.h"
#include "cuda/cuda.h"
#include "ops/create.h"
#include "ops/detail/volume.h"
#include "ops/optim.h"

namespace voxgrad::nn {
namespace {

constexpr const char* kOp = "DataParallel";
using distributed::Communicator;

/// Returns a text that must be the same on all ranks: a line with the options and a line for each tensor.
std::string describe_lines(const Module& module, const DataParallelOptions& options) {
  std::string lines =
      concat("options reduce_dtype ", options.reduce_dtype, ", bucket_cap_mb ", options.bucket_cap_mb, '\n');
  for (const bool buffers : {false, true})
    for (const auto& [name, tensor] : buffers ? module.named_buffers() : module.named_parameters())
      lines += concat(buffers ? "buffer " : "parameter ", name, ", ", tensor.shape(), ' ', tensor.dtype(),
                      tensor.is_contiguous() ? "" : concat(" with strides ", tensor.strides()),
                      !buffers && !tensor.requires_grad() ? ", frozen" : "", '\n');
  return lines + "no more tensors\n";
}

/// Throws on all ranks unless the lines of all ranks are the same.
void check_same(Communicator& group, const std::string& own) {
  const Tensor size = full({}, static_cast<double>(own.size()), {.dtype = i64});
  const std::vector<int64_t> sizes = group.all_gather(size).to_vector<int64_t>();
  const Tensor bytes = zeros({std::ranges::max(sizes)}, {.dtype = u8});
  std::copy(own.begin(), own.end(), bytes.mutable_data<uint8_t>());
  const Tensor all = group.all_gather(bytes);
  const auto text_of = [&](int rank) {
    return std::string_view(reinterpret_cast<const char*>(all[rank].data<uint8_t>()), static_cast<size_t>(all.size(1)));
  };
  const std::string_view first = text_of(0);
  for (int rank = 1; rank < group.size(); ++rank) {
    const std::string_view other = text_of(rank);
    if (other == first) continue;
    const auto same = static_cast<size_t>(std::ranges::mismatch(first, other).in1 - first.begin());
    const size_t begin = first.substr(0, same).rfind('\n') + 1;  // start of the first line that differs
    const auto line = [begin](std::string_view text) { return text.substr(begin, text.find('\n', begin) - begin); };
    throw distributed::CollectiveError(0, concat(kOp, ": the ranks' models differ: rank ", rank, " has ", line(other),
                                                 ", where rank 0 has ", line(first)));
  }
}

}  // namespace

/// The buckets of gradients, and the hooks that fill them.
class DataParallel::Reducer : NonCopyable {
 public:
  Reducer(const Module& module, Communicator& group, const DataParallelOptions& options);
  ~Reducer() {
    for (const HookHandle& hook : hooks_) hook.remove();
  }

  const std::shared_ptr<int> no_sync_guards = std::make_shared<int>(0);  // number of existing NoSync objects

 private:
  /// A parameter and the location of its gradient in a bucket.
  struct Slot {
    Tensor param;
    size_t bucket = 0;
    Tensor values{};       // the part of the bucket, with the shape and strides of the parameter
    bool arrived = false;  // true if the gradient has been computed or will not be computed in this pass
  };
  /// Gradients of one dtype and device.
  struct Bucket {
    Tensor memory{};              // the gradients, one after another
    Tensor wire{};                // the tensor that is reduced: `memory` itself, or a copy in another dtype
    std::vector<size_t> slots{};  // indices of the parameters
    size_t missing = 0;           // number of gradients that have not arrived
    std::unique_ptr<distributed::Work> work{};
  };

  /// Returns the dtype in which the gradient of a parameter is reduced.
  DType wire_dtype(const Tensor& param) const { return param.dtype() == f64 ? f64 : reduce_dtype_; }

  void make_buckets(const Tensors& params, double cap_bytes) {
    double bytes = 0;
    for (const Tensor& param : params) {
      const auto param_bytes = static_cast<double>(param.numel() * item_size(wire_dtype(param)));
      if (buckets_.empty() || bytes + param_bytes > cap_bytes || slots_.back().param.dtype() != param.dtype() ||
          slots_.back().param.device() != param.device()) {
        buckets_.emplace_back();
        bytes = 0;
      }
      bytes += param_bytes;
      buckets_.back().slots.push_back(slots_.size());
      slots_.push_back({.param = param, .bucket = buckets_.size() - 1});
    }
    for (Bucket& bucket : buckets_) {
      int64_t count = 0;
      for (const size_t i : bucket.slots) count += slots_[i].param.numel();
      const Tensor& first = slots_[bucket.slots[0]].param;
      bucket.memory = empty({count}, {first.dtype(), first.device()});
      bucket.wire =
          wire_dtype(first) == first.dtype() ? bucket.memory : empty({count}, {wire_dtype(first), first.device()});
      int64_t offset = 0;
      for (const size_t i : bucket.slots) {
        const Tensor& param = slots_[i].param;
        slots_[i].values = as_strided(bucket.memory, param.shape(), param.strides(), offset);
        offset += param.numel();
      }
    }
  }

  /// Prepares the buckets at the first gradient of a backward pass.
  void begin() {
    bool running = flags_work_ != nullptr;
    for (const Bucket& bucket : buckets_) running = running || bucket.work;
    check(!running, kOp,
          "the previous backward pass failed during its reductions, so the ranks are no longer synchronized");
    const auto pass = std::make_shared<int>();
    autograd::queue_callback([this, pass] { finish(); });
    pass_ = pass;
    next_ = 0;
    reached_here_.assign(slots_.size(), 0);
    for (Bucket& bucket : buckets_) bucket.missing = bucket.slots.size();
    for (Slot& slot : slots_) slot.arrived = false;
    const auto reached = autograd::reached_leaves();
    for (size_t i = 0; i < slots_.size(); ++i) {
      const bool is_reached = reached.contains(slots_[i].param.body().get());
      reached_here_[i] = is_reached || slots_[i].param.grad().defined();
      if (!is_reached) mark(slots_[i]);
    }
    send_flags();
  }

  /// Starts the reduction of reached_here_ on a separate stream, so that the reduction does not wait for queued kernels
  /// of the pass.
  void send_flags() {
    if (Capture::current()) return;
    std::optional<cuda::StreamGuard> guard;
    if (flags_stream_) guard.emplace(*flags_stream_);
    flags_ = from_span<double>(reached_here_, {std::ssize(reached_here_)}, group_.device());
    flags_work_ = group_.all_reduce_async(flags_, ReduceOp::max);
  }

  /// The hook of a parameter, called when its gradient has been computed.
  void arrived(size_t slot) {
    if (*no_sync_guards > 0) return;
    check(!grad_enabled(), kOp, "gradients cannot be averaged in a backward pass with create_graph = true");
    const NoGradGuard no_grad;
    if (pass_.expired()) begin();
    mark(slots_[slot]);
    start_full_buckets();
    for (const Bucket& bucket : buckets_)
      if (bucket.work) bucket.work->test();  // MPI makes progress only during calls
  }

  /// Marks a gradient as arrived.
  void mark(Slot& slot) {
    if (!slot.arrived) --buckets_[slot.bucket].missing;
    slot.arrived = true;
  }

  void start_full_buckets() {
    for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_) start(buckets_[next_]);
  }

  /// Starts the reduction of a bucket. Each gradient is divided by the number of ranks; a missing gradient counts as
  /// zero.
  void start(Bucket& bucket) {
    Tensors places, grads;
    for (const size_t i : bucket.slots) {
      const Tensor grad = slots_[i].param.grad();
      if (!grad.defined()) {
        slots_[i].values.zero_();
        continue;
      }
      places.push_back(slots_[i].values);
      grads.push_back(grad);
    }
    // Divides in the wider of the dtypes of `bucket.memory` and `bucket.wire`.
    const double part = 1.0 / group_.size();
    const bool widens = item_size(bucket.wire.dtype()) > item_size(bucket.memory.dtype());
    scaled_copies(places, grads, widens ? 1 : part);
    if (!bucket.wire.is_same(bucket.memory)) bucket.wire.copy_(bucket.memory);
    if (widens) bucket.wire.mul_(part);
    bucket.work = group_.all_reduce_async(bucket.wire);
  }

  /// Returns reached_anywhere_ for this pass. The host waits for the result only on ranks on which a parameter has no
  /// gradient.
  std::vector<double> receive_flags() {
    std::vector<double> result = reached_here_;
    if (Capture::current()) {
      for (size_t i = 0; i < reached_anywhere_.size(); ++i) result[i] = std::max(result[i], reached_anywhere_[i]);
      return result;
    }
    std::optional<cuda::StreamGuard> guard;
    if (flags_stream_) guard.emplace(*flags_stream_);
    std::exchange(flags_work_, nullptr)->wait();
    if (std::ranges::find(reached_here_, 0.0) != reached_here_.end()) result = flags_.to_vector();
    flags_ = {};
    return reached_anywhere_ = result;
  }

  /// Waits for the reductions at the end of a backward pass, and sets the gradients.
  void finish() {
    const NoGradGuard no_grad;
    for (Slot& slot : slots_) mark(slot);
    start_full_buckets();
    const std::vector<double> is_reached_anywhere = receive_flags();
    for (Bucket& bucket : buckets_) {
      bucket.work->wait();
      bucket.work.reset();
      if (!bucket.wire.is_same(bucket.memory)) bucket.memory.copy_(bucket.wire);
      for (const size_t i : bucket.slots)
        if (is_reached_anywhere[i] != 0) slots_[i].param.set_grad(slots_[i].values);
    }
    pass_.reset();
  }

  Communicator& group_;
  DType reduce_dtype_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<HookHandle> hooks_;
  size_t next_ = 0;          // next bucket to start; all ranks start buckets in the same order
  std::weak_ptr<int> pass_;  // expires when the backward pass ends, even if it throws
  // By slot: nonzero if, on this rank, the running pass reaches the parameter or the parameter has a gradient.
  std::vector<double> reached_here_;
  // By slot: nonzero if reached_here_ was nonzero on any rank in the last pass that was not captured.
  std::vector<double> reached_anywhere_;
  std::optional<cuda::Stream> flags_stream_;  // the stream on which send_flags() reduces; set only on a GPU
  Tensor flags_;                              // the reduction of reached_here_, which becomes reached_anywhere_
  std::unique_ptr<distributed::Work> flags_work_;
};

DataParallel::Reducer::Reducer(const Module& module, Communicator& group, const DataParallelOptions& options)
    : group_(group), reduce_dtype_(options.reduce_dtype) {
  check(reduce_dtype_ == f32 || reduce_dtype_ == bf16, kOp, "reduce_dtype must be f32 or bf16, got ", reduce_dtype_);
  check(options.bucket_cap_mb > 0, kOp, "bucket_cap_mb must be positive, got ", options.bucket_cap_mb);
  check_same(group, describe_lines(module, options));
  for (const auto& [name, param] : module.named_parameters())
    check(is_dense_volume(param), kOp, "parameter ", name,
          " is neither contiguous nor channels_last: ", describe(param));
  const NoGradGuard no_grad;
  for (const Tensor& tensor : module.parameters()) group.broadcast(tensor);
  for (const Tensor& tensor : module.buffers()) group.broadcast(tensor);
  if (group.size() == 1) return;  // gradients of one rank need no averaging
  Tensors params = module.parameters();
  std::erase_if(params, [](const Tensor& param) { return !param.requires_grad(); });
  std::reverse(params.begin(), params.end());
  make_buckets(params, options.bucket_cap_mb * 1024 * 1024);
  for (size_t i = 0; i < slots_.size(); ++i)
    hooks_.push_back(slots_[i].param.register_post_accumulate_grad_hook([this, i](const Tensor&) { arrived(i); }));
  if (group.device().is_cuda()) flags_stream_.emplace(group.device().index);
}

DataParallel::DataParallel(const Module& module, Communicator& communicator, const DataParallelOptions& options)
    : reducer_(std::make_unique<Reducer>(module, communicator, options)) {}

DataParallel::~DataParallel() = default;

DataParallel::NoSync DataParallel::no_sync() { return NoSync(reducer_->no_sync_guards); }

}  // namespace voxgrad::nn
