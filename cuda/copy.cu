// Copies with conversion, constant fills, and arange.
#include <type_traits>

#include "cuda/detail/kernels.h"
#include "cuda/map.cuh"
#include "cuda/transpose.cuh"
#include "ops/detail/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

template <class To, class From>
struct Convert {
  __device__ To operator()(From x) const { return convert<To>(x); }
};

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

/// Computes out[i] = start + i * step for `count` contiguous elements. Launch: one thread per element in a 1-D
/// grid-stride loop, kBlock threads per CTA. No shared memory.
template <class T>
__global__ void __launch_bounds__(kBlock) arange_kernel(T* out, int64_t count, double start, double step) {
  wait_for_previous_kernels();
  for (int64_t i = thread_index(); i < count; i += thread_count()) out[i] = convert<T>(arange_value(start, step, i));
}

}  // namespace

void copy(const View& out, const View& in) {
  const Nest<2> nest = make_nest<2>({out, in});
  const int axis = transposed_axis(nest);
  const auto copy_as = [&]<class To, class From>() {
    if constexpr (std::is_same_v<compute_t<To>, compute_t<From>>)
      if (axis > 0) return transpose<To, From>(out, in, nest, axis);
    map<To, From>("copy", Convert<To, From>(), out, in);
  };
  if (out.dtype == in.dtype)
    return dispatch_word(item_size(out.dtype), [&]<class Word>() { copy_as.template operator()<Word, Word>(); });
  dispatch_cuda(Anything(), out.dtype, "copy", [&]<class To>() {
    dispatch_cuda(Anything(), in.dtype, "copy", [&]<class From>() {
      if constexpr (!std::is_same_v<To, From>) copy_as.template operator()<To, From>();
    });
  });
}

void fill(const View& out, double value) {
  dispatch_cuda(Anything(), out.dtype, "fill", [&]<class T>() {
    const T element = convert<T>(value);
    dispatch_word(sizeof(T), [&]<class Word>() {
      if constexpr (sizeof(Word) == sizeof(T)) map<Word>("fill", Constant<Word>{std::bit_cast<Word>(element)}, out);
    });
  });
}

void arange(const View& out, double start, double step) {
  const int64_t count = out.numel();
  if (count == 0) return;
  dispatch_cuda(Numbers(), out.dtype, "arange", [&]<class T>() {
    const Launch launch(out);
    launch_kernel("arange", arange_kernel<T>, grid_size(count), kBlock, 0, launch.stream, out.as<T>(), count, start,
                  step);
  });
}

}  // namespace voxgrad::cuda::kernel
