// Tests of modules: names, state_dict(), moves and conversions.
#include "nn/module.h"

#include <array>
#include <optional>
#include <sstream>

#include "core/autograd.h"
#include "nn/layers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

struct Scale : nn::Module {
  Tensor factor = full({2}, 3, {.requires_grad = true});
  nn::Buffer count{zeros({}, {.dtype = i64})};
  Tensor absent;
  VG_MODULE(factor, count, absent)
  Tensor forward(const Tensor& x) { return x * factor; }
};

class Tree : public nn::Module {
 public:
  Tree() {
    blocks_.emplace_back();
    blocks_.emplace_back();
  }
  Scale scale;
  std::unique_ptr<Scale> owned = std::make_unique<Scale>();
  std::optional<Scale> maybe;
  std::array<Tensor, 2> pair{ones({1}, {.requires_grad = true}), ones({1}, {.requires_grad = true})};
  nn::Linear linear{2, 3};

 private:
  std::vector<Scale> blocks_;

 public:
  VG_MODULE(scale, owned, maybe, pair, blocks_, linear);
};

struct Empty : nn::Module {
  VG_MODULE();
};

static_assert(!std::is_copy_constructible_v<Tree> && !std::is_copy_assignable_v<Tree>);
static_assert(std::is_move_constructible_v<Tree> && std::is_move_assignable_v<Tree>);

template <class List>
std::vector<std::string> names_of(const List& list) {
  std::vector<std::string> names;
  for (const auto& [name, value] : list) names.push_back(name);
  return names;
}

using Names = std::vector<std::string>;

TEST(Module, ListsNamesInDeclarationOrder) {
  const Tree tree;
  EXPECT_EQ(names_of(tree.named_parameters()),
            (Names{"pair.0", "pair.1", "scale.factor", "owned.factor", "blocks.0.factor", "blocks.1.factor",
                   "linear.weight", "linear.bias"}));
  EXPECT_EQ(names_of(tree.named_buffers()), (Names{"scale.count", "owned.count", "blocks.0.count", "blocks.1.count"}));
  EXPECT_EQ(names_of(tree.named_modules()), (Names{"", "scale", "owned", "blocks.0", "blocks.1", "linear"}));
  EXPECT_EQ(names_of(tree.named_children()), (Names{"scale", "owned", "blocks.0", "blocks.1", "linear"}));
  EXPECT_EQ(tree.parameters().size(), 8u);
  EXPECT_EQ(tree.buffers().size(), 4u);
  EXPECT_EQ(tree.children().size(), 5u);
  EXPECT_EQ(tree.state_dict().size(), 12u);
  EXPECT_TRUE(Empty().parameters().empty());
}

TEST(Module, MovingAModuleMovesItsMembers) {
  Tree first;
  const Tensor factor = first.scale.factor;
  const Tree second = std::move(first);
  EXPECT_TRUE(second.named_parameters()[2].second.is_same(factor));
  EXPECT_EQ(second.named_modules()[0].second, &second);
  EXPECT_EQ(second.children()[0], &second.scale);
}

struct Tied : nn::Module {
  nn::Linear a{3, 3};
  nn::Linear b{3, 3};
  VG_MODULE(a, b)
};

TEST(Module, ListsSharedParametersOnce) {
  Tied tied;
  tied.b.weight = tied.a.weight;
  EXPECT_EQ(tied.parameters().size(), 3u);
  EXPECT_EQ(tied.named_parameters().size(), 4u);
  tied.to(f64);
  EXPECT_TRUE(tied.a.weight.is_same(tied.b.weight));
  EXPECT_EQ(tied.b.weight.dtype(), f64);
}

struct Mixture : nn::Module {
  nn::Parameter weight{full({2}, 3)};
  VG_MODULE(weight)
  Tensor forward(const Tensor& x, double factor, std::vector<int>* calls = nullptr) {
    if (calls) calls->push_back(1);
    return x * weight * factor;
  }
  double forward() const { return 0.5; }
};

TEST(Module, CallOperatorForwardsToForward) {
  Mixture mixture;
  std::vector<int> calls;
  EXPECT_EQ(mixture(ones({2}), 2, &calls).to_vector(), (std::vector<double>{6, 6}));
  EXPECT_EQ(mixture(ones({2}), 0.5).to_vector(), (std::vector<double>{1.5, 1.5}));
  EXPECT_EQ(calls.size(), 1u);
  const Mixture constant;
  EXPECT_EQ(constant(), 0.5);
  const nn::ConvTranspose3d up(2, 1, 2, 2);
  EXPECT_EQ(up(ones({1, 2, 3, 3, 3})).shape(), (Shape{1, 1, 6, 6, 6}));
  EXPECT_EQ(up(ones({1, 2, 3, 3, 3}), {7, 6, 7}).shape(), (Shape{1, 1, 7, 6, 7}));
}

