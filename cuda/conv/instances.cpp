#include "cuda/conv/instances.h"

namespace voxgrad::cuda {
namespace {

std::vector<ConvInstance*>& list() {
  static std::vector<ConvInstance*> instances;
  return instances;
}

}  // namespace

ConvInstance::ConvInstance(bool weight_gradient, bool by_wgmma, ConvArithmetic of, int tile_width)
    : weight(weight_gradient), wgmma(by_wgmma), arithmetic(of), width(tile_width) {
  list().push_back(this);
}

const std::vector<ConvInstance*>& conv_instances() { return list(); }

}  // namespace voxgrad::cuda
