// Implements the sharding of an optimizer's state over the ranks.
#include "nn/distributed/zero.h"

#include <algorithm>
#include <numeric>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/halves.h"
#include "ops/optim.h"

namespace voxgrad::nn {
namespace {

constexpr const char* kOp = "ZeroRedundancy";

/// Returns an owner for each parameter, given the parameters' numbers of elements. Assigns the parameters in order of
/// decreasing size, each to the rank with the fewest elements so far.
std::vector<int> assign_owners(const std::vector<int64_t>& sizes, int ranks) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> load(static_cast<size_t>(ranks), 0);
  std::vector<int> owners(sizes.size());
  for (const size_t i : order) {
    const auto min_load = std::min_element(load.begin(), load.end());
    *min_load += sizes[i];
    owners[i] = static_cast<int>(min_load - load.begin());
  }
  return owners;
}

}  // namespace

ZeroRedundancy::ZeroRedundancy(optim::Optimizer& optimizer, distributed::Communicator& communicator)
    : optimizer_(optimizer), group_(communicator) {
  std::vector<int64_t> sizes;
  for (const auto& slot : optimizer_.slots_) sizes.push_back(slot.param.numel());
  bool fresh = !optimizer_.after_step_;
  for (size_t g = 0; g < optimizer_.num_groups(); ++g) fresh = fresh && !optimizer_.has_state(g);
  // Three numbers of this rank: its parameters, their elements, and whether the optimizer has no state and is not
  // sharded (1 or 0).
  const Tensor own = zeros({3}, {.dtype = i64});
  own.mutable_data<int64_t>()[0] = std::ssize(sizes);
  own.mutable_data<int64_t>()[1] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  own.mutable_data<int64_t>()[2] = fresh;
  const Tensor all = group_.all_gather(own);
  const std::vector<int64_t> counts = all.to_vector<int64_t>();
  for (size_t i = 0; i < counts.size(); i += 3) {
    check(counts[i] == counts[0] && counts[i + 1] == counts[1], kOp, "the ranks' parameters differ: rank ", i / 3,
          " has (parameters, elements) = (", counts[i], ", ", counts[i + 1], "), but rank 0 has (", counts[0], ", ",
          counts[1], ')');
    check(counts[i + 2] != 0, kOp, "the optimizer of rank ", i / 3, " already has state or is already sharded");
  }
  owners_ = assign_owners(sizes, group_.size());
  optimizer_.owned_.assign(sizes.size(), false);
  for (size_t i = 0; i < sizes.size(); ++i) optimizer_.owned_[i] = owners_[i] == group_.rank();
  optimizer_.consolidated_ = group_.size() == 1;
  optimizer_.after_step_ = [this] { exchange(); };
}

ZeroRedundancy::~ZeroRedundancy() {
  optimizer_.after_step_ = [] { fail(kOp, "the ZeroRedundancy object of this optimizer was destroyed"); };
}

/// Packs the parameters of one owner and one dtype into one message, to reduce the number of broadcasts.
void ZeroRedundancy::exchange() {
  const NoGradGuard no_grad;
  for (int rank = 0; rank < group_.size(); ++rank)
    for (const DType dtype : {f32, f64, bf16, f16}) {
      Tensors params;
      int64_t count = 0;
      for (size_t i = 0; i < owners_.size(); ++i) {
        auto& slot = optimizer_.slots_[i];
        if (owners_[i] != rank || slot.param.dtype() != dtype) continue;
        params.push_back(as_strided(slot.param, {slot.param.numel()}, {1}, slot.param.storage_offset()));
        count += slot.param.numel();
        if (rank == group_.rank()) continue;
        slot = {.param = slot.param, .group = slot.group};  // drops the state that consolidate_state_dict() gathered
      }
      if (count == 0) continue;
      const Tensor message = empty({count}, {.dtype = dtype, .device = params[0].device()});
      Tensors parts;
      int64_t offset = 0;
      for (const Tensor& param : params) {
        parts.push_back(as_strided(message, {param.numel()}, {1}, offset));
        offset += param.numel();
      }
      if (rank == group_.rank()) scaled_copies(parts, params, 1);
      group_.broadcast(message, rank);
      if (rank != group_.rank()) scaled_copies(params, parts, 1);
    }
  optimizer_.consolidated_ = group_.size() == 1;
}

void ZeroRedundancy::consolidate_state_dict(int to) {
  check(to >= 0 && to < group_.size(), kOp, "the argument `to` must be a rank in [0, ", group_.size(), "), got ", to);
  const NoGradGuard no_grad;
  for (size_t i = 0; i < owners_.size(); ++i) {
    auto& slot = optimizer_.slots_[i];
    const int owner = owners_[i];
    const bool here = group_.rank() == owner, takes = !here && group_.rank() == to;
    // Excludes the steps that a GradScaler skipped. Only the owner counts the skipped steps.
    const int64_t steps = slot.step - (here && slot.skipped.defined() ? slot.skipped.item<int64_t>() : 0);
    const Tensor step = full({}, static_cast<double>(here ? steps : 0), {.dtype = i64});
    group_.broadcast(step, owner);
    if (takes) slot = {.param = slot.param, .group = slot.group, .step = step.item<int64_t>()};
    if (step.item<int64_t>() == 0) continue;
    const optim::BufferSpecs specs = optimizer_.buffers(slot.group);
    for (size_t b = 0; b < specs.size(); ++b) {
      if (!specs[b].used) continue;
      const Tensor buffer = here ? slot.buffers[b] : widened(empty_like(slot.param));
      group_.broadcast(buffer, owner);
      if (takes) slot.buffers[b] = buffer;
    }
  }
  optimizer_.consolidated_ = group_.rank() == to || group_.size() == 1;
}

}  // namespace voxgrad::nn