struct Forgetful : nn::Module {
  Tensor mean = zeros({3});
  VG_MODULE(mean)
};

TEST(Module, ParametersRequireGrad) {
  const Forgetful forgetful;
  EXPECT_ERROR(
      forgetful.parameters(),
      "VG_MODULE: the Tensor mean, [3] f32 on cpu, does not require grad; declare the member as nn::Parameter, or "
      "as nn::Buffer if it is not trained");
  EXPECT_ERROR(forgetful.state_dict(), "VG_MODULE: the Tensor mean");
  Tree tree;
  tree.requires_grad_(false);  // a frozen parameter is still a parameter
  EXPECT_EQ(tree.parameters().size(), Tree().parameters().size());
  Mixture mixture;
  EXPECT_TRUE(mixture.weight.requires_grad());
  mixture.requires_grad_(false);
  mixture.to(f64);
  const Mixture moved = std::move(mixture);
  EXPECT_FALSE(moved.parameters()[0].requires_grad());
  EXPECT_ERROR(nn::Parameter(zeros({2}, {.dtype = i64})), "only floating-point tensors have gradients");
  EXPECT_ERROR(nn::Parameter(moved.weight.requires_grad_() * 2), "Parameter: the result of an operation");
}

TEST(Module, PrintsLayersAndParameterCounts) {
  Tree tree;
  tree.linear.requires_grad_(false);
  std::ostringstream text;
  text << tree;
  EXPECT_EQ(text.str(),
            "Tree(\n"
            "  (scale): Scale(): factor [2], count []\n"
            "  (owned): Scale(): factor [2], count []\n"
            "  (blocks.0): Scale(): factor [2], count []\n"
            "  (blocks.1): Scale(): factor [2], count []\n"
            "  (linear): Linear(in_features=2, out_features=3): weight [3, 2], bias [3]\n"
            "): pair.0 [1], pair.1 [1]\n"
            "19 parameters, 10 of them trained");
  text.str("");
  text << nn::Sequential{nn::Conv3d(2, 4, 3, 1, {0, 1, 2}), nn::ReLU(),
                         nn::ConvTranspose1d{{.in_channels = 4, .out_channels = 2, .kernel_size = 2, .bias = false}}};
  EXPECT_EQ(text.str(),
            "Sequential(\n"
            "  (0): Conv3d(2, 4, kernel_size=[3, 3, 3], stride=[1, 1, 1], padding=[0, 1, 2]): weight [4, 2, 3, 3, 3], "
            "bias [4]\n"
            "  (1): ReLU()\n"
            "  (2): ConvTranspose1d(4, 2, kernel_size=[2], stride=[1], bias=false): weight [4, 2, 2]\n"
            ")\n"
            "236 parameters");
}

template <class... Layers>
std::vector<std::string> printed(const Layers&... layers) {
  return {nn::detail::summary(layers)...};
}

