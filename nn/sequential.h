// Modules one after the other.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "module.h"

namespace voxgrad::nn {

/// Feeds each module's output to the next: Sequential{Conv3d{{...}}, ReLU{}, GroupNorm{8, 32}}. Takes any module
/// with a Tensor forward(const Tensor&), by value or as a shared_ptr. Parameters are named "0.weight", "2.bias".
///
/// A norm and an activation behind each other, in either order, run as one operation, together with a convolution
/// before them (ops/fused.h): the same results and gradients with fewer passes over memory. Norms: GroupNorm,
/// InstanceNorm3d, BatchNorm1d to 3d, LayerNorm; activations: ReLU, LeakyReLU, GELU, SiLU. Without a norm, a
/// convolution takes a ReLU behind it, and no other activation. Only voxgrad's own classes are taken together, never
/// one derived from them. Empty, it is the identity.
class Sequential : public Layer {
 public:
  template <class... Modules>
  explicit Sequential(Modules&&... modules) requires((!std::same_as<std::remove_cvref_t<Modules>, Sequential> ||
                                                      sizeof...(Modules) > 1) &&
                                                     ...) {
    (push_back(std::forward<Modules>(modules)), ...);
  }

  /// Throws if `module` is null.
  template <std::derived_from<Module> M>
  void push_back(std::shared_ptr<M> module) {
    check(module != nullptr, "Sequential", "module ", size(), " is null");
    steps_.push_back({std::move(module), [](Module& m, const Tensor& x) { return static_cast<M&>(m).forward(x); }});
  }
  template <std::derived_from<Module> M>
  void push_back(M module) {
    push_back(std::make_shared<M>(std::move(module)));
  }

  size_t size() const { return steps_.size(); }
  /// Throws if there is no such module.
  Module& operator[](size_t index) const;
  Tensor forward(const Tensor& x) const override;
  Members members() override;

 private:
  struct Step {
    std::shared_ptr<Module> module;
    Tensor (*forward)(Module&, const Tensor&);
  };
  std::vector<Step> steps_;
};

}  // namespace voxgrad::nn
