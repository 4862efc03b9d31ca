// Predicts the labels of a case with a trained network.
#include "examples/common/options.h"
#include "examples/nnunet/pipeline.h"
#include "examples/segment/train.h"

namespace segment {
namespace vg = voxgrad;

Prediction predict(const TrainResult& trained, const Case& c, const TrainOptions& options, vg::Device device,
                   bool probabilities) {
  const nnunet::OrientedImage oriented = nnunet::orient(c.image, c.geometry, trained.plan);
  const nnunet::PreparedImage prepared = nnunet::prepare(oriented, trained.plan);
  const vg::Tensor logits = nnunet::predict_logits(
      prepared.image, trained.network, trained.plan, /*mirror_axes=*/{},
      {.device = device, .sums = device, .autocast = examples::Precision(options.precision).half()});
  Prediction result{.labels = nnunet::unorient(nnunet::labels_of(logits, prepared, trained.plan), oriented)};
  if (probabilities)
    result.probabilities = nnunet::unorient(nnunet::probabilities_of(logits, prepared, trained.plan), oriented);
  return result;
}

}  // namespace segment
