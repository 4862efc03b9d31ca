// Sums over the voxels of every class, of which losses are made, and their gradient: one pass over the logits each. A
// thread holds the logits of all classes of a voxel, and sums of all classes, in registers. Of more classes than that
// forward takes the softmax's maximum and total first, then the sums of a chunk of classes at a time; backward reads a
// voxel's logits again. Threads sum a few dozen voxels in compute_t, blocks and what joins them in double and in a
// fixed order.
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"

namespace voxgrad::cuda {
namespace {

/// x (N, C, L) as kernels address it.
struct Logits {
  void* data;
  int64_t sample, category, position;  // strides

  explicit Logits(const View& v) : data(v.data), sample(v.stride[0]), category(v.stride[1]), position(v.stride[2]) {}
  template <class T>
  __device__ T* at(int64_t n, int64_t l) const {
    return static_cast<T*>(data) + n * sample + l * position;
  }
};

struct ClassMap {
  const void* data;
  DType dtype;
  int64_t sample, position, ignored;
  IndexCheck inside;

  ClassMap(const char* op, const View& v, int64_t classes, int64_t ignore_index, const Launch& launch)
      : data(v.data),
        dtype(v.dtype),
        sample(v.stride[0]),
        position(v.stride[1]),
        ignored(ignore_index),
        inside(classes, op, launch) {}
  /// The number of the class, or -1 if the voxel is passed over.
  __device__ int at(int64_t n, int64_t l) const {
    const int64_t i = n * sample + l * position;
    const int64_t number = dtype == i64   ? static_cast<const int64_t*>(data)[i]
                           : dtype == i32 ? static_cast<const int32_t*>(data)[i]
                                          : static_cast<const uint8_t*>(data)[i];
    return number != ignored && inside(number) ? static_cast<int>(number) : -1;
  }
};

/// How blocks share the voxels: ranges of each sample. Follows from shapes alone.
struct Ranges {
  int64_t samples, length, ranges, range;

