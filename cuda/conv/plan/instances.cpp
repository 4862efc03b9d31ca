// The list of the compiled tiles.
#include "cuda/conv/plan/instances.h"

namespace voxgrad::cuda {
namespace {

std::vector<ConvInstance*>& list() {
  static std::vector<ConvInstance*> instances;
  return instances;
}

}  // namespace

ConvInstance::ConvInstance(ConvPass conv_pass, ConvKernel conv_kernel, ConvArithmetic conv_arithmetic, int tile_width,
                           int tile_rows, int tile_blocks)
    : pass(conv_pass),
      kernel(conv_kernel),
      arithmetic(conv_arithmetic),
      width(tile_width),
      rows(tile_rows),
      blocks(tile_blocks) {
  list().push_back(this);
}

const std::vector<ConvInstance*>& conv_instances() { return list(); }

}  // namespace voxgrad::cuda
