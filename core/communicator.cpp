// Implements Communicator: checks of arguments, collectives, and descriptions of calls that disagree.
#include "core/communicator.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "core/autograd.h"

namespace voxgrad::distributed {
namespace {

using Kind = Collective::Kind;

thread_local ScopedValue<Communicator*>* newest_group = nullptr;

void check_tensor(const Communicator& group, const char* op, const Tensor& tensor) {
  check(tensor.defined(), op, "the tensor is undefined");
  const Device device = tensor.device();
  check(device == group.device() || device.is_cpu(), op, "tensors of this rank must be on ", group.device(), ", got ",
        describe(tensor),
        group.device().is_cpu() ? "; for GPU tensors, use NCCL: distributed::run(f, Device::cuda())" : "");
  check(tensor.numel() <= std::numeric_limits<int>::max(), op, "collectives support at most 2^31 - 1 elements, got ",
        describe(tensor));
}

void check_reduced(const Communicator& group, const char* op, const Tensor& tensor, ReduceOp reduction) {
  check_tensor(group, op, tensor);
  const DType dtype = tensor.dtype();
  check(is_floating(dtype) || dtype == i64, op, "reductions support f32, f64, bf16, f16 and i64, got ", dtype);
  check(reduction != ReduceOp::mean, op, "reductions over ranks support sum, max and min, not mean");
}

/// Returns the FNV-1a hash, which is the same on all machines.
uint64_t hash(std::string_view bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return value;
}

/// Returns "[2, 3]". Does not use a stream, which would add microseconds to every call.
std::string to_text(const Shape& shape) {
  std::string text = "[";
  for (int64_t axis = 0; axis < shape.size(); ++axis) text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  return text + ']';
}

}  // namespace

Tensors Collective::tensors() const {
  Tensors all;
  if (in.defined()) all.push_back(in);
  if (out.defined() && !out.is_same(in)) all.push_back(out);
  for (const auto* messages : {&sends, &receives})
    for (const auto& [tensor, peer] : *messages) all.push_back(tensor);
  return all;
}

Call Collective::call(int rank) const {
  constexpr std::array ops{" (sum)", " (max)", " (min)"};
  Call result{.description = name};
  std::string& text = result.description;
  if (kind == Kind::all_reduce) text += ops[static_cast<size_t>(op)];
  if (kind != Kind::send_receive) text += " of " + to_text(in.shape()) + ' ' + voxgrad::name(in.dtype());
  if (kind == Kind::broadcast) text += " from rank " + std::to_string(root);
  if (!slab.empty()) text += " of planes of " + to_text(slab);
  result.signature.call = hash(text);
  const auto add = [&](int from, int to, const Tensor& tensor) {
    const std::array<int64_t, 3> message{from, to, tensor.numel() * item_size(tensor.dtype())};
    const uint64_t value = hash({reinterpret_cast<const char*>(message.data()), sizeof message});
    result.signature.messages += from == rank ? value : -value;
    text += ", " + std::to_string(message[2]) + " bytes ";
    text += from == rank ? "to rank " + std::to_string(to) : "from rank " + std::to_string(from);
  };
  for (const auto& [tensor, peer] : sends) add(rank, peer, tensor);
  for (const auto& [tensor, peer] : receives) add(peer, rank, tensor);
  return result;
}

std::string describe_disagreement(const std::vector<Call>& of_ranks) {
  uint64_t messages = 0;
  for (const Call& call : of_ranks) messages += call.signature.messages;
  const auto is_first = [&](const Call& call) { return call.signature.call == of_ranks[0].signature.call; };
  if (messages == 0 && std::ranges::all_of(of_ranks, is_first)) return {};
  std::string text = "the ranks' calls differ";
  const char* separator = ": ";
  for (size_t first = 0; first < of_ranks.size(); ++first) {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank)
      if (of_ranks[rank].description == of_ranks[first].description) ranks.push_back(static_cast<int>(rank));
    if (ranks[0] != static_cast<int>(first)) continue;
    text += concat(separator, list_ranks(ranks), ranks.size() > 1 ? " call " : " calls ", of_ranks[first].description);
    separator = "; ";
  }
  return text;
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i > 0 ? ", " : "", ranks[i]);
  return text;
}

