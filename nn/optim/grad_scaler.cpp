// Implements loss scaling for training in f16.
#include "nn/optim/grad_scaler.h"

#include <cmath>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/elementwise.h"

namespace voxgrad::optim {
namespace {

constexpr const char* kOp = "GradScaler";

void validate(const GradScalerOptions& o) {
  check(o.init_scale >= GradScaler::kMinScale && o.init_scale <= GradScaler::kMaxScale, kOp,
        "the scale must lie in [2^-126, 2^126], got ", o.init_scale);
  check(std::isfinite(o.growth_factor) && o.growth_factor > 1, kOp, "growth_factor must be above 1, got ",
        o.growth_factor);
  check(o.backoff_factor > 0 && o.backoff_factor < 1, kOp, "backoff_factor must lie in (0, 1), got ", o.backoff_factor);
  check(o.growth_interval > 0, kOp, "growth_interval must be positive, got ", o.growth_interval);
}

/// Returns the entries of a state_dict, except for the name of the class.
nn::Fields fields_of(GradScalerOptions& o, int64_t& growth_tracker) {
  return nn::named_fields("scale, growth_factor, backoff_factor, growth_interval, growth_tracker",  //
                          o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval, growth_tracker);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) { validate(options); }

Tensor GradScaler::scale(const Tensor& loss) {
  if (!options_.enabled) return loss;
  check(loss.defined() && is_floating(loss.dtype()), kOp, "scale() takes floating-point tensors, got ", describe(loss));
  if (!scale_.defined()) {
    check(!Capture::current(), kOp, "the first scale() allocates the scale; scale one loss before the capture");
    scale_ = full({}, options_.init_scale, {.dtype = f32, .device = loss.device()});
    growth_tracker_ = full({}, static_cast<double>(initial_tracker_), {.dtype = i64, .device = loss.device()});
  }
  check(loss.device() == scale_.device(), kOp, "all losses must be on one device: the first loss was on ",
        scale_.device(), ", this loss is ", describe(loss));
  return mul(loss, scale_.clone());  // a copy, because backward() may run after update()
}

GradScaler::Checked& GradScaler::check_gradients(const Optimizer& optimizer, bool unscale) {
  check(scale_.defined(), kOp, "no loss was scaled yet: call scale(loss).backward() before unscale_() and step()");
  const Tensors grads = optimizer.gradients();
  check(!grads.empty(), kOp, "the optimizer has no gradients to check");
  for (const Tensor& grad : grads) {
    check(grad.device() == scale_.device(), kOp, "losses and gradients must be on one device: the losses are on ",
          scale_.device(), ", a gradient is ", describe(grad));
    check(!unscale || grad.dtype() != f16, kOp, "unscale_() rejects f16 gradients, because they would underflow");
  }
  const Tensor found_inf = zeros({}, {.dtype = i64, .device = scale_.device()});
  unscale_gradients(grads, found_inf, scale_, unscale);
  return checked_[&optimizer] = {.found_inf = found_inf, .unscaled = unscale};
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto checked = checked_.find(&optimizer);
  check(checked == checked_.end() || !checked->second.stepped, kOp, "unscale_() must be called before step()");
  check(checked == checked_.end(), kOp, "unscale_() was already called on this optimizer since the last update()");
  check_gradients(optimizer, true);
}

void GradScaler::step(Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step();
  const auto found = checked_.find(&optimizer);
  check(found == checked_.end() || !found->second.stepped, kOp,
        "step() was already called on this optimizer since the last update()");
  Checked& checked = found != checked_.end() ? found->second : check_gradients(optimizer, false);
  optimizer.step({checked.unscaled ? Tensor() : scale_, checked.found_inf});
  checked.stepped = true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  check(!checked_.empty(), kOp, "call step() or unscale_() before update()");
  NoGradGuard no_grad;
  Tensor found;
  for (const auto& [optimizer, checked] : checked_)
    found = found.defined() ? maximum(found, checked.found_inf) : checked.found_inf;
  const Tensor overflow = found > 0, tracker = where(overflow, 0, growth_tracker_ + 1);
  const Tensor grows = tracker >= options_.growth_interval, larger = scale_ * options_.growth_factor;
  const Tensor grown = where(larger <= kMaxScale, larger, scale_);
  const Tensor smaller = clamp_min(scale_ * options_.backoff_factor, kMinScale);
  scale_.copy_(where(overflow, smaller, where(grows, grown, scale_)));
  growth_tracker_.copy_(where(grows, 0, tracker));
  checked_.clear();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  GradScalerOptions changed = options_;
  changed.init_scale = new_scale;
  validate(changed);
  options_ = changed;
  if (scale_.defined()) scale_.fill_(new_scale);
  checked_.clear();
}

TensorMap GradScaler::state_dict() const {
  if (!options_.enabled) return nn::write_state(kOp, {});
  GradScalerOptions options = options_;
  options.init_scale = get_scale();
  int64_t tracker = growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : initial_tracker_;
  return nn::write_state(kOp, fields_of(options, tracker));
}

void GradScaler::read_state(const TensorMap& state, bool keep) {
  if (!options_.enabled) return;
  GradScalerOptions options;
  int64_t tracker = 0;
  const nn::Fields fields = fields_of(options, tracker);
  nn::check_class(state, kOp, "a");
  nn::read_fields(state, "", fields, kOp);
  validate(options);
  check(tracker < options.growth_interval, kOp, "growth_tracker must be below growth_interval ",
        options.growth_interval, ", got ", tracker);
  check(state.size() == fields.size() + 1, kOp, "the state must have ", fields.size() + 1, " entries, got ",
        state.size());
  if (!keep) return;
  options_ = options;
  initial_tracker_ = tracker;
  if (!scale_.defined()) return;
  scale_.fill_(options_.init_scale);
  growth_tracker_.fill_(static_cast<double>(initial_tracker_));
}

}  // namespace voxgrad::optim
