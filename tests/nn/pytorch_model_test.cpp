// Tests of files shared with PyTorch. A model that PyTorch saved (pytorch_model.py) gives the same results here, and an
// independent reader (read_safetensors.py) reads a file that this library saved.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "core/autograd.h"
#include "core/io/safetensors.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

const std::filesystem::path kFolder = TESTS_DIR "/nn";

/// The counterpart of Model in pytorch_model.py.
struct Model : nn::Module {
  nn::ConvTranspose3d up{{.in_channels = 4,
                          .out_channels = 6,
                          .kernel_size = {4, 3, 2},
                          .stride = {2, 2, 1},
                          .padding = {1, 0, 1},
                          .output_padding = {0, 1, 0},
                          .groups = 2}};
  nn::GroupNorm norm{3, 6};
  nn::Sequential body{nn::ReLU{},
                      nn::Conv3d{{.in_channels = 6, .out_channels = 4, .kernel_size = 3, .padding = 1, .bias = false}},
                      nn::InstanceNorm3d{4, {.affine = true}},
                      nn::Sequential{nn::SiLU{}, nn::Conv3d{{.in_channels = 4, .out_channels = 2, .kernel_size = 1}}}};
  nn::Linear head{6, 3};
  nn::LayerNorm head_norm{3};
  nn::Buffer steps{zeros({}, {.dtype = i64})};
  VG_MODULE(up, norm, body, head, head_norm, steps)
  Tensor forward(const Tensor& x) { return head_norm(head(body(norm(up(x))))); }
};

/// Expects equal f32 values, except for differences due to the order of summation and to fused multiply-adds.
void expect_close(const std::string& what, const Tensor& actual, const Tensor& expected) {
  ASSERT_EQ(actual.shape(), expected.shape()) << what;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << what;
  const std::vector<double> values = actual.to_vector(), references = expected.to_vector();
  double largest = 0, difference = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    largest = std::max(largest, std::abs(references[i]));
    difference = std::max(difference, std::abs(values[i] - references[i]));
  }
  EXPECT_GT(largest, 0) << what;
  EXPECT_LE(difference, 4e-5 * largest) << what;
}

TEST(PyTorchModel, LoadsPyTorchsFileAndMatchesItsResults) {
  Metadata metadata;
  const TensorMap state = load_safetensors(kFolder / "pytorch_model.safetensors", Device::cpu(), &metadata);
  const TensorMap results = load_safetensors(kFolder / "pytorch_model_results.safetensors");
  EXPECT_EQ(metadata.at("format"), "pt");
  for (Device device : devices()) {
    Model model;
    model.load_state_dict(state);
    EXPECT_EQ(model.steps.item<int>(), 7);
    model.to(device);
    const Tensor x = results.at("input").detach().clone().to(device);
    x.requires_grad_();
    const Tensor y = model.forward(x);
    expect_close("output", y, results.at("output"));
    sum(y * y).backward();
    expect_close("input", x.grad(), results.at("grad.input"));
    for (const auto& [name, parameter] : model.named_parameters())
      expect_close(name, parameter.grad(), results.at("grad." + name));
  }
}

/// Returns the output of a shell command, or an empty string if it cannot be started.
std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen((command + " 2>&1").c_str(), "r"), pclose);
  std::string text;
  std::array<char, 256> line;
  while (pipe && fgets(line.data(), line.size(), pipe.get())) text += line.data();
  return text;
}

TEST(PyTorchModel, AnIndependentReaderReadsSavedFiles) {
  if (output_of("python3 --version").find("Python 3") != 0) GTEST_SKIP() << "needs python3";
  const auto path = std::filesystem::path(testing::TempDir()) / "voxgrad_read_test.safetensors";
  const Tensor values = tensor({{1, -2.5, 0}, {7, 100, 0.125}});
  save_safetensors(path,
                   {{"f32", values},
                    {"f64.transposed", values.to(f64).transpose(0, 1)},
                    {"f16", values.to(f16)},
                    {"bf16", values.to(bf16)},
                    {"i64", full({}, -3, {.dtype = i64})},
                    {"i32", arange(0, 3, 1, {.dtype = i32})},
                    {"u8", full({1, 1}, 255, {.dtype = u8})},
                    {"bool", tensor({0, 1, 1}).to(b8)},
                    {"empty", zeros({2, 0})},
                    {"a \"quoted\" näme", ones({1})}},
                   {{"format", "pt"}, {"epoch", "3"}});
  const std::string script = (kFolder / "read_safetensors.py").string();
  const std::string text = output_of("PYTHONIOENCODING=utf-8 python3 '" + script + "' '" + path.string() + "'");
  std::filesystem::remove(path);
  EXPECT_EQ(text,
            "epoch=3\n"
            "format=pt\n"
            "a \"quoted\" näme F32 [1] 1\n"
            "bf16 BF16 [2, 3] 1 -2.5 0 7 100 0.125\n"
            "bool BOOL [3] 0 1 1\n"
            "empty F32 [2, 0] \n"
            "f16 F16 [2, 3] 1 -2.5 0 7 100 0.125\n"
            "f32 F32 [2, 3] 1 -2.5 0 7 100 0.125\n"
            "f64.transposed F64 [3, 2] 1 7 -2.5 100 0 0.125\n"
            "i32 I32 [3] 0 1 2\n"
            "i64 I64 [] -3\n"
            "u8 U8 [1, 1] 255\n");
}

}  // namespace
}  // namespace voxgrad
