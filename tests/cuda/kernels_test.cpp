// Tests the elementwise CUDA kernels, random numbers, indexing, optimizer steps and matmul against the CPU. Most tests
// call the kernels through the kernel table on views with any strides and alignment, between guard bands that must not
// change.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <tuple>
#include <vector>

#include "core/tensor.h"
#include "ops/create.h"
#include "ops/detail/kernels.h"
#include "ops/detail/scalar_ops.h"
#include "ops/elementwise.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "ops/shape.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

constexpr int64_t kGuard = 32;

/// The same view on the CPU and on the GPU.
struct Twin {
  Tensor cpu;  // 1-D buffer that contains the view and its guard bands
  Tensor gpu;  // copy of the buffer on the GPU
  View view;
  int64_t start = 0;  // offset of the first element in the buffers

  struct Layout {
    Dims order = {};      // axes in memory, outermost first; empty: row-major
    int64_t offset = 0;   // elements between the guard band and the view
    Dims flipped = {};    // axes with negative strides
    Dims broadcast = {};  // axes with stride 0
    int64_t gap = 1;      // stride of the innermost axis
  };

  Twin(DType dtype, const Shape& shape, Layout layout, uint32_t seed, double low = -3, double high = 3) {
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.size);
    if (layout.order.empty())
      for (int64_t axis = 0; axis < shape.size(); ++axis) layout.order.push_back(axis);
    int64_t step = layout.gap;
    start = kGuard + layout.offset;
    for (int64_t i = shape.size() - 1; i >= 0; --i) {
      const int64_t axis = layout.order[i];
      if (std::find(layout.broadcast.begin(), layout.broadcast.end(), axis) != layout.broadcast.end()) continue;
      const bool flip = std::find(layout.flipped.begin(), layout.flipped.end(), axis) != layout.flipped.end();
      view.stride[axis] = flip ? -step : step;
      if (flip) start += step * (shape[axis] - 1);
      step *= shape[axis];
    }
    cpu = empty({step + 2 * kGuard + layout.offset}, {.dtype = dtype});
    uint32_t state = seed;
    for (int64_t i = 0; i < cpu.numel(); ++i) {
      state = state * 1664525 + 1013904223;
      const double value = low + (high - low) * (state >> 8) / (1 << 24);
      const double whole = dtype == u8 ? std::floor(std::abs(value)) : std::floor(value);
      cpu.set({i}, dtype == b8 ? state >> 31 : is_floating(dtype) ? value : whole);
    }
    gpu = cpu.to(Device::cuda());
  }

  View on(Device device) const {
    View placed = view;
    const Tensor& tensor = device.is_cuda() ? gpu : cpu;
    placed.device = device.is_cuda() ? device.index : -1;
    placed.data = static_cast<char*>(tensor.mutable_raw_data()) + start * item_size(view.dtype);
    return placed;
  }

  /// Expects each element of the GPU buffer to be within `tolerance` * max(1, |CPU element|) of the CPU element. NaN
  /// matches NaN.
  void expect_same(double tolerance, const std::string& name) const {
    const Tensor got = gpu.to(Device::cpu());
    const auto bytes = static_cast<size_t>(cpu.numel() * item_size(cpu.dtype()));
    if (std::memcmp(got.raw_data(), cpu.raw_data(), bytes) == 0) return;
    const auto expected_values = cpu.to_vector<double>(), values = got.to_vector<double>();
    for (size_t i = 0; i < values.size(); ++i) {
      const double expected = expected_values[i];
      if (values[i] == expected || (std::isnan(values[i]) && std::isnan(expected))) continue;
      ASSERT_LE(std::abs(values[i] - expected), tolerance * std::max(1.0, std::abs(expected)))
          << name << ": element " << i << " of the buffer is " << values[i] << " on the GPU and " << expected
          << " on the CPU";
      ASSERT_GT(tolerance, 0) << name << ": element " << i;
    }
  }
};

/// Calls run(kernels, views...) on both devices and compares all buffers. Failures print `name`.
template <class Run, class... Twins>
void compare_devices(const std::string& name, double tolerance, Run run, const Twins&... twins) {
  for (const Device device : {Device::cpu(), Device::cuda()}) run(kernels(device), twins.on(device)...);
  (twins.expect_same(tolerance, name), ...);
}

