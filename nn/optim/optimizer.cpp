// Implements the base classes of all optimizers.
#include "nn/optim/optimizer.h"

#include <map>
#include <set>
#include <tuple>

#include "core/autograd.h"
#include "nn/module.h"
#include "ops/create.h"
#include "ops/detail/halves.h"

namespace voxgrad::optim {
namespace {

/// Throws if two parameters share memory, because a step would update the shared elements twice. The parameters must be
/// dense.
void check_disjoint(const char* op, const Tensors& params) {
  std::vector<std::tuple<const char*, const char*, size_t>> ranges;  // begin, end, index
  for (size_t i = 0; i < params.size(); ++i) {
    const auto* begin = static_cast<const char*>(params[i].raw_data());
    const int64_t bytes = params[i].numel() * item_size(params[i].dtype());
    if (bytes > 0) ranges.push_back({begin, begin + bytes, i});
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    const auto [begin, end, index] = ranges[i - 1];
    const auto [next_begin, next_end, next] = ranges[i];
    check(end <= next_begin, op, "parameters ", std::min(index, next), " and ", std::max(index, next), " share memory");
  }
}

}  // namespace

Optimizer::Optimizer(const char* name, const std::vector<Tensors>& groups) : name_(name) {
  std::set<const TensorBody*> seen;
  for (const Tensors& params : groups) {
    const size_t group = group_sizes_.size();
    check(!params.empty(), name, "parameter group ", group, " is empty");
    for (const Tensor& param : params) {
      const size_t index = slots_.size();
      check(param.defined(), name, "parameter ", index, " is undefined");
      check(param.is_leaf(), name, "parameter ", index, " is the result of an operation, not a leaf");
      check(is_floating(param.dtype()), name, "parameters must have a floating-point dtype, but parameter ", index,
            " is ", describe(param));
      check(param.is_contiguous(param.suggest_memory_format()), name, "parameter ", index,
            " is neither contiguous nor channels_last: ", describe(param));
      check(seen.insert(param.body().get()).second, name, "parameter ", index, " appears twice");
      slots_.push_back({.param = param, .group = group});
    }
    group_sizes_.push_back(params.size());
  }
  check(!slots_.empty(), name, "there are no parameters to optimize");
  Tensors params;
  for (const Slot& slot : slots_) params.push_back(slot.param);
  check_disjoint(name, params);
  initial_lr_.resize(num_groups());
}

void Optimizer::check_gradients() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Tensor& param = slots_[i].param;
    check(param.body().use_count() > 1, name_, "parameter ", i, ", ", describe(param),
          ", is no longer used by any module: its module was destroyed, or another tensor was assigned to the member; "
          "create the optimizer after replacing modules or parameters");
    const Tensor grad = param.grad();
    if (!grad.defined()) continue;
    const bool fits = grad.shape() == param.shape() && grad.dtype() == param.dtype() && grad.device() == param.device();
    check(fits, name_, "parameter ", i, " is ", describe(param), ", its gradient is ", describe(grad));
    for (const Tensor& buffer : slots_[i].buffers)
      check(!buffer.defined() || (buffer.device() == param.device() && buffer.dtype() == widened(param.dtype())), name_,
            "the state of parameter ", i, " is ", describe(buffer), ", the parameter is ", describe(param),
            "; create the optimizer after moving the model");
  }
}

std::vector<const void*> Optimizer::memory_of(const Update& u) const {
  std::vector<const void*> memory;
  for (const size_t i : u.slots) {
    memory.push_back(slots_[i].param.raw_data());
    for (const Tensor& buffer : slots_[i].buffers) memory.push_back(buffer.defined() ? buffer.raw_data() : nullptr);
    memory.push_back(slots_[i].skipped.defined() ? slots_[i].skipped.raw_data() : nullptr);
  }
  return memory;
}

