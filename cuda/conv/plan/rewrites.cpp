// Implements the rewrites of a problem as another problem.
#include "cuda/conv/plan/rewrites.h"

#include <algorithm>

#include "cuda/conv/plan/common.h"
#include "cuda/conv/plan/depthwise.h"
#include "ops/detail/halves.h"

namespace voxgrad::cuda {
namespace {

constexpr double kCopyKernel = 4000;        // clocks of a kernel that copies a small tensor
constexpr double kTransposed = 3;           // transfers per byte of a copy in another layout
constexpr int64_t kMaxPhaseChannels = 128;  // more channels make no difference to products and stores

/// Returns whether the kernel is as wide as its stride. The taps of neighboring results are then neighboring voxels and
/// do not overlap.
bool has_width_of_stride(const ConvProblem& p) {
  const ConvGeometry& g = p.geometry;
  const int64_t stride = g.stride[2];
  if (stride == 1 || p.kernel[2] != stride || g.dilation[2] > 1 || g.padding[2] > 0 || p.groups > 1) return false;
  if (!p.weight_channels_last) return false;
  return p.pass == ConvPass::dgrad ? p.out_channels_last && p.out_stride[2] == p.out_channels &&
                                         p.out_size[2] == p.in_size[2] * stride && p.groups * p.out_channels > 1
                                   : p.in_channels_last && p.in_stride[2] == p.in_channels;
}

bool suits_width_as_channels(const ConvProblem& p) {
  if (!is_channels_last(p) || p.dtype == DType::f64) return false;
  const bool one_channel = p.pass != ConvPass::dgrad && p.in_channels == 1 && p.groups == 1 && p.kernel[2] > 1 &&
                           p.out_channels > 8 && p.out_channels_last;
  return one_channel || has_width_of_stride(p);
}

/// Returns the clocks of the padded copy of x and of the copy of the weights, if they are necessary.
double padded_copy_cycles(const ConvProblem& p) {
  if (has_width_of_stride(p)) return 0;
  return 2 * kCopyKernel + memory_cycles(2.0 * static_cast<double>(p.batch * p.in_size[0] * p.in_size[1] *
                                                                   p.in_size[2] * item_size(p.dtype)));
}

/// The rewritten input is channels-last unless it is a view of a padded copy.
ConvProblem with_width_as_channels(ConvProblem p) {
  const bool dgrad = p.pass == ConvPass::dgrad;
  p.in_channels_last &= has_width_of_stride(p);
  (dgrad ? p.out_channels : p.in_channels) *= p.kernel[2];
  (dgrad ? p.out_size : p.in_size)[2] = (dgrad ? p.in_size : p.out_size)[2];
  if (dgrad) p.out_stride[2] *= p.kernel[2];
  p.kernel[2] = p.geometry.stride[2] = p.geometry.dilation[2] = 1;
  p.geometry.padding[2] = 0;
  return p;
}

bool suits_phases_as_channels(const ConvProblem& p) {
  const int64_t stride = p.geometry.stride[2], padding = p.geometry.padding[2];
  return p.pass == ConvPass::dgrad && stride > 1 && padding < p.kernel[2] && p.geometry.dilation[2] == 1 &&
         p.groups == 1 && p.dtype != DType::f64 && p.out_channels_last && p.out_stride[2] == p.out_channels &&
         p.out_size[2] % stride == 0 && p.out_channels > 1 && p.out_channels * stride <= kMaxPhaseChannels &&
         !has_width_of_stride(p);
}

ConvProblem with_phases_as_channels(ConvProblem p) {
  int64_t &stride = p.geometry.stride[2], &padding = p.geometry.padding[2];
  // Result q of phase r reads input q + j with tap r + padding - stride * j.
  const int64_t last = (stride - 1 + padding) / stride;
  p.kernel[2] = last + (p.kernel[2] - 1 - padding) / stride + 1;
  padding = last;
  p.out_channels *= stride;
  p.out_stride[2] *= stride;
  p.out_size[2] /= stride;
  stride = 1;
  return p;
}

bool suits_patches_as_channels(const ConvProblem& p) {
  const bool dgrad = p.pass == ConvPass::dgrad;
  bool patches =
      p.groups == 1 && p.dtype != DType::f64 && p.weight_rows && (dgrad ? p.in_channels_last : p.out_channels_last);
  for (int a = 0; a < 3; ++a) {
    const int64_t results = dgrad ? p.in_size[a] : p.out_size[a];
    patches &= p.kernel[a] == p.geometry.stride[a] && p.geometry.padding[a] == 0 && p.geometry.dilation[a] == 1 &&
               (dgrad ? p.out_size[a] == results * p.kernel[a] : results > 0);
  }
  const int64_t channels = dgrad ? p.out_channels : p.in_channels, taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  const int64_t patch_bytes = channels * taps * static_cast<int64_t>(item_size(p.dtype));
  const Triple& grid = dgrad ? p.in_size : p.out_size;
  return patches && taps > 1 && patch_bytes % 16 == 0 &&
         p.batch * grid[0] * grid[1] * grid[2] * patch_bytes <= kMaxCopied;
}

/// The copy reads and writes all elements of x, in pieces of a line of a patch.
double patch_copy_cycles(const ConvProblem& p) {
  const bool dgrad = p.pass == ConvPass::dgrad;
  const Triple& size = dgrad ? p.out_size : p.in_size;
  const int64_t channel_bytes = (dgrad ? p.out_channels : p.in_channels) * static_cast<int64_t>(item_size(p.dtype));
  const double piece = static_cast<double>(channel_bytes * p.kernel[2]),
               bytes = static_cast<double>(p.batch * channel_bytes * size[0] * size[1] * size[2]);
  return kCopyKernel + memory_cycles((3 + 128 / piece) * bytes);
}

/// Returns a channels-last view with padded voxels, without memory.
View channels_last(const ConvProblem& p, int64_t channels, const Triple& size) {
  View view{.dtype = p.dtype, .rank = 5, .size = {p.batch, channels, size[0], size[1], size[2]}};
  lay_out(view, {1, 4, 3, 2, 0});
  return view;
}

ConvProblem with_patches_as_channels(ConvProblem p) {
  const bool dgrad = p.pass == ConvPass::dgrad;
  int64_t& channels = dgrad ? p.out_channels : p.in_channels;
  const Triple size = dgrad ? p.in_size : p.out_size;
  channels *= p.kernel[0] * p.kernel[1] * p.kernel[2];
  (dgrad ? p.out_size : p.in_size) = size;
  const View copy = channels_last(p, channels, size);
  if (dgrad)
    set_out_layout(p, copy);
  else
    set_in_layout(p, copy);
  p.kernel = {1};
  p.geometry = {{1}, {0}, {1}, 1};
  return p;
}

bool suits_mirrored(const ConvProblem& p) {
  bool suits = p.groups == 1;
  for (int a = 0; a < 3; ++a)
    suits &= p.geometry.stride[a] == 1 && p.geometry.padding[a] <= (p.kernel[a] - 1) * p.geometry.dilation[a];
  return suits && (p.pass != ConvPass::wgrad || p.in_dense);
}

ConvProblem with_mirrored_kernel(ConvProblem p) {
  for (int a = 0; a < 3; ++a)
    p.geometry.padding[a] = (p.kernel[a] - 1) * p.geometry.dilation[a] - p.geometry.padding[a];
  p.weight_channels_last = p.weight_rows = false;
  if (p.pass != ConvPass::wgrad) {
    p.pass = p.pass == ConvPass::fprop ? ConvPass::dgrad : ConvPass::fprop;
    return p;
  }
  std::swap(p.in_channels, p.out_channels);
  std::swap(p.in_size, p.out_size);
  std::swap(p.in_stride, p.out_stride);
  std::swap(p.in_channel_stride, p.out_channel_stride);
  std::swap(p.in_channels_last, p.out_channels_last);
  std::swap(p.in_aligned, p.out_aligned);
  std::swap(p.in_dense, p.out_dense);
  std::swap(p.in_planes, p.out_planes);
  p.out_sample_stride = p.out_size[0] * p.out_size[1] * p.out_size[2] * p.out_channels;
  return p;
}

/// Returns the problem for contiguous copies, which through_float32() makes.
ConvProblem with_float32_copies(ConvProblem p) {
  const auto contiguous = [](int64_t outer, int64_t channels, const Triple& size) {
    const View view{.rank = 5, .size = {outer, channels, size[0], size[1], size[2]}};
    return dense_like(view, nullptr, DType::f32);
  };
  const bool dgrad = p.pass == ConvPass::dgrad;
  p.dtype = DType::f32;
  set_in_layout(p, contiguous(p.batch, p.groups * p.in_channels, p.in_size));
  set_out_layout(p, contiguous(p.batch, p.groups * p.out_channels, p.out_size));
  set_weight_layout(p, contiguous(p.groups * (dgrad ? p.in_channels : p.out_channels),
                                  dgrad ? p.out_channels : p.in_channels, p.kernel));
  return p;
}

/// Returns the problem with channels-last copies of the tensors that have another layout or that TMA cannot read, or
/// nothing if both tensors are channels-last or the copies would be too large.
std::vector<RewrittenProblem> with_channels_last_copies(const ConvProblem& problem) {
  ConvProblem p = problem;
  double cycles = 0;
  int64_t bytes = 0;
  const auto copied = [&](int64_t channels, const Triple& size) {
    const View view = channels_last(p, channels, size);
    const int64_t copy = view.size[0] * view.stride[0] * item_size(p.dtype);
    bytes += copy;
    cycles += kCopyKernel + memory_cycles(kTransposed * static_cast<double>(copy));
    return view;
  };
  if (p.in_channels_last && p.out_channels_last) return {};
  if (!p.in_channels_last || !p.in_aligned) set_in_layout(p, copied(p.groups * p.in_channels, p.in_size));
  if (!p.out_channels_last || !p.out_aligned) set_out_layout(p, copied(p.groups * p.out_channels, p.out_size));
  if (bytes > kMaxCopied || p.dtype == DType::f64 || !p.wgmma) return {};
  return {{ConvRewrite::channels_last_copies, p, 1, cycles}};
}

/// Returns whether the channels of each group begin at multiples of 32 bytes, which tensor core kernels require.
bool has_wide_groups(const ConvProblem& p) {
  const int64_t wide = 32 / static_cast<int64_t>(item_size(p.dtype));
  return p.in_channels % wide == 0 && p.out_channels % wide == 0;
}

/// Yields the problem with two groups merged into one, and with more groups if they have at most 64 channels together.
std::vector<RewrittenProblem> with_merged_groups(const ConvProblem& problem) {
  std::vector<RewrittenProblem> result;
  const int64_t channels = std::max(problem.in_channels, problem.out_channels);
  for (int64_t count = 2; count <= problem.groups && (count <= 2 || count * channels <= 64); ++count) {
    if (problem.groups % count != 0) continue;
    ConvProblem p = problem;
    p.groups /= count;
    p.in_channels *= count;
    p.out_channels *= count;
    if (count < problem.groups && !has_wide_groups(p)) continue;
    result.push_back({ConvRewrite::merged_groups, p, count, 2 * kCopyKernel});
  }
  return result;
}

}  // namespace

std::vector<RewrittenProblem> rewritten_problems(ConvRewrite rewrite, const ConvProblem& p) {
  switch (rewrite) {
    case ConvRewrite::none:
      return {{rewrite, p}};
    case ConvRewrite::width_as_channels:
      if (suits_width_as_channels(p)) return {{rewrite, with_width_as_channels(p), 1, padded_copy_cycles(p)}};
      return {};
    case ConvRewrite::merged_groups:
      // Without a merge, an infinity in a channel of a depthwise convolution does not reach other channels.
      if (p.groups > 1 && is_channels_last(p) && !plan_depthwise(p)) return with_merged_groups(p);
      return {};
    case ConvRewrite::phases_as_channels:
      if (suits_phases_as_channels(p))
        return {{rewrite, with_phases_as_channels(p), 1, static_cast<double>(1 + p.geometry.stride[2]) * kCopyKernel}};
      return {};
    case ConvRewrite::patches_as_channels:
      if (suits_patches_as_channels(p)) return {{rewrite, with_patches_as_channels(p), 1, patch_copy_cycles(p)}};
      return {};
    case ConvRewrite::mirrored:
      if (suits_mirrored(p)) return {{rewrite, with_mirrored_kernel(p)}};
      return {};
    case ConvRewrite::channels_last_copies:
      return with_channels_last_copies(p);
    case ConvRewrite::float32_copies:
      if (is_half(p.dtype)) return {{rewrite, with_float32_copies(p)}};
      return {};
  }
  return {};
}

}  // namespace voxgrad::cuda
