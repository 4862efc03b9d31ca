// Implements the kernels that prepare the operands of the channels-last weight gradient.
#include "cuda/conv/sm90/wgrad/operand.h"

#include <cooperative_groups.h>

#include "cuda/conv/common/tensor_map.h"
#include "cuda/conv/common/wgrad_splits.h"
#include "cuda/conv/plan/common.h"
#include "cuda/conv/sm90/wgmma.cuh"
#include "cuda/detail/divisor.h"
#include "cuda/detail/kernels.h"
#include "cuda/transpose.cuh"
#include "ops/detail/halves.h"

namespace voxgrad::cuda::implicit_wgrad {
namespace {

constexpr const char* kOp = "conv weight gradient";
// Constants of scale_slices(): channels of a slice, CTAs of a cluster, threads of a CTA, and the maximum number of
// voxels.
constexpr int kSlice = 16, kCluster = 8, kSliceBlock = 512, kMaxSliceVoxels = 1 << 15;

/// The voxels of a float32 view with any strides.
struct Voxels {
  const float* data;
  int64_t stride[4];  // strides of sample, depth, height and width
  Divisor size[3];    // width, height, depth
  int count;          // number of voxels
  int channels;
  bool dense;  // the distance between consecutive voxels is always stride[3]

  __device__ int64_t offset(int voxel) const {
    if (dense) return voxel * stride[3];
    const int w = size[0].take_digit(voxel), h = size[1].take_digit(voxel), d = size[2].take_digit(voxel);
    return voxel * stride[0] + d * stride[1] + h * stride[2] + w * stride[3];
  }
};

Voxels describe(const View& view) {
  Voxels v{view.as<float>(), {view.stride[0], view.stride[2], view.stride[3], view.stride[4]}, {}, 0, 0, true};
  for (int a = 0; a < 3; ++a) v.size[a] = Divisor(static_cast<int>(view.size[4 - a]));
  v.count = static_cast<int>(view.numel() / view.size[1]);
  v.channels = static_cast<int>(view.size[1]);
  v.dense = is_dense(view, {4, 3, 2, 0}, v.stride[3]);
  return v;
}

/// Sets `most` to the maximum of `most` and the magnitude of x, as bits. Ignores infinities and NaN.
__device__ void keep_finite(uint32_t& most, float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
  if (bits < 0x7f800000) most = max(most, bits);
}

/// Computes the largest finite magnitude of each channel, as bits. `maxima` must be initialized with zeros. A CTA
/// reads a part of the voxels for `of_block` vectors of `width` channels. If channels are not innermost, a CTA reads
/// one channel.
template <int width>
__global__ void __launch_bounds__(kBlock) find_maxima_kernel(const __grid_constant__ Voxels p, int64_t channel_stride,
                                                             Divisor of_block, Divisor tiles, uint32_t* maxima) {
  wait_for_previous_kernels();
  __shared__ uint32_t largest[kBlock * width];
  int block = static_cast<int>(blockIdx.x), row = static_cast<int>(threadIdx.x);
  const int first = tiles.take_digit(block) * of_block.value() * width, column = of_block.take_digit(row) * width;
  const int rows = kBlock / of_block.value(), step = static_cast<int>(gridDim.x) / tiles.value() * rows;
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
      for (int j = 0; j < width; ++j) keep_finite(most[j], x[j]);
    }
    for (int j = 0; j < width; ++j) atomicMax(&largest[column + j], most[j]);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < of_block.value() * width && first + i < p.channels; i += kBlock)
    atomicMax(&maxima[first + i], largest[i]);
}

/// A scaled value as two f16: the rounded value (high) and its rounding error (low).
struct Halves {
  Float16 high;
  Float16 low;

  __device__ Halves(float x, uint32_t maximum) {
    const float scaled = x * __int_as_float(scale_exponent(maximum) + 127 << 23);
    high = Float16(scaled);
    const float rest = scaled - static_cast<float>(high);
    low = Float16(rest == rest ? rest : 0.0f);  // no rounding error for infinities
  }
};

/// Scales values of neighboring channels, whose maxima begin at `maxima`, and stores both parts at offset `to`. `low`
/// is null if there is only one part.
template <int width>
__device__ void store_halves(const float (&x)[width], const uint32_t* maxima, Float16* high, Float16* low, int64_t to) {
  Vector<Float16, width> highs, lows;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    const Halves halves(x[j], maxima[j]);
    highs.v[j] = halves.high;
    lows.v[j] = halves.low;
  }
  store_vector(high + to, highs);
  if (low) store_vector(low + to, lows);
}

/// Converts elements in transpose(). Channel 0 is the channel of maxima[0].
struct ScaleChannel {
  const uint32_t* maxima;
  bool low;
  __device__ Float16 operator()(float x, uint32_t channel) const {
    const Halves halves(x, maxima[channel]);
    return low ? halves.low : halves.high;
  }
};

