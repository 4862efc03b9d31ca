// Implements nnU-Net's preprocessing of a case, sliding-window inference, and the conversion of logits to labels.
#include "examples/nnunet/pipeline.h"

#include <algorithm>
#include <cmath>
#include <span>

#include <Eigen/SVD>

namespace nnunet {

using namespace voxgrad;

namespace {

constexpr double kMinDeviation = 1e-8;  // nnU-Net's lower bound for a standard deviation or a range

/// Returns a bool mask (D, H, W) of the voxels that are nonzero in at least one channel, with holes filled. A hole
/// consists of zero voxels that no path of face-adjacent zero voxels connects to the border of the image.
Tensor filled_mask(const Tensor& image) {
  const Tensor mask = nonzero_mask(image).to(u8).contiguous();
  const int64_t sizes[] = {mask.size(0), mask.size(1), mask.size(2)};
  const int64_t steps[] = {sizes[1] * sizes[2], sizes[2], 1};
  std::vector<uint8_t> outside(static_cast<size_t>(mask.numel()));
  const uint8_t* inside = mask.data<uint8_t>();
  std::vector<int64_t> open;
  const auto visit = [&](int64_t i) {
    if (inside[i] || outside[static_cast<size_t>(i)]) return;
    outside[static_cast<size_t>(i)] = 1;
    open.push_back(i);
  };
  for (int64_t d = 0; d < sizes[0]; ++d)
    for (int64_t h = 0; h < sizes[1]; ++h) {
      const bool border = d == 0 || d + 1 == sizes[0] || h == 0 || h + 1 == sizes[1];
      const int64_t line = d * steps[0] + h * steps[1];
      for (int64_t w = 0; w < sizes[2]; w += border ? 1 : std::max<int64_t>(sizes[2] - 1, 1)) visit(line + w);
    }
  while (!open.empty()) {
    const int64_t i = open.back();
    open.pop_back();
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t position = i / steps[axis] % sizes[axis];
      if (position > 0) visit(i - steps[axis]);
      if (position + 1 < sizes[axis]) visit(i + steps[axis]);
    }
  }
  return eq(from_span<uint8_t>(outside, mask.shape()), 0);
}

/// Normalizes a channel (D, H, W) f32 to mean 0 and standard deviation 1. Computes the sums in double. If `mask`, bool
/// (D, H, W), is defined, computes the mean and the deviation of the voxels inside the mask and changes only these
/// voxels.
Tensor z_scored(const Tensor& x, const Tensor& mask) {
  const Tensor result = x.clone();
  const std::span<float> voxels(result.mutable_data<float>(), static_cast<size_t>(result.numel()));
  const bool* inside = mask.defined() ? mask.data<bool>() : nullptr;
  const auto mean_of = [&](auto value) {
    double sum = 0, count = 0;
    for (size_t i = 0; i < voxels.size(); ++i) {
      if (inside && !inside[i]) continue;
      sum += value(static_cast<double>(voxels[i]));
      ++count;
    }
    return sum / std::max(count, 1.0);
  };
  const double mean = mean_of([](double v) { return v; });
  const double variance = mean_of([=](double v) { return (v - mean) * (v - mean); });
  const double scale = std::max(std::sqrt(variance), kMinDeviation);
  for (size_t i = 0; i < voxels.size(); ++i)
    if (!inside || inside[i]) voxels[i] = static_cast<float>((static_cast<double>(voxels[i]) - mean) / scale);
  return result;
}

/// Normalizes a channel (D, H, W) f32 on the CPU. Only z_score with plan.use_mask uses `mask`.
Tensor normalized(const Tensor& x, const ChannelPlan& plan, const Tensor& mask) {
  switch (plan.kind) {
    case Normalization::none:
      return x;
    case Normalization::rgb_to_0_1:
      return x / 255.0;
    case Normalization::rescale_to_0_1: {
      const Tensor shifted = x - amin(x);
      return shifted / clamp_min(amax(shifted), kMinDeviation);
    }
    case Normalization::ct: {
      const Tensor clamped = clamp(x, plan.intensities.low, plan.intensities.high);
      return (clamped - plan.intensities.mean) / std::max(plan.intensities.std, kMinDeviation);
    }
    case Normalization::z_score:
      break;
  }
  return z_scored(x, plan.use_mask ? mask : Tensor());
}

/// Returns a pair for each axis i, j, k of a file: the closest anatomical axis (0: right, 1: anterior, 2: superior),
/// and true if the two axes have opposite directions. Like nibabel, selects the anatomical axes by the rotation that is
/// closest to the affine.
std::array<std::pair<int, bool>, 3> closest_axes(const std::array<std::array<double, 4>, 4>& affine) {
  Eigen::Matrix3d columns;
  for (int row = 0; row < 3; ++row)
    for (int column = 0; column < 3; ++column) columns(row, column) = affine[size_t(row)][size_t(column)];
  columns.colwise().normalize();
  const Eigen::JacobiSVD<Eigen::Matrix3d> svd(columns, Eigen::ComputeFullU | Eigen::ComputeFullV);
  Eigen::Matrix3d rotation = svd.matrixU() * svd.matrixV().transpose();
  std::array<int, 3> order{0, 1, 2};  // columns of the rotation, in descending order of their largest component
  std::ranges::stable_sort(order, std::greater(),
                           [&](int column) { return rotation.col(column).cwiseAbs().maxCoeff(); });
  std::array<std::pair<int, bool>, 3> result;
  for (const int column : order) {
    int row = 0;
    rotation.col(column).cwiseAbs().maxCoeff(&row);
    result[size_t(column)] = {row, rotation(row, column) < 0};
    rotation.row(row).setZero();
  }
  return result;
}

/// Returns the argument with which permute() reorders the three spatial axes by `order` and keeps the `leading` axes
/// before them: axis leading + i of the result is axis leading + order[i] of the input.
Dims permutation(int64_t leading, const Dims& order) {
  Dims axes;
  for (int64_t i = 0; i < leading; ++i) axes.push_back(i);
  for (const int64_t axis : order) axes.push_back(axis + leading);
  return axes;
}

/// Resizes one output of the network (D, H, W) to the shape of the cropped image.
Tensor full_resolution(const Tensor& logits, const PreparedImage& prepared, const ModelPlan& plan) {
  const ResampleOptions& options = plan.resample_logits;
  const std::optional<int64_t> axis = separate_axis(options, prepared.network_spacing, prepared.spacing);
  const Dims& size = prepared.box.size;
  if (logits.dtype() == f16 || options.order != 1)
    return resample(logits.unsqueeze(0), size, options.order, axis).squeeze(0);
  // interpolate() computes linear interpolation in f32 and needs less memory than resample(), which computes in f64.
  Dims in_plane = size;
  if (axis) in_plane[*axis] = logits.size(*axis);
  Tensor x = logits.unsqueeze(0).unsqueeze(0);
  if (x.size(2) != in_plane[0] || x.size(3) != in_plane[1] || x.size(4) != in_plane[2])
    x = interpolate(x, {.size = in_plane, .mode = InterpolateMode::trilinear});
  if (axis && in_plane[*axis] != size[*axis])
    x = interpolate(x, {.size = size, .mode = InterpolateMode::nearest_exact});
  return x.squeeze(0).squeeze(0);
}

/// Pads x (..., D, H, W), which covers the nonzero region, with `value` to the shape of the original image.
Tensor uncropped(const Tensor& x, const PreparedImage& prepared, double value = 0) {
  std::vector<int64_t> amounts;
  for (int64_t axis = 2; axis >= 0; --axis) {
    const int64_t start = prepared.box.start[axis];
    amounts.push_back(start);
    amounts.push_back(prepared.original_shape[axis] - start - prepared.box.size[axis]);
  }
  return pad(x, amounts, value);
}

}  // namespace

