// Implements the exponential moving average of parameters.
#include "nn/optim/ema.h"

#include <algorithm>

#include "core/autograd.h"
#include "core/capture.h"
#include "core/device.h"
#include "nn/optim/optimizer.h"
#include "ops/detail/halves.h"

namespace voxgrad::optim {
namespace {

constexpr const char* kOp = "ExponentialMovingAverage";

void validate(const EmaOptions& o) {
  check_options(kOp, {{"decay", o.decay, 0, 1}, {"warmup", o.warmup}});
  check(o.warmup == 0 || o.warmup >= 1, kOp, "warmup must be 0 or at least 1, got ", o.warmup);
}

/// Returns the fields of a state_dict: all entries except the values and the class.
nn::Fields fields_of(EmaOptions& options, int64_t& updates) {
  return nn::named_fields("updates, decay, warmup", updates, options.decay, options.warmup);
}

}  // namespace

ExponentialMovingAverage::ExponentialMovingAverage(const nn::Module& model, const EmaOptions& options)
    : options_(options), self_(std::make_shared<ExponentialMovingAverage*>(this)) {
  validate(options);
  NoGradGuard no_grad;
  std::map<const TensorBody*, Tensor> known;  // modules may share tensors
  const auto add = [&](const nn::NamedTensors& named, bool widens, Tensors& own, Tensors& kept) {
    for (const auto& [name, tensor] : named) {
      Tensor& copy = known[tensor.body().get()];
      if (!copy.defined()) {
        copy = tensor.detach().clone();
        if (widens) copy = widened(copy);
        own.push_back(tensor);
        kept.push_back(copy);
      }
      values_[name] = copy;
    }
  };
  add(model.named_parameters(), true, params_, averages_);
  add(model.named_buffers(), false, buffers_, copies_);
}

void ExponentialMovingAverage::advance(bool count) {
  const auto n = static_cast<double>(updates_);
  const double limit = options_.warmup == 0 ? 1 : (1 + n) / (options_.warmup + n);
  optimizer_step(params_, params_, {averages_}, EmaStep{.decay = std::min(options_.decay, limit)});
  if (count) ++updates_;
}

void ExponentialMovingAverage::update() {
  NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) match_memory_format(kOp, averages_[i], params_[i]);
  if (Capture* const capture = Capture::current())
    capture->optimizer_step([self = std::weak_ptr(self_)](bool replay) {
      const auto average = self.lock();
      check(average != nullptr, kOp, "the average was destroyed after its update was captured");
      (*average)->advance(replay);
    });
  else
    advance(true);
  for (size_t i = 0; i < buffers_.size(); ++i) copies_[i].copy_(buffers_[i]);
}

/// Calls another constructor first. If memory runs out below, the destructor therefore restores the model.
ExponentialMovingAverage::Swapped::Swapped(const ExponentialMovingAverage& average) : Swapped() {
  NoGradGuard no_grad;
  for (const Tensors& own : {average.params_, average.buffers_})
    for (const Tensor& tensor : own) {
      own_.push_back(tensor.detach());
      saved_.push_back(own_.back().clone());  // before anything is written, because memory may run out
    }
  Tensors kept = average.averages_;
  kept.insert(kept.end(), average.copies_.begin(), average.copies_.end());
  for (size_t i = 0; i < own_.size(); ++i) own_[i].copy_(kept[i]);
}

ExponentialMovingAverage::Swapped::~Swapped() {
  const NoGradGuard no_grad;
  for (size_t i = 0; i < saved_.size(); ++i) {
    const Tensor &own = own_[i], &saved = saved_[i];
    const auto bytes = static_cast<size_t>(saved.numel() * item_size(saved.dtype()));
    if (own.strides() == saved.strides())  // both are dense
      // copy_() would allocate memory. If memory has run out, the program would end here.
      copy_bytes(own.mutable_raw_data(), own.device(), saved.raw_data(), saved.device(), bytes);
    else
      own.copy_(saved);
  }
}

TensorMap ExponentialMovingAverage::state_dict() const {
  EmaOptions options = options_;
  int64_t updates = updates_;
  TensorMap dict = nn::write_state(kOp, fields_of(options, updates));
  nn::add_prefixed(dict, "values.", values_);
  return dict;
}

void ExponentialMovingAverage::read_state(const TensorMap& dict, bool keep) {
  EmaOptions options;
  int64_t updates = 0;
  const nn::Fields fields = fields_of(options, updates);
  nn::check_class(dict, kOp, "an");
  nn::read_fields(dict, "", fields, kOp);
  validate(options);
  const TensorMap values = nn::with_prefix(dict, "values.");
  check(values.size() == values_.size() && dict.size() == values.size() + fields.size() + 1, kOp,
        "the state must have ", values_.size() + fields.size() + 1, " entries, ", values_.size(),
        " of which begin with \"values.\", got ", dict.size(), " and ", values.size());
  for (const auto& [name, value] : values_) {
    const auto entry = values.find(name);
    check(entry != values.end(), kOp, "the state has no values.", name);
    const Tensor& tensor = entry->second;
    check(tensor.defined() && tensor.shape() == value.shape() && tensor.dtype() == value.dtype(), kOp, "values.", name,
          " is ", describe(tensor), ", expected ", describe(value));
  }
  if (!keep) return;
  NoGradGuard no_grad;
  for (const auto& [name, value] : values_) value.copy_(values.at(name));
  options_ = options;
  updates_ = updates;
}

}  // namespace voxgrad::optim