double rounding(DType dtype) { return dtype == f64 ? 1e-13 : dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 4e-6; }
constexpr DType kFloats[] = {f32, f64, bf16, f16};

/// A shape, and the layouts of an output and two inputs.
struct Geometry {
  const char* name;
  Shape shape;
  Twin::Layout out, x, y;
};
const Geometry kGeometries[] = {
    {"aligned row", {1031}, {}, {}, {}},
    {"unaligned row", {1031}, {.offset = 3}, {.offset = 3}, {.offset = 3}},
    {"rows with different alignments", {1031}, {.offset = 1}, {.offset = 2}, {}},
    {"shorter than a vector", {3}, {.offset = 1}, {.offset = 1}, {.offset = 1}},
    {"scalar", {}, {}, {}, {}},
    {"channels last", {2, 5, 3, 4, 7}, {{0, 2, 3, 4, 1}}, {{0, 2, 3, 4, 1}}, {{0, 2, 3, 4, 1}}},
    {"permuted", {6, 5, 7, 1, 4}, {}, {{4, 2, 0, 1, 3}, 1}, {{1, 0, 3, 2, 4}}},
    {"flipped", {6, 5, 7}, {}, {{}, 0, {1, 2}}, {{}, 0, {0}}},
    {"broadcast", {3, 4, 50}, {}, {}, {{}, 0, {}, {0, 2}}},
    {"bias for each row", {2, 3, 4, 65}, {}, {}, {{}, 0, {}, {0, 2, 3}}},
    {"unaligned bias", {5, 2, 67}, {.offset = 1}, {.offset = 1}, {{}, 1, {}, {0, 2}}},
    {"bias along rows with different alignments", {5, 130}, {.offset = 3}, {.offset = 1}, {{}, 2, {}, {0}}},
    {"scalar operand", {300}, {}, {.offset = 1}, {{}, 0, {}, {0}}},
    {"rows in permuted order", {5, 4, 67}, {{1, 0, 2}, 1}, {.offset = 2}, {{1, 0, 2}}},
    {"one element for each row", {5, 4, 67}, {{1, 0, 2}, 3}, {{}, 1, {}, {2}}, {{}, 0, {}, {0}}},
    {"gaps", {9, 31}, {.gap = 2}, {.gap = 3}, {.gap = 1}},
    {"eight axes", {2, 3, 2, 3, 2, 3, 2, 3}, {}, {{7, 6, 5, 4, 3, 2, 1, 0}}, {{1, 0, 3, 2, 5, 4, 7, 6}}},
    {"empty", {4, 0, 3}, {}, {}, {}},
};
constexpr DType kAllTypes[] = {f32, f64, bf16, f16, i64, i32, u8, b8};

class CudaKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::is_available()) GTEST_SKIP() << "no GPU is present";
  }
};

TEST_F(CudaKernels, CopyConvertsEveryPairOfTypes) {
  for (const Geometry& g : kGeometries)
    for (const DType to : kAllTypes)
      for (const DType from : kAllTypes) {
        const Twin out(to, g.shape, g.out, 1), x(from, g.shape, g.x, 2, 0, 200);
        compare_devices(
            concat(g.name, " ", from, " to ", to), 0,
            [](const Kernels& k, const View& o, const View& i) { k.copy(o, i); }, out, x);
      }
}

