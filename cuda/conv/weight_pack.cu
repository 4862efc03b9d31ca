// Packs y for weight_wgmma.cuh: as it shall stand in the slots, plane after plane, so that one copy brings a plane.
#include "cuda/conv/weight_wgmma.cuh"

namespace voxgrad::cuda {
namespace {

struct PackPlanes {
  const char* y;
  int64_t stride[5];  // bytes
  int size[3], channels, shift;
  WeightPlanes slot;
  int64_t samples, planes;  // planes: of all samples, groups, tiles
  int row_tiles, rows;      // channels of a tile
  Divisor quads, all_rows, tile_rows;
  int lines, height_tiles, width_tiles;
};

/// A block packs a plane: 4 words of a channel a thread at a time, neighbours along the width.
template <class Arithmetic>
__global__ void __launch_bounds__(kBlock) pack_planes(const __grid_constant__ PackPlanes p, char* packed) {
  using Element = typename Arithmetic::Element;
  constexpr int kElements = Arithmetic::kElements, kParts = Arithmetic::kParts;
  const int units = p.quads.value * p.all_rows.value * p.lines;
  for (int64_t plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
    int64_t rest = plane;
    const int w = static_cast<int>(take_digit(rest, p.width_tiles)) * p.quads.value * 4 * kElements;
    const int h = static_cast<int>(take_digit(rest, p.height_tiles)) * p.lines;
    const int64_t d = take_digit(rest, p.size[0]), sample = take_digit(rest, static_cast<int>(p.samples));
    const int first = static_cast<int>(take_digit(rest, p.row_tiles)) * p.rows;
    const char* const from = p.y + sample * p.stride[0] + (rest * p.channels + first) * p.stride[1] + d * p.stride[2];
    char* const to = packed + plane * p.slot.slot_bytes;
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kBlock) {
      int line = unit;
      const int quad = p.quads.take(line), row = p.all_rows.take(line);
      int version = row;
      const int channel = p.tile_rows.take(version), at = w + quad * 4 * kElements - version * p.shift;
      const bool inside = first + channel < p.channels && h + line < p.size[1];
      const char* const line_from = from + channel * p.stride[1] + (h + line) * p.stride[3] + at * p.stride[4];
      uint32_t word[kParts][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Element x[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int j = i * kElements + e;
          x[e] = inside && static_cast<unsigned>(at + j) < static_cast<unsigned>(p.size[2])
                     ? *reinterpret_cast<const Element*>(line_from + j * p.stride[4])
                     : Element(0.0f);
        }
        uint32_t parts[kParts];
        Arithmetic::split(x, parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) word[part][i] = parts[part];
      }
      char* const at_line = to + quad * p.slot.quad_pitch + (line * p.all_rows.value + row) * 16;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        *reinterpret_cast<uint4*>(at_line + part * p.slot.part_bytes) =
            make_uint4(word[part][0], word[part][1], word[part][2], word[part][3]);
    }
  }
}

}  // namespace

template <class Arithmetic>
void pack_lattice(const WeightWgmma& p, const View& y, int shift, char* packed, cudaStream_t stream) {
  PackPlanes pack{.y = y.as<char>(),
                  .stride = {},
                  .size = {},
                  .channels = p.y_channels,
                  .shift = shift,
                  .slot = p.of_y,
                  .samples = p.samples,
                  .planes = p.groups * p.samples * p.row_tiles * p.depth.count * p.height.tiles * p.width_tiles,
                  .row_tiles = p.row_tiles,
                  .rows = p.row_octets * 8,
                  .quads = Divisor(2 * p.pairs),
                  .all_rows = Divisor(p.row_octets * 8 * p.versions),
                  .tile_rows = Divisor(p.row_octets * 8),
                  .lines = p.height.box,
                  .height_tiles = p.height.tiles,
                  .width_tiles = p.width_tiles};
  for (int a = 0; a < 5; ++a) pack.stride[a] = y.stride[a] * static_cast<int64_t>(item_size(y.dtype));
  for (int a = 0; a < 3; ++a) pack.size[a] = static_cast<int>(y.size[a + 2]);
  pack_planes<Arithmetic><<<grid_size(pack.planes, 1), kBlock, 0, stream>>>(pack, packed);
  check_launch("conv weight gradient: packing");
}

template void pack_lattice<Tf32>(const WeightWgmma&, const View&, int, char*, cudaStream_t);
template void pack_lattice<Tf32x3>(const WeightWgmma&, const View&, int, char*, cudaStream_t);
template void pack_lattice<Bf16>(const WeightWgmma&, const View&, int, char*, cudaStream_t);
template void pack_lattice<F16>(const WeightWgmma&, const View&, int, char*, cudaStream_t);

}  // namespace voxgrad::cuda
