// Loss scaling for training in f16.
#pragma once

#include <map>

#include "optimizer.h"

namespace voxgrad::optim {

/// Options of GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;       ///< in [GradScaler::kMinScale, GradScaler::kMaxScale]
  double growth_factor = 2;        ///< factor by which the scale grows, above 1
  double backoff_factor = 0.5;     ///< factor by which the scale shrinks after an overflow, in (0, 1)
  int64_t growth_interval = 2000;  ///< consecutive updates without overflow after which the scale grows
  bool enabled = true;             ///< false: nothing is scaled, and step() calls the optimizer's step()
};

/// Scales losses up, so that small gradients do not underflow in f16, and divides gradients by the scale before a step.
/// Skips steps whose gradients overflowed, and then reduces the scale (Micikevicius et al., "Mixed precision training",
/// ICLR 2018). The interface is that of torch.amp.GradScaler:
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);  // needed only before the program clips gradients with clip_grad_norm_(params, 1)
///     scaler.step(optimizer);
///     scaler.update();
///
/// All losses and parameters must be on the same device; the scale is stored there. The host does not wait for the
/// device. The four calls may be captured in a CUDA graph together, after one step outside of the capture.
class GradScaler : public nn::Stateful {
 public:
  /// Bounds of the scale. Within these bounds, f32 represents the scale and its reciprocal with full precision. PyTorch
  /// has no bounds: its scale may become 0, and the next step then divides by 0.
  static constexpr double kMinScale = 0x1p-126;
  static constexpr double kMaxScale = 0x1p126;

  /// Throws Error for invalid options.
  explicit GradScaler(const GradScalerOptions& options = {});

  /// Returns loss * scale, differentiably. For a scalar f16 loss, the product is f32. Throws Error if the loss is not
  /// floating-point or is not on the device of the first loss.
  Tensor scale(const Tensor& loss);
  /// Divides the optimizer's gradients by the scale in place and checks them for infinities and NaN. Call unscale_()
  /// before step(), at most once between two updates. Throws Error for a wrong order of calls, if there are no
  /// gradients, and for f16 gradients, which would underflow again; step() divides f16 gradients in f32.
  void unscale_(Optimizer& optimizer);
  /// Performs the optimizer's step. The device skips the step if a gradient, divided by the scale, is infinite or NaN.
  /// Gradients that were not unscaled are divided during the step. Call step() once between two updates. Throws Error
  /// for a wrong order of calls and if there are no gradients.
  void step(Optimizer& optimizer);
  /// Reduces the scale after an overflow, but not below kMinScale. Increases the scale after growth_interval updates
  /// without overflow, unless the result would exceed kMaxScale. Throws Error if no gradients were checked since the
  /// last update.
  void update();
  /// Sets the scale. Throws Error unless `new_scale` lies in [kMinScale, kMaxScale].
  void update(double new_scale);
  /// Returns the scale, or 1 if not enabled. Waits for the device.
  double get_scale() const {
    if (!options_.enabled) return 1;
    return scale_.defined() ? scale_.item() : options_.init_scale;
  }
  bool is_enabled() const { return options_.enabled; }

  /// Returns the scale, the factors, the interval, and the number of updates since the scale changed. Waits for the
  /// device. If not enabled, the state contains only the class, and load_state_dict accepts any state.
  TensorMap state_dict() const override;

 private:
  /// The result of checking the gradients of an optimizer.
  struct Checked {
    Tensor found_inf;       ///< i64 scalar, not 0 if a gradient overflowed
    bool unscaled = false;  ///< whether unscale_() was called
    bool stepped = false;   ///< whether step() was called
  };
  void read_state(const TensorMap& state, bool keep) override;
  /// Checks the gradients for infinities and NaN. If `unscale`, also divides the gradients by the scale.
  Checked& check_gradients(const Optimizer& optimizer, bool unscale);

  GradScalerOptions options_;
  int64_t initial_tracker_ = 0;  // initial value of growth_tracker_
  // Scalars on the device of the first loss; undefined before the first call of scale().
  Tensor scale_;                                 // f32
  Tensor growth_tracker_;                        // i64, updates since the last change of the scale
  std::map<const Optimizer*, Checked> checked_;  // optimizers whose gradients were checked since the last update
};

}  // namespace voxgrad::optim