TEST_F(CudaKernels, RoundsToHalfPrecisionLikeTheCpu) {
  std::vector<float> values{0,        65504,        65519,    65520,      1e30f,       3e38f,        2049,
                            2051,     0x1p-24f,     0x1p-25f, 0x1.8p-25f, 1 + 0x1p-8f, 1 + 0x1p-11f, 1 + 0x1.8p-7f,
                            0x1p-14f, 0x1.ffcp-15f, 1e-40f,   INFINITY,   NAN};
  for (size_t i = values.size(); i-- > 0;) values.push_back(-values[i]);
  const Tensor x = empty({static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<float*>(x.mutable_raw_data()));
  for (const DType dtype : {bf16, f16}) {
    const auto expected = x.to(dtype).to(f32).to_vector<float>();
    const auto got = x.to(Device::cuda()).to(dtype).to(f32).to_vector<float>();
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(std::isnan(expected[i]) ? std::isnan(got[i])
                                          : got[i] == expected[i] && std::signbit(got[i]) == std::signbit(expected[i]))
          << values[i] << " rounded to " << dtype << " is " << got[i] << " on the GPU and " << expected[i]
          << " on the CPU";
  }
}

TEST_F(CudaKernels, FillMatchesCpu) {
  for (const Geometry& g : kGeometries)
    for (const DType dtype : kAllTypes) {
      const Twin out(dtype, g.shape, g.out, 1);
      compare_devices(
          concat(g.name, " ", dtype), 0, [](const Kernels& k, const View& o) { k.fill(o, 1.75); }, out);
    }
}

TEST_F(CudaKernels, ArangeIsBitEqual) {
  for (const DType dtype : {f32, f64, bf16, f16, i64, i32}) {
    const Twin out(dtype, {1001}, {.offset = 1}, 1);
    compare_devices(
        name(dtype), 0, [](const Kernels& k, const View& o) { k.arange(o, -3.7, 0.1); }, out);
  }
}

/// Returns the dtype of the result of an operator.
DType result_of(UnaryOp op, DType dtype) { return op == UnaryOp::logical_not || op == UnaryOp::isfinite ? b8 : dtype; }
DType result_of(BinaryOp op, DType dtype) { return op >= BinaryOp::eq ? b8 : dtype; }

#define VG_ROW(name, types, ...) \
  case UnaryOp::name:            \
    return has(types(), dtype);
/// Returns true if an operator supports elements of `dtype`.
constexpr bool supports(UnaryOp op, DType dtype) {
  switch (op) { VG_UNARY_OPERATORS(VG_ROW) }
  return false;
}
#undef VG_ROW
#define VG_ROW(name, types, ...) \
  case BinaryOp::name:           \
    return has(types(), dtype);
constexpr bool supports(BinaryOp op, DType dtype) {
  switch (op) { VG_BINARY_OPERATORS(VG_ROW) }
  return false;
}
#undef VG_ROW

TEST_F(CudaKernels, UnaryMatchesCpu) {
  for (const Geometry& g : kGeometries)
    for (size_t i = 0; i < std::size(kUnaryNames); ++i)
      for (const DType dtype : kAllTypes) {
        const auto op = static_cast<UnaryOp>(i);
        if (!supports(op, dtype)) continue;
        const bool positive = op == UnaryOp::log || op == UnaryOp::sqrt || op == UnaryOp::rsqrt || dtype == u8;
        const Twin out(result_of(op, dtype), g.shape, g.out, 1), x(dtype, g.shape, g.x, 2, positive ? 0.1 : -3, 3);
        compare_devices(
            concat(g.name, " ", kUnaryNames[i], " ", dtype), rounding(dtype),
            [op](const Kernels& k, const View& o, const View& v) {
              k.unary(op, o, v, op == UnaryOp::clamp ? -1 : 2, op == UnaryOp::softplus ? 5 : 1);
            },
            out, x);
      }
}

TEST_F(CudaKernels, UnaryMatchesCpuForSpecialValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f32, f64, bf16, f16})
    for (size_t i = 0; i < std::size(kUnaryNames); ++i) {
      const auto op = static_cast<UnaryOp>(i);
      Twin x(dtype, {7}, {}, 1);
      const Twin out(result_of(op, dtype), {7}, {}, 2);
      int64_t at = x.start;
      for (const double value : {infinity, -infinity, std::nan(""), 0.0, -0.0, 88.0, -88.0}) x.cpu.set({at++}, value);
      x.gpu = x.cpu.to(Device::cuda());
      compare_devices(
          concat(kUnaryNames[i], " ", dtype), rounding(dtype),
          [op](const Kernels& k, const View& o, const View& v) { k.unary(op, o, v, 1, 2); }, out, x);
    }
}

