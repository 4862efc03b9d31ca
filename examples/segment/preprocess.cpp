#include "examples/segment/preprocess.h"

#include <algorithm>

namespace segment {
namespace vg = voxgrad;

Case Preprocessing::operator()(const Case& of) const {
  Case made = vg::data::crop(of, vg::data::nonzero_box(of.image));
  made.image = channels.empty() ? vg::data::z_score(made.image) : vg::data::ct_normalize(made.image, channels);
  return vg::data::resample(made, spacing);
}

Preprocessing choose_preprocessing(const Task& task, double spacing, uint64_t seed) {
  Preprocessing made;
  for (size_t a = 0; a < 3; ++a) {
    std::vector<double> along;
    for (const Case& of : task.training) along.push_back(of.geometry.spacing[a]);
    std::ranges::nth_element(along, along.begin() + std::ssize(along) / 2);
    made.spacing[a] = spacing > 0 ? spacing : along[along.size() / 2];
  }
  if (!task.ct) return made;
  constexpr int64_t kSamples = 10000;  // of a case
  vg::Generator random(seed);
  for (int64_t c = 0; c < task.training[0].image.size(0); ++c) {
    std::vector<float> values;
    for (const Case& of : task.training) {
      const std::vector<float> some = vg::data::sample_foreground(of, c, kSamples, random);
      values.insert(values.end(), some.begin(), some.end());
    }
    made.channels.push_back(vg::data::measure_intensities(std::move(values)));
  }
  return made;
}

}  // namespace segment
