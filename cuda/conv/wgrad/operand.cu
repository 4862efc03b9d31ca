#include "cuda/conv/wgrad/operand.h"

#include "cuda/conv/plan_common.h"
#include "cuda/conv/tensor_map.h"
#include "cuda/divisor.h"
#include "cuda/kernels.h"
#include "cuda/transpose.cuh"
#include "ops/halves.h"

namespace voxgrad::cuda::implicit_wgrad {
namespace {

constexpr const char* kOp = "conv weight gradient";

/// float32 voxels in any order of axes.
struct Voxels {
  const float* data;
  int64_t stride[4];  // of sample, depth, height, width
  Divisor size[3];    // width, height, depth
  int count, channels;
  bool dense;  // all voxels are as far apart as those of a line

  __device__ int64_t offset(int voxel) const {
    if (dense) return voxel * stride[3];
    const int w = size[0].take(voxel), h = size[1].take(voxel), d = size[2].take(voxel);
    return voxel * stride[0] + d * stride[1] + h * stride[2] + w * stride[3];
  }
};

Voxels describe(const View& view) {
  Voxels v{view.as<float>(), {view.stride[0], view.stride[2], view.stride[3], view.stride[4]}, {}, 0, 0, true};
  for (int a = 0; a < 3; ++a) v.size[a] = Divisor(static_cast<int>(view.size[4 - a]));
  v.count = static_cast<int>(view.numel() / view.size[1]);
  v.channels = static_cast<int>(view.size[1]);
  int64_t step = v.stride[3];
  for (const int axis : {4, 3, 2, 0}) {
    v.dense &= view.size[axis] == 1 || view.stride[axis] == step;
    step *= view.size[axis];
  }
  return v;
}

/// Each channel's largest finite magnitude, as bits, into zeros. A block looks at some voxels of `of_block` vectors of
/// `width` channels, which are innermost, or of one channel.
template <int width>
__global__ void __launch_bounds__(kBlock) find_maxima(const __grid_constant__ Voxels p, int64_t channel_stride,
                                                      Divisor of_block, Divisor tiles, uint32_t* maxima) {
  __shared__ uint32_t largest[kBlock * width];
  int block = static_cast<int>(blockIdx.x), row = static_cast<int>(threadIdx.x);
  const int first = tiles.take(block) * of_block.value * width, column = of_block.take(row) * width;
  const int rows = kBlock / of_block.value, step = static_cast<int>(gridDim.x) / tiles.value * rows;
  for (int i = static_cast<int>(threadIdx.x); i < kBlock * width; i += kBlock) largest[i] = 0;
  __syncthreads();
  uint32_t most[width] = {};
  if (row < rows && first + column < p.channels) {
    const float* const channel = p.data + (first + column) * channel_stride;
#pragma unroll 8
    for (int voxel = block * rows + row; voxel < p.count; voxel += step) {
      float x[width];
      load_values<width>(channel + p.offset(voxel), x);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const uint32_t bits = __float_as_uint(x[j]) & 0x7fffffff;
        if (bits < 0x7f800000) most[j] = max(most[j], bits);
      }
    }
    for (int j = 0; j < width; ++j) atomicMax(&largest[column + j], most[j]);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < of_block.value * width && first + i < p.channels; i += kBlock)
    atomicMax(&maxima[first + i], largest[i]);
}

/// x times a power of two, and what rounding that to f16 loses.
struct Halves {
  Float16 high, low;

  __device__ Halves(float x, uint32_t maximum) {
    const float scaled = x * __int_as_float(scale_exponent(maximum) + 127 << 23);
    high = Float16(scaled);
    const float rest = scaled - static_cast<float>(high);
    low = Float16(rest == rest ? rest : 0.0f);  // infinities
  }
};

/// For transpose(): of the channels from that of maxima[0] on.
struct ScaleChannel {
  const uint32_t* maxima;
  bool low;
  __device__ Float16 operator()(float x, uint32_t channel) const {
    const Halves halves(x, maxima[channel]);
    return low ? halves.low : halves.high;
  }
};

/// Vectors of `width` channels, innermost ones if they are more than 1; those of a group begin at multiples of `pitch`
/// in the copy.
template <int width>
__global__ void __launch_bounds__(kBlock)
    scale_to_halves(const __grid_constant__ Voxels p, int64_t channel_stride, const uint32_t* maxima, Divisor of_group,
                    int pitch, int64_t voxel_pitch, Float16* high, Float16* low) {
  const int vectors = p.channels / width;
  for (int64_t i = thread_index(); i < int64_t{p.count} * vectors; i += thread_count()) {
    const int voxel = static_cast<int>(i / vectors), channel = static_cast<int>(i - int64_t{voxel} * vectors) * width;
    float x[width];
    load_values<width>(p.data + p.offset(voxel) + channel * channel_stride, x);
    Vector<Float16, width> highs, lows;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const Halves halves(x[j], maxima[channel + j]);
      highs.v[j] = halves.high;
      lows.v[j] = halves.low;
    }
    const int group = of_group.divide(channel);
    const int64_t to = voxel * voxel_pitch + group * pitch + channel - group * of_group.value;
    store_vector(high + to, highs);
    if (low) store_vector(low + to, lows);
  }
}