TEST_F(CudaKernels, BinaryMatchesCpu) {
  for (const Geometry& g : kGeometries)
    for (size_t i = 0; i < std::size(kBinaryNames); ++i)
      for (const DType dtype : kAllTypes) {
        const auto op = static_cast<BinaryOp>(i);
        if (!supports(op, dtype)) continue;
        const double low = op == BinaryOp::pow || dtype == u8 ? 0.25 : -3;
        const Twin out(result_of(op, dtype), g.shape, g.out, 1), x(dtype, g.shape, g.x, 2, low, 3),
            y(dtype, g.shape, g.y, 3, low, 3);
        compare_devices(
            concat(g.name, " ", kBinaryNames[i], " ", dtype), rounding(dtype),
            [op](const Kernels& k, const View& o, const View& v, const View& w) { k.binary(op, o, v, w, 0.5, 1); }, out,
            x, y);
      }
}

TEST_F(CudaKernels, GeluBackwardMatchesCpu) {
  // Both memory formats; one, three and 129 vectors of channels; channels that are no whole vectors; unaligned tensors.
  const std::tuple<Shape, Twin::Layout> shapes[] = {
      {{2, 8, 9001}, {{0, 2, 1}}}, {{1, 24, 703}, {{0, 2, 1}}}, {{2, 1032, 5}, {{0, 2, 1}}},
      {{2, 6, 301}, {{0, 2, 1}}},  {{2, 3, 2005}, {}},          {{1, 8, 77}, {{0, 2, 1}, 1}},
      {{3, 16, 0}, {{0, 2, 1}}},   {{3, 16, 1}, {{0, 2, 1}}},
  };
  for (const auto& [shape, layout] : shapes)
    for (const DType dtype : kFloats) {
      const Twin y(dtype, shape, layout, 1), dx(dtype, shape, layout, 2), sums(dtype, {shape[1]}, {}, 3),
          dy(dtype, shape, layout, 4), x(dtype, shape, layout, 5);
      // The sums of up to 18,002 terms are of the order of 100.
      compare_devices(
          concat(shape, " ", dtype), 2 * rounding(dtype),
          [](const Kernels& k, const View& y_view, const View& dx_view, const View& sums_view, const View& dy_view,
             const View& x_view) { k.gelu_backward(y_view, dx_view, sums_view, dy_view, x_view); },
          y, dx, sums, dy, x);
      compare_devices(
          concat(shape, " ", dtype, " in place"), 2 * rounding(dtype),
          [](const Kernels& k, const View& y_view, const View& sums_view, const View& dy_view, const View& x_view) {
            k.gelu_backward(y_view, dy_view, sums_view, dy_view, x_view);
          },
          y, sums, dy, x);
    }
}

TEST_F(CudaKernels, WhereMatchesCpu) {
  for (const Geometry& g : kGeometries)
    for (const DType dtype : kAllTypes) {
      const Twin out(dtype, g.shape, g.out, 1), condition(b8, g.shape, g.x, 2), x(dtype, g.shape, g.y, 3, 0, 9),
          y(dtype, g.shape, g.x, 4, 0, 9);
      compare_devices(
          concat(g.name, " ", dtype), 0,
          [](const Kernels& k, const View& o, const View& c, const View& v, const View& w) { k.where(o, c, v, w); },
          out, condition, x, y);
    }
}

TEST_F(CudaKernels, UniformIsBitEqualAndNormalIsEqualUpToRounding) {
  for (const DType dtype : kFloats)
    for (const int64_t count : {0, 1, 2, 3, 4, 5, 1023, 5000})
      for (const GeneratorState state : {GeneratorState{0, 0}, GeneratorState{~0ull - 3, (1ull << 32) - 2}}) {
        const Twin out(dtype, {count}, {.offset = count % 4}, 1);
        compare_devices(
            concat("uniform ", dtype, " ", count), 0, [&](const Kernels& k, const View& o) { k.uniform(o, state); },
            out);
        compare_devices(
            concat("normal ", dtype, " ", count), rounding(dtype),
            [&](const Kernels& k, const View& o) { k.normal(o, state); }, out);
      }
}

