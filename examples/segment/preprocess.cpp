#include "examples/segment/preprocess.h"

#include <algorithm>

#include "examples/segment/checksum.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// A channel (1, D, H, W), normalized.
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

Case Preprocessing::operator()(const Case& of) const {
  vg::check(vg::amax(vg::abs(of.image)).item() > 0, "segment", "all voxels of case '", of.name, "' are 0");
  Case made = nnunet::crop(of, nnunet::nonzero_box(of.image));
  vg::check(made.image.size(0) == std::ssize(normalization), "segment", "case '", of.name, "' has ", made.image.size(0),
            " channels, expected ", normalization.size());
  vg::Tensors channels;
  for (size_t c = 0; c < normalization.size(); ++c)
    channels.push_back(normalize(made.image.narrow(0, static_cast<int64_t>(c), 1), normalization[c], intensities[c]));
  made.image = vg::cat(channels, 0);
  return nnunet::resample(made, spacing);
}

Survey survey(const Task& task, double spacing, uint64_t seed) {
  constexpr int64_t kSamples = 10000;  // of a channel of a case of CT
  vg::Generator random(seed);
  Survey made;
  made.preprocess.normalization = task.normalization;
  made.preprocess.intensities.resize(task.normalization.size());
  std::array<std::vector<double>, 3> spacings;
  double sum = 0;
  for (size_t c = 0; c < task.normalization.size(); ++c) {
    const bool ct = task.normalization[c] == Normalization::ct;
    if (c > 0 && !ct) continue;
    std::vector<float> values;
    for (const LazyCase& from : task.training) {
      const Case of = from.load();
      if (c == 0) {
        made.checksums.push_back(checksum(of));
        sum += of.image.to(vg::f64).sum().item();
        for (size_t a = 0; a < 3; ++a) spacings[a].push_back(of.geometry.spacing[a]);
      }
      if (!ct) continue;
      const std::vector<float> some =
          nnunet::sample_foreground(of, static_cast<int64_t>(c), kSamples, random, task.ignore_index);
      values.insert(values.end(), some.begin(), some.end());
    }
    if (ct) made.preprocess.intensities[c] = nnunet::measure_intensities(std::move(values));
  }
  made.cases = vg::concat(task.training.size(), " with sum ", sum);
  for (size_t a = 0; a < 3; ++a) {
    std::vector<double>& along = spacings[a];
    std::ranges::nth_element(along, along.begin() + std::ssize(along) / 2);
    made.preprocess.spacing[a] = spacing > 0 ? spacing : along[along.size() / 2];
  }
  return made;
}

}  // namespace segment
