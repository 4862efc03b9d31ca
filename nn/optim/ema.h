// An exponential moving average (EMA) of a model's parameters.
#pragma once

#include <memory>

#include "../fields.h"
#include "../module.h"

namespace voxgrad::optim {

/// Options of ExponentialMovingAverage.
struct EmaOptions {
  double decay = 0.999;  ///< weight of the previous average in an update, in [0, 1]
  /// If not 0, limits the decay of update n = 0, 1, ... to (1 + n) / (warmup + n), so that the influence of the initial
  /// parameters decreases quickly. Must be 0 or at least 1; 10 is common.
  double warmup = 0;
};

/// Averages of a model's parameters. update() computes average = decay * average + (1 - decay) * parameter. Averaged
/// models often perform better than the last model of a training run (Polyak and Juditsky, "Acceleration of stochastic
/// approximation by averaging", 1992; with a decay as in Tarvainen and Valpola, "Mean teachers are better role models",
/// NeurIPS 2017). Buffers are copied without averaging. Averages of bf16 and f16 parameters are f32.
///
/// The object keeps handles of the model's tensors. As with an optimizer, create the object after the model has its
/// final device and dtype. update() may be captured in a CUDA graph. Only one thread may use an object at a time.
class ExponentialMovingAverage : public nn::Stateful, NonCopyable {
 public:
  /// Starts from the current values of the model. Throws Error for invalid options.
  explicit ExponentialMovingAverage(const nn::Module& model, const EmaOptions& options = {});

  /// Updates the averages with the current values of the model. Call update() after each step of the optimizer.
  void update();
  /// Returns the number of updates.
  int64_t updates() const { return updates_; }

  /// Returns the averages and the copies of buffers under the model's names. update() modifies these tensors in place.
  const TensorMap& values() const { return values_; }
  /// Copies the averages to a model of the same structure: model.load_state_dict(values()).
  void apply_to(nn::Module& model) const { model.load_state_dict(values_); }

  /// While this object exists, the model has the averaged values. The destructor restores the model's own values. If
  /// several Swapped objects of a model exist at once, they must be destroyed in the reverse order of their creation.
  class [[nodiscard]] Swapped : NonCopyable {
   public:
    ~Swapped();

   private:
    friend class ExponentialMovingAverage;
    Swapped() = default;
    [[nodiscard]] explicit Swapped(const ExponentialMovingAverage& average);
    Tensors own_;    ///< the model's tensors
    Tensors saved_;  ///< the values to restore
  };
  /// Swaps the averages into the model, for example for validation: `const auto swapped = average.swap();`
  Swapped swap() const { return Swapped(*this); }

  /// Returns the entries "values.<name>" and "updates", and the options. load_state_dict throws Error for an incomplete
  /// state and for the state of another model.
  TensorMap state_dict() const override;

 private:
  void read_state(const TensorMap& state, bool keep) override;
  /// Computes the averages. Counts the update if `count`.
  void advance(bool count);

  EmaOptions options_;
  int64_t updates_ = 0;
  Tensors params_;    // the model's parameters
  Tensors averages_;  // the averages of params_
  Tensors buffers_;   // the model's buffers
  Tensors copies_;    // the copies of buffers_
  TensorMap values_;  // averages_ and copies_ by name
  // Captured updates hold a weak pointer to self_, which expires with this object.
  std::shared_ptr<ExponentialMovingAverage*> self_;
};

}  // namespace voxgrad::optim
