// Copies with conversion, constant fills and ranges.
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "cuda/transpose.cuh"
#include "ops/scalar_ops.h"

namespace voxgrad::cuda::kernel {
namespace {

template <class To, class From>
struct Convert {
  __device__ To operator()(From x) const { return convert<To>(x); }
};

struct Same {
  template <class T>
  __device__ T operator()(T x) const {
    return x;
  }
};

/// Calls f<To, From>() if transpose_kernel copies between the dtypes: floats and halves, and words of one size.
template <class F>
void dispatch_transpose(DType to, DType from, const F& f) {
  if (to == from) return dispatch_word(item_size(to), [&]<class Word>() { f.template operator()<Word, Word>(); });
  for (const bool float_first : {true, false}) {
    if ((float_first ? to : from) != f32) continue;
    select<bf16, f16>(float_first ? from : to, [&]<DType half>() {
      using Half = std::conditional_t<half == bf16, BFloat16, Float16>;
      if (float_first)
        f.template operator()<float, Half>();
      else
        f.template operator()<Half, float>();
    });
  }
}

/// Copies by way of tiles where the innermost axes differ; else returns false.
bool copy_transposed(const View& out, const View& in) {
  const Nest<2> nest = make_nest<2>({out, in});
  const int axis = nest.numel() > 0 ? transposed_axis(nest) : 0;
  bool done = false;
  if (axis == 0) return done;
  dispatch_transpose(out.dtype, in.dtype, [&]<class To, class From>() {
    const Launch launch(out);
    for_each_part(nest, [&](const Nest<2>& part, const std::array<int64_t, 2>& base) {
      transpose(out.as<To>() + base[0], in.as<From>() + base[1], part, axis, launch.stream);
    });
    done = true;
  });
  return done;
}

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

template <class T>
__global__ void __launch_bounds__(kBlock) range(T* out, int64_t count, double start, double step) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) out[i] = convert<T>(arange_value(start, step, i));
}

}  // namespace

void copy(const View& out, const View& in) {
  if (copy_transposed(out, in)) return;
  if (out.dtype == in.dtype)
    return dispatch_word(item_size(out.dtype), [&]<class Word>() { map<Word, Word>("copy", Same(), out, in); });
  dispatch_cuda(Anything(), out.dtype, "copy", [&]<class To>() {
    dispatch_cuda(Anything(), in.dtype, "copy", [&]<class From>() {
      if constexpr (!std::is_same_v<To, From>) map<To, From>("copy", Convert<To, From>(), out, in);
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
    range<<<grid_size(count), kBlock, 0, launch.stream>>>(out.as<T>(), count, start, step);
    check_launch("arange");
  });
}

}  // namespace voxgrad::cuda::kernel
