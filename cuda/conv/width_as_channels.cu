#include "cuda/conv/width_as_channels.h"

#include <algorithm>

#include "cuda/kernels.h"

namespace voxgrad::cuda {
namespace {

/// Positions along the width from the first that a tap reads to the last.
int64_t read_width(const View& w, const View& out, const ConvGeometry& g) {
  return (out.size[4] - 1) * g.stride[2] + (w.size[4] - 1) * g.dilation[2] + 1;
}

}  // namespace

WidthAsChannels::WidthAsChannels(const View& x, const View& weight, const View& out, const ConvGeometry& of,
                                 const Launch& launch)
    : in(x),
      w(weight),
      geometry(of),
      padded_(launch, static_cast<size_t>(x.size[0] * x.size[2] * x.size[3] * read_width(weight, out, of) *
                                          item_size(x.dtype))) {
  const int64_t width = read_width(weight, out, of), padding = of.padding[2];
  View padded = x;
  padded.size[4] = width;
  padded = dense_like(padded, padded_.as<void>(), x.dtype);
  kernel::fill(padded, 0);
  View from = x, to = padded;
  to.size[4] = from.size[4] = std::clamp<int64_t>(width - padding, 0, x.size[4]);
  to.data = to.as<char>() + padding * item_size(x.dtype);
  if (from.size[4] > 0) kernel::copy(to, from);
  in = padded;
  in.size[1] = w.size[1] = weight.size[4];
  in.stride[1] = of.dilation[2];
  in.size[4] = out.size[4];
  in.stride[4] = of.stride[2];
  w.stride[1] = weight.stride[4];
  w.size[4] = 1;
  geometry.stride[2] = geometry.dilation[2] = 1;
  geometry.padding[2] = 0;
}

}  // namespace voxgrad::cuda
