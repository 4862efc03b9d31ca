// Tests of save_model(): values of the plan that a saved model folder must keep, and plans that it rejects.
#include "examples/nnunet/model_folder.h"

#include "tests/core/file_support.h"

namespace nnunet {
namespace {

using namespace voxgrad;

class SaveModel : public FileTest {
 protected:
  /// Returns the plan of a small U-Net for images with one channel.
  static ModelPlan small_plan() {
    const std::filesystem::path model = std::filesystem::path(TESTS_DIR) / "examples/nnunet/iso_plain/model";
    return read_plan(model / "dataset.json", model / "plans.json", "3d_fullres");
  }
};

TEST_F(SaveModel, KeepsTheResamplingOfThePlan) {
  for (const std::optional<bool> separate : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    ModelPlan plan = small_plan();
    plan.resample_image = {0, separate};
    plan.resample_logits = {3, separate};
    save_model(path("model"), plan, make_network(plan.network), {}, 1);
    const ModelPlan saved = read_plan(path("model/dataset.json"), path("model/plans.json"), "3d_fullres");
    EXPECT_EQ(saved.resample_image.order, 0);
    EXPECT_EQ(saved.resample_logits.order, 3);
    EXPECT_EQ(saved.resample_image.force_separate_z, separate);
    EXPECT_EQ(saved.resample_logits.force_separate_z, separate);
  }
}

TEST_F(SaveModel, RejectsUnsupportedPlans) {
  const auto rejects = [&](const auto& change, const std::string& message) {
    ModelPlan plan = small_plan();
    change(plan, std::get<nn::UNetOptions>(plan.network));
    EXPECT_ERROR(check_savable(plan), message);
    EXPECT_ERROR(save_model(path("model"), plan, make_network(plan.network), {}, 1), message);
    EXPECT_FALSE(std::filesystem::exists(path("model")));
  };
  const std::string network = "save_model: expected a network with InstanceNorm and LeakyReLU";
  rejects([](ModelPlan&, nn::UNetOptions& unet) { unet.norm->batch = true; }, network);
  rejects([](ModelPlan&, nn::UNetOptions& unet) { unet.norm.reset(); }, network);
  rejects([](ModelPlan&, nn::UNetOptions& unet) { unet.activation.kind = ActivationKind::relu; }, network);
  const std::string labels = "save_model: expected a 3-D network and labels without regions";
  rejects([](ModelPlan& plan, nn::UNetOptions&) { plan.labels.regions = true; }, labels);
  rejects([](ModelPlan& plan, nn::UNetOptions&) { plan.is_2d = true; }, labels);
  EXPECT_NO_THROW(check_savable(small_plan()));
}

TEST_F(SaveModel, RejectsOldPlansWithTooManyFeatures) {
  const std::filesystem::path model = std::filesystem::path(TESTS_DIR) / "examples/nnunet/random_old_plans/model";
  std::string text = get(model / "plans.json");
  const std::string key = "\"UNet_base_num_features\": ", max = "\"unet_max_num_features\": ";
  ASSERT_NE(text.find(key), std::string::npos);
  text.insert(text.find(key) + key.size(), "461168601842738790");  // the digits of the original number follow
  text.insert(text.find(max) + max.size(), "9000000000000000");
  EXPECT_ERROR(read_plan(model / "dataset.json", put("plans.json", text), "3d_fullres"),
               "UNet_base_num_features and unet_max_num_features must lie in [1, 2^31)");
}

}  // namespace
}  // namespace nnunet
