// Compares the CPU kernels of optimizer steps with PyTorch's formulas in double. Also tests that the results of CPU
// kernels do not depend on the number of threads.
#include <cmath>
#include <cstring>
#include <vector>

#include "core/thread_pool.h"
#include "tests/ops/cpu_kernels_support.h"

namespace voxgrad {
namespace {

using namespace kerneltest;

constexpr int64_t kCount = 1031;
constexpr int kSteps = 5;

/// Runs kSteps optimizer steps twice with the same gradients: with `kernel` on arrays of T, and with `reference` in
/// double. Then compares all arrays. Array 0 is the parameter, array 1 is the gradient, and the others are the state,
/// which is initially zero.
template <class T, size_t states, class Kernel, class Reference>
void compare_steps(Kernel kernel, Reference reference) {
  std::vector<Array<T>> arrays(states + 2, Array<T>({kCount}));
  std::vector<std::vector<double>> values(states + 2, std::vector<double>(kCount));
  for (auto& a : arrays) a.view.data = a.data() + 8;  // points the copied view to the memory of its array
  for (size_t s = 2; s < states + 2; ++s) cpu_table.fill(arrays[s].view, 0);
  arrays[0].random(-1, 1);
  for (int64_t i = 0; i < kCount; ++i) values[0][static_cast<size_t>(i)] = static_cast<double>(arrays[0]({i}));
  for (int step = 1; step <= kSteps; ++step) {
    arrays[1].random(-1, 1, static_cast<unsigned>(step));
    kernel(step, arrays);
    for (size_t i = 0; i < static_cast<size_t>(kCount); ++i) {
      values[1][i] = static_cast<double>(arrays[1]({static_cast<int64_t>(i)}));
      reference(step, [&](size_t k) -> double& { return values[k][i]; });
    }
  }
  for (size_t k = 0; k < arrays.size(); ++k)
    expect_close<T>(
        arrays[k], [&](const Dims& i) { return values[k][static_cast<size_t>(i[0])]; }, sizeof(T) == 4 ? 5e-6 : 1e-13);
}

/// Returns a list with one entry: the views of a parameter, its gradient and its state.
template <class T>
std::vector<StepViews> step_list(const std::vector<Array<T>>& a) {
  StepViews views{a[0].view, a[1].view, {}};
  for (size_t k = 2; k < a.size(); ++k) views.state[k - 2] = a[k].view;
  return {views};
}

TEST(CpuKernels, SgdStepsMatchFormulas) {
  for_floats([]<class T>() {
    for (int variant = 0; variant < 16; ++variant) {
      SgdStep o{.lr = 0.1,
                .momentum = 0.9,
                .dampening = variant & 1 ? 0.0 : 0.25,
                .weight_decay = variant & 2 ? 0.01 : 0.0,
                .nesterov = (variant & 5) == 5,
                .maximize = (variant & 8) != 0,
                .step = 1};
      if (variant & 4 && !(variant & 1)) o.momentum = 0;
      compare_steps<T, 1>(
          [&](int step, std::vector<Array<T>>& a) {
            o.step = step;
            cpu_table.step("sgd", step_list(a), o, {});
          },
          [&](int step, auto at) {
            double g = (o.maximize ? -at(1) : at(1)) + o.weight_decay * at(0);
            if (o.momentum != 0) {
              at(2) = step == 1 ? g : o.momentum * at(2) + (1 - o.dampening) * g;
              g = o.nesterov ? g + o.momentum * at(2) : at(2);
            }
            at(0) -= o.lr * g;
          });
    }
  });
}

TEST(CpuKernels, AdamStepsMatchFormulas) {
  for_floats([]<class T>() {
    for (int variant = 0; variant < 16; ++variant) {
      AdamStep o{.lr = 0.01,
                 .beta1 = 0.9,
                 .beta2 = 0.99,
                 .eps = 1e-6,
                 .weight_decay = variant & 2 ? 0.1 : 0.0,
                 .decoupled = (variant & 1) != 0,
                 .amsgrad = (variant & 4) != 0,
                 .maximize = (variant & 8) != 0,
                 .step = 0};
      compare_steps<T, 3>(
          [&](int step, std::vector<Array<T>>& a) {
            o.step = step;
            cpu_table.step("adam", step_list(a), o, {});
          },
          [&](int step, auto at) {
            double g = o.maximize ? -at(1) : at(1);
            if (o.decoupled)
              at(0) *= 1 - o.lr * o.weight_decay;
            else
              g += o.weight_decay * at(0);
            at(2) = o.beta1 * at(2) + (1 - o.beta1) * g;
            at(3) = o.beta2 * at(3) + (1 - o.beta2) * g * g;
            if (o.amsgrad) at(4) = std::max(at(4), at(3));
            const double v = o.amsgrad ? at(4) : at(3);
            at(0) -= o.lr / (1 - std::pow(o.beta1, step)) * at(2) /
                     (std::sqrt(v) / std::sqrt(1 - std::pow(o.beta2, step)) + o.eps);
          });
    }
  });
}

TEST(CpuKernels, RmspropStepsMatchFormulas) {
  for_floats([]<class T>() {
    for (int variant = 0; variant < 16; ++variant) {
      const RmspropStep o{.lr = 0.01,
                          .alpha = 0.9,
                          .eps = 1e-3,
                          .weight_decay = variant & 2 ? 0.1 : 0.0,
                          .momentum = variant & 1 ? 0.9 : 0.0,
                          .centered = (variant & 4) != 0,
                          .maximize = (variant & 8) != 0};
      compare_steps<T, 3>([&](int, std::vector<Array<T>>& a) { cpu_table.step("rmsprop", step_list(a), o, {}); },
                          [&](int, auto at) {
                            const double g = (o.maximize ? -at(1) : at(1)) + o.weight_decay * at(0);
                            at(2) = o.alpha * at(2) + (1 - o.alpha) * g * g;
                            double square = at(2);
                            if (o.centered) {
                              auto& average = at(o.momentum > 0 ? 4 : 3);
                              average = o.alpha * average + (1 - o.alpha) * g;
                              square = std::max(0.0, square - average * average);
                            }
                            double change = g / (std::sqrt(square) + o.eps);
                            if (o.momentum > 0) change = at(3) = o.momentum * at(3) + change;
                            at(0) -= o.lr * change;
                          });
    }
  });
}

TEST(CpuKernels, HalfPrecisionStepsRoundOnceAndKeepFloatState) {
  const auto compare = [](auto type, auto step) {
    using T = decltype(type);
    Array<T> param({kCount}), grad({kCount});
    param.random(0.1, 1, 0);
    grad.random(0.1, 1, 1);
    std::vector<Array<float>> state(3, Array<float>({kCount})), wide(5, Array<float>({kCount}));
    for (auto* arrays : {&state, &wide})
      for (auto& array : *arrays)
        array.view.data = array.data() + 8;  // points the copied view to the memory of its array
    for (size_t k = 0; k < 3; ++k) {
      state[k].random(0.1, 1, static_cast<unsigned>(k + 2));
      cpu_table.copy(wide[k + 2].view, state[k].view);
    }
    cpu_table.copy(wide[0].view, param.view);
    cpu_table.copy(wide[1].view, grad.view);
    step(std::vector{StepViews{param.view, grad.view, {state[0].view, state[1].view, state[2].view}}});
    step(step_list(wide));
    expect_close<T>(
        param, [&](const Dims& i) { return static_cast<double>(T(wide[0](i))); }, 0);
    for (size_t k = 0; k < 3; ++k)
      expect_close<float>(
          state[k], [&](const Dims& i) { return wide[k + 2](i); }, 0);
  };
  const auto all = [&](auto type) {
    compare(type, [](const auto& list) {
      cpu_table.step("sgd", list, SgdStep{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}, {});
    });
    compare(type, [](const auto& list) {
      cpu_table.step("adam", list, AdamStep{.lr = 0.1, .weight_decay = 0.1, .amsgrad = true}, {});
    });
    compare(type, [](const auto& list) {
      cpu_table.step("rmsprop", list, RmspropStep{.lr = 0.1, .momentum = 0.9, .centered = true}, {});
    });
  };
  all(BFloat16());
  all(Float16());
}

/// Runs multithreaded kernels, and returns the bytes of the arrays that they write.
std::vector<char> kernel_outputs() {
  std::vector<char> bytes;
  const auto keep = [&](auto& a) { bytes.insert(bytes.end(), a.bytes.begin(), a.bytes.end()); };
  Array<float> x({2, 6, 20011}), y(x.shape()), total({1, 1, 1}), rows({2, 6, 1}), columns({1, 1, 20011});
  x.random(-3, 3);
  for (UnaryOp op : {UnaryOp::exp, UnaryOp::gelu, UnaryOp::affine}) {
    cpu_table.unary(op, y.view, x.view, 1.1, 0.3);
    keep(y);
  }
  for (auto* out : {&total, &rows, &columns}) {
    cpu_table.reduce(ReduceOp::sum, out->view, x.view);
    keep(*out);
  }
  for (int axis = 0; axis < 3; ++axis) {
    cpu_table.softmax(y.view, x.view, axis, false);
    keep(y);
  }
  Array<double> statistics({2, 3, 2}), means({2, 3, 2});
  Array<float> gamma({6}), dgamma({6}), dbeta({6}), dx(x.shape());
  gamma.random(0, 1);
  cpu_table.group_norm(y.view, statistics.view, x.view, &gamma.view, nullptr, nullptr, 1e-5, {}, nullptr);
  cpu_table.group_norm_backward({dx.view, &dgamma.view, &dbeta.view}, means.view, y.view, x.view, statistics.view,
                                &gamma.view, nullptr, {}, nullptr);
  Array<float> a({2, 301, 700}), b({2, 700, 601}), c({2, 301, 601});
  a.random(-1, 1);
  b.random(-1, 1);
  cpu_table.matmul(c.view, a.view, b.view);
  keep(statistics);
  for (auto* array : {&dgamma, &dbeta, &dx, &y, &c}) keep(*array);
  cpu_table.step("adam", std::vector{StepViews{x.view, y.view, {dx.view, y.view}}},
                 AdamStep{.lr = 0.1, .beta2 = 0.99, .step = 3}, {});
  keep(x);
  return bytes;
}

TEST(CpuKernels, ResultsDoNotDependOnThreadCount) {
  const int threads = num_threads();
  set_num_threads(1);
  const std::vector<char> serial = kernel_outputs();
  for (int count : {2, 5}) {
    set_num_threads(count);
    const std::vector<char> threaded = kernel_outputs();
    EXPECT_EQ(std::memcmp(serial.data(), threaded.data(), serial.size()), 0) << "with " << count << " threads";
  }
  set_num_threads(threads);
}

}  // namespace
}  // namespace voxgrad
