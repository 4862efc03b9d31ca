// Pointwise convolutions of contiguous voxels on the CPU: the forward pass, and the weight gradient with few channels.
// Other pointwise convolutions use the kernels of ops/cpu/conv.cpp and ops/cpu/conv_weight.cpp.
#include "ops/cpu/conv_problem.h"

#include <algorithm>

#include "ops/cpu/loops.h"

namespace voxgrad::cpu {

bool merge_voxels(View& x, View& y, const View& w, const ConvGeometry& geometry) {
  for (int axis = 0; axis < 3; ++axis)
    if (w.size[axis + 2] != 1 || geometry.stride[axis] != 1 || geometry.padding[axis] != 0 ||
        x.size[axis + 2] != y.size[axis + 2])  // output_padding may make the output larger
      return false;
  for (const View* v : {&x, &y})
    if (v->stride[3] != v->size[4] * v->stride[4] || v->stride[2] != v->size[3] * v->stride[3]) return false;
  for (View* v : {&x, &y}) {
    v->size[4] *= v->size[2] * v->size[3];
    v->size[2] = v->size[3] = 1;
  }
  return true;
}

namespace {

/// Copies `count` voxels of `channels` channels. Fills the rest of each row of `padded` voxels with
/// zeros.
template <class T>
void copy_piece(T* to, int64_t pitch, const T* from, int64_t stride, int64_t channels, int64_t count, int64_t padded) {
  for (int64_t c = 0; c < channels; ++c)
    std::fill(std::copy_n(from + c * stride, count, to + c * pitch), to + c * pitch + padded, T(0));
}

/// Packs the weights for multiply_pointwise(): (group, block of `rows` outputs, input, output of the block). Transposes
/// squares of n weights if the weights of an output are contiguous. The last square of outputs overlaps the previous
/// one.
template <class T>
void pack_weights(const ConvProblem<T>& p, int64_t rows, T* to) {
  constexpr int64_t kInputs = 64;  // inputs per task, so that the rows of the weight stay in the cache
  constexpr int n = kColumnUnit<T>;
  const int64_t outputs = p.out_channels(), inputs = p.in_channels(), out_stride = p.weight_out_stride;
  const int64_t blocks = divide_up(outputs, rows), parts = divide_up(inputs, kInputs);
  parallel_for(p.groups * parts * blocks, grain_of(rows * kInputs), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t group = i / blocks / parts, first = i % blocks * rows, step = std::min(rows, outputs - first);
      const T* const from = p.weight + group * p.weight_group_stride + first * out_stride;
      T* const block = to + (group * outputs + first) * inputs;
      int64_t c = i / blocks % parts * kInputs;
      const int64_t last = std::min(inputs, c + kInputs);
      for (; p.weight_in_stride == 1 && step >= n && c + n <= last; c += n)
        for (int64_t o = 0; o < step; o += n) {
          const int64_t at = std::min(o, step - n);
          transpose<T, n>([&](int k) { return from + (at + k) * out_stride + c; },
                          [&](int k) { return block + (c + k) * step + at; });
        }
      for (; c < last; ++c)
        for (int64_t o = 0; o < step; ++o) block[c * step + o] = from[o * out_stride + c * p.weight_in_stride];
    }
  });
}

/// Adds the bias to the sums of one output channel and applies ReLU. NaN remains NaN.
template <class T>
void finish_row(const ConvProblem<T>& p, int64_t channel, int64_t count, T* y) {
  const T bias = p.bias ? p.bias[channel * p.bias_stride] : T(0);
  for (int64_t j = 0; j < count; ++j) y[j] = p.relu && y[j] + bias < 0 ? T(0) : y[j] + bias;
}

/// Number of voxels per piece. A piece consists of consecutive voxels of a sample.
constexpr int64_t kPiece = 512;
/// Largest number of products per voxel of the weight gradient. With this limit, the sums and the packed channels of a
/// piece fit in the second-level cache.
constexpr int64_t kMaxProducts = 4096;
/// Number of pieces whose products are summed in T. The results of these sums are added in double.
constexpr int64_t kPiecesPerSum = 16;
/// Smallest number of parallel tasks, if there are enough pieces. A task sums the products of a part of the pieces for
/// one group.
constexpr int64_t kMinParts = 64;

