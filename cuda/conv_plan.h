// Which convolution kernel takes which problem, and how: a pure function of the problem, tested on the host.
#pragma once

#include <optional>
#include <vector>

#include "core/precision.h"
#include "cuda/conv_parts.h"

namespace voxgrad::cuda {

enum class ConvDirection : uint8_t { forward, transposed, weight };

/// A convolution as its kernels see it: `in` is gathered, `out` (or, for the weight gradient, the lattice y) is even.
struct ConvProblem {
  ConvDirection direction;
  DType dtype;
  Float32Precision precision;
  int64_t batch, groups, in_channels, out_channels;  // channels of a group
  Triple in_size{1}, out_size{1}, kernel{1};
  ConvGeometry geometry{};
};

/// A tile of the tensor-core gather (conv_gather_mma.cuh).
struct GatherPlan {
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];
  int halo_voxels, pitch, classes, taps;  // taps: most of a block
  int columns, column_tiles, chunks;
  bool merged;    // a block takes all phases
  double cycles;  // of all multiprocessors, by the model that chose the box
};

/// Nothing if the plain kernel has to take it.
std::optional<GatherPlan> plan_gather(const ConvProblem& problem);

/// A tile of the tensor-core weight gradient (conv_weight_mma.cuh). A class is a part of each axis.
struct WeightPlan {
  struct Class {
    int taps, padded_taps;  // with those that fill up tiles
    int tile_columns;       // columns of 8 of a tile
    int tiles;
  };
  AxisParts axis[3];
  int box[3], extent[3], tiles[3];  // extent: of the halo, in words
  int run, halo_words, pitch;
  int rows, row_tiles, blocks8;  // blocks of 8 channels of x
  std::vector<Class> classes;
  int column_tiles, columns;     // of all classes; columns of 8
  int64_t boxes, range, ranges;  // range: boxes of a block
  int shared_bytes, buffers;     // 2: the next box is copied in the background
  double cycles;
};

/// Nothing if the plain kernel has to take it. In a weight gradient `in` is x and `out` the lattice y.
std::optional<WeightPlan> plan_weight(const ConvProblem& problem);

}  // namespace voxgrad::cuda
