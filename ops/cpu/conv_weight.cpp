// The weight gradient of convolutions on the CPU: dw(co, ci, tap) = sum over n and o of y(n, co, o) * x(n, ci, i),
// with i = o * stride - padding + tap * dilation.
//
// The channels of x and y are divided into pieces. Tiles are packed piece by piece, with the channels of a piece
// innermost. For each tap, the register tile multiplies the channels of one operand by the channels of the other
// operand and sums over voxels, with x shifted by the tap. The channels of the first operand are the rows of the
// product, and the channels of the second operand are its columns. Each thread computes the sums of some (channels,
// tap) combinations, so no sum is split between threads.
#include <algorithm>

#include "ops/cpu/conv_problem.h"
#include "ops/cpu/loops.h"

namespace voxgrad::cpu {
namespace {

// kBatchBytes limits the packed tiles of x and y that are multiplied together, kSumBytes limits the part of the result
// that is being summed, and kTileBytes limits a packed tile.
constexpr int64_t kBatchBytes = 16 << 20;
constexpr int64_t kSumBytes = 16 << 20;
constexpr int64_t kTileBytes = 2 << 20;
// Largest number of voxels per tile. The product of a tile is summed in registers and then added to memory. Larger
// tiles need fewer of these additions; smaller tiles have smaller rounding errors.
constexpr int64_t kTileVoxels = 1024;

/// Channels that are packed next to each other.
template <class T>
struct Piece {
  int64_t first = 0;
  int64_t count = 0;
  int64_t width = 0;                      // packed elements per voxel; elements from `count` on are 0
  const TileFamily<T>* family = nullptr;  // the tiles that multiply the piece; null for pieces of the row operand
};

/// One operand of the product: x, which the taps shift, or y.
template <class T>
struct Operand {
  Volume<const T> volume;
  Gather3 gather;
  Tiling tiling;
  int64_t weight_stride = 0;  // stride of the operand's channels in the weight
  int64_t first_channel = 0;
  int64_t channels = 0;
  std::vector<Piece<T>> pieces = {};

  explicit Operand(const View& view) : volume(view) {}
  /// Returns the number of elements of a packed tile before piece number `piece`.
  int64_t elements(size_t piece) const {
    int64_t width = 0;
    for (size_t i = 0; i < piece; ++i) width += pieces[i].width;
    return width * tiling.slots();
  }
  int64_t elements() const { return elements(pieces.size()); }
  /// Returns the number of tasks that pack a tile. Each task packs one piece.
  int64_t pack_tasks() const { return static_cast<int64_t>(pieces.size()); }

  void pack(T* packed, int64_t n, const std::array<int64_t, 3>& origin, int64_t task) const {
    const Piece<T>& piece = pieces[static_cast<size_t>(task)];
    T* to = packed + elements(static_cast<size_t>(task));
    if (piece.count < piece.width) std::fill_n(to, piece.width * tiling.slots(), T(0));
    pack_tile(to, {tiling.windows[2].slots * piece.width, 1, piece.width}, volume.at(n, first_channel + piece.first),
              volume, piece.count, gather, tiling, origin);
  }
};

template <class T>
class WeightGradient {
 public:
  WeightGradient(const View& w, const View& x, const View& y, const ConvGeometry& geometry)
      : w_(w), groups_(geometry.groups), kernel_(w.size[2], w.size[3], w.size[4]), x_(x), y_(y) {
    for (int axis = 0; axis < 3; ++axis) {
      const size_t i = static_cast<size_t>(axis);
      x_.gather[i] = gather_forward(conv_axis(x, w, y, geometry, axis));
      y_.gather[i] = gather_forward({y.size[axis + 2], y.size[axis + 2], 1, 1, 0, 1});
    }
    x_.weight_stride = w.stride[1];
    y_.weight_stride = w.stride[0];
  }

