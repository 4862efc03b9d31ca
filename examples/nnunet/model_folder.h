// Model folders of nnU-Net v2: dataset.json, plans.json, and a checkpoint per fold.
#pragma once

#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <voxgrad.h>

#include "examples/nnunet/case.h"
#include "examples/nnunet/dataset_json.h"
#include "examples/nnunet/network.h"
#include "examples/nnunet/resample.h"

namespace nnunet {

/// nnU-Net's normalizations of a channel.
enum class Normalization : uint8_t {
  z_score,         ///< to mean 0 and standard deviation 1
  ct,              ///< clips to the percentiles of the training cases, then uses their mean and standard deviation
  none,            ///< unchanged
  rescale_to_0_1,  ///< from [minimum, maximum] of the channel to [0, 1]
  rgb_to_0_1       ///< from [0, 255] to [0, 1]
};

/// Returns nnU-Net's name of a normalization in plans.json: "ZScoreNormalization", ...
const char* scheme_name(Normalization kind);

/// How a channel is normalized.
struct ChannelPlan {
  Normalization kind = Normalization::z_score;
  bool use_mask = false;      ///< z_score: uses and changes only the voxels of the nonzero region
  Intensities intensities{};  ///< ct: statistics of the training cases
};

/// The order of an image's axes in memory.
enum class Orientation : uint8_t {
  as_stored,       ///< the order of the file (SimpleITKIO, NibabelIO)
  closest_to_ras,  ///< axes permuted and flipped to right, anterior, superior (NibabelIOWithReorient)
};

/// Everything about a trained model except its weights. Axes are those of the network: axis i is axis
/// transpose_forward[i] of (D, H, W).
struct ModelPlan {
  std::string configuration;  ///< "3d_fullres", "2d", ...
  std::vector<std::string> channels;
  std::string file_ending;  ///< ".nii.gz" or ".nii"
  Labels labels;
  Orientation orientation = Orientation::as_stored;
  std::array<int64_t, 3> transpose_forward{0, 1, 2};
  bool is_2d = false;  ///< predicts slices along axis 0, with one voxel along axis 0 per patch
  Spacing spacing{};   ///< mm; in 2-D, spacing[0] is 0 and the slices keep their distance
  voxgrad::Triple patch_size = 1;
  std::vector<ChannelPlan> normalization;  ///< per channel
  ResampleOptions resample_image, resample_logits;
  NetworkOptions network;
};

/// Reads the plan of `configuration` from the files dataset.json and plans.json of a model. Throws voxgrad::Error, with
/// the file and the key, if a file is missing, contradicts itself, or describes something that voxgrad does not
/// support: cascades, readers other than SimpleITKIO, NibabelIO and NibabelIOWithReorient, resampling functions other
/// than resample_data_or_seg_to_shape, and networks other than PlainConvUNet, ResidualEncoderUNet and MedNeXt. Accepts
/// plans of early versions of nnU-Net v2, which have no "architecture".
ModelPlan read_plan(const std::filesystem::path& dataset, const std::filesystem::path& plans,
                    const std::string& configuration);

/// A checkpoint in the folder of a fold: checkpoint_final.pth, which nnU-Net writes, or checkpoint_final.safetensors,
/// which save_model() writes.
class Checkpoint {
 public:
  /// Opens a file. Throws Error unless it is a checkpoint.
  explicit Checkpoint(const std::filesystem::path& path);

  std::string configuration;
  voxgrad::Axes mirror_axes;  ///< spatial axes that mirroring at test time may flip; in 2-D, axis 0 is H
  /// Returns the network of `plan` with the weights of the checkpoint, in evaluation mode. Throws Error, with the names
  /// and shapes of the first tensors that differ, if the weights belong to another network.
  Network network(const ModelPlan& plan) const;

 private:
  /// Returns a tensor of the network, or an undefined tensor if the file has none of this name.
  voxgrad::Tensor weight(const std::string& name) const;

  std::filesystem::path path_;
  std::map<std::string, voxgrad::PtValue> pt_weights_;  // of a .pth file; a tensor is read when it is needed
  voxgrad::TensorMap weights_;                          // of a .safetensors file
};

/// Writes a model folder that predict can use: dataset.json, plans.json and fold_0/checkpoint_final.safetensors. The
/// two JSON files are those of nnU-Net, which can use the folder unless the network is a MedNeXt. A U-Net must be
/// three-dimensional with InstanceNorm and LeakyReLU, and the labels must not be regions. `training_cases` is the
/// number of cases that the network was trained on.
void save_model(const std::filesystem::path& folder, const ModelPlan& plan, const Network& network,
                const voxgrad::Axes& mirror_axes, int64_t training_cases);

}  // namespace nnunet
