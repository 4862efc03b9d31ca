// What group normalisation's forward and backward passes share: tensors (N, C, L) in either memory order, how each
// group is cut into ranges that blocks work on, and element-wise formulas whose constants change with the channel.
//
// Each pass has two forms. Where the tensors are contiguous, a group is one span of memory, read and written 16 bytes
// at a time; else a walk of single elements takes any strides.
#pragma once

#include <bit>

#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace voxgrad::cuda {
namespace {  // kernels of one name in two files

/// One tensor (N, C, L) as the kernels address it.
struct Volume {
  void* data = nullptr;
  int64_t sample = 0, channel = 0, position = 0;  // strides

  Volume() = default;
  explicit Volume(const View& v) : data(v.data), sample(v.stride[0]), channel(v.stride[1]), position(v.stride[2]) {}
};

/// All of the tensors are contiguous, and their vectors begin at the same elements.
template <class T, class... Views>
bool are_dense(const Views&... views) {
  const void* const data[] = {views.data...};
  size_t places = 0;
  const auto is_contiguous = [](const View& v) {
    return v.stride[2] == 1 && v.stride[1] == v.size[2] && v.stride[0] == v.size[1] * v.size[2];
  };
  for (const void* start : data)
    places |= size_t{1} << (reinterpret_cast<uintptr_t>(start) / sizeof(T) % kVectorWidth<T>);
  return (is_contiguous(views) && ...) && std::has_single_bit(places);
}

/// A vector over the channels, or `otherwise` for each of them.
struct PerChannel {
  void* data = nullptr;
  int64_t stride = 0;

  explicit PerChannel(const View* v) : data(v ? v->data : nullptr), stride(v ? v->stride[0] : 0) {}
  template <class T>
  __device__ T at(int64_t channel, T otherwise) const {
    return data ? static_cast<const T*>(data)[channel * stride] : otherwise;
  }
};

/// A matrix (N, groups).
struct Matrix {
  void* data;
  int64_t stride[2];

  explicit Matrix(const View& v) : data(v.data), stride{v.stride[0], v.stride[1]} {}
  template <class T>
  __device__ T& at(int64_t n, int64_t group) const {
    return static_cast<T*>(data)[n * stride[0] + group * stride[1]];
  }
};

/// The sizes, and how each group's elements are cut into ranges.
struct Groups {
  int64_t samples, channels, length, groups;
  int64_t group_channels;
  bool channels_inner;
  int64_t ranges, range;

  Groups(const View& x, int64_t group_count)
      : samples(x.size[0]),
        channels(x.size[1]),
        length(x.size[2]),
        groups(group_count),
        group_channels(channels / groups),
        channels_inner(channels > 1 && std::abs(x.stride[1]) < std::abs(x.stride[2])) {
    // Some thousand blocks, of four vectors a thread or a multiple of that.
    constexpr int64_t kShortest = 16 * kBlock, kBlocks = 4096;
    const int64_t most = std::max<int64_t>(kBlocks / std::max<int64_t>(samples * groups, 1), 1);
    const int64_t wanted = std::clamp<int64_t>((elements() + kShortest - 1) / kShortest, 1, most);
    range = std::max<int64_t>(((elements() + wanted - 1) / wanted + kShortest - 1) / kShortest * kShortest, 1);
    ranges = std::max<int64_t>((elements() + range - 1) / range, 1);
  }
  VG_HOST_DEVICE int64_t elements() const { return group_channels * length; }  // of a group
  VG_HOST_DEVICE int64_t blocks() const { return samples * groups * ranges; }
};

/// Walks through the elements of one range of one group, the inner axis first, in steps of a block.
class GroupWalk {
 public:
  __device__ GroupWalk(const Groups& shape, int64_t block, int64_t thread)
      : shape_(shape),
        group_number_(block / shape.ranges),
        columns_(shape.channels_inner ? shape.group_channels : shape.length) {
    const int64_t begin = (block - group_number_ * shape.ranges) * shape.range;
    const int64_t end = min(begin + shape.range, shape.elements());
    left_ = end - begin - thread;
    row_ = 0;
    column_ = begin + thread;
    carry();
  }
  __device__ bool inside() const { return left_ > 0; }
  __device__ void advance() {
    left_ -= blockDim.x;
    column_ += blockDim.x;
    carry();
  }
  __device__ int64_t sample() const { return group_number_ / shape_.groups; }
  __device__ int64_t group() const { return group_number_ % shape_.groups; }
  /// Of all channels.
  __device__ int64_t channel() const {
    return group() * shape_.group_channels + (shape_.channels_inner ? column_ : row_);
  }
  template <class T>
  __device__ T& in(const Volume& v) const {
    const int64_t position = shape_.channels_inner ? row_ : column_;
    return static_cast<T*>(v.data)[sample() * v.sample + channel() * v.channel + position * v.position];
  }

 private:
  __device__ void carry() {
    if (column_ < columns_ || left_ <= 0) return;
    const int64_t rows = quotient(column_, columns_);
    row_ += rows;
    column_ -= rows * columns_;
  }

