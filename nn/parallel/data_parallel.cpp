#include "nn/parallel/data_parallel.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "core/capture.h"
#include "cuda/cuda.h"
#include "ops/create.h"

namespace voxgrad::nn {
namespace {

constexpr const char* kOp = "DataParallel";
using parallel::Communicator;

/// What has to be the same on all ranks, a line each.
std::vector<std::string> describe_lines(const Module& module, const DataParallelOptions& options) {
  std::vector<std::string> lines{
      concat("options reduce_dtype ", options.reduce_dtype, ", bucket_cap_mb ", options.bucket_cap_mb)};
  for (const bool buffers : {false, true})
    for (const auto& [name, tensor] : buffers ? module.named_buffers() : module.named_parameters())
      lines.push_back(concat(buffers ? "buffer " : "parameter ", name, ", ", tensor.shape(), ' ', tensor.dtype(),
                             tensor.is_contiguous() ? "" : concat(" with strides ", tensor.strides()),
                             !buffers && !tensor.requires_grad() ? " that is frozen" : ""));
  return lines;
}

/// The lines of rank `root`, on all ranks.
std::vector<std::string> broadcast_lines(Communicator& group, const std::vector<std::string>& lines, int root) {
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  const Tensor size = full({}, static_cast<double>(text.size()), {.dtype = i64});
  group.broadcast(size, root);
  const Tensor bytes = zeros({size.item<int64_t>()}, {.dtype = u8});
  if (group.rank() == root) std::copy(text.begin(), text.end(), bytes.mutable_data<uint8_t>());
  group.broadcast(bytes, root);
  std::vector<std::string> result(1);
  for (int64_t i = 0; i < bytes.numel(); ++i)
    if (const char c = static_cast<char>(bytes.data<uint8_t>()[i]); c == '\n')
      result.emplace_back();
    else
      result.back() += c;
  result.back() = "no more tensors";
  return result;
}

/// Throws on all ranks unless all have rank 0's lines.
void check_same(Communicator& group, const std::vector<std::string>& own) {
  const std::vector<std::string> first = broadcast_lines(group, own, 0);
  const auto place = std::mismatch(own.begin(), own.end(), first.begin(), first.end() - 1);
  const bool same = place.first == own.end() && place.second == first.end() - 1;
  const int64_t difference = same ? -1 : place.first - own.begin();
  const std::vector<int64_t> all =
      group.all_gather(full({}, static_cast<double>(difference), {.dtype = i64})).to_vector<int64_t>();
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t line = all[static_cast<size_t>(rank)];
    if (line < 0) continue;
    const auto other = broadcast_lines(group, own, rank);
    throw parallel::CollectiveError(
        0, concat(kOp, ": the ranks' models differ: rank ", rank, " has ", other[static_cast<size_t>(line)],
                  ", where rank 0 has ", first[static_cast<size_t>(line)]));
  }
}

}  // namespace