/// Converts a tensor to scaled halves, in vectors of `width` channels. Channels must be innermost if `width` is more
/// than 1. In the copy, the channels of each group begin at a multiple of `pitch`.
template <int width>
__global__ void __launch_bounds__(kBlock)
    scale_to_halves(const __grid_constant__ Voxels p, int64_t channel_stride, const uint32_t* maxima, Divisor of_group,
                    int pitch, int64_t voxel_pitch, Float16* high, Float16* low) {
  wait_for_previous_kernels();
  const int vectors = p.channels / width;
  for (int64_t i = thread_index(); i < int64_t{p.count} * vectors; i += thread_count()) {
    const int voxel = static_cast<int>(i / vectors), channel = static_cast<int>(i - int64_t{voxel} * vectors) * width;
    float x[width];
    load_values<width>(p.data + p.offset(voxel) + channel * channel_stride, x);
    const int group = of_group.divide(channel);
    const int64_t to = voxel * voxel_pitch + group * pitch + channel - group * of_group.value();
    store_halves(x, maxima + channel, high, low, to);
  }
}

/// An operand of scale_slices().
struct SlicedOperand {
  Voxels voxels;
  uint32_t* maxima;
  Float16* high;
  Float16* low;      // null if there is only one part
  Divisor of_group;  // channels of a group
  int group_pitch;   // elements of the copy from one group to the next
  int slices;
  int64_t voxel_pitch;  // elements of the copy from one voxel to the next
};

/// Computes the maxima of both operands and scales both. Launch: a cluster of kCluster CTAs for each slice of channels.
/// The CTAs of a cluster divide the voxels, exchange their maxima, and read the voxels a second time.
__global__ void __launch_bounds__(kSliceBlock)
    scale_slices(const __grid_constant__ SlicedOperand x, const __grid_constant__ SlicedOperand y) {
  wait_for_previous_kernels();
#if VOXGRAD_HAS_WGMMA
  constexpr int kVector = 4, kLanes = kSlice / kVector, kStep = kCluster * kSliceBlock / kLanes;
  __shared__ uint32_t largest[kSlice];
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = static_cast<int>(threadIdx.x), number = static_cast<int>(blockIdx.x) / kCluster;
  const SlicedOperand& p = number < x.slices ? x : y;
  const int first = (number < x.slices ? number : number - x.slices) * kSlice;
  const int column = thread % kLanes * kVector, channel = first + column;
  const int voxel = static_cast<int>(cluster.block_rank()) * (kSliceBlock / kLanes) + thread / kLanes;
  const int count = channel < p.voxels.channels ? p.voxels.count : 0;
  if (thread < kSlice) largest[thread] = 0;
  __syncthreads();
  uint32_t most[kVector] = {};
#pragma unroll 4
  for (int i = voxel; i < count; i += kStep) {
    float value[kVector];
    load_values<kVector>(p.voxels.data + p.voxels.offset(i) + channel, value);
#pragma unroll
    for (int j = 0; j < kVector; ++j) keep_finite(most[j], value[j]);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    for (int lanes = kLanes; lanes < 32; lanes *= 2) most[j] = max(most[j], __shfl_xor_sync(~0u, most[j], lanes));
    if (thread % 32 < kLanes) atomicMax(&largest[column + j], most[j]);
  }
  cluster.sync();
  for (int j = 0; j < kVector; ++j)
    for (unsigned block = 0; block < kCluster; ++block)
      most[j] = max(most[j], cluster.map_shared_rank(largest, block)[column + j]);
  cluster.sync();  // other CTAs may still read the maxima of this CTA
  const int group = p.of_group.divide(channel);
  const int to = group * p.group_pitch + channel - group * p.of_group.value();
  if (voxel == 0)
    for (int j = 0; j < kVector && count > 0; ++j) p.maxima[channel + j] = most[j];
#pragma unroll 4
  for (int i = voxel; i < count; i += kStep) {
    float value[kVector];
    load_values<kVector>(p.voxels.data + p.voxels.offset(i) + channel, value);
    store_halves(value, most, p.high, p.low, i * p.voxel_pitch + to);
  }
#endif
}

}  // namespace

Operand::Operand(const View& view, int64_t groups, int parts, const Launch& launch)
    : view_(view), launch_(launch), groups_(groups), parts_(parts) {
  const int64_t of_group = view.size[1] / groups;
  channel_pitch_ = static_cast<int>(groups > 1 && !as_it_lies() ? (of_group + 7) / 8 * 8 : of_group);
}