/// Returns random indices with the given shape into an axis of `size` elements.
Twin index_twin(const Shape& shape, const Twin::Layout& layout, int64_t size) {
  return Twin(i64, shape, layout, 7, 0, static_cast<double>(size));
}

TEST_F(CudaKernels, GatherMatchesCpu) {
  for (const DType dtype : kAllTypes) {
    const Twin in(dtype, {4, 9, 5}, {{2, 0, 1}, 1, {1}}, 1, 0, 100), out(dtype, {4, 6, 5}, {{1, 2, 0}}, 2, 0, 100),
        index = index_twin({4, 6, 5}, {{0, 2, 1}}, 9);
    compare_devices(
        name(dtype), 0,
        [](const Kernels& k, const View& o, const View& i, const View& n) { k.gather("gather", o, i, n, 1); }, out, in,
        index);
  }
}

TEST_F(CudaKernels, GatherReportsIndicesOutOfRange) {
  const Device device = Device::cuda();
  const Tensor index = empty({3}, {.dtype = i64});
  for (const int64_t i : {0, 1, 2}) index.set({i}, i == 0 ? -1.0 : i == 1 ? 2.0 : 1.0);
  const Tensor floats = full({2}, 5, {.device = device}), out = full({3}, 5, {.device = device});
  const Tensor integers = full({2}, 5, {.dtype = i32, .device = device});
  const Tensor out_integers = full({3}, 5, {.dtype = i32, .device = device});
  const Tensor gpu_index = index.to(device);
  kernels(device).gather("gather", out.view_out(), floats.view_in(), gpu_index.view_in(), 0);
  kernels(device).gather("gather", out_integers.view_out(), integers.view_in(), gpu_index.view_in(), 0);
  EXPECT_ERROR(out.to_vector(), "is out of range for an axis of size 2 (on cuda:0");
  EXPECT_TRUE(std::isnan(out.at({0})) && std::isnan(out.at({1})));
  EXPECT_EQ(out.at({2}), 5);
  EXPECT_EQ(out_integers.to_vector<double>(), (std::vector<double>{0, 0, 5}));
}

TEST_F(CudaKernels, SynchronizationThrowsForIndicesOutOfRange) {
  const Device device = Device::cuda();
  const auto on_gpu = [&](std::vector<int64_t> values, const Shape& shape) {
    return from_span<int64_t>(values, shape).to(device);
  };
  const Tensor x = ones({2, 3}, {.device = device}), many = ones({5000, 1}, {.device = device});
  const Tensor nines = full({5000, 1}, 9, {.dtype = i64, .device = device});
  gather(x, 1, on_gpu({0, 3}, {2, 1}));
  EXPECT_ERROR(synchronize(device), "gather: index 3 is out of range for an axis of size 3 (on cuda:0");
  index_select(x, 0, on_gpu({-1}, {1}));
  EXPECT_ERROR(x.at({0, 0}), "index_select: index -1 is out of range for an axis of size 2");
  scatter_add(x, 1, on_gpu({0, 0, 0, 0, 0, 7}, {2, 3}), 5);
  cuda::Event event;
  event.record();
  EXPECT_ERROR(event.synchronize(), "scatter_add: index 7 is out of range for an axis of size 5");
  scatter_add(many, 1, nines, 4);
  EXPECT_ERROR(synchronize(device), "scatter_add: index 9 is out of range for an axis of size 4");
  EXPECT_ERROR(cross_entropy(x, on_gpu({0, 5}, {2})).item(), "cross_entropy: index 5 is out of range for an axis of");
  synchronize(device);  // later work is not affected
  EXPECT_EQ(gather(x, 1, on_gpu({0, 2}, {2, 1})).to_vector(), (std::vector<double>{1, 1}));
}

TEST_F(CudaKernels, ScatterAddIsBitEqualForFewAndManyLines) {
  for (const DType dtype : kFloats)
    for (const int64_t lines : {int64_t{3}, int64_t{5000}}) {
      const Twin out(dtype, {lines, 7, 2}, {{2, 0, 1}}, 1), in(dtype, {lines, 20, 2}, {{0, 2, 1}, 1, {1}}, 2),
          index = index_twin({lines, 20, 2}, {}, 7);
      compare_devices(
          concat(dtype, " ", lines), 0,
          [](const Kernels& k, const View& o, const View& i, const View& n) {
            k.scatter_add("scatter_add", o, i, n, 1);
          },
          out, in, index);
    }
}

