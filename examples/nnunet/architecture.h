// The networks that nnU-Net's plans describe.
#pragma once

#include <string>

#include <voxgrad.h>

#include "examples/nnunet/json.h"
#include "examples/nnunet/network.h"

namespace nnunet {

/// Returns the network of a configuration of plans.json, with "inherits_from" already resolved. A 2-D network becomes a
/// 3-D network with kernel size 1 and stride 1 along D. Throws Error if the network is neither an nn::UNet nor a
/// MedNeXt that save_model() wrote.
NetworkOptions read_architecture(const Json& configuration, int64_t in_channels, int64_t num_classes);

/// Returns true if the patches of the configuration have two axes.
bool is_2d(const Json& configuration);

}  // namespace nnunet
