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
  z_score,         ///< maps to mean 0 and standard deviation 1
  ct,              ///< clips to the percentiles of the training cases, then uses their mean and standard deviation
  none,            ///< unchanged
  rescale_to_0_1,  ///< maps [minimum, maximum] of the channel to [0, 1]
  rgb_to_0_1       ///< maps [0, 255] to [0, 1]
};

/// Returns nnU-Net's name of a normalization in plans.json: "ZScoreNormalization", ...
const char* scheme_name(Normalization kind);

/// Normalization of a channel.
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

/// Everything about a trained model except its weights. Spacings, patch sizes and kernel sizes have the axis order of
/// the network: axis i is axis transpose_forward[i] of the image (D, H, W).
struct ModelPlan {
  std::string configuration;  ///< "3d_fullres", "2d", ...
  std::vector<std::string> channels;
  std::string file_ending;  ///< ".nii.gz" or ".nii"
  Labels labels;
  Orientation orientation = Orientation::as_stored;
  std::array<int64_t, 3> transpose_forward{0, 1, 2};
  bool is_2d = false;  ///< predicts each slice of axis 0 separately; patch_size[0] is 1
  Spacing spacing{};   ///< mm; in 2-D, spacing[0] is 0, because axis 0 is not resampled
  voxgrad::Triple patch_size = 1;
  std::vector<ChannelPlan> normalization;  ///< one item per channel
  ResampleOptions resample_image;
  ResampleOptions resample_logits;
  NetworkOptions network;
};

/// Reads the plan of `configuration` from the files dataset.json and plans.json of a model. Throws voxgrad::Error, with
/// the file and the key, if a file is missing, contradicts itself, or needs something that this reader does not
/// support. Cascades are not supported. The image reader must be SimpleITKIO, NibabelIO or NibabelIOWithReorient, the
/// resampling function must be resample_data_or_seg_to_shape, and the network must be PlainConvUNet,
/// ResidualEncoderUNet or MedNeXt. Accepts plans of early versions of nnU-Net v2, which have no "architecture".
ModelPlan read_plan(const std::filesystem::path& dataset, const std::filesystem::path& plans,
                    const std::string& configuration);

/// A checkpoint in the folder of a fold: checkpoint_final.pth, which nnU-Net writes, or checkpoint_final.safetensors,
/// which save_model() writes.
class Checkpoint {
 public:
  /// Opens a file. Throws Error if the file is not a checkpoint.
  explicit Checkpoint(const std::filesystem::path& path);

  std::string configuration;
  voxgrad::Axes mirror_axes;  ///< spatial axes that mirroring at test time may flip; in 2-D, axis 0 is H
  /// Returns the network of `plan` with the weights of the checkpoint, in evaluation mode. Throws Error if a tensor of
  /// this network is missing in the checkpoint or has a different shape there. The message lists up to three such
  /// tensors.
  Network network(const ModelPlan& plan) const;

 private:
  /// Returns the tensor `name` of the checkpoint, or an undefined tensor if the checkpoint does not contain it.
  voxgrad::Tensor weight(const std::string& name) const;

  std::filesystem::path path_;
  std::map<std::string, voxgrad::PtValue> pt_weights_;  // weights in a .pth file, which weight() reads
  voxgrad::TensorMap weights_;                          // weights in a .safetensors file
};

/// Throws Error if save_model() cannot write the plan. A U-Net must be three-dimensional with InstanceNorm and
/// LeakyReLU, and the labels must not be regions.
void check_savable(const ModelPlan& plan);

/// Writes a model folder that predict can use: dataset.json, plans.json and fold_0/checkpoint_final.safetensors. The
/// two JSON files have nnU-Net's format. Unless the network is a MedNeXt, nnU-Net can use the folder after
/// examples/segment/to_nnunet.py has added a .pth checkpoint. `training_cases` is the number of cases that the network
/// was trained on. Throws the errors of check_savable().
void save_model(const std::filesystem::path& folder, const ModelPlan& plan, const Network& network,
                const voxgrad::Axes& mirror_axes, int64_t training_cases);

}  // namespace nnunet