/// Parameters of an optimizer step with their gradients and states. on() returns their views on a device.
struct StepTwins {
  std::vector<std::array<Twin, 5>> params;

  /// Creates a parameter of each size in `counts`. Each parameter starts `offset` elements after a vector-aligned
  /// address.
  StepTwins(DType dtype, const std::vector<int64_t>& counts, int64_t offset) {
    for (const int64_t count : counts) {
      // RMSprop subtracts the square of the mean gradient (the last state) from the mean squared gradient. The mean
      // gradient must be small; otherwise, the two numbers could be nearly equal and their difference mostly rounding
      // error.
      const DType wide = dtype == f64 ? f64 : f32;
      const auto twin = [&](DType type, uint32_t seed, double low, double high) {
        return Twin(type, {count}, {.offset = offset}, seed, low, high);
      };
      params.push_back({twin(dtype, 1, 0.1, 2), twin(dtype, 2, 0.1, 2), twin(wide, 3, 0.1, 2), twin(wide, 4, 0.1, 2),
                        twin(wide, 5, -0.2, 0.2)});
    }
  }
  std::vector<StepViews> on(Device device) const {
    std::vector<StepViews> list;
    for (const auto& [param, grad, a, b, c] : params)
      list.push_back({param.on(device), grad.on(device), {a.on(device), b.on(device), c.on(device)}});
    return list;
  }
};

TEST_F(CudaKernels, OptimizerStepsMatchCpu) {
  std::vector<int64_t> many = {1003, 0, 1, 8192, 8193, 20001};  // more parameters than one launch processes
  for (int64_t i = 0; i < 130; ++i) many.push_back(i % 7);
  const auto run = [&](const char* name, DType dtype, int64_t offset, const auto& step) {
    const StepTwins twins(dtype, offset == 0 ? many : std::vector<int64_t>{1003}, offset);
    for (const Device device : {Device::cpu(), Device::cuda()}) step(kernels(device), twins.on(device));
    for (const auto& param : twins.params)
      for (const Twin& twin : param) twin.expect_same(rounding(dtype), name);
  };
  for (const DType dtype : kFloats)
    for (const int64_t offset : {0, 1})
      for (const bool flag : {false, true})
        for (const double momentum : {0.0, 0.9}) {
          run("sgd", dtype, offset, [&](const Kernels& k, const std::vector<StepViews>& list) {
            k.step("sgd", list, SgdStep{0.1, momentum, 0.2, 0.01, flag, flag, 2}, {});
          });
          run("adam", dtype, offset, [&](const Kernels& k, const std::vector<StepViews>& list) {
            k.step("adam", list, AdamStep{0.1, 0.9, 0.99, 1e-8, 0.01, flag, flag, flag, 3}, {});
          });
          run("adagrad", dtype, offset, [&](const Kernels& k, const std::vector<StepViews>& list) {
            k.step("adagrad", list, AdagradStep{0.1, momentum, 0.01, 1e-8, flag, 3}, {});
          });
          run("lion", dtype, offset, [&](const Kernels& k, const std::vector<StepViews>& list) {
            // Do not set maximize: the average and the negated gradient would nearly cancel, and the sign of the
            // update would depend on rounding.
            k.step("lion", list, LionStep{0.1, momentum, 0.9, 0.01}, {});
          });
          run("ema", dtype, offset, [&](const Kernels& k, const std::vector<StepViews>& list) {
            k.step("ema", list, EmaStep{momentum}, {});
          });
          run("rmsprop", dtype, offset, [&](const Kernels& k, std::vector<StepViews> list) {
            if (momentum == 0)  // without momentum, the mean gradient is the second state
              for (StepViews& views : list) views.state[1] = views.state[2];
            k.step("rmsprop", list, RmspropStep{0.1, 0.9, 1e-8, 0.01, momentum, flag, flag}, {});
          });
        }
}

