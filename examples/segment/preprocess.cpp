#include "examples/segment/preprocess.h"

#include <algorithm>

#include "examples/segment/checksum.h"

namespace segment {
namespace vg = voxgrad;

Case Preprocessing::operator()(const Case& of) const {
  vg::check(vg::amax(vg::abs(of.image)).item() > 0, "segment", "all voxels of case '", of.name, "' are 0");
  Case made = vg::data::crop(of, vg::data::nonzero_box(of.image));
  made.image = channels.empty() ? vg::data::z_score(made.image) : vg::data::ct_normalize(made.image, channels);
  return vg::data::resample(made, spacing);
}

Survey survey(const Task& task, double spacing, uint64_t seed) {
  constexpr int64_t kSamples = 10000;  // of a channel of a case of CT
  vg::Generator random(seed);
  Survey made;
  std::array<std::vector<double>, 3> spacings;
  double sum = 0;
  for (int64_t c = 0; c < (task.ct ? std::max<int64_t>(made.channels, 1) : 1); ++c) {
    std::vector<float> values;
    for (const LazyCase& from : task.training) {
      const Case of = from.load();
      if (c == 0) {
        made.channels = of.image.size(0);
        made.checksums.push_back(checksum(of));
        sum += of.image.to(vg::f64).sum().item();
        for (size_t a = 0; a < 3; ++a) spacings[a].push_back(of.geometry.spacing[a]);
      }
      if (!task.ct) continue;
      const std::vector<float> some = vg::data::sample_foreground(of, c, kSamples, random);
      values.insert(values.end(), some.begin(), some.end());
    }
    if (task.ct) made.preprocess.channels.push_back(vg::data::measure_intensities(std::move(values)));
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
