// A container that applies modules one after another.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "module.h"

namespace voxgrad::nn {

/// Applies modules in order, each to the result of the previous one. Example:
/// Sequential{Conv3d{{...}}, ReLU{}, GroupNorm{8, 32}}. Accepts any module with a function
/// Tensor forward(const Tensor&), by value or as a shared_ptr. Parameters are named "0.weight", "2.bias" and so on. An
/// empty Sequential returns its input.
///
/// Runs a norm and an activation that are adjacent, in either order, as one operation. A convolution directly before
/// them becomes part of this operation (ops/fused.h). Fused operations need fewer passes over memory. Results and
/// gradients equal those of the separate modules up to rounding. Fused norms: GroupNorm, InstanceNorm3d and, in
/// training, BatchNorm1d to BatchNorm3d. Fused activations: ReLU, LeakyReLU, GELU and SiLU. Without one of these norms,
/// a convolution is fused only with a ReLU. Classes derived from these layers are not fused.
class Sequential : public Layer {
 public:
  template <class... Modules>
  explicit Sequential(Modules&&... modules) requires((!std::same_as<std::remove_cvref_t<Modules>, Sequential> ||
                                                      sizeof...(Modules) > 1) &&
                                                     ...) {
    (push_back(std::forward<Modules>(modules)), ...);
  }

  /// Appends a module. Throws Error if `module` is null.
  template <std::derived_from<Module> M>
  void push_back(std::shared_ptr<M> module) {
    check(module != nullptr, "Sequential", "module ", size(), " is null");
    steps_.push_back({std::move(module), [](Module& m, const Tensor& x) { return static_cast<M&>(m).forward(x); }});
  }
  template <std::derived_from<Module> M>
  void push_back(M module) {
    push_back(std::make_shared<M>(std::move(module)));
  }

  /// Returns the number of modules.
  size_t size() const { return steps_.size(); }
  /// Returns the module at `index`. Throws Error if index >= size().
  Module& operator[](size_t index) const {
    check(index < size(), "Sequential", "module index ", index, " is out of range: size() is ", size());
    return *steps_[index].module;
  }
  Tensor forward(const Tensor& x) const override;
  Members members() override {
    Members list;
    for (const Step& step : steps_) list.push_back({std::to_string(list.size()), {}, false, step.module.get()});
    return list;
  }

 private:
  /// A module and a function that calls its forward().
  struct Step {
    std::shared_ptr<Module> module;
    Tensor (*forward)(Module&, const Tensor&);
  };
  std::vector<Step> steps_;
};

}  // namespace voxgrad::nn