OrientedImage orient(const Tensor& image, const Geometry& geometry, const ModelPlan& plan) {
  Dims order{0, 1, 2};
  if (plan.orientation == Orientation::closest_to_ras) {
    const auto closest = closest_axes(geometry.affine);
    for (int i = 0; i < 3; ++i) order[2 - closest[size_t(i)].first] = 2 - i;
  }
  OrientedImage result;
  for (const int64_t axis : plan.transpose_forward) result.order.push_back(order[axis]);
  for (int64_t i = 0; i < 3; ++i) {
    result.spacing[size_t(i)] = geometry.spacing[size_t(result.order[i])];
    if (plan.orientation == Orientation::closest_to_ras &&
        closest_axes(geometry.affine)[size_t(2 - result.order[i])].second)
      result.flipped.push_back(i);
  }
  result.image = permute(image, permutation(1, result.order));
  Dims axes;
  for (const int64_t axis : result.flipped) axes.push_back(axis + 1);
  if (!axes.empty()) result.image = flip(result.image, axes);
  result.image = result.image.contiguous();
  return result;
}

Tensor unorient(const Tensor& result, const OrientedImage& oriented) {
  const int64_t leading = result.dim() - 3;
  Dims axes, inverse{0, 0, 0};
  for (const int64_t axis : oriented.flipped) axes.push_back(axis + leading);
  for (int64_t i = 0; i < 3; ++i) inverse[oriented.order[i]] = i;
  return permute(axes.empty() ? result : flip(result, axes), permutation(leading, inverse)).contiguous();
}

