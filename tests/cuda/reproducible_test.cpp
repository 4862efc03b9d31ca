// Tests that results of operators have the same bits in every run, also while the GPU does other work.
#include <vector>

#include "core/autograd.h"
#include "ops/create.h"
#include "ops/detail/kernels.h"
#include "ops/elementwise.h"
#include "ops/grid_sample.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/cuda/random_view.h"
#include "tests/support.h"

namespace voxgrad::cudatest {
namespace {

using CudaReproducible = OnGpu;

// A second stream is busy during every other run.
TEST_F(CudaReproducible, HasEqualBitsBesideOtherWork) {
  const Device gpu = Device::cuda();
  const cuda::Stream other_stream;
  Tensor load = rand({1 << 22}, {.device = gpu});
  const Tensor x = randn({2, 8, 40, 41, 42}).to(gpu).requires_grad_();
  const Tensor index = (rand({2, 8, 60, 41, 42}) * 40).to(gpu, i64), grid = (rand({2, 20, 21, 22, 3}) * 2 - 1).to(gpu);
  std::vector<std::vector<float>> first;
  for (int run = 0; run < 10; ++run) {
    if (run % 2) {
      const cuda::StreamGuard guard(other_stream);
      for (int i = 0; i < 10; ++i) kernels(gpu).unary(UnaryOp::sin, load.view_out(), load.view_in(), 0, 0);
    }
    Tensors results{sum(x, {0, 2, 3, 4}), softmax(x, 1), group_norm(x, 4), gather(x, 2, index), grid_sample(x, grid)};
    for (size_t i = 0; i < 5; ++i) results.push_back(grad({results[i]}, {x}, {sin(results[i].detach())})[0]);
    for (size_t i = 0; i < results.size(); ++i) {
      const auto got = results[i].to_vector<float>();
      if (run == 0) first.push_back(got);
      ASSERT_EQ(got, first[i]) << "run " << run << ", result " << i;
    }
  }
  other_stream.synchronize();
}

}  // namespace
}  // namespace voxgrad::cudatest