void Optimizer::perform(std::vector<Update>& updates) {
  for (Update& u : updates) {
    check(memory_of(u) == u.memory, name_,
          "parameters or state were replaced since the step was captured; capture the graph again");
    u.step = slots_[u.slots.front()].step + 1;
    for (const size_t i : u.slots)
      check(slots_[i].step + 1 == u.step, name_,
            "parameters have taken different numbers of steps since the step was captured; capture the graph again");
  }
  for (const Update& u : updates) {
    update(u);
    for (const size_t i : u.slots) slots_[i].step = u.step;
  }
}

void Optimizer::count_skip(Update& u) {
  const auto sharing = [&](const Slot& slot) { return slot.skipped.is_same(u.skipped); };
  const auto sharers = static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), sharing));
  if (!u.skipped.defined() || sharers != u.slots.size()) {
    check(!Capture::current(), name_,
          "the first step with a GradScaler allocates a counter; run one step before the capture");
    u.skipped = u.skipped.defined() ? u.skipped.clone() : zeros({}, {.dtype = i64, .device = u.params[0].device()});
    for (const size_t i : u.slots) slots_[i].skipped = u.skipped;
  }
  u.skipped.add_(u.given.found_inf);
}

void Optimizer::step(const GradScaling& scaling) {
  check_gradients();
  NoGradGuard no_grad;
  Capture* const capture = Capture::current();
  check(!capture || !after_step_, name_, "a step of an optimizer with ZeroRedundancy cannot be captured");
  std::map<std::tuple<size_t, int64_t, TensorBody*>, Update> by_key;  // by group, step and counter of skipped steps
  for (size_t number = 0; number < slots_.size(); ++number) {
    Slot& slot = slots_[number];
    const Tensor grad = slot.param.grad();
    if (!grad.defined() || !owns(number)) continue;
    if (capture)
      check(slot.param.device() == capture->device(), name_, "a parameter on ", slot.param.device(),
            " cannot be updated by a graph that is captured on ", capture->device());
    Update& u = by_key[{slot.group, slot.step + 1, slot.skipped.body().get()}];
    u.group = slot.group;
    u.step = slot.step + 1;
    u.given = scaling;
    u.skipped = slot.skipped;
    u.params.push_back(slot.param);
    u.grads.push_back(grad);
    u.slots.push_back(number);
    const BufferSpecs specs = buffers(slot.group);
    for (size_t i = 0; i < specs.size(); ++i) {
      if (!specs[i].used) continue;
      check(!capture || slot.buffers[i].defined(), name_,
            "the first step allocates the optimizer's state; run one step before the capture");
      if (!slot.buffers[i].defined())
        slot.buffers[i] =
            full(slot.param.shape(), specs[i].initial, {widened(slot.param.dtype()), slot.param.device()});
      match_memory_format(name_, slot.buffers[i], slot.param);
      u.buffers[i].push_back(slot.buffers[i]);
    }
  }
  std::vector<Update> updates;
  for (auto& [key, u] : by_key) {
    if (scaling.found_inf.defined()) count_skip(u);
    u.memory = memory_of(u);
    updates.push_back(u);
  }
  if (!capture) {
    perform(updates);
    if (after_step_) after_step_();
    return;
  }
  capture->optimizer_step([self = std::weak_ptr(self_), name = name_, updates](bool replay) mutable {
    const auto optimizer = self.lock();
    check(optimizer != nullptr, name, "the optimizer was destroyed after its step was captured");
    if (replay) return (*optimizer)->perform(updates);
    for (const Update& u : updates) (*optimizer)->update(u);
  });
}

TensorMap Optimizer::state_dict() const {
  check(consolidated_, name_,
        "each rank has only a part of the state; call consolidate_state_dict() on all ranks first");
  TensorMap state = nn::write_state(name_, {});
  for (size_t g = 0, first = 0; g < num_groups(); first += group_sizes_[g++]) {
    const std::string prefix = concat("param_groups.", g, '.');
    write_options(g, state, prefix);
    const auto begin = static_cast<double>(first), end = static_cast<double>(first + group_sizes_[g]);
    state[prefix + "params"] = arange(begin, end, 1, {.dtype = i64});
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    int64_t step = slot.step - (slot.skipped.defined() ? slot.skipped.item<int64_t>() : 0);
    if (step == 0) continue;
    const std::string prefix = concat("state.", i, '.');
    nn::write_fields(state, prefix, {{"step", &step}});
    const BufferSpecs specs = buffers(slot.group);
    for (size_t b = 0; b < specs.size(); ++b)
      if (specs[b].used) state[prefix + specs[b].name] = slot.buffers[b];
  }
  return state;
}