void Operand::find_maxima() const {
  const View& view = view_;
  const Voxels voxels = describe(view);
  const bool vectors = view.stride[1] == 1 && view.size[1] % 4 == 0 && is_tma_tensor(view);
  const int width = vectors ? 4 : 1, columns = voxels.channels / width;
  const Divisor of_block(view.stride[1] == 1 ? std::min(columns, kBlock) : 1),
      tiles(divide_up(columns, of_block.value()));
  const int64_t blocks = divide_up(voxels.count, int64_t{16} * (kBlock / of_block.value()));
  const int64_t most = std::max<int64_t>(8 * kMultiprocessors / tiles.value(), 1);
  const auto kernel = vectors ? find_maxima_kernel<4> : find_maxima_kernel<1>;
  launch_kernel(kOp, kernel, static_cast<unsigned>(std::min(blocks, most) * tiles.value()), kBlock, 0, launch_.stream,
                voxels, view.stride[1], of_block, tiles, maxima_);
}

bool Operand::as_it_lies() const {
  return is_half(view_.dtype) && is_tma_tensor(view_) && (groups_ == 1 || view_.size[1] / groups_ % 8 == 0);
}

void Operand::allocate(int64_t samples) {
  if (as_it_lies()) return;
  const int64_t voxels = samples * view_.size[2] * view_.size[3] * view_.size[4];
  copy_.emplace(launch_, static_cast<size_t>(voxels * parts_ * 2 * ((groups_ * channel_pitch_ + 7) / 8 * 8)));
  samples_ = samples;
}

View Operand::copy_of(const View& view) const {
  View copy = view;
  copy.data = copy_->as<void>();
  if (view.dtype == DType::f32) copy.dtype = DType::f16;
  copy.size[1] = groups_ * channel_pitch_;
  lay_out(copy, {1, 4, 3, 2, 0});
  return copy;
}

bool Operand::suits_slices() const {
  const int64_t channels = view_.size[1];
  return view_.dtype == DType::f32 && view_.stride[1] == 1 && channels / groups_ % 4 == 0 && is_tma_tensor(view_) &&
         samples_ == view_.size[0] && view_.numel() / channels <= kMaxSliceVoxels;
}

View Operand::samples(int64_t first, int64_t count) {
  View view = view_;
  view.data = view_.as<char>() + first * view_.stride[0] * item_size(view_.dtype);
  view.size[0] = count;
  if (as_it_lies()) return view;
  const bool floats = view.dtype == DType::f32;
  const int64_t of_group = view.size[1] / groups_;
  View copy = copy_of(view);
  if (scaled_) {
    copy.size[0] = parts_ * count;
    return copy;
  }
  View to = copy, from = view;  // the channels that are contiguous in the copy: those of all groups, or of one group
  to.size[1] = from.size[1] = channel_pitch_ == of_group ? view.size[1] : of_group;
  const auto each_group = [&](const auto& f) {  // calls f(part of the copy, part of the tensor, first channel)
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
        transpose<Float16, float>(part, of, nest, axis, ScaleChannel{maxima_ + channel, i == 1});
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
  launch_kernel(kOp, kernel, grid_size(int64_t{voxels.count} * voxels.channels / (vectors ? 8 : 1)), kBlock, 0,
                launch_.stream, voxels, view.stride[1], maxima_, Divisor(static_cast<int>(of_group)), channel_pitch_,
                pitch, high, low);
}

Scales::Scales(Operand& x, Operand& y, const Launch& launch) {
  if (x.view_.dtype != DType::f32) return;
  const auto channels = static_cast<size_t>(x.view_.size[1] + y.view_.size[1]);
  maxima_.emplace(launch, channels * sizeof(uint32_t));
  x.maxima_ = maxima_->as<uint32_t>();
  y.maxima_ = x.maxima_ + x.view_.size[1];
  if (!x.suits_slices() || !y.suits_slices()) {
    check_cuda(cudaMemsetAsync(x.maxima_, 0, channels * sizeof(uint32_t), launch.stream), kOp);
    x.find_maxima();
    y.find_maxima();
    return;
  }
  const auto describe_slices = [](Operand& of) {
    of.scaled_ = true;
    const Voxels voxels = describe(of.view_);
    const View copy = of.copy_of(of.view_);
    const int64_t pitch = copy.stride[4];
    Float16* const high = copy.as<Float16>();
    return SlicedOperand{voxels,
                         of.maxima_,
                         high,
                         of.parts_ > 1 ? high + voxels.count * pitch : nullptr,
                         Divisor(static_cast<int>(of.view_.size[1] / of.groups_)),
                         of.channel_pitch_,
                         divide_up(voxels.channels, kSlice),
                         pitch};
  };
  const SlicedOperand of_x = describe_slices(x), of_y = describe_slices(y);
  launch_in_clusters(kOp, kCluster, scale_slices, static_cast<unsigned>(kCluster * (of_x.slices + of_y.slices)),
                     kSliceBlock, 0, launch.stream, of_x, of_y);
}

}  // namespace voxgrad::cuda::implicit_wgrad
