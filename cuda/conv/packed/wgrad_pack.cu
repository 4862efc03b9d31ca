// Packs y for packed/wgrad.cuh: as it shall stand in the stages, plane after plane, so that one copy brings a plane.
#include "cuda/conv/packed/wgrad.cuh"

namespace voxgrad::cuda {
namespace {

struct PackPlanes {
  const char* y;
  int64_t stride[5];  // bytes
  int size[3], channels, shift;
  StagedPlanes stage;
  int64_t samples, planes;             // planes: of all samples, groups, tiles
  int row_tiles, rows;                 // channels of a tile
  Divisor quads, all_rows, tile_rows;  // of halves: voxels of a line; lines of the tile; 8 channels of a y shift
  int lines, height_tiles, width_tiles;
};

/// Where a plane of y begins: its first voxel, and the first of its channels.
struct PackedPlane {
  int height, width, first;
  const char* from;  // that channel of the plane

  __device__ PackedPlane(const PackPlanes& p, int64_t plane, int tile_width) {
    width = static_cast<int>(take_digit(plane, p.width_tiles)) * tile_width;
    height = static_cast<int>(take_digit(plane, p.height_tiles)) * p.lines;
    const int64_t d = take_digit(plane, p.size[0]), sample = take_digit(plane, static_cast<int>(p.samples));
    first = static_cast<int>(take_digit(plane, p.row_tiles)) * p.rows;
    from = p.y + sample * p.stride[0] + (plane * p.channels + first) * p.stride[1] + d * p.stride[2];
  }
};

/// A block packs a plane of halves: 8 channels of a voxel a thread at a time.
template <class Element>
__global__ void __launch_bounds__(kBlock) pack_octets(const __grid_constant__ PackPlanes p, char* packed) {
  const int units = p.stage.stage_bytes / 16;
  for (int64_t plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
    const PackedPlane at(p, plane, p.quads.value);
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kBlock) {
      int row = unit;
      const int voxel = p.quads.take(row), line = p.all_rows.take(row);
      int y_shift = row;
      const int octet = p.tile_rows.take(y_shift), w = at.width + voxel - y_shift * p.shift;
      const bool inside = at.height + line < p.size[1] && static_cast<unsigned>(w) < static_cast<unsigned>(p.size[2]);
      const char* const from = at.from + octet * 8 * p.stride[1] + (at.height + line) * p.stride[3] + w * p.stride[4];
      alignas(16) Element x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c)
        x[c] = inside && at.first + octet * 8 + c < p.channels
                   ? *reinterpret_cast<const Element*>(from + c * p.stride[1])
                   : Element(0.0f);
      reinterpret_cast<uint4*>(packed + plane * p.stage.stage_bytes)[unit] = *reinterpret_cast<const uint4*>(x);
    }
  }
}

/// Of floats: 4 words of a channel a thread at a time, neighbours along the width.
template <class Arithmetic>
__global__ void __launch_bounds__(kBlock) pack_planes(const __grid_constant__ PackPlanes p, char* packed) {
  constexpr int kParts = Arithmetic::kParts;
  const int units = p.quads.value * p.all_rows.value * p.lines;
  for (int64_t plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
    const PackedPlane of_y(p, plane, p.quads.value * 4);
    char* const to = packed + plane * p.stage.stage_bytes;
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kBlock) {
      int line = unit;
      const int quad = p.quads.take(line), row = p.all_rows.take(line);
      int y_shift = row;
      const int channel = p.tile_rows.take(y_shift), at = of_y.width + quad * 4 - y_shift * p.shift;
      const bool inside = of_y.first + channel < p.channels && of_y.height + line < p.size[1];
      const char* const from =
          of_y.from + channel * p.stride[1] + (of_y.height + line) * p.stride[3] + at * p.stride[4];
      uint32_t word[kParts][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = inside && static_cast<unsigned>(at + i) < static_cast<unsigned>(p.size[2]);
        const float x[] = {exists ? *reinterpret_cast<const float*>(from + i * p.stride[4]) : 0.0f};
        uint32_t parts[kParts];
        Arithmetic::split(x, parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) word[part][i] = parts[part];
      }
      char* const at_line = to + quad * p.stage.pitch + (line * p.all_rows.value + row) * 16;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        *reinterpret_cast<uint4*>(at_line + part * p.stage.part_bytes) =
            make_uint4(word[part][0], word[part][1], word[part][2], word[part][3]);
    }
  }
}

}  // namespace

template <class Arithmetic>
void pack_y(const PackedWgradParams& p, const View& y, char* packed, cudaStream_t stream) {
  PackPlanes pack{
      .y = y.as<char>(),
      .stride = {},
      .size = {},
      .channels = p.y_channels,
      .shift = p.shift,
      .stage = p.of_y,
      .samples = p.samples,
      .planes = int64_t{p.groups} * p.samples * p.row_tiles * p.depth.count * p.height.tiles * p.width_tiles,
      .row_tiles = p.row_tiles,
      .rows = p.row_octets * 8,
      .quads = Divisor(2 * p.pairs),
      .all_rows = Divisor(p.row_octets * 8 * p.y_shifts),
      .tile_rows = Divisor(p.row_octets * 8),
      .lines = p.height.tile,
      .height_tiles = p.height.tiles,
      .width_tiles = p.width_tiles};
  for (int a = 0; a < 5; ++a) pack.stride[a] = y.stride[a] * static_cast<int64_t>(item_size(y.dtype));
  for (int a = 0; a < 3; ++a) pack.size[a] = static_cast<int>(y.size[a + 2]);
  if constexpr (Arithmetic::kElements == 2) {
    pack.quads = Divisor(16 * p.pairs);
    pack.all_rows = Divisor(p.height.tile);
    pack.tile_rows = Divisor(p.row_octets);
    pack_octets<typename Arithmetic::Element><<<grid_size(pack.planes, 1), kBlock, 0, stream>>>(pack, packed);
  } else {
    pack_planes<Arithmetic><<<grid_size(pack.planes, 1), kBlock, 0, stream>>>(pack, packed);
  }
  check_launch("conv weight gradient: packing");
}

template void pack_y<Tf32>(const PackedWgradParams&, const View&, char*, cudaStream_t);
template void pack_y<Tf32x3>(const PackedWgradParams&, const View&, char*, cudaStream_t);
template void pack_y<Bf16>(const PackedWgradParams&, const View&, char*, cudaStream_t);
template void pack_y<F16>(const PackedWgradParams&, const View&, char*, cudaStream_t);

}  // namespace voxgrad::cuda
