#include "examples/common/options.h"
#include "examples/segment/train.h"

namespace segment {
namespace vg = voxgrad;

vg::NiftiImage predict(const TrainResult& trained, const Case& of, const TrainOptions& options, vg::Device device) {
  const Case seen = trained.preprocess(of);
  const vg::nn::SlidingWindowOptions windows{.window = trained.window, .device = device, .accumulate = device};
  const examples::Precision precision(options.precision);
  const auto logits = [&](const vg::Tensor& patches) {
    const vg::autocast guard = precision.autocast();
    return (*trained.model)(patches);
  };
  const vg::Tensor found = vg::nn::sliding_window_inference(seen.image.unsqueeze(0), logits, windows);
  return nnunet::restore(vg::softmax(found, 1).squeeze(0).to(vg::Device::cpu()), seen);
}

vg::Tensor labels_of(const vg::NiftiImage& probabilities) { return vg::argmax(probabilities.data, 0).to(vg::u8); }

}  // namespace segment