void Communicator::set_timeout(double seconds) {
  check(seconds > 0, "set_timeout", "the time must be positive, got ", seconds, " s");
  timeout_ = seconds;
}

std::unique_ptr<Work> Communicator::all_reduce_async(const Tensor& tensor, ReduceOp op) {
  constexpr const char* kOp = "all_reduce";
  check_reduced(*this, kOp, tensor, op);
  check(tensor.is_contiguous(), kOp, "the tensor is not contiguous: ", describe(tensor), " with strides ",
        tensor.strides());
  const Tensor values = tensor.detach().to(device_);
  auto work = start({.kind = Kind::all_reduce, .name = kOp, .in = values, .out = values, .op = op});
  if (tensor.device() != device_) {
    work->wait();
    tensor.detach().copy_(values);
  }
  return work;
}

void Communicator::all_reduce(const Tensor& tensor, ReduceOp op) {
  check_reduced(*this, "all_reduce", tensor, op);
  check_in_place("all_reduce", tensor);
  const Tensor values = tensor.detach(), dense = values.contiguous();
  all_reduce_async(dense, op)->wait();
  if (!dense.is_same(values)) values.copy_(dense);
}

void Communicator::broadcast(const Tensor& tensor, int root) {
  constexpr const char* kOp = "broadcast";
  check_tensor(*this, kOp, tensor);
  check(root >= 0 && root < size_, kOp, "root must be a rank in [0, ", size_, "), got ", root);
  check_in_place(kOp, tensor);
  const Tensor dense = tensor.detach().to(device_).contiguous();
  start({.kind = Kind::broadcast, .name = kOp, .in = dense, .out = dense, .root = root})->wait();
  if (dense.raw_data() != tensor.raw_data()) tensor.detach().copy_(dense);
}

std::unique_ptr<Work> Communicator::send_receive_async(const std::vector<Message>& sends,
                                                       const std::vector<Message>& receives, const Shape& slab) {
  constexpr const char* kOp = "send_receive";
  for (const auto* messages : {&sends, &receives})
    for (const auto& [tensor, peer] : *messages) {
      check(peer >= 0 && peer < size_ && peer != rank_, kOp, "the peer must be a rank in [0, ", size_,
            ") other than this rank, which is ", rank_, "; got ", peer);
      check_tensor(*this, kOp, tensor);
      check(tensor.device() == device_, kOp, "tensors of this rank must be on ", device_, ", got ", describe(tensor));
      check(tensor.is_contiguous() || tensor.is_contiguous(MemoryFormat::channels_last), kOp,
            "the tensor is not dense: ", describe(tensor), " with strides ", tensor.strides());
    }
  return start({.kind = Kind::send_receive, .name = kOp, .sends = sends, .receives = receives, .slab = slab});
}

Tensor Communicator::all_gather(const Tensor& tensor) {
  constexpr const char* kOp = "all_gather";
  check_tensor(*this, kOp, tensor);
  const Tensor own = tensor.detach().to(device_).contiguous();
  Shape shape = own.shape();
  shape.insert(0, size_);
  const Tensor all = empty(shape, own.options());
  start({.kind = Kind::all_gather, .name = kOp, .in = own, .out = all})->wait();
  return all.to(tensor.device());
}

void Communicator::barrier() {
  const Tensor one = empty({1}, {.device = device_}).zero_();
  start({.kind = Kind::all_reduce, .name = "barrier", .in = one, .out = one})->wait();
  synchronize(device_);
}

Communicator* spatial_group() { return newest_group ? newest_group->value() : nullptr; }
SpatialGroupGuard::SpatialGroupGuard(Communicator* group) : ScopedValue(newest_group, group) {}

}  // namespace voxgrad::distributed