void Optimizer::read_state(const TensorMap& state, bool keep) {
  nn::check_class(state, name_, "an");
  size_t known = 1;  // entries of `state` that have been read; check_class() has read "class.<name>"
  std::vector<BufferSpecs> specs(num_groups());
  for (size_t g = 0, first = 0; g < num_groups(); first += group_sizes_[g++]) {
    const std::string prefix = concat("param_groups.", g, '.');
    specs[g] = read_options(g, state, prefix, false);
    const auto params = state.find(prefix + "params");
    std::vector<int64_t> expected(group_sizes_[g]);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<int64_t>(first + i);
    check(params != state.end() && params->second.to_vector<int64_t>() == expected, name_,
          "the state's parameter group ", g, " must contain exactly the parameters ", first, " to ",
          first + group_sizes_[g] - 1);
    known += nn::with_prefix(state, prefix).size();
  }

  NoGradGuard no_grad;
  std::vector<Slot> loaded;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot slot{.param = slots_[i].param, .group = slots_[i].group};
    const std::string prefix = concat("state.", i, '.');
    if (state.contains(prefix + "step")) {
      nn::read_fields(state, prefix, {{"step", &slot.step}}, name_);
      ++known;
      for (size_t b = 0; b < specs[slot.group].size(); ++b) {
        const BufferSpec& spec = specs[slot.group][b];
        if (!spec.used) continue;
        const auto entry = state.find(prefix + spec.name);
        check(entry != state.end(), name_, "the state has no ", prefix, spec.name);
        const Tensor& buffer = entry->second;
        check(buffer.defined() && buffer.shape() == slot.param.shape() && buffer.dtype() == widened(slot.param.dtype()),
              name_, prefix, spec.name, " is ", describe(buffer), ", the parameter is ", describe(slot.param),
              is_half(slot.param.dtype()) ? "; the state of an f16 or bf16 parameter must be f32" : "");
        ++known;
        if (keep && owns(i)) slot.buffers[b] = buffer.to(slot.param.device()).clone().contiguous();
      }
      if (!owns(i)) slot.step = 0;
    }
    loaded.push_back(std::move(slot));
  }
  check(known == state.size(), name_, "the state has ", state.size(),
        " entries, but these parameters and options use only ", known);
  if (!keep) return;
  for (size_t g = 0; g < num_groups(); ++g) read_options(g, state, concat("param_groups.", g, '.'), true);
  slots_ = std::move(loaded);
  consolidated_ = std::find(owned_.begin(), owned_.end(), false) == owned_.end();
}

void match_memory_format(const char* op, const Tensor& state, const Tensor& param) {
  const MemoryFormat format = param.suggest_memory_format();
  if (state.is_contiguous(format)) return;
  check(!Capture::current(), op,
        "the first step in another memory format converts the state; run one step before the capture");
  nn::detail::convert("state", state, [format](const Tensor& t) { return t.contiguous(format); });
}

void check_options(const char* op, std::initializer_list<BoundedOption> options) {
  for (const auto& [name, value, low, high] : options) {
    const bool bounded = high < std::numeric_limits<double>::max();
    check(value >= low && value <= high, op, name,
          bounded ? concat(" must lie in [", low, ", ", high, "]") : concat(" must be finite and at least ", low),
          ", got ", value);
  }
}

void check_betas(const char* optimizer, const std::array<double, 2>& betas) {
  for (const double beta : betas)
    check(beta >= 0 && beta < 1, optimizer, "betas must lie in [0, 1), got ", betas[0], " and ", betas[1]);
}

}  // namespace voxgrad::optim
