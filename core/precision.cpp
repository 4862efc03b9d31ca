// Implements the setting of the precision of float32 products on GPUs.
#include "core/precision.h"

#include <atomic>

namespace voxgrad {
namespace {

std::atomic<Float32Precision> current{Float32Precision::highest};

}  // namespace

void set_float32_precision(Float32Precision precision) { current.store(precision, std::memory_order_relaxed); }
Float32Precision float32_precision() { return current.load(std::memory_order_relaxed); }

}  // namespace voxgrad