  /// `step`: positions that a block takes at a time; `times`: how often voxels are gone through.
  Ranges(const View& x, int64_t step, int64_t times) : samples(x.size[0]), length(x.size[2]) {
    const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
    const int64_t wanted = std::clamp<int64_t>(samples * length * times / 1024, step, 64 * kBlock);
    range = parts(wanted, step) * step;
    ranges = parts(length, range);
  }
  int64_t blocks() const { return samples * ranges; }
};

/// f(c) for the classes; in code without a loop if kClasses is not 0.
template <int kClasses, class F>
__device__ void each_class(int classes, const F& f) {
  if constexpr (kClasses > 0) {
#pragma unroll
    for (int c = 0; c < kClasses; ++c)
      if (c < classes) f(c);
  } else {
    for (int c = 0; c < classes; ++c) f(c);
  }
}

/// Largest logit of a voxel, and the total of exponentials of what the others are below it.
template <class W>
struct Scale {
  W top, total;
};
template <class W, int kClasses, class F>
__device__ Scale<W> softmax_scale(int classes, const F& logit) {
  Scale<W> scale{-std::numeric_limits<W>::infinity(), 0};
  each_class<kClasses>(classes, [&](int c) { scale.top = logit(c) > scale.top ? logit(c) : scale.top; });
  each_class<kClasses>(classes, [&](int c) { scale.total += exp(logit(c) - scale.top); });
  return scale;  // a NaN reaches the total
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    scale_kernel(const __grid_constant__ Ranges shape, Logits x, int classes, Scale<compute_t<T>>* scales) {
  using Wide = compute_t<T>;
  for (int64_t i = thread_index(); i < shape.samples * shape.length; i += thread_count()) {
    const int64_t n = quotient(i, shape.length);
    const T* from = x.at<const T>(n, i - n * shape.length);
    scales[i] = softmax_scale<Wide, 0>(classes, [&](int c) { return convert<Wide>(from[c * x.category]); });
  }
}

struct Sums {
  double v[kClassSums];
};
__device__ inline Sums add(Sums a, const Sums& b) {
#pragma unroll
  for (int k = 0; k < kClassSums; ++k) a.v[k] += b.v[k];
  return a;
}

/// Of one class and one thread.
template <class W>
struct ThreadSums {
  W v[kClassSums] = {};

  __device__ void add(W p, W minus_log, bool here, bool squared) {
    v[0] += squared ? p * p : p;
    v[4] += minus_log;
    if (here) {
      v[1] += p;
      v[2] += 1;
      v[3] += minus_log;
    }
  }
};

/// The most classes that a thread holds.
template <class T>
inline constexpr int kMostClasses = sizeof(compute_t<T>) == 8 ? 8 : 12;

/// partial[sample, range, class]. `scales` is null if a thread holds all classes.
template <class T, int kClasses>
__global__ void __launch_bounds__(kBlock, kClasses <= 4 && sizeof(compute_t<T>) == 4 ? 3 : 2)
    sums_kernel(const __grid_constant__ Ranges shape, const __grid_constant__ Logits x,
                const __grid_constant__ ClassMap target, int classes, int chunks, ClassSums options,
                const Scale<compute_t<T>>* scales, double* partial) {
  using Wide = compute_t<T>;
  constexpr int kVoxels = std::max(1, 64 / (kClasses * static_cast<int>(sizeof(Wide))));  // on their way at a time
  __shared__ Sums shared[kBlock];
  const BlockLayout layout{1, kBlock, false};
  for (int64_t block = blockIdx.x; block < shape.samples * shape.ranges * chunks; block += gridDim.x) {
    const int64_t part = quotient(block, chunks), n = quotient(part, shape.ranges);
    const int64_t begin = (part - n * shape.ranges) * shape.range, end = min(begin + shape.range, shape.length);
    const int first = static_cast<int>(block - part * chunks) * kClasses, own = min(kClasses, classes - first);
    ThreadSums<Wide> sums[kClasses];
    for (int64_t l = begin + threadIdx.x; l < end; l += kVoxels * kBlock) {
      Wide logit[kVoxels][kClasses];
      int number[kVoxels];
#pragma unroll
      for (int u = 0; u < kVoxels; ++u) {
        const int64_t at = l + u * kBlock;
        number[u] = -1;
        if (at >= end) continue;
        number[u] = target.at(n, at);
        const T* from = x.at<const T>(n, at) + first * x.category;
        each_class<kClasses>(own, [&](int c) { logit[u][c] = convert<Wide>(from[c * x.category]); });
      }
#pragma unroll
      for (int u = 0; u < kVoxels; ++u) {
        if (number[u] < 0) continue;
        const auto add = [&](int c, Wide p, Wide minus_log) {
          sums[c].add(p, minus_log, first + c == number[u], options.squared);
        };
        if (!options.softmax) {
          each_class<kClasses>(own, [&](int c) { add(c, logit[u][c], 0); });
          continue;
        }
        const Scale<Wide> scale = kClasses == kMostClasses<T> && scales
                                      ? scales[n * shape.length + l + u * kBlock]
                                      : softmax_scale<Wide, kClasses>(own, [&](int c) { return logit[u][c]; });
        const Wide factor = 1 / scale.total, log_total = log(scale.total);
        each_class<kClasses>(own, [&](int c) {
          const Wide shifted = logit[u][c] - scale.top;
          add(c, exp(shifted) * factor, log_total - shifted);
        });
      }
    }
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
      Sums total;
#pragma unroll
      for (int k = 0; k < kClassSums; ++k) total.v[k] = static_cast<double>(sums[c].v[k]);
      total = combine_reducers(total, layout, shared, add);
      if (c < own && threadIdx.x == 0)
#pragma unroll
        for (int k = 0; k < kClassSums; ++k) partial[(part * classes + first + c) * kClassSums + k] = total.v[k];
    }
  }
}

/// sums[set, k] = the sums of partial[row, k] over the rows of each set.
__global__ void __launch_bounds__(kBlock)
    join_kernel(int64_t sets, int64_t rows, int64_t width, const double* partial, double* sums) {
  __shared__ double shared[kBlock];
  const BlockLayout layout{4, kBlock / 4, true};
  for (int64_t tile = blockIdx.x; tile * layout.columns < sets * width; tile += gridDim.x) {
    const int64_t i = tile * layout.columns + layout.column(), set = quotient(i, width), k = i - set * width;
    double sum = 0;
    if (i < sets * width)
#pragma unroll 8
      for (int64_t row = layout.reducer(); row < rows; row += layout.reducers)
        sum += partial[(set * rows + row) * width + k];
    sum = combine_reducers(sum, layout, shared, [](double a, double b) { return a + b; });
    if (i < sets * width && layout.reducer() == 0) sums[i] = sum;
  }
}

/// kClasses is 0 for any number.
template <class T, int kClasses>
__global__ void __launch_bounds__(kBlock)
    gradient_kernel(const __grid_constant__ Ranges shape, const __grid_constant__ Logits dx,
                    const __grid_constant__ Logits x, const __grid_constant__ ClassMap target, int classes,
                    ClassSums options, const compute_t<T>* grad, int64_t grad_step) {
  using Wide = compute_t<T>;
  constexpr int kHeld = kClasses > 0 ? kClasses : 1;
  for (int64_t block = blockIdx.x; block < shape.samples * shape.ranges; block += gridDim.x) {
    const int64_t n = quotient(block, shape.ranges);
    const int64_t begin = (block - n * shape.ranges) * shape.range, end = min(begin + shape.range, shape.length);
    const Wide* const of_sums = grad + n * grad_step;
    Wide held[2][kHeld] = {}, of_logs = 0;
    const auto of_p = [&](int c) { return kClasses > 0 ? held[0][c] : of_sums[c * kClassSums]; };
    const auto of_log = [&](int c) { return kClasses > 0 ? held[1][c] : of_sums[c * kClassSums + 4]; };
    each_class<kClasses>(classes, [&](int c) {
      if constexpr (kClasses > 0) {
        held[0][c] = of_sums[c * kClassSums];
        held[1][c] = of_sums[c * kClassSums + 4];
      }
      of_logs += of_log(c);
    });
    for (int64_t l = begin + threadIdx.x; l < end; l += kBlock) {
      const T* from = x.at<const T>(n, l);
      T* to = dx.at<T>(n, l);
      const int number = target.at(n, l);
      if (number < 0) {
        each_class<kClasses>(classes, [&](int c) { to[c * dx.category] = convert<T>(Wide(0)); });
        continue;
      }
      Wide logits[kHeld];
      if constexpr (kClasses > 0)
        each_class<kClasses>(classes, [&](int c) { logits[c] = convert<Wide>(from[c * x.category]); });
      const auto logit = [&](int c) {
        if constexpr (kClasses > 0)
          return logits[c];
        else
          return convert<Wide>(from[c * x.category]);
      };
      Scale<Wide> scale{0, 1};
      if (options.softmax) scale = softmax_scale<Wide, kClasses>(classes, logit);
      const Wide factor = 1 / scale.total, both = of_sums[number * kClassSums + 1],
                 hard = of_sums[number * kClassSums + 3];
      const auto share = [&](int c) { return options.softmax ? exp(logit(c) - scale.top) * factor : logit(c); };
      const auto slope = [&](int c, Wide p) {
        return of_p(c) * (options.squared ? 2 * p : Wide(1)) + (c == number ? both : Wide(0));
      };
      Wide common = of_logs + hard;
      if (options.softmax)
        each_class<kClasses>(classes, [&](int c) {
          const Wide p = share(c);
          common -= p * slope(c, p);
          if constexpr (kClasses > 0) logits[c] = p;
        });
      each_class<kClasses>(classes, [&](int c) {
        const Wide p = kClasses > 0 ? logit(c) : share(c);
        Wide d = slope(c, p);
        if (options.softmax) d = p * (d + common) - of_log(c) - (c == number ? hard : Wide(0));
        to[c * dx.category] = convert<T>(d);
      });
    }
  }
}

/// f.operator()<k>(), k at least `classes` if there is such a kernel, else the most.
template <class T, class F>
void with_classes(int64_t classes, const F& f) {
  if (classes <= 2) return f.template operator()<2>();
  if (classes <= 4) return f.template operator()<4>();
  if (classes <= 8) return f.template operator()<8>();
  f.template operator()<kMostClasses<T>>();
}

template <class T>
void forward(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options) {
  using Wide = compute_t<T>;
  const Launch launch(x);
  const int64_t classes = x.size[1], width = classes * kClassSums;
  const bool all = classes <= kMostClasses<T>;
  const int64_t chunks = all ? 1 : (classes + kMostClasses<T> - 1) / kMostClasses<T>;
  const Ranges shape(x, 8 * kBlock, chunks);
  const Workspace partial(launch, static_cast<size_t>(shape.blocks() * width) * sizeof(double));
  const bool needs_scales = !all && options.softmax;
  const int64_t voxels = needs_scales ? x.size[0] * x.size[2] : 0;
  const Workspace scales(launch, static_cast<size_t>(voxels) * sizeof(Scale<Wide>));
  if (voxels > 0) {
    scale_kernel<T><<<grid_size(voxels), kBlock, 0, launch.stream>>>(shape, Logits(x), static_cast<int>(classes),
                                                                     scales.as<Scale<Wide>>());
    check_launch(op);
  }
  if (shape.blocks() > 0)
    with_classes<T>(classes, [&]<int kClasses>() {
      sums_kernel<T, kClasses><<<grid_size(shape.blocks() * chunks, 1), kBlock, 0, launch.stream>>>(
          shape, Logits(x), ClassMap(op, target, classes, options.ignore_index, launch), static_cast<int>(classes),
          static_cast<int>(chunks), options, needs_scales ? scales.as<Scale<Wide>>() : nullptr, partial.as<double>());
      check_launch(op);
    });
  const int64_t sets = sums.size[0], rows = sets == 1 ? shape.blocks() : shape.ranges;
  join_kernel<<<grid_size(sets * width, 4), kBlock, 0, launch.stream>>>(sets, rows, width, partial.as<double>(),
                                                                        sums.as<double>());
  check_launch(op);
}

template <class T>
void backward(const View& dx, const View& grad, const View& x, const View& target, const ClassSums& options) {
  constexpr const char* kOp = "class_sums_backward";
  const Launch launch(x);
  const int64_t classes = x.size[1];
  const Ranges shape(x, kBlock, 1);
  const auto launch_kernel = [&]<int kClasses>() {
    gradient_kernel<T, kClasses><<<grid_size(shape.blocks(), 1), kBlock, 0, launch.stream>>>(
        shape, Logits(dx), Logits(x), ClassMap(kOp, target, classes, options.ignore_index, launch),
        static_cast<int>(classes), options, grad.as<const compute_t<T>>(),
        grad.size[0] == 1 ? 0 : classes * kClassSums);
    check_launch(kOp);
  };
  if (classes > kMostClasses<T>) return launch_kernel.template operator()<0>();
  with_classes<T>(classes, launch_kernel);
}

}  // namespace

namespace kernel {

void class_sums(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options) {
  if (sums.numel() == 0) return;
  dispatch(Floats(), x.dtype, op, "CUDA", [&]<class T>() { forward<T>(op, sums, x, target, options); });
}

void class_sums_backward(const View& dx, const View& grad, const View& x, const View& target,
                         const ClassSums& options) {
  if (x.numel() == 0) return;
  dispatch(Floats(), x.dtype, "class_sums_backward", "CUDA",
           [&]<class T>() { backward<T>(dx, grad, x, target, options); });
}

}  // namespace kernel
}  // namespace voxgrad::cuda