/// Rows of the register tile. A row is a channel of y.
constexpr int kRows = 4;
/// Columns of the register tile. A column is a channel of x.
constexpr int kColumns = kVectorRegisters * 3 / 16;

/// The products of kRows channels of y with some channels of x. A vector holds consecutive voxels.
template <class T>
struct ChannelProduct {
  static constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));  // elements of a vector
  const T* y = nullptr;
  const T* x = nullptr;
  int64_t pitch = 0;  // distance between neighboring channels, for x and for y
  int64_t count = 0;  // voxels, a multiple of kLanes
  T* sums = nullptr;  // one vector of sums per product
  int64_t row = 0;    // distance between the sums of neighboring channels of y
};

template <class T, int columns>
void add_products(const ChannelProduct<T>& p) {
  using Vector = typename VectorOf<T, kVectorBytes>::Type;
  constexpr int lanes = ChannelProduct<T>::kLanes;
  Vector sums[kRows * columns] = {};
  for (int64_t i = 0; i < p.count; i += lanes) {
    Vector x[columns];
    unrolled<columns>([&](auto c) { x[c] = load<T, kVectorBytes>(p.x + c * p.pitch + i); });
    unrolled<kRows>([&](auto r) {
      const Vector y = load<T, kVectorBytes>(p.y + r * p.pitch + i);
      unrolled<columns>([&](auto c) { sums[r * columns + c] += y * x[c]; });
    });
  }
  unrolled<kRows>([&](auto r) {
    unrolled<columns>([&](auto c) {
      T* const to = p.sums + r * p.row + c * lanes;
      const Vector total = load<T, kVectorBytes>(to) + sums[r * columns + c];
      std::memcpy(to, &total, kVectorBytes);
    });
  });
}

/// Calls add_products for `columns` channels of x.
template <class T>
void add_products(const ChannelProduct<T>& product, int64_t columns) {
  unrolled<kColumns>([&](auto last) {
    if (columns == last + 1) add_products<T, last + 1>(product);
  });
}

}  // namespace

