// Linear maps along the axes of volumes; each one's gradient is the transposed map.
#include "core/autograd.h"
#include "ops/volume.h"

namespace voxgrad {

Tensor resample(const Tensor& x, const ResampleMaps& maps, const Triple& size, bool transposed) {
  const Tensor y = empty_volume(x, x.size(1), size, x.dtype());
  kernels(x.device()).resample(y.view_out(), x.view_in(), maps, transposed);
  return record("resample", y, {x}, [=, from = spatial_size(x)](const Tensor& grad) {
    return Tensors{resample(grad, maps, from, !transposed)};
  });
}

}  // namespace voxgrad
