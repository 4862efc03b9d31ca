#include "examples/segment/preprocess.h"

#include <algorithm>

#include "examples/segment/checksum.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// Returns a normalized channel (1, D, H, W).
vg::Tensor normalize(const vg::Tensor& channel, Normalization kind, const nnunet::Intensities& intensities) {
  switch (kind) {
    case Normalization::z_score:
      return nnunet::z_score(channel);
    case Normalization::ct:
      return nnunet::ct_normalize(channel, {intensities});
    case Normalization::none:
      return channel;
    case Normalization::rgb_to_0_1:
      return channel / 255.0;
    case Normalization::rescale_to_0_1:
      break;
  }
  const vg::Tensor shifted = channel - vg::amin(channel);
  return shifted / vg::clamp_min(vg::amax(shifted), 1e-8);
}

}  // namespace

Case Preprocessing::operator()(const Case& c) const {
  vg::check(vg::amax(vg::abs(c.image)).item() > 0, "segment", "all voxels of case '", c.name, "' are 0");
  Case result = nnunet::crop(c, nnunet::nonzero_box(c.image));
  vg::check(result.image.size(0) == std::ssize(normalization), "segment", "case '", c.name, "' has ",
            result.image.size(0), " channels, expected ", normalization.size());
  vg::Tensors channels;
  for (size_t i = 0; i < normalization.size(); ++i)
    channels.push_back(normalize(result.image.narrow(0, static_cast<int64_t>(i), 1), normalization[i], intensities[i]));
  result.image = vg::cat(channels, 0);
  return nnunet::resample(result, spacing);
}

Survey survey(const Task& task, double spacing, uint64_t seed) {
  constexpr int64_t kSamples = 10000;  // random voxels per CT channel of a case
  vg::Generator random(seed);
  Survey result;
  result.preprocess.normalization = task.normalization;
  result.preprocess.intensities.resize(task.normalization.size());
  std::array<std::vector<double>, 3> spacings;
  double sum = 0;
  for (size_t channel = 0; channel < task.normalization.size(); ++channel) {
    const bool ct = task.normalization[channel] == Normalization::ct;
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
    if (ct) result.preprocess.intensities[channel] = nnunet::measure_intensities(std::move(values));
  }
  result.cases = vg::concat(task.training.size(), " with sum ", sum);
  for (size_t a = 0; a < 3; ++a) {
    std::vector<double>& along = spacings[a];
    std::ranges::nth_element(along, along.begin() + std::ssize(along) / 2);
    result.preprocess.spacing[a] = spacing > 0 ? spacing : along[along.size() / 2];
  }
  return result;
}

}  // namespace segment
