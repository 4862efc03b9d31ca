// Step 2 of docs/tutorial.md: gradients, and how to check them.
#include <voxgrad.h>

#include <cmath>
#include <iostream>

namespace vg = voxgrad;

namespace {

void compute_gradients() {
  const vg::Tensor x = vg::tensor({1, 2, 3}, {.requires_grad = true});
  const vg::Tensor y = (x * x).sum();
  y.backward();
  std::cout << x.grad() << '\n';  // 2 x: [2, 4, 6]

  (3 * x).sum().backward();       // adds to x.grad(), as in PyTorch
  std::cout << x.grad() << '\n';  // [5, 7, 9]
  x.set_grad({});                 // clears the gradient
  vg::check(!x.grad().defined(), "tutorial", "the gradient was not cleared");
}

void compute_without_recording() {
  const vg::Tensor x = vg::ones({3}, {.requires_grad = true});
  vg::Tensor y;
  {
    const vg::NoGradGuard no_grad;  // nothing is recorded until the end of the block
    y = 2 * x;
  }
  vg::check(!y.requires_grad(), "tutorial", "the multiplication was recorded");
}

void compute_second_derivatives() {
  const vg::Tensor x = vg::tensor({1, 2, 3}, {.requires_grad = true});
  const vg::Tensors first = vg::grad({(x * x * x).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  const vg::Tensors second = vg::grad({first[0].sum()}, {x});
  std::cout << second[0] << '\n';  // 6 x: [6, 12, 18]
  vg::check(second[0].at({2}) == 18, "tutorial", "wrong second derivative");
}

void check_gradients() {
  const vg::Tensor x = vg::randn({1, 2, 3, 3, 3}, {.dtype = vg::f64, .requires_grad = true});
  const vg::Tensor w = vg::randn({2, 1, 2, 2, 2}, {.dtype = vg::f64, .requires_grad = true});
  const auto function = [](const vg::Tensors& in) {
    return vg::Tensors{vg::silu(vg::conv_transpose3d(in[0], in[1], {}, {.stride = 2}))};
  };
  const vg::GradcheckReport report = vg::gradcheck(function, {x, w});
  std::cout << report.checked << " derivatives, largest error " << report.max_error << '\n';
  vg::check(report.passed, "tutorial", report.message);
  vg::check(vg::gradgradcheck(function, {x, w}, {.projections = 3}).passed, "tutorial", "wrong second derivative");
}

}  // namespace

int main() {
  vg::manual_seed(0);
  compute_gradients();
  compute_without_recording();
  compute_second_derivatives();
  check_gradients();
}