  void run() {
    const int64_t x_channels = w_.size[1], y_channels = w_.size[0] / groups_;
    const int64_t chunk = channels_per_tile(x_channels);
    for (int64_t group = 0; group < groups_; ++group)
      for (int64_t first = 0; first < x_channels; first += chunk) {
        x_.first_channel = group * x_channels + first;
        x_.channels = std::min(chunk, x_channels - first);
        y_.first_channel = group * y_channels;
        y_.channels = y_channels;
        run_channels(w_.as<T>() + y_.first_channel * w_.stride[0] + first * w_.stride[1]);
      }
  }

 private:
  static constexpr int64_t item() { return static_cast<int64_t>(sizeof(T)); }

  int64_t channels_per_tile(int64_t channels) const {
    const Tiling smallest = make_tiling(x_.gather, kernel_, {.slots = 1});
    return even_piece(channels, std::max<int64_t>(1, kTileBytes / item() / std::max<int64_t>(1, smallest.slots())));
  }

  /// Chooses the operand whose channels are the columns of the product. Prefers the operand with less padding in the
  /// vectors. With equal padding, prefers the operand with more channels.
  void choose_roles() {
    const int64_t x_waste = padded_columns(column_blocks<T>(x_.channels)) * y_.channels,
                  y_waste = padded_columns(column_blocks<T>(y_.channels)) * x_.channels;
    const bool y_is_columns = y_waste < x_waste || (y_waste == x_waste && y_.channels >= x_.channels);
    columns_ = y_is_columns ? &y_ : &x_;
    rows_ = y_is_columns ? &x_ : &y_;
    columns_->pieces.clear();
    for (const ColumnBlock<T>& block : column_blocks<T>(columns_->channels))
      columns_->pieces.push_back({block.first, block.count, block.family->columns, block.family});
    int64_t max_rows = kMaxTileRows;
    for (const Piece<T>& piece : columns_->pieces) max_rows = std::min<int64_t>(max_rows, piece.family->max_rows);
    int64_t height = even_piece(rows_->channels, max_rows);
    // Round up to a multiple of 4 if possible, because packing interleaves 4 or 8 channels at a time.
    if (const int64_t rounded = round_up(height, int64_t{4}); height > 4 && rounded <= max_rows) height = rounded;
    rows_->pieces.clear();
    for (int64_t first = 0; first < rows_->channels; first += height)
      rows_->pieces.push_back({first, std::min(height, rows_->channels - first), height, nullptr});
  }

  /// Computes the gradient `w` of the weight of one group for the current channels of x.
  void run_channels(T* w) {
    choose_roles();
    const int64_t elements = kTileBytes / item();
    x_.tiling = make_tiling(x_.gather, kernel_,
                            {.slots = elements / x_.channels, .steps = std::min(kTileVoxels, elements / y_.channels)});
    y_.tiling = x_.tiling;  // with the steps of the tiles of x; each step reads one element of y
    for (size_t i = 0; i < 3; ++i) y_.tiling.windows[i] = AxisWindow(y_.gather[i], 1, y_.tiling.length[i]);
    const int64_t items = static_cast<int64_t>(columns_->pieces.size() * rows_->pieces.size()) * taps();
    const int64_t at_once = std::min(items, std::max<int64_t>(1, kSumBytes / item() / item_elements()));
    const Workspace<T> sums(at_once * item_elements()), packed(tiles_at_once() * tile_elements());
    for (int64_t first = 0; first < items; first += at_once)
      run_items(w, sums.data(), packed.data(), {first, std::min(items, first + at_once)});
  }

  int64_t tiles() const { return x_.volume.batch * x_.tiling.count(); }
  int64_t tile_elements() const { return x_.elements() + y_.elements(); }
  int64_t tiles_at_once() const {
    const int64_t fitting = kBatchBytes / item() / std::max<int64_t>(1, tile_elements());
    return std::clamp<int64_t>(fitting, 1, std::max<int64_t>(1, tiles()));
  }