// A task computes a block of output channels for a piece: consecutive voxels of a sample and a group. Register tiles
// read the input channels in place and store their sums directly. The tasks of a piece also prefetch the input channels
// of the next piece into the second-level cache, so that loading overlaps with the products.
template <class T>
void multiply_pointwise(const ConvProblem<T>& p) {
  constexpr int64_t kPieceBytes = 1 << 18, kMaxPiece = 512, kUnit = kPointwiseUnit<T>;
  const TileFamily<T>& tiles = *column_blocks<T>(kUnit).front().family;  // has kUnit columns
  const int64_t voxels = p.out.size[2], outputs = p.out_channels(), inputs = p.in_channels();
  const int64_t fitting = kPieceBytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(inputs, 1);
  const int64_t piece = even_piece(divide_up(voxels, kUnit), std::clamp(fitting, kUnit, kMaxPiece) / kUnit) * kUnit;
  const int64_t pieces = divide_up(voxels, piece), rows = even_piece(outputs, int64_t{tiles.max_rows});
  const int64_t blocks = divide_up(outputs, rows), x_step = p.in.channel_stride, y_step = p.out.channel_stride;
  const Workspace<T> weights(p.groups * outputs * inputs);
  pack_weights(p, rows, weights.data());
  const std::array<TileSegment, 1> whole{};
  parallel_for(p.out.batch * p.groups * pieces * blocks, grain_of(piece * inputs * rows), [&](int64_t i, int64_t end) {
    alignas(kTileAlignment) T sums[kMaxTileRows * kMaxTileWidth / sizeof(T)];
    for (; i < end; ++i) {
      const int64_t o = i % blocks * rows, now = std::min(rows, outputs - o), first = i / blocks % pieces * piece;
      const int64_t group = i / blocks / pieces % p.groups, n = i / blocks / pieces / p.groups;
      const int64_t count = std::min(piece, voxels - first), channel = group * outputs + o;
      const T* const x = p.in.at(n, group * inputs) + first;
      T* const y = p.out.at(n, channel) + first;
      TileProduct<T> product{weights.data() + channel * inputs, now, x, x_step, whole, inputs, y, y_step};
      for (int64_t j = 0; j < count; j += kUnit) {
        for (int64_t c = o * inputs / outputs; c < (o + now) * inputs / outputs; ++c)
          for (int64_t k = 0; k < kUnit; k += kTileAlignment / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(x + c * x_step + j + piece + k, 0, 2);
        // The last tile of a sample ends at the last voxel. Only columns that no other tile computes are stored.
        const int64_t before = std::max<int64_t>(0, j + kUnit - count);
        product.b = x + j - before;
        product.c = before == 0 ? y + j : sums;
        product.c_step = before == 0 ? y_step : kUnit;
        tiles.products[now - 1](product);
        for (int64_t r = 0; before > 0 && r < now; ++r)
          std::copy(sums + r * kUnit + before, sums + (r + 1) * kUnit, y + r * y_step + j);
      }
      for (int64_t r = 0; (p.bias || p.relu) && r < now; ++r) finish_row(p, channel + r, count, y + r * y_step);
    }
  });
}

bool has_few_products(const View& w, const View& x, const View& y, int64_t groups) {
  return x.stride[4] == 1 && y.stride[4] == 1 && x.size[4] >= kPiece / 4 &&
         w.size[1] * w.size[0] / groups <= kMaxProducts;
}

template <class T>
void pointwise_weight_gradient(const View& w, const View& x_view, const View& y_view, int64_t groups) {
  constexpr int64_t lanes = ChannelProduct<T>::kLanes;
  const Volume<const T> x(x_view), y(y_view);
  const int64_t voxels = x.size[2], inputs = w.size[1], outputs = w.size[0] / groups,
                rows = round_up(outputs, int64_t{kRows});
  const int64_t pieces = divide_up(voxels, kPiece), all_pieces = x.batch * pieces;
  const int64_t pieces_per_part = std::max<int64_t>(1, all_pieces / divide_up(kMinParts, groups));
  const int64_t parts = divide_up(all_pieces, pieces_per_part), pitch = kPiece + lanes, terms = rows * inputs;
  std::vector<double> totals(static_cast<size_t>(groups * parts * terms), 0);
  parallel_for(groups * parts, 1, [&](int64_t begin, int64_t end) {
    const Workspace<T> packed_x(inputs * pitch), packed_y(rows * pitch), sums(terms * lanes);
    std::fill_n(packed_y.data(), rows * pitch, T(0));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / parts, first = i % parts * pieces_per_part,
                    last = std::min(all_pieces, first + pieces_per_part);
      std::fill_n(sums.data(), terms * lanes, T(0));
      for (int64_t piece = first; piece < last; ++piece) {
        const int64_t n = piece / pieces, from = piece % pieces * kPiece, count = std::min(kPiece, voxels - from);
        const int64_t padded = round_up(count, lanes);
        copy_piece(packed_x.data(), pitch, x.at(n, group * inputs) + from, x.channel_stride, inputs, count, padded);
        copy_piece(packed_y.data(), pitch, y.at(n, group * outputs) + from, y.channel_stride, outputs, count, padded);
        for (int64_t r = 0; r < rows; r += kRows)
          for (int64_t c = 0; c < inputs; c += kColumns)
            add_products<T>({packed_y.data() + r * pitch, packed_x.data() + c * pitch, pitch, padded,
                             sums.data() + (r * inputs + c) * lanes, inputs * lanes},
                            std::min<int64_t>(kColumns, inputs - c));
        if ((piece - first + 1) % kPiecesPerSum != 0 && piece + 1 != last) continue;
        for (int64_t k = 0; k < terms * lanes; ++k)
          totals[static_cast<size_t>(i * terms + k / lanes)] += static_cast<double>(sums.data()[k]);
        std::fill_n(sums.data(), terms * lanes, T(0));
      }
    }
  });
  for (int64_t channel = 0; channel < w.size[0]; ++channel)
    for (int64_t c = 0; c < inputs; ++c) {
      double sum = 0;
      for (int64_t part = 0; part < parts; ++part)
        sum += totals[static_cast<size_t>((channel / outputs * parts + part) * terms + channel % outputs * inputs + c)];
      w.as<T>()[channel * w.stride[0] + c * w.stride[1]] = static_cast<T>(sum);
    }
}

template void multiply_pointwise(const ConvProblem<float>& problem);
template void multiply_pointwise(const ConvProblem<double>& problem);
template void pointwise_weight_gradient<float>(const View&, const View&, const View&, int64_t);
template void pointwise_weight_gradient<double>(const View&, const View&, const View&, int64_t);

}  // namespace voxgrad::cpu
