// The code of docs/pitfalls.md. Each function checks one statement of the page.
#include <voxgrad.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace vg = voxgrad;

/// Lists only one of its two layers.
struct Incomplete : vg::nn::Module {
  vg::nn::Linear first{2, 4};
  vg::nn::Linear second{4, 2};
  VG_MODULE(first)  // second is missing
};

/// Stores a layer in a std::vector that VG_MODULE does not list.
struct Hidden : vg::nn::Module {
  std::vector<vg::nn::Linear> layers;
  vg::nn::Linear last{2, 2};
  VG_MODULE(last)  // layers is missing, and no error is thrown
  Hidden() { layers.emplace_back(2, 2); }
};

namespace {

void expect(bool condition, const char* what) { vg::check(condition, "pitfalls", what); }

void expect_error(const std::function<void()>& function, const std::string& fragment) {
  try {
    function();
  } catch (const vg::Error& error) {
    vg::check(std::string(error.what()).find(fragment) != std::string::npos, "pitfalls", error.what());
    return;
  }
  vg::fail("pitfalls", "expected an error that contains '", fragment, "'");
}

void write_elements() {
  const vg::Tensor x = vg::zeros({2, 3});
  x[0].copy_(vg::ones({3}));  // writes three elements of x
  x[1].fill_(2);
  expect(x.sum().item() == 9, "the elements were not written");

  vg::Tensor row = x[0];
  row = vg::zeros({3});  // row is now a new tensor; x is unchanged
  expect(x.sum().item() == 9, "the assignment wrote elements");
}

void add_in_place() {
  vg::Tensor x = vg::zeros({3});
  const vg::Tensor alias = x;
  x += 1.0;  // in place: alias changes, too
  expect(alias.sum().item() == 3, "x += 1 made a new tensor");

  const vg::Tensor w = vg::ones({3}, {.requires_grad = true});
  vg::Tensor y = 2 * w;
  const vg::Tensor before = y;
  y += 1.0;  // autograd records this: y becomes a new tensor, and `before` keeps its values
  expect(before.sum().item() == 6 && y.sum().item() == 9, "y += 1 wrote into a recorded tensor");
  expect_error([&] { y.add_(vg::ones({3})); }, "an in-place write is not recorded");
}

void list_members() {
  const Incomplete model;
  expect_error([&] { model.parameters(); }, "does not list its member Linear");
  expect(Hidden().parameters().size() == 2, "the layers of the vector were found");  // weight and bias of last
}

void hold_guards() {
  const vg::Tensor w = vg::ones({3}, {.requires_grad = true});
  const vg::NoGradGuard no_grad;  // the guard has a name: it lives until the end of the block
  expect(!(2 * w).requires_grad(), "the multiplication was recorded");
}

void keep_a_state() {
  vg::nn::Linear layer(2, 2);
  vg::TensorMap best = layer.state_dict();                    // shares memory with layer
  for (auto& [name, tensor] : best) tensor = tensor.clone();  // a copy of the values
  const vg::NoGradGuard no_grad;
  layer.weight.zero_();
  expect(vg::abs(best.at("weight")).amax().item() > 0, "the copy has changed");
  expect(vg::abs(layer.state_dict().at("weight")).amax().item() == 0, "state_dict() does not share memory");
}

void choose_the_precision() {
  expect(vg::float32_precision() == vg::Float32Precision::highest, "highest is not the default");
  vg::set_float32_precision(vg::Float32Precision::high);  // TF32, PyTorch's default for convolutions
  vg::set_float32_precision(vg::Float32Precision::highest);
}

void mix_dtypes() {
  expect(vg::arange(0, 3).dtype() == vg::f32, "arange is not f32");  // PyTorch: int64
  expect(vg::full({3}, 1).dtype() == vg::f32, "full is not f32");    // PyTorch: int64
  expect(vg::tensor({1, 2}).dtype() == vg::f32, "a tensor of a list is not f32");
  expect(vg::tensor(std::vector<int64_t>{1, 2}).dtype() == vg::i64, "a tensor of a vector is not i64");

  const vg::Tensor bytes = vg::full({3}, 200, {.dtype = vg::u8});
  expect((bytes + bytes).at({0}) == 144, "u8 does not wrap around");  // as in PyTorch
  expect((bytes * 0.5).dtype() == vg::f32 && (bytes / 2).dtype() == vg::f32, "u8 is not promoted to f32");
  expect(vg::full({3}, 2, {.dtype = vg::i64}).sum().dtype() == vg::i64, "the sum of i64 is not i64");
  expect_error([&] { vg::exp(bytes); }, "exp has no CPU kernel for u8");  // PyTorch: float32
  expect_error([&] { bytes.mean(); }, "needs a floating-point dtype");
}

void pass_a_batch() {
  const vg::Tensor weight = vg::ones({1, 2, 3, 3, 3});
  expect(vg::conv3d(vg::ones({2, 8, 8, 8}), weight).shape() == vg::Shape{1, 6, 6, 6}, "(C, D, H, W) is rejected");
  expect_error([&] { vg::mse_loss(vg::ones({2, 1}), vg::ones({2})); }, "differ in shape");
}

void share_memory() {
  const vg::Tensor x = vg::zeros({2, 3});
  vg::dlpack::DLManagedTensorVersioned* managed = vg::to_dlpack(x);
  const vg::Tensor y = vg::from_dlpack(managed);  // y owns `managed` and shares the memory of x
  y.fill_(7);
  expect(x.at({1, 2}) == 7, "x and y do not share memory");
}

void write_to_a_saved_tensor() {
  const vg::Tensor w = vg::ones({3}, {.requires_grad = true});
  const vg::Tensor x = vg::ones({3});
  const vg::Tensor y = (w * x).sum();  // saves x
  x.fill_(2);
  expect_error([&] { y.backward(); }, "was written to in place");
}

}  // namespace

int main() {
  write_elements();
  add_in_place();
  list_members();
  hold_guards();
  keep_a_state();
  choose_the_precision();
  mix_dtypes();
  pass_a_batch();
  share_memory();
  write_to_a_saved_tensor();
}