  /// Computes the items (struct Item) [range.begin, range.end). Packs the tiles in batches and adds the products of
  /// each batch to the sums.
  void run_items(T* w, T* sums, T* packed, const ConvRange& range) {
    std::fill_n(sums, (range.end - range.begin) * item_elements(), T(0));
    auto over_items = [&](const auto& body) {
      parallel_for(range.end - range.begin, 1, [&](int64_t begin, int64_t end) {
        body(ConvRange{range.begin + begin, range.begin + end}, sums + begin * item_elements());
      });
    };
    for (int64_t first = 0; first < tiles(); first += tiles_at_once()) {
      const int64_t count = std::min(tiles_at_once(), tiles() - first);
      const int64_t tasks = x_.pack_tasks() + y_.pack_tasks();
      parallel_for(count * tasks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack(packed + i / tasks * tile_elements(), first + i / tasks, i % tasks);
      });
      over_items([&](const ConvRange& items, T* to) {
        for (int64_t i = 0; i < count; ++i)
          multiply(to, packed + i * tile_elements(), x_.tiling.origin((first + i) % x_.tiling.count()), items);
      });
    }
    over_items([&](const ConvRange& items, const T* from) { write(w, from, items); });
  }

  void pack(T* packed, int64_t tile, int64_t task) const {
    const int64_t n = tile / x_.tiling.count();
    const auto origin = x_.tiling.origin(tile % x_.tiling.count());
    if (task < x_.pack_tasks())
      x_.pack(packed, n, origin, task);
    else
      y_.pack(packed + x_.elements(), n, origin, task - x_.pack_tasks());
  }

  int64_t taps() const { return kernel_[0] * kernel_[1] * kernel_[2]; }
  std::array<size_t, 3> tap_index(int64_t tap) const {
    return {static_cast<size_t>(tap / (kernel_[1] * kernel_[2])), static_cast<size_t>(tap / kernel_[2] % kernel_[1]),
            static_cast<size_t>(tap % kernel_[2])};
  }

  /// A register tile of the result: the product of two pieces for one tap. Consecutive items differ in the tap, so that
  /// their pieces stay in the cache.
  struct Item {
    size_t columns;  // index of the piece of the columns
    size_t rows;     // index of the piece of the rows
    int64_t tap;
  };
  Item item_at(int64_t i) const {
    const size_t pair = static_cast<size_t>(i / taps());
    return {pair / rows_->pieces.size(), pair % rows_->pieces.size(), i % taps()};
  }
  int64_t item_elements() const {
    int64_t width = 0;
    for (const Piece<T>& piece : columns_->pieces) width = std::max(width, piece.width);
    return width * rows_->pieces[0].width;
  }

  /// Adds the products of one packed tile to the sums of the items.
  void multiply(T* sums, const T* packed, const std::array<int64_t, 3>& origin, const ConvRange& items) const {
    const T* rows_data = packed + (rows_ == &x_ ? 0 : x_.elements());
    const T* columns_data = packed + (columns_ == &x_ ? 0 : x_.elements());
    alignas(kTileAlignment) T products[kMaxTileRows * kMaxTileWidth / sizeof(T)];
    std::vector<TileSegment> segments;
    for (int64_t i = items.begin; i < items.end; ++i, sums += item_elements()) {
      const Item it = item_at(i);
      const Piece<T>&rows = rows_->pieces[it.rows], &columns = columns_->pieces[it.columns];
      const int64_t depth = fill_segments(rows.width, columns.width, it.tap, origin, segments);
      if (depth == 0 || segments.empty()) continue;
      columns.family->products[rows.count - 1]({rows_data + rows_->elements(it.rows), rows.width,
                                                columns_data + columns_->elements(it.columns), columns.width, segments,
                                                depth, products, columns.width});
      for (int64_t j = 0; j < rows.count * columns.width; ++j) sums[j] += products[j];
    }
  }

