// An exponential moving average of a model.
#pragma once

#include <memory>

#include "../fields.h"
#include "../module.h"

namespace voxgrad::optim {

struct EmaOptions {
  double decay = 0.999;  ///< in [0, 1]
  /// If not 0, update n (from 0) has at most the decay (1 + n) / (warmup + n), so that the start is soon forgotten; at
  /// least 1. 10 is usual.
  double warmup = 0;
};

/// average = decay * average + (1 - decay) * parameter after each step: models that often do better than the last one
/// (Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; with a decay as in Tarvainen
/// and Valpola, "Mean teachers are better role models", NeurIPS 2017). Buffers are copied. Averages of halves are f32.
///
/// It holds the model's tensors, not the model: like an optimizer it is made after the model has its device and dtype.
/// update() may be part of a captured CUDA graph. For one thread at a time.
class ExponentialMovingAverage : public nn::Stateful {
 public:
  /// Starts with the model as it is. Throws Error for options out of range.
  explicit ExponentialMovingAverage(const nn::Module& model, const EmaOptions& options = {});
  ExponentialMovingAverage(const ExponentialMovingAverage&) = delete;
  ExponentialMovingAverage& operator=(const ExponentialMovingAverage&) = delete;

  /// Takes in the model as it is now.
  void update();
  int64_t updates() const { return updates_; }

  /// Averages and buffers by the model's names. Handles.
  const TensorMap& values() const { return values_; }
  /// model.load_state_dict(values()): for the model or one like it.
  void apply_to(nn::Module& model) const { model.load_state_dict(values_); }

  /// While it lives, the model has the averages; afterwards it has its own values again. Swaps of one or several
  /// averages may be alive at once and be destroyed in any order.
  class [[nodiscard]] Swapped {
   public:
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;
    ~Swapped();

   private:
    friend class ExponentialMovingAverage;
    [[nodiscard]] explicit Swapped(const ExponentialMovingAverage& average);
    Tensors own_, saved_;
  };
  Swapped swap() const { return Swapped(*this); }

  /// "values.<name>", "updates", and the options. load_state_dict throws for the state of another model, an incomplete
  /// one, options out of range, averages that are not finite, and NaN in buffers.
  TensorMap state_dict() const override;

 private:
  void read_state(const TensorMap& state, bool keep) override;
  void advance(bool count);

  EmaOptions options_;
  int64_t updates_ = 0;
  Tensors params_, averages_, buffers_, copies_;
  TensorMap values_;
  std::shared_ptr<ExponentialMovingAverage*> self_;  // captured updates see by it that it is gone
};

}  // namespace voxgrad::optim
