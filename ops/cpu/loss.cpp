// Computes class_sums and its gradient. class_sums returns sums over the voxels for each class
// (ops/detail/kernels.def), from which losses are computed.
#include <algorithm>
#include <vector>

#include "ops/cpu/loops.h"
#include "ops/detail/class_voxel.h"

namespace voxgrad::cpu {

void class_sums(const char* op, const View& sums, const View& x, const View& target, const ClassSums& options) {
  constexpr int64_t kPart = 4096;  // voxels per part; one thread adds up a part
  const int64_t length = x.size[2], classes = x.size[1], sums_per_part = classes * kClassSums;
  const int64_t parts = divide_up(length, kPart), count = x.size[0] * parts;
  std::vector<double> partial(static_cast<size_t>(count * sums_per_part));
  const auto add_part = [&]<class T, int kClasses>(int64_t part) {
    const int64_t n = part / parts, first = part % parts * kPart, last = std::min(first + kPart, length);
    double part_sums[kClasses][kClassSums] = {};
    for (int64_t l = first; l < last; ++l) {
      const int64_t number = class_at(target, n, l);
      if (number == options.ignore_index) continue;
      ClassVoxel<compute_t<T>, kClasses> voxel{static_cast<int>(classes), {}};
      voxel.load(x.as<const T>() + n * x.stride[0] + l * x.stride[2], x.stride[1]);
      voxel.add_to(part_sums, number, options);
    }
    std::copy_n(part_sums[0], sums_per_part, partial.data() + part * sums_per_part);
  };
  dispatch(Floats(), x.dtype, op, "CPU", [&]<class T>() {
    with_classes(classes, [&]<int kClasses>() {
      parallel_for(count, grain_of(std::min(kPart, length) * classes * 8), [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) add_part.template operator()<T, kClasses>(part);
      });
    });
  });
  const int64_t rows = sums.size[0] == 1 ? count : parts;
  reduce(ReduceOp::sum, sums_of_parts(sums, sums.data, 1), sums_of_parts(sums, partial.data(), rows));
}

void class_sums_backward(const View& dx, const View& grad, const View& x, const View& target,
                         const ClassSums& options) {
  const int64_t length = x.size[2], classes = x.size[1], grad_step = grad.size[0] == 1 ? 0 : classes * kClassSums;
  const auto differentiate = [&]<class T, int kClasses>(int64_t n, int64_t l) {
    const int64_t number = class_at(target, n, l);
    ClassVoxel<compute_t<T>, kClasses> voxel{static_cast<int>(classes), {}};
    if (number != options.ignore_index) {
      voxel.load(x.as<const T>() + n * x.stride[0] + l * x.stride[2], x.stride[1]);
      voxel.differentiate(grad.as<const compute_t<T>>() + n * grad_step, number, options);
    }
    voxel.store(dx.as<T>() + n * dx.stride[0] + l * dx.stride[2], dx.stride[1]);
  };
  dispatch(Floats(), x.dtype, "class_sums_backward", "CPU", [&]<class T>() {
    with_classes(classes, [&]<int kClasses>() {
      parallel_for(x.size[0] * length, grain_of(classes * 8), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) differentiate.template operator()<T, kClasses>(i / length, i % length);
      });
    });
  });
}

}  // namespace voxgrad::cpu
