// The sums over voxels from which segmentation losses are computed, and the gradient of the logits. Each class has
// kClassSums sums. Each kernel reads the logits once. A thread holds all classes of a voxel, and the sums of all
// classes, in registers. A thread sums a few dozen voxels in compute_t; sums over threads and CTAs are in double and in
// a fixed order.
#include "core/detail/divide.h"
#include "core/dtype.h"
#include "cuda/detail/kernels.h"
#include "cuda/reduce.cuh"
#include "ops/detail/class_voxel.h"

namespace voxgrad::cuda {
namespace {

/// Computes the sums of class_sums() over each range of `range` positions of a sample, and writes them to `partial`
/// (sample, range, class, kClassSums). A sample has `ranges` ranges. `x` contains the logits (N, C, L), and `target`
/// contains the class indices (N, L), where L is the number of voxels of a sample. Launch: one CTA per range in a 1-D
/// grid-stride loop, kBlock threads per CTA. Static shared memory: kBlock doubles.
template <class T, int kClasses>
__global__ void __launch_bounds__(kBlock)
    sums_kernel(const __grid_constant__ View x, const __grid_constant__ View target, IndexCheck inside,
                ClassSums options, int64_t range, int64_t ranges, double* partial) {
  wait_for_previous_kernels();
  using C = compute_t<T>;
  __shared__ double shared[kBlock];
  const int classes = static_cast<int>(x.size[1]);
  for (int64_t part = blockIdx.x; part < x.size[0] * ranges; part += gridDim.x) {
    const int64_t n = quotient(part, ranges), begin = (part - n * ranges) * range, end = min(begin + range, x.size[2]);
    C sums[kClasses][kClassSums] = {};
    for (int64_t l = begin + threadIdx.x; l < end; l += kBlock) {
      const int64_t label = class_at(target, n, l);
      ClassVoxel<C, kClasses> voxel{classes, {}};
      voxel.load(static_cast<const T*>(x.data) + n * x.stride[0] + l * x.stride[2], x.stride[1]);
      if (label != options.ignore_index && inside(label)) voxel.add_to(sums, label, options);
    }
#pragma unroll
    for (int i = 0; i < kClasses * kClassSums; ++i) {
      if (i >= classes * kClassSums) break;
      const double total = block_sum(static_cast<double>(sums[i / kClassSums][i % kClassSums]), shared);
      if (threadIdx.x == 0) partial[part * classes * kClassSums + i] = total;
    }
  }
}

/// Computes the gradient dx of the logits from `grad`, the gradient of the sums: (N, C, kClassSums), or (1, C,
/// kClassSums) with grad_step 0. Launch: one thread per voxel in a 1-D grid-stride loop, kBlock threads per CTA. No
/// shared memory.
template <class T, int kClasses>
__global__ void __launch_bounds__(kBlock)
    gradient_kernel(const __grid_constant__ View dx, const __grid_constant__ View x,
                    const __grid_constant__ View target, IndexCheck inside, ClassSums options, const compute_t<T>* grad,
                    int64_t grad_step) {
  wait_for_previous_kernels();
  for (int64_t i = thread_index(); i < x.size[0] * x.size[2]; i += thread_count()) {
    const int64_t n = quotient(i, x.size[2]), l = i - n * x.size[2], label = class_at(target, n, l);
    ClassVoxel<compute_t<T>, kClasses> voxel{static_cast<int>(x.size[1]), {}};
    if (label != options.ignore_index && inside(label)) {
      voxel.load(static_cast<const T*>(x.data) + n * x.stride[0] + l * x.stride[2], x.stride[1]);
      voxel.differentiate(grad + n * grad_step, label, options);
    }
    voxel.store(static_cast<T*>(dx.data) + n * dx.stride[0] + l * dx.stride[2], dx.stride[1]);
  }
}

}  // namespace

namespace kernel {

void class_sums(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options) {
  if (sums.numel() == 0) return;
  const Launch launch(x);
  constexpr int64_t kStep = 8 * kBlock;
  const int64_t range = std::clamp<int64_t>(x.size[0] * x.size[2] / 512 / kStep, 1, 8) * kStep;
  const int64_t ranges = divide_up(x.size[2], range), blocks = x.size[0] * ranges;
  const int64_t rows = sums.size[0] == 1 ? blocks : ranges;
  const Workspace partial(launch, static_cast<size_t>(rows * sums.numel()) * sizeof(double));
  if (blocks > 0)
    dispatch_cuda(Floats(), x.dtype, op, [&]<class T>() {
      with_classes(x.size[1], [&]<int kClasses>() {
        launch_kernel(op, sums_kernel<T, kClasses>, grid_size(blocks, 1), kBlock, 0, launch.stream, x, target,
                      IndexCheck(x.size[1], op, launch), options, range, ranges, partial.as<double>());
      });
    });
  reduce(ReduceOp::sum, sums_of_parts(sums, sums.data, 1), sums_of_parts(sums, partial.as<void>(), rows));
}

void class_sums_backward(const View& dx, const View& grad, const View& x, const View& target,
                         const ClassSums& options) {
  constexpr const char* kOp = "class_sums_backward";
  if (x.numel() == 0) return;
  const Launch launch(x);
  dispatch_cuda(Floats(), x.dtype, kOp, [&]<class T>() {
    with_classes(x.size[1], [&]<int kClasses>() {
      launch_kernel(kOp, gradient_kernel<T, kClasses>, grid_size(x.size[0] * x.size[2]), kBlock, 0, launch.stream, dx,
                    x, target, IndexCheck(x.size[1], kOp, launch), options, grad.as<const compute_t<T>>(),
                    grad.size[0] == 1 ? 0 : x.size[1] * kClassSums);
    });
  });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