PreparedImage prepare(const OrientedImage& oriented, const ModelPlan& plan) {
  const Tensor& image = oriented.image;
  PreparedImage result;
  result.spacing = result.network_spacing = oriented.spacing;
  for (size_t i = plan.is_2d ? 1 : 0; i < 3; ++i) result.network_spacing[i] = plan.spacing[i];
  result.original_shape = {image.size(1), image.size(2), image.size(3)};
  result.box = {{0, 0, 0}, result.original_shape};
  if (amax(nonzero_mask(image).to(u8)).item() > 0) result.box = nonzero_box(image);
  Tensor cropped = image;
  for (int64_t axis = 0; axis < 3; ++axis)
    cropped = cropped.narrow(axis + 1, result.box.start[axis], result.box.size[axis]);
  cropped = cropped.contiguous();
  const bool use_mask = std::ranges::any_of(plan.normalization, &ChannelPlan::use_mask);
  const Tensor mask = use_mask ? filled_mask(cropped) : Tensor();
  const Dims size = resampled_size(result.box.size, result.spacing, result.network_spacing);
  const std::optional<int64_t> axis = separate_axis(plan.resample_image, result.spacing, result.network_spacing);
  Tensors channels;
  for (int64_t c = 0; c < cropped.size(0); ++c) {
    const Tensor channel = normalized(cropped.select(0, c), plan.normalization[size_t(c)], mask);
    channels.push_back(resample(channel.unsqueeze(0), size, plan.resample_image.order, axis));
  }
  result.image = cat(channels, 0);
  return result;
}

TrainingVolume prepare_for_training(const Case& labeled, const ModelPlan& plan) {
  check(amax(abs(labeled.image)).item() > 0, "nnU-Net", "all voxels of case '", labeled.name, "' are 0");
  const PreparedImage prepared = prepare(orient(labeled.image, labeled.geometry, plan), plan);
  Tensor label = orient(labeled.label.unsqueeze(0), labeled.geometry, plan).image;
  for (int64_t axis = 0; axis < 3; ++axis)
    label = label.narrow(axis + 1, prepared.box.start[axis], prepared.box.size[axis]);
  const Shape size{prepared.image.size(1), prepared.image.size(2), prepared.image.size(3)};
  if (label[0].shape() != size)
    label = interpolate(label.to(f32).unsqueeze(0), {.size = size, .mode = InterpolateMode::nearest_exact})
                .squeeze(0)
                .to(u8);
  return {prepared.image, label.squeeze(0).contiguous()};
}

Tensor predict_logits(const Tensor& image, const Network& network, const ModelPlan& plan, const Axes& mirror_axes,
                      const PredictOptions& options) {
  Axes axes;
  for (const int64_t axis : mirror_axes) axes.push_back(plan.is_2d ? axis + 1 : axis);
  const nn::SlidingWindowOptions windows{.window = plan.patch_size,
                                         .overlap = 1 - options.step,
                                         .sigma = options.gaussian ? 0.125 : 0,
                                         .mirror_axes = axes,
                                         .precision = options.autocast,
                                         .device = options.device,
                                         .accumulate = options.sums,
                                         .sum_dtype = options.half_accumulation ? f16 : f32,
                                         .progress = options.progress};
  const auto model = [&network](const Tensor& x) { return network.module->forward(x); };
  return nn::sliding_window_inference(image.unsqueeze(0), model, windows).squeeze(0);
}

Tensor labels_of(const Tensor& logits, const PreparedImage& prepared, const ModelPlan& plan) {
  const Labels& labels = plan.labels;
  const DType dtype = std::ranges::max(labels.values) < 255 ? u8 : i32;
  Tensor result = zeros(prepared.box.size, {.dtype = dtype, .device = logits.device()}), best;
  for (int64_t k = 0; k < logits.size(0); ++k) {
    const Tensor x = full_resolution(logits.select(0, k), prepared, plan);
    const Tensor chosen = labels.regions ? gt(sigmoid(x.to(f32)), 0.5) : k == 0 ? Tensor() : gt(x, best);
    if (chosen.defined())
      result = where(chosen, full_like(result, static_cast<double>(labels.values[size_t(k)])), result);
    if (!labels.regions) best = chosen.defined() ? where(chosen, x, best) : x;
  }
  return uncropped(result.to(Device::cpu()), prepared);
}

Tensor probabilities_of(const Tensor& logits, const PreparedImage& prepared, const ModelPlan& plan) {
  Tensors outputs;
  for (int64_t k = 0; k < logits.size(0); ++k)
    outputs.push_back(full_resolution(logits.select(0, k), prepared, plan).to(f32).to(Device::cpu()));
  const Tensor all = stack(outputs);
  outputs.clear();
  if (plan.labels.regions) return uncropped(sigmoid(all), prepared);
  const Tensor probabilities = softmax(all, 0);
  return cat({uncropped(probabilities.narrow(0, 0, 1), prepared, 1),
              uncropped(probabilities.narrow(0, 1, all.size(0) - 1), prepared)});
}

}  // namespace nnunet