/// The same voxels with innermost channels, dense.
View innermost(const View& view, void* data, DType dtype, int64_t channels) {
  View dense = view;
  dense.data = data;
  dense.dtype = dtype;
  dense.stride[1] = 1;
  for (const int axis : {4, 3, 2, 0}) {
    dense.stride[axis] = channels;
    channels *= view.size[axis];
  }
  return dense;
}

}  // namespace

Operand::Operand(const View& view, int64_t groups, int parts, const Launch& launch)
    : view_(view), launch_(launch), groups_(groups), parts_(parts) {
  const int64_t of_group = view.size[1] / groups;
  channel_pitch_ = static_cast<int>(groups > 1 && !as_it_lies() ? (of_group + 7) / 8 * 8 : of_group);
  if (view.dtype != DType::f32) return;
  maxima_.emplace(launch, static_cast<size_t>(view.size[1]) * sizeof(uint32_t));
  check_cuda(
      cudaMemsetAsync(maxima_->as<void>(), 0, static_cast<size_t>(view.size[1]) * sizeof(uint32_t), launch.stream),
      kOp);
  const Voxels voxels = describe(view);
  const bool vectors = view.stride[1] == 1 && view.size[1] % 4 == 0 && is_tma_tensor(view);
  const int width = vectors ? 4 : 1, columns = voxels.channels / width;
  const Divisor of_block(view.stride[1] == 1 ? std::min(columns, kBlock) : 1),
      tiles(divide_up(columns, of_block.value));
  const int64_t blocks = divide_up(voxels.count, int64_t{16} * (kBlock / of_block.value));
  const int64_t most = std::max<int64_t>(8 * kMultiprocessors / tiles.value, 1);
  const auto kernel = vectors ? find_maxima<4> : find_maxima<1>;
  kernel<<<static_cast<unsigned>(std::min(blocks, most) * tiles.value), kBlock, 0, launch.stream>>>(
      voxels, view.stride[1], of_block, tiles, maxima_->as<uint32_t>());
  check_launch(kOp);
}

bool Operand::as_it_lies() const {
  return is_half(view_.dtype) && is_tma_tensor(view_) && (groups_ == 1 || view_.size[1] / groups_ % 8 == 0);
}

void Operand::allocate(int64_t samples) {
  if (as_it_lies()) return;
  const int64_t voxels = samples * view_.size[2] * view_.size[3] * view_.size[4];
  copy_.emplace(launch_, static_cast<size_t>(voxels * parts_ * 2 * ((groups_ * channel_pitch_ + 7) / 8 * 8)));
}

View Operand::samples(int64_t first, int64_t count) {
  View view = view_;
  view.data = view_.as<char>() + first * view_.stride[0] * item_size(view_.dtype);
  view.size[0] = count;
  if (as_it_lies()) return view;
  const bool floats = view.dtype == DType::f32;
  const int64_t pitch = (groups_ * channel_pitch_ + 7) / 8 * 8, of_group = view.size[1] / groups_;
  View copy = innermost(view, copy_->as<void>(), floats ? DType::f16 : view.dtype, pitch);
  copy.size[1] = groups_ * channel_pitch_;
  View to = copy, from = view;  // channels that are dense in the copy: of all groups, or of one
  to.size[1] = from.size[1] = channel_pitch_ == of_group ? view.size[1] : of_group;
  const auto each_group = [&](const auto& f) {  // f(its part of the copy, of the tensor, its first channel)
    for (int64_t channel = 0; channel < view.size[1]; channel += from.size[1]) {
      View part = to, of = from;
      part.data = to.as<char>() + channel / of_group * channel_pitch_ * 2;
      of.data = from.as<char>() + channel * view.stride[1] * item_size(view.dtype);
      f(part, of, channel);
    }
  };
  if (!floats) {
    each_group([](const View& to, const View& from, int64_t) { kernel::copy(to, from); });
    return copy;
  }
  const Nest<2> nest = make_nest<2>({to, from});
  if (const int axis = transposed_axis(nest); axis > 0) {
    for (int i = 0; i < parts_; ++i)
      each_group([&](View part, const View& of, int64_t channel) {
        part.data = part.as<Float16>() + i * copy.size[0] * copy.stride[0];
        transpose<Float16, float>(part, of, nest, axis, ScaleChannel{maxima() + channel, i == 1});
      });
  } else {
    scale(copy, view);
  }
  copy.size[0] = parts_ * count;
  return copy;
}

void Operand::scale(const View& copy, const View& view) const {
  const Voxels voxels = describe(view);
  const int64_t of_group = view.size[1] / groups_, pitch = copy.stride[4];
  Float16* const high = copy.as<Float16>();
  Float16* const low = parts_ > 1 ? high + voxels.count * pitch : nullptr;
  const bool vectors = of_group % 8 == 0 && is_tma_tensor(view);
  const auto kernel = vectors ? scale_to_halves<8> : scale_to_halves<1>;
  kernel<<<grid_size(int64_t{voxels.count} * voxels.channels / (vectors ? 8 : 1)), kBlock, 0, launch_.stream>>>(
      voxels, view.stride[1], maxima(), Divisor(static_cast<int>(of_group)), channel_pitch_, pitch, high, low);
  check_launch(kOp);
}

}  // namespace voxgrad::cuda::implicit_wgrad