/// The buckets and their hooks.
class DataParallel::Reducer {
 public:
  Reducer(const Module& module, Communicator& group, const DataParallelOptions& options);
  ~Reducer() {
    for (const HookHandle& hook : hooks_) hook.remove();
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  bool no_sync = false;

 private:
  /// A parameter's place in its bucket, and whether its gradient lies there.
  struct Slot {
    Tensor param;
    size_t bucket = 0;
    Tensor values{};  // of the parameter's shape and strides
    Tensor flag{};    // one element behind the bucket's gradients: not 0 if a rank has a gradient
    bool filled = false, used_here = false;
    bool used = false;  // by a rank, in the last pass that was not captured
  };
  struct Bucket {
    Tensor memory{};
    Tensor flags{};  // of all slots
    std::vector<size_t> slots{};
    size_t missing = 0;
    std::unique_ptr<parallel::Work> work{};
  };

  DType wire_dtype(const Tensor& param) const { return param.dtype() == f64 ? f64 : reduce_dtype_; }
  void make_buckets(const Tensors& params, double cap_bytes);
  void begin();
  void arrived(size_t slot);
  void fill(Slot& slot);
  void start_full_buckets();
  void finish();
  bool is_used(const Bucket& bucket, const Slot& slot);

  Communicator& group_;
  DType reduce_dtype_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<HookHandle> hooks_;
  size_t next_ = 0;  // bucket to be started: all ranks start them in the same order
  std::optional<cuda::Stream> flags_stream_;
  std::weak_ptr<int> pass_;  // lives while a backward pass does, also one that throws
};

DataParallel::Reducer::Reducer(const Module& module, Communicator& group, const DataParallelOptions& options)
    : group_(group), reduce_dtype_(options.reduce_dtype) {
  check(reduce_dtype_ == f32 || reduce_dtype_ == bf16, kOp, "reduce_dtype must be f32 or bf16, got ", reduce_dtype_);
  check(options.bucket_cap_mb > 0, kOp, "bucket_cap_mb must be positive, got ", options.bucket_cap_mb);
  check_same(group, describe_lines(module, options));
  const NoGradGuard no_grad;
  for (const Tensor& tensor : module.parameters()) group.broadcast(tensor);
  for (const Tensor& tensor : module.buffers()) group.broadcast(tensor);
  if (group.size() == 1) return;  // a gradient is its own mean
  Tensors params = module.parameters();
  std::erase_if(params, [](const Tensor& param) { return !param.requires_grad(); });
  std::reverse(params.begin(), params.end());
  make_buckets(params, options.bucket_cap_mb * 1024 * 1024);
  for (size_t i = 0; i < slots_.size(); ++i)
    hooks_.push_back(slots_[i].param.register_post_accumulate_grad_hook([this, i](const Tensor&) { arrived(i); }));
}

void DataParallel::Reducer::make_buckets(const Tensors& params, double cap_bytes) {
  double bytes = 0;
  for (const Tensor& param : params) {
    const DType dtype = wire_dtype(param);
    const auto own = static_cast<double>(param.numel() * item_size(dtype));
    if (buckets_.empty() || bytes + own > cap_bytes || wire_dtype(slots_.back().param) != dtype ||
        slots_.back().param.device() != param.device()) {
      buckets_.emplace_back();
      bytes = 0;
    }
    bytes += own;
    buckets_.back().slots.push_back(slots_.size());
    slots_.push_back({.param = param, .bucket = buckets_.size() - 1});
  }
  for (Bucket& bucket : buckets_) {
    int64_t count = std::ssize(bucket.slots);
    for (const size_t i : bucket.slots) count += slots_[i].param.numel();
    const Tensor& first = slots_[bucket.slots[0]].param;
    bucket.memory = empty({count}, {wire_dtype(first), first.device()});
    int64_t place = 0;
    for (const size_t i : bucket.slots) {
      Slot& slot = slots_[i];
      slot.values = as_strided(bucket.memory, slot.param.shape(), slot.param.strides(), place);
      place += slot.param.numel();
    }
    bucket.flags = as_strided(bucket.memory, {std::ssize(bucket.slots)}, {1}, place);
    for (const size_t i : bucket.slots) slots_[i].flag = as_strided(bucket.memory, {}, {}, place++);
  }
}

void DataParallel::Reducer::begin() {
  for (const Bucket& bucket : buckets_)
    check(!bucket.work, kOp, "the backward pass before this one failed while gradients travelled: the ranks are apart");
  const auto pass = std::make_shared<int>();
  autograd::queue_callback([this, pass] { finish(); });
  pass_ = pass;
  for (Slot& slot : slots_) slot.filled = false;
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.flags.fill_(1);
  }
  next_ = 0;
  const auto reached = autograd::reached_leaves();
  for (Slot& slot : slots_)
    if (!reached.contains(slot.param.body().get())) fill(slot);
}

void DataParallel::Reducer::arrived(size_t slot) {
  if (no_sync) return;
  const NoGradGuard no_grad;
  if (pass_.expired()) begin();
  fill(slots_[slot]);
  start_full_buckets();
  for (const Bucket& bucket : buckets_)
    if (bucket.work) bucket.work->test();  // MPI moves only while it is called
}

/// A parameter without a gradient counts as zero.
void DataParallel::Reducer::fill(Slot& slot) {
  const Tensor grad = slot.param.grad();
  check(!grad.defined() || !grad.requires_grad(), kOp, "gradients that are recorded (create_graph) cannot be averaged");
  slot.used_here = grad.defined();
  if (!grad.defined()) {
    slot.values.zero_();
    slot.flag.zero_();
  } else if (grad.raw_data() != slot.values.raw_data()) {
    slot.values.copy_(grad);
  }
  if (!slot.filled) --buckets_[slot.bucket].missing;
  slot.filled = true;
}

void DataParallel::Reducer::start_full_buckets() {
  for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_)
    buckets_[next_].work = group_.all_reduce_async(buckets_[next_].memory);
}

void DataParallel::Reducer::finish() {
  const NoGradGuard no_grad;
  for (Slot& slot : slots_)
    if (!slot.filled) fill(slot);
  start_full_buckets();
  for (Bucket& bucket : buckets_) {
    for (const size_t i : bucket.slots) slots_[i].used = is_used(bucket, slots_[i]);
    bucket.work->wait();
    bucket.work.reset();
    bucket.memory.mul_(1.0 / group_.size());
    for (const size_t i : bucket.slots)
      if (const Slot& slot = slots_[i]; slot.used)
        slot.param.set_grad(slot.values.dtype() == slot.param.dtype() ? slot.values
                                                                      : slot.values.to(slot.param.dtype()));
  }
  pass_.reset();
}

/// Whether a rank has a gradient. Of parameters that have none here the host waits for their bucket, on a GPU in a
/// stream of its own, while the pass before it goes on there.
bool DataParallel::Reducer::is_used(const Bucket& bucket, const Slot& slot) {
  if (slot.used_here) return true;
  if (Capture::current()) return slot.used;
  std::optional<cuda::StreamGuard> guard;
  if (const Device device = slot.param.device(); device.is_cuda()) {
    if (!flags_stream_) flags_stream_.emplace(device.index);
    guard.emplace(*flags_stream_);
  }
  bucket.work->wait();
  return slot.flag.item() != 0;
}

DataParallel::DataParallel(const Module& module, Communicator& communicator, const DataParallelOptions& options)
    : reducer_(std::make_unique<Reducer>(module, communicator, options)) {}

DataParallel::~DataParallel() = default;

DataParallel::NoSync DataParallel::no_sync() { return NoSync(reducer_->no_sync); }

}  // namespace voxgrad::nn
