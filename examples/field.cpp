// Recovers the heat conductivity k inside a block from temperatures at 512 sensors. Each of three experiments
// heats the block along one axis. The temperatures u of an experiment satisfy div(k grad u) = 0. An optimizer minimizes
// the error at the sensors. The adjoint method computes the gradient of this error, without differentiating solve().
//
// The picture and the recovered conductivity are written to out/field.
#include <voxgrad.h>

#include <cstdio>
#include <vector>

#include "examples/common/short_program.h"

namespace {
namespace vg = voxgrad;
using vg::Tensor;

constexpr int64_t kSize = 34;       // voxels along each axis; the temperatures of the outermost layer are known
constexpr int64_t kSpacing = 4;     // distance between neighboring sensors in voxels
constexpr double kNoise = 0.001;    // standard deviation of the measurement noise; the temperatures are in [0, 1]
constexpr double kSmoothing = 100;  // weight of the total variation of log k

/// Returns x (N, 1, D, H, W) without its outermost layer.
Tensor crop(const Tensor& x) { return vg::pad(x, {-1, -1, -1, -1, -1, -1}); }
/// Surrounds x with a layer of zeros.
Tensor extend(const Tensor& x) { return vg::pad(x, {1, 1, 1, 1, 1, 1}); }

/// Returns the sum of the six neighbors minus six times the voxel, for each voxel that is not in the outermost layer.
Tensor laplacian(const Tensor& x) {
  Tensor kernel = vg::zeros({27});
  for (const int64_t neighbor : {4, 10, 12, 14, 16, 22}) kernel.set({neighbor}, 1);
  kernel.set({13}, -6);
  return vg::conv3d(x, kernel.reshape({1, 1, 3, 3, 3}).to(x.device()));
}

/// Returns div(k grad u), the heat that flows into each voxel, for k (1, 1, D, H, W) and u (N, 1, D, H, W). A voxel i
/// receives (k_i + k_j) / 2 * (u_j - u_i) from its neighbor j. The sum over the neighbors is
/// (k lap(u) + lap(k u) - u lap(k)) / 2, where lap is the Laplacian.
Tensor heat_balance(const Tensor& k, const Tensor& u) {
  return 0.5 * (crop(k) * laplacian(u) + laplacian(k * u) - crop(u) * laplacian(k));
}

/// Solves div(k grad u) = source by conjugate gradients until the norm of the residual is below `tolerance`. Starts
/// from u and keeps its outermost layer.
Tensor solve(const Tensor& k, Tensor u, const Tensor& source, double tolerance) {
  const vg::NoGradGuard no_grad;
  const auto dot = [](const Tensor& a, const Tensor& b) { return vg::sum(a * b, {1, 2, 3, 4}, /*keepdim=*/true); };
  Tensor residual = heat_balance(k, u) - source, direction = residual, square = dot(residual, residual);
  for (int i = 0; i < 500 && square.amax().item() > tolerance * tolerance; ++i) {
    const Tensor applied = -heat_balance(k, extend(direction)), step = square / dot(direction, applied);
    u = u + extend(step * direction);
    residual = residual - step * applied;
    const Tensor next = dot(residual, residual);
    direction = residual + next / square * direction;
    square = next;
  }
  return u;
}

/// Returns log k: the sum of trilinearly interpolated grids, and 0 in the outermost layer.
Tensor log_conductivity(const vg::Tensors& grids) {
  Tensor sum = vg::zeros({}, grids[0].options());
  for (const Tensor& grid : grids)
    sum = sum + vg::interpolate(grid, {.size = kSize - 2, .mode = vg::InterpolateMode::trilinear});
  return extend(sum);
}

/// Returns the mean length of the gradient of x (1, 1, D, H, W), in forward differences.
Tensor total_variation(const Tensor& x) {
  Tensor kernel = vg::zeros({3, 8});  // a kernel of 2^3 for each of the axes W, H and D
  for (int64_t axis = 0; axis < 3; ++axis) {
    kernel.set({axis, 0}, -1);
    kernel.set({axis, int64_t{1} << axis}, 1);
  }
  const Tensor gradient = vg::conv3d(x, kernel.reshape({3, 1, 2, 2, 2}).to(x.device()));
  return vg::mean(vg::sqrt(vg::sum(gradient * gradient, {1}) + 1e-4));
}

/// Returns the true log k, which the program recovers: k is 1, except for a ball with k = 3.3 and a ball with k = 0.3.
Tensor true_log_conductivity(const Tensor& x, const Tensor& y, const Tensor& z) {
  const auto ball = [&](double cx, double cy, double cz, double radius) {
    return vg::sigmoid(60 * (radius - vg::sqrt(vg::pow(x - cx, 2) + vg::pow(y - cy, 2) + vg::pow(z - cz, 2))));
  };
  return (1.2 * ball(0.33, 0.38, 0.4, 0.18) - 1.2 * ball(0.66, 0.62, 0.6, 0.2)).reshape({1, 1, kSize, kSize, kSize});
}

/// Draws two slices of log k and of the temperature of the first experiment. The temperature is drawn in ten colors.
void draw(const std::filesystem::path& path, const Tensor& truth, const Tensor& log_k, const Tensor& u) {
  constexpr int64_t kPixels = 6 * kSize;
  examples::Panels panels{{"log k", "recovered", "difference", "temperature"}, {"z = 13", "z = 20"}, {}};
  panels.height = panels.width = kPixels;
  panels.color_map = examples::ColorMap::diverging;
  for (const int64_t z : {13, 20}) {
    for (const Tensor& volume : {truth, log_k, log_k - truth})
      panels.slices.push_back(volume[0][0][z] / 2.4 + 0.5);  // log k lies in [-1.2, 1.2]
    const Tensor fine = vg::interpolate(u.select(2, z), {.size = kPixels, .mode = vg::InterpolateMode::bilinear});
    panels.slices.push_back((fine[0][0] * 9.99).to(vg::i64).to(vg::f32) / 9);
  }
  examples::write_panels(path, panels);
}

void run(int64_t steps, const std::filesystem::path& out, vg::Device device) {
  // Simulate the three experiments. The temperatures of the outermost layer are x in the first experiment, y in the
  // second and z in the third.
  const Tensor x = vg::linspace(0, 1, kSize, {.device = device}).expand({kSize, kSize, kSize});
  const Tensor y = x.transpose(1, 2), z = x.transpose(0, 2), boundary = vg::stack({x, y, z}).unsqueeze(1);
  const Tensor truth = true_log_conductivity(x, y, z), no_source = vg::zeros({}, {.device = device});
  const Tensor true_u = solve(vg::exp(truth), boundary, no_source, 1e-4);
  const Tensor measured = true_u + kNoise * vg::randn_like(true_u);
  Tensor line = vg::zeros({kSize});
  for (int64_t i = kSpacing - 1; i < kSize - 1; i += kSpacing) line.set({i}, 1);
  const Tensor sensors = (line * line.reshape({kSize, 1}) * line.reshape({kSize, 1, 1})).to(device);  // 1 at sensors
  const double weight = 1 / (kNoise * kNoise * 3 * sensors.sum().item());

  vg::Tensors grids;  // the coarse grids let the optimizer change large regions in a few steps
  for (int64_t n = 4; n < kSize; n *= 2)
    grids.push_back(vg::zeros({1, 1, n, n, n}, {.device = device, .requires_grad = true}));
  vg::optim::Adam optimizer(grids, {.lr = 0.05});
  vg::optim::CosineAnnealingLR schedule(optimizer, {.t_max = steps});
  examples::Progress progress(0, steps, "step");
  Tensor u = boundary, adjoint = vg::zeros_like(u);  // each step starts from the solutions of the previous step
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor log_k = log_conductivity(grids), k = vg::exp(log_k);
    u = solve(k, u, no_source, 1e-3);
    const Tensor error = sensors * (u - measured);
    adjoint = solve(k, adjoint, crop(error) * (-2 * weight), 1e-2);
    // The gradient of the squared error with respect to k is the gradient of the first term of this loss.
    const Tensor loss = vg::sum(crop(adjoint) * heat_balance(k, u)) + kSmoothing * total_variation(log_k);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    schedule.step();
    progress.update(step, vg::concat("misfit ", weight * vg::sum(error * error).item()));
  }

  const vg::NoGradGuard no_grad;
  const Tensor log_k = log_conductivity(grids);
  vg::save_safetensors(out / "field.safetensors", {{"log_k", log_k}, {"true_log_k", truth}});
  draw(out / "field.png", truth, log_k, u);
  std::printf("relative error of log k: %.3f; results are in %s\n", (vg::norm(log_k - truth) / vg::norm(truth)).item(),
              out.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_short_program("field", "Recovers a heat conductivity from temperatures at sensors", 100, argc,
                                     argv, run);
}
