// Loss scaling for training in f16.
#pragma once

#include <map>

#include "optimizer.h"

namespace voxgrad::optim {

struct GradScalerOptions {
  double init_scale = 65536;  ///< in [GradScaler::kMinScale, GradScaler::kMaxScale]
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  ///< updates without infinities after which the scale grows
  bool enabled = true;             ///< false: losses and gradients are left alone, step() is the optimizer's
};

/// Scales losses up, so that small gradients do not vanish in f16, and gradients down again before a step; steps whose
/// gradients overflowed are left out, and the scale gets smaller (Micikevicius et al., "Mixed precision training", ICLR
/// 2018). As torch.amp.GradScaler:
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);  // only to clip gradients: clip_grad_norm_(params, 1)
///   scaler.step(optimizer);
///   scaler.update();
///
/// For losses and parameters on one device, where the scale lives too. Nothing waits for the device, and all of it may
/// be captured in a CUDA graph, all four together, after a step outside.
class GradScaler : public nn::Stateful {
 public:
  /// The scale stays within these bounds, where float32 holds it and its reciprocal with full precision. PyTorch's
  /// scale has none: it may become 0, and the next step would divide by it.
  static constexpr double kMinScale = 0x1p-126;
  static constexpr double kMaxScale = 0x1p126;

  /// Throws Error for options out of range.
  explicit GradScaler(const GradScalerOptions& options = {});

  /// loss * scale, differentiably; the product of an f16 loss without axes is f32.
  Tensor scale(const Tensor& loss);
  /// Divides the optimizer's gradients by the scale, in place, and checks them. Once between two updates, before the
  /// step; throws otherwise, for no gradients, and for gradients of f16, which would vanish again: step() divides in
  /// f32.
  void unscale_(Optimizer& optimizer);
  /// Takes the optimizer's step, unless a gradient divided by the scale is infinite or NaN. Once between two updates;
  /// throws otherwise, and as unscale_() does. Divides gradients that were not unscaled as it reads them.
  void step(Optimizer& optimizer);
  /// Makes the scale smaller after infinities, down to kMinScale, and larger after growth_interval updates without,
  /// unless it would exceed kMaxScale. Throws if no gradients were checked since the last update.
  void update();
  /// Sets the scale instead. Throws unless it lies in [kMinScale, kMaxScale].
  void update(double new_scale);
  /// Waits for the device. 1 if not enabled.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled; }

  /// Scale, factors, interval, and the updates since the last change. Waits for the device. Only the class if not
  /// enabled, when loading accepts any state. load_state_dict throws for options that the constructor refuses and for a
  /// count of updates that no run leaves.
  TensorMap state_dict() const override;

 private:
  struct Checked {
    Tensor found_inf;  ///< i64
    bool unscaled = false, stepped = false;
  };
  void read_state(const TensorMap& state, bool keep) override;
  Checked& check_gradients(const Optimizer& optimizer, bool unscale);

  GradScalerOptions options_;
  int64_t first_tracker_ = 0;
  // f32, i64, without axes; from options_ and first_tracker_ on the first loss's device
  Tensor scale_, growth_tracker_;
  std::map<const Optimizer*, Checked> checked_;  // since the last update
};

}  // namespace voxgrad::optim