  const Groups& shape_;
  int64_t group_number_, columns_, left_, row_, column_;
};

__device__ inline double2 add(const double2& a, const double2& b) { return {a.x + b.x, a.y + b.y}; }

/// out = formula(in...), element by element.
template <class T, class Formula, class... Volumes>
__global__ void __launch_bounds__(kBlock)
    walk_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Formula formula,
                const __grid_constant__ Volume out, const __grid_constant__ Volumes... in) {
  for (int64_t block = blockIdx.x; block < shape.blocks(); block += gridDim.x) {
    const typename Formula::Group group = formula.group(shape, quotient(block, shape.ranges));
    typename Formula::Channel constants{};
    int64_t channel = -1;
    for (GroupWalk walk(shape, block, threadIdx.x); walk.inside(); walk.advance()) {
      if (walk.channel() != channel) {
        channel = walk.channel();
        constants = formula.channel(group, channel);
      }
      walk.in<T>(out) = formula(group, constants, walk.in<const T>(in)...);
    }
  }
}

/// Where a thread is in a contiguous group.
struct ChannelCursor {
  int64_t length, channel, position;

  __device__ ChannelCursor(int64_t row_length, int64_t first_channel, int64_t element)
      : length(row_length), channel(first_channel), position(0) {
    advance(element);
  }
  __device__ void advance(int64_t elements) {
    position += elements;
    if (position < length) return;
    const int64_t rows = quotient(position, length);
    channel += rows;
    position -= rows * length;
  }
};

/// A vector of each input.
template <class T, int kInputs>
struct Vectors {
  Vector<T, Span<T>::kWidth> in[kInputs];

  template <class Formula>
  __device__ T apply(const Formula& formula, const typename Formula::Group& group,
                     const typename Formula::Channel& constants, int j) const {
    if constexpr (kInputs == 1)
      return formula(group, constants, in[0].v[j]);
    else
      return formula(group, constants, in[0].v[j], in[1].v[j]);
  }
};

/// The same as walk_kernel for contiguous tensors: `in` and `out` begin with the first group.
template <class T, class Formula, class... Ins>
__global__ void __launch_bounds__(kBlock)
    dense_kernel(const __grid_constant__ Groups shape, const __grid_constant__ Formula formula, T* out,
                 const Ins*... in) {
  constexpr int width = Span<T>::kWidth, kUnroll = sizeof...(Ins) > 1 ? 2 : 4;
  for (int64_t i = blockIdx.x; i < shape.blocks(); i += gridDim.x) {
    // From behind, where the pass before this one ended: some of that is still in the cache.
    const int64_t block = shape.blocks() - 1 - i;
    const int64_t number = quotient(block, shape.ranges), begin = (block - number * shape.ranges) * shape.range;
    const typename Formula::Group group = formula.group(shape, number);
    const int64_t first_channel = number % shape.groups * shape.group_channels;
    const int64_t start = number * shape.elements() + begin;
    const Span<T> span(out + start, min(shape.range, shape.elements() - begin));
    ChannelCursor cursor(shape.length, first_channel, begin + span.head + threadIdx.x * width);
    typename Formula::Channel constants{};
    int64_t channel = -1;  // that `constants` are of
    for (int64_t v = threadIdx.x; v < span.vectors; v += kUnroll * kBlock) {
      const int64_t element = start + span.head + v * width;
      Vectors<T, sizeof...(Ins)> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (v + u * kBlock < span.vectors) loaded[u] = {{load_vector<T, width>(in + element + u * kBlock * width)...}};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (v + u * kBlock >= span.vectors) continue;
        Vector<T, width> result;
        if (cursor.position + width <= shape.length) {
          if (cursor.channel != channel) constants = formula.channel(group, channel = cursor.channel);
#pragma unroll
          for (int j = 0; j < width; ++j) result.v[j] = loaded[u].apply(formula, group, constants, j);
        } else {
          ChannelCursor at = cursor;
#pragma unroll
          for (int j = 0; j < width; ++j, at.advance(1))
            result.v[j] = loaded[u].apply(formula, group, formula.channel(group, at.channel), j);
        }
        store_vector(out + element + u * kBlock * width, result);
        cursor.advance(kBlock * width);
      }
    }
    for (int64_t s = threadIdx.x; s < span.scalars(); s += kBlock) {
      const int64_t e = span.scalar(s);
      const ChannelCursor at(shape.length, first_channel, begin + e);
      out[start + e] = formula(group, formula.channel(group, at.channel), in[start + e]...);
    }
  }
}

template <class T, class Formula, class... Views>
void apply_formula(const char* op, const Groups& shape, const Formula& formula, const Launch& launch, const View& out,
                   const Views&... in) {
  if (out.numel() == 0) return;
  const unsigned grid = grid_size(shape.blocks(), 1);
  if (are_dense<T>(out, in...))
    dense_kernel<T><<<grid, kBlock, 0, launch.stream>>>(shape, formula, out.as<T>(), in.template as<const T>()...);
  else
    walk_kernel<T><<<grid, kBlock, 0, launch.stream>>>(shape, formula, Volume(out), Volume(in)...);
  check_launch(op);
}

}  // namespace
}  // namespace voxgrad::cuda
