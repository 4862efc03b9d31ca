#include "cuda/conv/instances.h"

namespace voxgrad::cuda {
namespace {

std::vector<ConvInstance*>& list() {
  static std::vector<ConvInstance*> instances;
  return instances;
}

}  // namespace

ConvInstance::ConvInstance(ConvPass of_pass, ConvKernel which, ConvArithmetic of, int tile_width, int tile_rows,
                           int of_multiprocessor)
    : pass(of_pass), kernel(which), arithmetic(of), width(tile_width), rows(tile_rows), blocks(of_multiprocessor) {
  list().push_back(this);
}

const std::vector<ConvInstance*>& conv_instances() { return list(); }

}  // namespace voxgrad::cuda
