// Stand-ins for the functions that query a GPU, in a build without CUDA.
#include "cuda/conv/plan/problem.h"

namespace voxgrad::cuda {

ConvGpu conv_gpu(int) { return {}; }
void describe_device(ConvProblem&, int) {}

}  // namespace voxgrad::cuda
