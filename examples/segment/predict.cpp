#include "examples/common/options.h"
#include "examples/segment/train.h"

namespace segment {
namespace vg = voxgrad;

vg::NiftiImage predict(const TrainResult& trained, const Case& c, const TrainOptions& options, vg::Device device) {
  const Case input = trained.preprocess(c);
  const vg::nn::SlidingWindowOptions windows{.window = trained.window, .device = device, .accumulate = device};
  const examples::Precision precision(options.precision);
  const auto logits = [&](const vg::Tensor& patches) {
    const vg::autocast guard = precision.autocast();
    return (*trained.model)(patches);
  };
  const vg::Tensor prediction = vg::nn::sliding_window_inference(input.image.unsqueeze(0), logits, windows);
  return nnunet::restore(vg::softmax(prediction, 1).squeeze(0).to(vg::Device::cpu()), input);
}

vg::Tensor labels_of(const vg::NiftiImage& probabilities) { return vg::argmax(probabilities.data, 0).to(vg::u8); }

}  // namespace segment