  /// Writes the sums of the items to the weight.
  void write(T* w, const T* sums, const ConvRange& items) const {
    for (int64_t i = items.begin; i < items.end; ++i, sums += item_elements()) {
      const Item it = item_at(i);
      const Piece<T>&rows = rows_->pieces[it.rows], &columns = columns_->pieces[it.columns];
      T* to = w + rows.first * rows_->weight_stride + columns.first * columns_->weight_stride;
      const auto tap = tap_index(it.tap);
      for (size_t axis = 0; axis < 3; ++axis) to += static_cast<int64_t>(tap[axis]) * w_.stride[axis + 2];
      for (int64_t m = 0; m < rows.count; ++m)
        for (int64_t n = 0; n < columns.count; ++n)
          to[m * rows_->weight_stride + n * columns_->weight_stride] = sums[m * columns.width + n];
    }
  }

  /// Lists the rows of voxels whose `tap` lies inside x along d and h, one segment per row. Returns the length of a
  /// segment, which is equal for all segments: the number of voxels per row whose tap lies inside x along w.
  int64_t fill_segments(int64_t rows_width, int64_t columns_width, int64_t tap, const std::array<int64_t, 3>& origin,
                        std::vector<TileSegment>& segments) const {
    const auto k = tap_index(tap);
    std::array<int64_t, 3> begin{}, end{};  // steps within the tile
    for (size_t i = 0; i < 3; ++i) {
      const ConvPhase& phase = x_.gather[i].phases[0];
      const ConvRange range = tap_range(x_.gather[i], phase, phase.taps[k[i]]);
      begin[i] = std::max<int64_t>(0, range.begin - origin[i]);
      end[i] = std::min(x_.tiling.length[i], range.end - origin[i]);
    }
    struct PackedOffsets {  // offsets in the packed tile of an operand
      int64_t start;        // first voxel
      int64_t d;            // stride along d
      int64_t h;            // stride along h
    };
    auto packed_offsets = [&](const Operand<T>& operand, int64_t width) {
      const auto& windows = operand.tiling.windows;
      auto slot = [&](size_t i) { return begin[i] + windows[i].base[&operand == &x_ ? k[i] : 0]; };
      const int64_t h = windows[2].slots * width, d = windows[1].slots * h;
      return PackedOffsets{slot(0) * d + slot(1) * h + slot(2) * width, d, h};
    };
    const PackedOffsets rows = packed_offsets(*rows_, rows_width), columns = packed_offsets(*columns_, columns_width);
    segments.clear();
    for (int64_t d = 0; d < end[0] - begin[0]; ++d)
      for (int64_t h = 0; h < end[1] - begin[1]; ++h)
        segments.push_back({rows.start + d * rows.d + h * rows.h, columns.start + d * columns.d + h * columns.h});
    return std::max<int64_t>(0, end[2] - begin[2]);
  }

  View w_;
  int64_t groups_;
  Triple kernel_;
  Operand<T> x_, y_;
  Operand<T>* rows_ = nullptr;
  Operand<T>* columns_ = nullptr;
};

}  // namespace

void conv_backward_weight(const View& w, const View& x_view, const View& y_view, const ConvGeometry& geometry) {
  View x = x_view, y = y_view;
  if (is_half(w.dtype))
    return through_float32(w, x, y, nullptr, [&](const View& weight, const View& a, const View& b, const View*) {
      conv_backward_weight(weight, a, b, geometry);
    });
  dispatch(WideFloats(), w.dtype, "conv_backward_weight", "CPU", [&]<class T>() {
    if (w.numel() == 0) return;
    const bool merged = merge_voxels(x, y, w, geometry);
    if (merged && has_few_products(w, x, y, geometry.groups))
      pointwise_weight_gradient<T>(w, x, y, geometry.groups);
    else if (is_depthwise(w, geometry))
      depthwise_weight_gradient<T>(w, x, y, geometry);
    else
      WeightGradient<T>(w, x, y, geometry).run();
  });
}

}  // namespace voxgrad::cpu