TEST(Module, LayersPrintPyTorchNamesAndOptions) {
  using namespace nn;
  EXPECT_EQ(printed(ReLU(), SiLU(), GELU(), SELU(), Mish(), Sigmoid(), Tanh(), Hardsigmoid(), Hardswish(), Identity()),
            (Names{"ReLU()", "SiLU()", "GELU()", "SELU()", "Mish()", "Sigmoid()", "Tanh()", "Hardsigmoid()",
                   "Hardswish()", "Identity()"}));
  EXPECT_EQ(printed(ELU(), PReLU(), LeakyReLU(), Softplus(), Softmax(1), LogSoftmax(-1), Dropout(), Dropout3d(0.25),
                    Flatten(), PixelShuffle3d(2), PixelUnshuffle3d(2)),
            (Names{"ELU(alpha=1)", "PReLU(num_parameters=1)", "LeakyReLU(negative_slope=0.01)",
                   "Softplus(beta=1, threshold=20)", "Softmax(dim=1)", "LogSoftmax(dim=-1)", "Dropout(p=0.5)",
                   "Dropout3d(p=0.25)", "Flatten(start_dim=1, end_dim=-1)", "PixelShuffle3d(upscale_factor=2)",
                   "PixelUnshuffle3d(downscale_factor=2)"}));
  EXPECT_EQ(
      printed(MaxPool3d(2), AvgPool2d(3, 2, 1), AdaptiveAvgPool3d(1), AdaptiveMaxPool1d(2),
              Upsample({.scale_factor = 2, .mode = InterpolateMode::trilinear}), Upsample({.size = 4}),
              ReflectionPad1d(1), ConstantPad2d(1, 0.5), ZeroPad3d(1)),
      (Names{"MaxPool3d(kernel_size=[2, 2, 2], stride=[2, 2, 2], padding=[0, 0, 0])",
             "AvgPool2d(kernel_size=[3, 3], stride=[2, 2], padding=[1, 1])", "AdaptiveAvgPool3d(output_size=[1, 1, 1])",
             "AdaptiveMaxPool1d(output_size=[2])", "Upsample(scale_factor=2, mode=trilinear)",
             "Upsample(size=[4], mode=nearest)", "ReflectionPad1d(padding=[1, 1])",
             "ConstantPad2d(padding=[1, 1, 1, 1], value=0.5)", "ZeroPad3d(padding=[1, 1, 1, 1, 1, 1], value=0)"}));
  EXPECT_EQ(printed(BatchNorm3d(4), BatchNorm1d(2, {.momentum = {}, .affine = false, .track_running_stats = false}),
                    GroupNorm(2, 4), InstanceNorm3d(4), LayerNorm(3, {.bias = false}),
                    Conv3d(1, 2, 3, 1, "same", 1, 1, true, PadMode::circular),
                    WeightNorm(Linear(2, 3, {.bias = false})), SpectralNorm(ConvTranspose1d(4, 2, 3))),
            (Names{"BatchNorm3d(4, eps=1e-05, momentum=0.1)",
                   "BatchNorm1d(2, eps=1e-05, momentum=none, affine=false, track_running_stats=false)",
                   "GroupNorm(2, 4, eps=1e-05)", "InstanceNorm3d(4, eps=1e-05, affine=false)",
                   "LayerNorm([3], eps=1e-05, bias=false)",
                   "Conv3d(1, 2, kernel_size=[3, 3, 3], stride=[1, 1, 1], padding=same, padding_mode=circular)",
                   "WeightNorm(Linear(in_features=2, out_features=3, bias=false))",
                   "SpectralNorm(ConvTranspose1d(4, 2, kernel_size=[3], stride=[1]))"}));
}

// ---- members that VG_MODULE does not list

/// A module that lists only one of its two members.
template <class T>
struct Partial : nn::Module {
  explicit Partial(T value = T()) : unlisted(std::move(value)) {}
  std::string class_name() const override { return "Partial"; }
  nn::Linear listed{1, 1};
  T unlisted;
  VG_MODULE(listed)
};
struct Helper {
  int number = 0;
  nn::Linear linear{2, 2};
};
struct WithoutList : nn::Module {
  nn::Linear linear{2, 2};
};
struct ListsTheRest : WithoutList {
  nn::Linear more{1, 1};
  VG_MODULE(linear, more)
};
struct AddsWithoutList : ListsTheRest {
  nn::Linear added{3, 3};
};
template <class T>
struct Holder : nn::Module {
  explicit Holder(T value = T()) : child(std::move(value)) {}
  T child;
  VG_MODULE(child)
};

