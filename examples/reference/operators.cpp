// Code examples of the API reference: operators and losses. docs/site/reference.py shows
// the code between "// [NAME]" and "// [end]" beside the declaration of NAME.
#include <voxgrad.h>

#include <cmath>
#include <iostream>

namespace vg = voxgrad;

namespace {

/// Throws unless a result is correct.
void expect(bool correct, const char* what) {
  vg::check(correct, "reference", "wrong result: ", what);
}

void compute() {
  // [where]
  const vg::Tensor x = vg::randn({4, 8, 8});
  const vg::Tensor positive = vg::where(x > 0.0, x, 0.0);
  // [end]
  expect(vg::abs(positive - vg::relu(x)).amax().item() == 0, "where");

  // [sum]
  const vg::Tensor volume = vg::ones({2, 3, 4, 4, 4});
  const vg::Tensor total = vg::sum(volume);                      // a scalar
  const vg::Tensor per_channel = vg::sum(volume, {0, 2, 3, 4});  // (3)
  const vg::Tensor kept = vg::sum(volume, {2, 3, 4}, true);      // (2, 3, 1, 1, 1)
  // [end]
  expect(total.item() == 384 && per_channel.at({0}) == 128 && kept.dim() == 5, "sum");

  // [softmax]
  const vg::Tensor logits = vg::randn({2, 5, 8, 8, 8});  // (N, classes, D, H, W)
  const vg::Tensor probabilities = vg::softmax(logits, 1);
  const vg::Tensor labels = logits.argmax(1);  // (N, D, H, W), i64
  // [end]
  expect(std::abs(probabilities.sum({1}).mean().item() - 1) < 1e-6 && labels.dim() == 4,
         "softmax");

  // [matmul]
  const vg::Tensor a = vg::randn({8, 16, 32});
  const vg::Tensor b = vg::randn({32, 4});
  const vg::Tensor product = vg::matmul(a, b);  // (8, 16, 4)
  // [end]
  expect(product.shape() == vg::Shape{8, 16, 4}, "matmul");

  // [scaled_dot_product_attention]
  const vg::Tensor query = vg::randn({2, 4, 64, 16});  // (N, heads, tokens, features)
  const vg::Tensor key = vg::randn({2, 4, 64, 16});
  const vg::Tensor value = vg::randn({2, 4, 64, 16});
  const vg::Tensor attended =
      vg::scaled_dot_product_attention(query, key, value);  // (2, 4, 64, 16)
  // [end]
  expect(attended.shape() == query.shape(), "attention");
}

void reshape() {
  // [reshape]
  const vg::Tensor x = vg::arange(0, 24);
  const vg::Tensor volume = vg::reshape(x, {2, 3, -1});  // (2, 3, 4), a view
  // [end]
  // [permute]
  const vg::Tensor last = vg::permute(volume, {1, 2, 0});  // (3, 4, 2), a view
  // [end]
  expect(last.at({0, 1, 1}) == volume.at({1, 0, 1}), "permute");

  // [slice]
  const vg::Tensor every_second =
      vg::slice(volume, 2, 0, 4, 2);                 // volume[:, :, 0:4:2] in Python
  const vg::Tensor middle = volume.narrow(2, 1, 2);  // volume[:, :, 1:3]
  // [end]
  expect(every_second.at({0, 0, 1}) == 2 && middle.at({0, 0, 0}) == 1, "slice");

  // [cat]
  const vg::Tensor skip = vg::randn({1, 8, 4, 4, 4});
  const vg::Tensor up = vg::randn({1, 16, 4, 4, 4});
  const vg::Tensor joined = vg::cat({skip, up}, 1);  // (1, 24, 4, 4, 4)
  // [end]
  expect(joined.size(1) == 24, "cat");

  // [pad]
  const vg::Tensor image = vg::randn({1, 1, 8, 8});
  const vg::Tensor padded =
      vg::pad(image, {1, 1, 2, 2});  // pads W by 1 and H by 2 on each side
  const vg::Tensor mirrored =
      vg::pad(image, {1, 1, 2, 2}, vg::PadMode::reflect);  // (1, 1, 12, 10)
  // [end]
  expect(padded.shape() == vg::Shape{1, 1, 12, 10} && mirrored.shape() == padded.shape(),
         "pad");
}

void convolve() {
  // [conv3d]
  const vg::Tensor x = vg::randn({2, 8, 16, 16, 16});     // (N, Cin, D, H, W)
  const vg::Tensor weight = vg::randn({12, 8, 3, 3, 3});  // (Cout, Cin, kD, kH, kW)
  const vg::Tensor bias = vg::zeros({12});
  const vg::Tensor same = vg::conv3d(x, weight, bias, {.padding = 1});  // (2, 12, 16, 16, 16)
  const vg::Tensor half =
      vg::conv3d(x, weight, bias, {.stride = 2, .padding = 1});  // (2, 12, 8, 8, 8)
  // [end]
  expect(same.size(2) == 16 && half.size(2) == 8, "conv3d");

  // [conv_transpose3d]
  const vg::Tensor kernel = vg::randn({12, 8, 2, 2, 2});  // (Cin, Cout, kD, kH, kW)
  const vg::Tensor up =
      vg::conv_transpose3d(half, kernel, {}, {.stride = 2});  // (2, 8, 16, 16, 16)
  // [end]
  expect(up.shape() == x.shape(), "conv_transpose3d");

  // [max_pool3d]
  const vg::Tensor pooled = vg::max_pool3d(x, {.kernel_size = 2});  // (2, 8, 8, 8, 8)
  const vg::Tensor in_plane =
      vg::max_pool3d(x, {.kernel_size = vg::Triple(1, 2, 2)});  // (2, 8, 16, 8, 8)
  // [end]
  expect(pooled.size(2) == 8 && in_plane.size(2) == 16, "max_pool3d");

  // [interpolate]
  const vg::Tensor larger = vg::interpolate(
      x, {.scale_factor = 2, .mode = vg::InterpolateMode::trilinear});  // (2, 8, 32, 32, 32)
  const vg::Tensor given = vg::interpolate(x, {.size = vg::Dims{20, 24, 24}});  // nearest
  // [end]
  expect(larger.size(4) == 32 && given.size(2) == 20, "interpolate");

  // [grid_sample]
  const vg::Tensor identity =
      vg::tensor({{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}}).reshape({1, 3, 4});
  const vg::Tensor volume = vg::randn({1, 1, 8, 8, 8});
  const vg::Tensor grid =
      vg::affine_grid(identity, {1, 1, 8, 8, 8});  // (1, 8, 8, 8, 3): x, y, z in [-1, 1]
  const vg::Tensor moved = vg::grid_sample(volume, grid);
  // [end]
  expect(vg::abs(moved - volume).amax().item() < 1e-5, "grid_sample");

  // [group_norm]
  const vg::Tensor normalized =
      vg::group_norm(x, 4, vg::ones({8}), vg::zeros({8}));  // 4 groups of 2 channels
  // [end]
  expect(std::abs(normalized.mean().item()) < 1e-5, "group_norm");
}

void compare() {
  // [mse_loss]
  const vg::Tensor prediction = vg::randn({2, 1, 8, 8, 8}, {.requires_grad = true});
  const vg::Tensor target = vg::zeros({2, 1, 8, 8, 8});
  vg::mse_loss(prediction, target).backward();
  const vg::Tensor voxels =
      vg::mse_loss(prediction, target, vg::Reduction::none);  // the shape of the input
  // [end]
  expect(prediction.grad().defined() && voxels.shape() == target.shape(), "mse_loss");

  // [cross_entropy]
  const vg::Tensor logits = vg::randn({2, 3, 8, 8, 8});  // (N, classes, D, H, W)
  const vg::Tensor labels =
      (vg::rand({2, 8, 8, 8}) * 3).to(vg::i64);  // (N, D, H, W), in 0 .. 2
  const vg::Tensor loss = vg::cross_entropy(logits, labels);
  const vg::Tensor weighted =
      vg::cross_entropy(logits, labels, {.weight = vg::tensor({0.1, 1, 1}), .ignore_index = 2});
  // [end]
  expect(loss.item() > 0 && weighted.item() > 0, "cross_entropy");

  // [dice_ce_loss]
  const vg::Tensor both =
      vg::dice_ce_loss(logits, labels, {.dice = {.batch = true, .include_background = false}});
  // [end]
  expect(both.item() > loss.item() - 1, "dice_ce_loss");
}

}  // namespace

int main() {
  vg::manual_seed(0);
  compute();
  reshape();
  convolve();
  compare();
}