TEST_F(CudaKernels, MatmulHandlesAnyStrides) {
  const Twin::Layout layouts[] = {
      {},                      // row-major
      {{0, 2, 1}},             // transposed
      {{1, 2, 0}},             // batch innermost: neither matrix axis is dense
      {{}, 1, {2}},            // columns in reverse order
      {{}, 0, {}, {0}},        // one matrix for the whole batch
      {{2, 1, 0}, 0, {}, {0}}  // the same, transposed
  };
  const std::array<int64_t, 3> sizes[] = {{5, 7, 6},    {1, 7, 6}, {5, 1, 6}, {5, 7, 1},
                                          {33, 65, 17}, {5, 0, 6}, {0, 3, 4}};
  for (const DType dtype : kFloats)
    for (const auto& [m, k, n] : sizes)
      for (const auto& left : layouts)
        for (const auto& right : layouts) {
          // The elements are small integers, so the sums are exact in any order.
          Twin c(dtype, {3, m, n}, {}, 1), a(dtype, {3, m, k}, left, 2, -8, 8), b(dtype, {3, k, n}, right, 3, -8, 8);
          for (Twin* twin : {&a, &b}) {
            for (int64_t i = 0; i < twin->cpu.numel(); ++i) twin->cpu.set({i}, std::round(twin->cpu.at({i})));
            twin->gpu = twin->cpu.to(Device::cuda());
          }
          compare_devices(
              concat(dtype, " ", m, " ", k, " ", n), 0,
              [](const Kernels& table, const View& z, const View& x, const View& y) { table.matmul(z, x, y); }, c, a,
              b);
        }
}

TEST_F(CudaKernels, MatmulComputesFloat32InFloat32) {
  // TF32 would round 1 + 2^-12 to 1.
  const Device device = Device::cuda();
  const Tensor a = full({1, 64, 64}, 1 + 0x1p-12, {.device = device}), b = full({1, 64, 64}, 1, {.device = device});
  const Tensor c = empty({1, 64, 64}, {.device = device});
  kernels(device).matmul(c.view_out(), a.view_in(), b.view_in());
  EXPECT_EQ(c.at({0, 63, 63}), 64 + 0x1p-6);
}

TEST_F(CudaKernels, MatmulSumsHalfPrecisionInFloat32) {
  // A sum of ones would stop at 2048 in f16 and at 256 in bf16.
  const Device device = Device::cuda();
  for (const DType dtype : {bf16, f16}) {
    const Tensor a = ones({2, 16, 4096}, {.dtype = dtype, .device = device}), b = ones({2, 4096, 8}, a.options());
    const Tensor c = empty({2, 16, 8}, a.options());
    kernels(device).matmul(c.view_out(), a.view_in(), b.view_in());
    EXPECT_EQ(c.at({1, 15, 7}), 4096) << dtype;
  }
}

TEST_F(CudaKernels, SupportsMoreThan2To31Elements) {
  const Device device = Device::cuda();
  const int64_t count = (int64_t{1} << 31) + 1000;
  Tensor in, out;
  try {
    in = empty({count}, {.dtype = u8, .device = device});
    out = empty({count}, {.dtype = u8, .device = device});
  } catch (const OutOfMemoryError& error) {
    GTEST_SKIP() << error.what();
  }
  const Kernels& table = kernels(device);
  table.fill(in.view_out(), 7);
  in.set({3}, 1);
  in.set({count - 2}, 2);
  table.copy(out.view_out(), in.view_in());
  EXPECT_EQ(out.at({3}), 1);
  EXPECT_EQ(out.at({count - 2}), 2);
  EXPECT_EQ(out.at({count - 1}), 7);

  View backwards = in.view_in();
  backwards.data = static_cast<char*>(backwards.data) + count - 1;
  backwards.stride[0] = -1;
  table.fill(out.view_out(), 0);
  table.copy(out.view_out(), backwards);
  EXPECT_EQ(out.at({1}), 2);
  EXPECT_EQ(out.at({count - 4}), 1);
  for (const int64_t i : {int64_t{0}, count / 2 - 1, count / 2, count - 1}) EXPECT_EQ(out.at({i}), 7) << i;
}

}  // namespace
}  // namespace voxgrad