TEST(Module, RejectsUnlistedMembersWithState) {
  EXPECT_ERROR(Partial<nn::Linear>(nn::Linear(2, 3)).parameters(),
               "VG_MODULE: Partial does not list its member Linear(in_features=2, out_features=3), which would be "
               "neither trained nor saved nor moved");
  EXPECT_ERROR(Partial<nn::Parameter>(ones({2})).state_dict(),
               "Partial does not list its member Parameter or Buffer [2] f32 on cpu");
  EXPECT_ERROR(Partial<nn::Buffer>(zeros({3})).to(f64), "does not list its member Parameter or Buffer [3] f32");
  EXPECT_ERROR(Partial<nn::Dropout>().eval(), "does not list its member Dropout(p=0.5)");
  EXPECT_ERROR(Partial<nn::BatchNorm3d>(nn::BatchNorm3d(2)).zero_grad(), "does not list its member BatchNorm3d(2");
  EXPECT_ERROR(Partial<nn::Sequential>(nn::Sequential{nn::Dropout{}}).train(), "does not list its member Sequential()");
  EXPECT_ERROR(Partial<Scale>().named_modules(), "does not list its member Scale()");
  EXPECT_ERROR(Partial<Helper>().parameters(), "does not list its member Linear(");
  EXPECT_ERROR(Partial<std::optional<Scale>>(Scale()).parameters(), "does not list its member Scale()");
  EXPECT_ERROR((Partial<std::array<Scale, 2>>().parameters()), "does not list its member Scale()");
  EXPECT_ERROR(Holder<WithoutList>().parameters(), "VG_MODULE: WithoutList does not list its member Linear(");
  EXPECT_ERROR(Holder<AddsWithoutList>().parameters(), "VG_MODULE: AddsWithoutList does not list its member Linear(");
  EXPECT_ERROR(Holder<Partial<Scale>>().parameters(), "VG_MODULE: Partial does not list its member Scale()");
  Partial<nn::Parameter> later;
  EXPECT_EQ(later.parameters().size(), 2u);
  later.unlisted = nn::Parameter(ones({1}));
  const Partial<nn::Parameter> moved = std::move(later);
  EXPECT_ERROR(moved.parameters(), "does not list its member Parameter or Buffer [1] f32");
}

struct ListsTensors : nn::Module {
  nn::Linear inner{2, 2};
  VG_MODULE(inner.weight, inner.bias)
};
struct ListsPartsOfHelper : nn::Module {
  Helper helper;
  VG_MODULE(helper.linear)
};

struct ListsAPointer : nn::Module {
  nn::Sequential part{nn::Linear{2, 2}, nn::Dropout{}};
  nn::Module* pointer = &part;
  VG_MODULE(pointer)
};

TEST(Module, AcceptsUnlistedMembersWithoutState) {
  EXPECT_EQ(Partial<nn::ReLU>().parameters().size(), 2u);
  EXPECT_EQ(Partial<nn::Sequential>(nn::Sequential{nn::ReLU{}}).parameters().size(), 2u);
  EXPECT_EQ(Partial<nn::Parameter>().parameters().size(), 2u);
  EXPECT_EQ(Partial<std::optional<Scale>>().parameters().size(), 2u);
  EXPECT_EQ(Partial<std::unique_ptr<Scale>>(std::make_unique<Scale>()).parameters().size(), 2u);
  EXPECT_EQ(Partial(std::vector<nn::Parameter>(1, ones({1}))).parameters().size(), 2u);
  EXPECT_EQ(ListsTensors().parameters().size(), 2u);
  EXPECT_EQ(ListsPartsOfHelper().parameters().size(), 2u);
  EXPECT_EQ(ListsAPointer().parameters().size(), 2u);
  EXPECT_EQ(Holder<ListsTheRest>().parameters().size(), 4u);
  EXPECT_EQ(Holder<nn::WeightNorm<nn::Linear>>(nn::WeightNorm(nn::Linear(2, 2))).parameters().size(), 3u);
  Partial<nn::Parameter> tied;  // the unlisted member is a second handle of a listed parameter
  tied.unlisted = nn::Parameter(tied.listed.weight);
  EXPECT_EQ(tied.parameters().size(), 2u);
  const Scale scale;
  const nn::Parameter local(ones({1}));
  const Scale next;
  EXPECT_EQ(scale.parameters().size() + next.parameters().size(), 2u);
}

TEST(Module, StateDictSharesMemoryWithTheParameters) {
  Tree tree;
  const TensorMap state = tree.state_dict();
  const Tensor handle = state.at("scale.factor");
  EXPECT_FALSE(handle.requires_grad());
  handle.fill_(7);
  EXPECT_EQ(tree.scale.factor.at({1}), 7);
}

TEST(Module, LoadStateDictCopiesValues) {
  Tree from, to;
  from.scale.factor.detach().fill_(5);
  from.scale.count.fill_(4);
  EXPECT_TRUE(to.load_state_dict(from.state_dict()).matches());
  EXPECT_EQ(to.scale.factor.at({0}), 5);
  EXPECT_EQ(to.scale.count.item<int>(), 4);
  EXPECT_EQ(to.linear.weight.to_vector(), from.linear.weight.to_vector());
  EXPECT_FALSE(to.linear.weight.detach().storage() == from.linear.weight.storage());
}

