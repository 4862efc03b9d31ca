// Step 5 of docs/tutorial.md: an operator with its own derivative.
#include <voxgrad.h>

#include <iostream>

namespace vg = voxgrad;

namespace {

/// Returns sqrt(x^2 + eps^2), the Charbonnier loss of each element. The backward pass keeps only x.
vg::Tensor charbonnier(const vg::Tensor& input, double eps) {
  const auto forward = [eps](const vg::Tensors& in) { return vg::Tensors{vg::sqrt(in[0] * in[0] + eps * eps)}; };
  const vg::Saved saved(input);  // saved() throws if the input was written to in the meantime
  const auto backward = [eps, saved](const vg::Tensors& grads) {
    const vg::Tensor& x = saved();
    return vg::Tensors{grads[0] * x / vg::sqrt(x * x + eps * eps)};  // these operators can be differentiated again
  };
  return vg::custom_function("charbonnier", {input}, forward, backward)[0];
}

/// Rounds to whole numbers; the gradient passes unchanged ("straight-through estimator").
vg::Tensor round_straight_through(const vg::Tensor& input) {
  return vg::custom_function(
      "round_straight_through", {input},
      [](const vg::Tensors& in) { return vg::Tensors{(in[0] + 0.5 * vg::sign(in[0])).to(vg::i32).to(vg::f32)}; },
      [](const vg::Tensors& grads) { return grads; })[0];
}

void check_charbonnier() {
  const vg::Tensor x = vg::randn({4, 5}, {.dtype = vg::f64, .requires_grad = true});
  const auto function = [](const vg::Tensors& in) { return vg::Tensors{charbonnier(in[0], 0.1)}; };
  vg::check(vg::gradcheck(function, {x}).passed, "tutorial", "wrong gradient");
  vg::check(vg::gradgradcheck(function, {x}).passed, "tutorial", "wrong second derivative");
}

void use_straight_through() {
  const vg::Tensor x = vg::tensor({0.2, 1.7, -2.6}, {.requires_grad = true});
  const vg::Tensor rounded = round_straight_through(x);
  rounded.sum().backward();
  std::cout << rounded << ' ' << x.grad() << '\n';  // [0, 2, -3] and [1, 1, 1]
  vg::check(rounded.at({2}) == -3 && x.grad().at({2}) == 1, "tutorial", "wrong rounding");
}

}  // namespace

int main() {
  vg::manual_seed(0);
  check_charbonnier();
  use_straight_through();
}
