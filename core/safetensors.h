// The safetensors format (https://github.com/huggingface/safetensors): an 8-byte little-endian header
// length, a JSON header with dtype, shape and byte range of each tensor, then the elements. Nothing in it
// can run code.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "core/tensor.h"

namespace voxgrad {

/// Tensors by name: a state_dict, or the contents of a file.
using TensorMap = std::map<std::string, Tensor>;
/// The "__metadata__" of a safetensors file.
using Metadata = std::map<std::string, std::string>;

/// All tensors of the file, contiguous, on `device`; its metadata in `*metadata` if that is given.
/// Throws Error if the file cannot be read or breaks a rule of the format: header length (at most
/// 100 MB, within the file), JSON, unknown or repeated keys, unsupported dtype, more than 8 axes, sizes
/// that overflow, ranges that differ from shape x dtype, overlap, leave a hole or do not end with the file.
/// All of this is checked before memory for a tensor is taken.
TensorMap load_safetensors(const std::filesystem::path& path, Device device = Device::cpu(),
                           Metadata* metadata = nullptr);

/// Writes `tensors`, from any device and with any strides, atomically. Names are UTF-8 and not "__metadata__".
void save_safetensors(const std::filesystem::path& path, const TensorMap& tensors, const Metadata& metadata = {});

}  // namespace voxgrad