TEST(Module, StrictLoadingReportsAllMismatchesAndChangesNothing) {
  Tree tree;
  TensorMap state = Tree().state_dict();
  state.at("scale.factor") = full({2}, 9);
  state.erase("linear.bias");
  state.erase("pair.0");
  state["extra.weight"] = ones({1});
  state.at("linear.weight") = ones({4, 2});
  state.at("owned.count") = ones({});
  EXPECT_ERROR(tree.load_state_dict(state),
               "load_state_dict: missing linear.bias, pair.0; unexpected extra.weight; mismatched linear.weight "
               "(module [3, 2] f32, state_dict [4, 2] f32), owned.count (module [] i64, state_dict [] f32)");
  EXPECT_EQ(tree.scale.factor.at({0}), 3);

  const nn::LoadReport report = tree.load_state_dict(state, false);
  EXPECT_EQ(report.missing, (Names{"linear.bias", "pair.0"}));
  EXPECT_EQ(report.unexpected, Names{"extra.weight"});
  EXPECT_EQ(report.mismatched, (Names{"linear.weight", "owned.count"}));
  EXPECT_EQ(tree.scale.factor.at({0}), 9);
}

TEST(Module, LoadingConvertsFloatingPointDtypes) {
  Scale scale;
  scale.load_state_dict({{"factor", tensor({0.5, 0.25}, {.dtype = f64})}, {"count", zeros({}, {.dtype = i64})}});
  EXPECT_EQ(scale.factor.dtype(), f32);
  EXPECT_EQ(scale.factor.to_vector(), (std::vector<double>{0.5, 0.25}));
  EXPECT_TRUE(scale.factor.requires_grad());
}

TEST(Module, TrainAndEvalApplyToAllChildren) {
  Tree tree;
  tree.eval();
  for (const auto& [name, module] : tree.named_modules()) EXPECT_FALSE(module->is_training()) << name;
  tree.train();
  for (const auto& [name, module] : tree.named_modules()) EXPECT_TRUE(module->is_training()) << name;
}

TEST(Module, ApplyVisitsChildrenFirst) {
  Tree tree;
  std::vector<nn::Module*> visited;
  tree.apply([&](nn::Module& module) { visited.push_back(&module); });
  ASSERT_EQ(visited.size(), 6u);
  EXPECT_EQ(visited.front(), &tree.scale);
  EXPECT_EQ(visited.back(), &tree);
}

TEST(Module, ZeroGradAndRequiresGradApplyToParameters) {
  Scale scale;
  scale.forward(ones({2})).sum().backward();
  EXPECT_EQ(scale.factor.grad().at({0}), 1);
  scale.zero_grad();
  EXPECT_FALSE(scale.factor.grad().defined());
  scale.requires_grad_(false);
  EXPECT_FALSE(scale.forward(ones({2})).requires_grad());
}

TEST(Module, ConversionKeepsHandlesAndGradients) {
  Scale scale;
  const Tensor factor = scale.factor;             // optimizers hold such a handle
  const Tensor alive = scale.forward(ones({2}));  // its graph refers to the f32 parameter
  scale.forward(ones({2})).sum().backward();
  scale.to(f64);
  EXPECT_EQ(factor.dtype(), f64);
  EXPECT_EQ(factor.grad().dtype(), f64);
  EXPECT_EQ(factor.grad().at({1}), 1);
  EXPECT_EQ(scale.count.dtype(), i64);
  scale.forward(ones({2}, {.dtype = f64})).sum().backward();
  EXPECT_EQ(factor.grad().at({1}), 2);
  EXPECT_ERROR(scale.to(i32), "to: modules can be converted to floating-point dtypes, not to i32");
}

TEST(Module, RejectsGraphsRecordedBeforeAConversion) {
  Scale scale;
  Tensor x = ones({2}, {.requires_grad = true});
  const Tensor before = scale.forward(x).sum();
  scale.to(f64);
  EXPECT_ERROR(before.backward(), "written to in place");
}

TEST(Module, MovesToEveryDevice) {
  for (Device device : devices()) {
    Tree tree;
    const std::vector<double> before = tree.linear.weight.to_vector();
    tree.to(device);
    for (const auto& [name, value] : tree.state_dict()) EXPECT_EQ(value.device(), device) << name;
    EXPECT_EQ(tree.linear.weight.to_vector(), before);
    EXPECT_TRUE(tree.load_state_dict(Tree().state_dict()).matches());
  }
  if (!cuda::is_available()) {
    Tree tree;
    EXPECT_ERROR(tree.to(Device::cuda()), "CUDA");
    EXPECT_TRUE(tree.linear.weight.device().is_cpu());
  }
}

}  // namespace
}  // namespace voxgrad
