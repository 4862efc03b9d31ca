// Computes the properties of the training cases that determine the preprocessing.
#include "examples/segment/survey.h"

#include <algorithm>
#include <array>

#include "examples/segment/checksum.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// Returns the plan of a task, without the fields that depend on the cases.
nnunet::ModelPlan plan_of(const Task& task) {
  nnunet::ModelPlan plan;
  plan.configuration = "3d_fullres";
  plan.channels = task.channels;
  plan.file_ending = ".nii.gz";
  // When the spacing doubles, linear interpolation reduces noise. nnU-Net's cubic spline does not.
  plan.resample_image.order = 1;
  plan.resample_logits.order = 1;
  for (const std::string& channel : task.channels) plan.normalization.push_back({normalization_of(channel)});
  plan.labels.names = task.classes;
  for (int64_t c = 0; c < std::ssize(task.classes); ++c) {
    plan.labels.values.push_back(c);
    plan.labels.parts.push_back({c});
  }
  return plan;
}

}  // namespace

Survey survey(const Task& task, double spacing, uint64_t seed, const std::filesystem::path& plans) {
  constexpr int64_t kSamples = 10000;  // random voxels per CT channel of a case
  vg::Generator random(seed);
  vg::check(plans.empty() || !task.dataset_json.empty(), "segment", "--plans needs --dataset");
  const bool planned = !plans.empty();
  Survey result{.plan = planned ? nnunet::read_plan(task.dataset_json, plans, "3d_fullres") : plan_of(task)};
  if (planned) nnunet::check_savable(result.plan);  // fail before the training, not after it
  std::array<std::vector<double>, 3> spacings;
  double sum = 0;
  for (size_t channel = 0; channel < task.channels.size(); ++channel) {
    const bool ct = !planned && result.plan.normalization[channel].kind == nnunet::Normalization::ct;
    if (channel > 0 && !ct) continue;
    std::vector<float> values;
    for (const LazyCase& lazy : task.training) {
      const Case c = lazy.load();
      if (channel == 0) {
        result.checksums.push_back(checksum(c));
        sum += c.image.to(vg::f64).sum().item();
        for (size_t a = 0; a < 3; ++a) spacings[a].push_back(c.geometry.spacing[a]);
      }
      if (!ct) continue;
      const std::vector<float> sample =
          nnunet::sample_foreground(c, static_cast<int64_t>(channel), kSamples, random, task.ignore_index);
      values.insert(values.end(), sample.begin(), sample.end());
    }
    if (ct) result.plan.normalization[channel].intensities = nnunet::measure_intensities(std::move(values));
  }
  result.cases = vg::concat(task.training.size(), " with sum ", sum);
  for (size_t a = 0; a < 3 && !planned; ++a) {
    std::vector<double>& along = spacings[a];
    std::ranges::nth_element(along, along.begin() + std::ssize(along) / 2);
    result.plan.spacing[a] = spacing > 0 ? spacing : along[along.size() / 2];
  }
  return result;
}

}  // namespace segment
