// Trains an auto-encoder on the shapes of the left half of the AAL brain atlas, and tests it on the mirrored regions of
// the right half. The auto-encoder compresses a volume of 32^3 voxels to 64 numbers, the code, and reconstructs the
// volume from the code. Debian's package mricron-data contains the atlas.
//
// The picture and the weights are written to out/shapes.
#include <voxgrad.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "examples/common/sample_data.h"
#include "examples/common/short_program.h"

namespace {
namespace vg = voxgrad;
using vg::Tensor;

constexpr int64_t kSize = 32;     // voxels along each axis of a shape
constexpr int64_t kRegions = 54;  // in each half of the atlas; left regions have odd numbers, right regions even

/// Maps occupancies (N, 1, 32, 32, 32) to codes (N, 64), and codes to the logits of occupancies. An occupancy is 1
/// inside the shape, 0 outside, and between 0 and 1 at the surface.
struct AutoEncoder : vg::nn::Module {
  vg::nn::Sequential encoder{vg::nn::Conv3d(1, 16, 4, 2, 1),  vg::nn::GroupNorm(4, 16), vg::nn::SiLU(),
                             vg::nn::Conv3d(16, 32, 4, 2, 1), vg::nn::GroupNorm(4, 32), vg::nn::SiLU(),
                             vg::nn::Conv3d(32, 64, 4, 2, 1), vg::nn::SiLU(),           vg::nn::Flatten(),
                             vg::nn::Linear(64 * 64, 64)};
  vg::nn::Linear unpack{64, 64 * 64};
  vg::nn::Sequential decoder{vg::nn::ConvTranspose3d(64, 32, 4, 2, 1), vg::nn::GroupNorm(4, 32), vg::nn::SiLU(),
                             vg::nn::ConvTranspose3d(32, 16, 4, 2, 1), vg::nn::GroupNorm(4, 16), vg::nn::SiLU(),
                             vg::nn::ConvTranspose3d(16, 1, 4, 2, 1)};
  VG_MODULE(encoder, unpack, decoder)

  Tensor decode(const Tensor& code) { return decoder(vg::silu(unpack(code)).reshape({-1, 64, 4, 4, 4})); }
};

/// Returns the masks (54, 1, 32, 32, 32) of the regions of the left or right half of the atlas (D, H, W). Each region
/// is centered and scaled so that its longest axis has 24 voxels. Regions of the right half are mirrored.
Tensor load_regions(const Tensor& atlas, bool right) {
  vg::Tensors regions;
  for (int64_t pair = 0; pair < kRegions; ++pair) {
    const Tensor mask = vg::eq(atlas, static_cast<double>(2 * pair + (right ? 2 : 1))).to(vg::f32);
    std::array<double, 3> center{};  // center of the region along W, H and D, in voxels
    std::array<double, 3> length{};  // size of the region along W, H and D, in voxels
    for (int64_t axis = 0; axis < 3; ++axis) {
      const Tensor line = mask.amax({axis == 2 ? 1 : 2, axis == 0 ? 1 : 0});
      const auto first = line.argmax().item(),
                 end = static_cast<double>(line.numel()) - vg::flip(line, {0}).argmax().item();
      center[static_cast<size_t>(2 - axis)] = (first + end) / 2;
      length[static_cast<size_t>(2 - axis)] = end - first;
    }
    Tensor theta = vg::zeros({1, 3, 4});
    for (int64_t i = 0; i < 3; ++i) {
      const auto size = static_cast<double>(atlas.size(2 - i));
      const double scale = std::ranges::max(length) / size * kSize / 24;
      theta.set({0, i, i}, right && i == 0 ? -scale : scale);
      theta.set({0, i, 3}, 2 * center[static_cast<size_t>(i)] / size - 1);
    }
    const Tensor grid = vg::affine_grid(theta, {1, 1, kSize, kSize, kSize});
    regions.push_back(vg::grid_sample(mask.reshape({1, 1, atlas.size(0), atlas.size(1), atlas.size(2)}), grid));
  }
  return vg::cat(regions);
}

/// Deforms occupancies by random affine maps.
Tensor deform(const Tensor& x) {
  const Tensor identity = vg::tensor({{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}}, x.options());
  const Tensor theta = identity + 0.06 * vg::randn({x.size(0), 3, 4}, x.options());
  return vg::grid_sample(x, vg::affine_grid(theta, x.shape()));
}

/// Thresholds two batches of occupancies at 0.5, and returns the Dice coefficient of each pair of occupancies. The
/// batch axes are broadcast against each other.
Tensor dice(const Tensor& a, const Tensor& b) {
  const Tensor x = vg::gt(a, 0.5).to(vg::f32).flatten(-4), y = vg::gt(b, 0.5).to(vg::f32).flatten(-4);
  return 2 * vg::sum(x * y, {-1}) / (vg::sum(x, {-1}) + vg::sum(y, {-1}));
}

/// Renders an occupancy (1, 32, 32, 32) as a surface in oblique light. Returns gray values (128, 128).
Tensor render(const Tensor& occupancy) {
  const Tensor smooth = vg::avg_pool3d(occupancy.unsqueeze(0), {.kernel_size = 3, .stride = 1, .padding = 1});
  // Axes of the view: depth along D, downwards along H, to the right along W. The rows of theta are x, y and z.
  const Tensor theta = vg::tensor({{{0.6, -0.28, 0.8, 0}, {0.8, 0.21, -0.6, 0}, {0, -1, -0.35, 0}}}, smooth.options());
  const Tensor view = vg::grid_sample(smooth, vg::affine_grid(theta, {1, 1, 128, 128, 128}))[0][0];
  const auto slope = [&](int64_t axis) { return view - vg::roll(view, {1}, {axis}); };
  const Tensor d = slope(0), h = slope(1), w = slope(2);
  const Tensor light = vg::clamp((0.7 * d + 0.6 * h + 0.35 * w) / vg::sqrt(d * d + h * h + w * w + 1e-8), 0, 1);
  const Tensor opacity = 0.7 * vg::sigmoid(30 * (view - 0.5));
  const Tensor arriving = vg::exp(opacity - vg::cumsum(opacity, 0));  // light that is not absorbed in front of a voxel
  return vg::sum(arriving * (1 - vg::exp(-opacity)) * (0.15 + 0.85 * light), {0});
}

void run(int64_t steps, const std::filesystem::path& out, vg::Device device) {
  const auto path = examples::find_sample("aal.nii.gz");
  vg::check(path.has_value(), "shapes", "aal.nii.gz was not found: install Debian's package mricron-data");
  const Tensor atlas = vg::load_nifti(*path).data;
  const Tensor training = load_regions(atlas, false).to(device), test = load_regions(atlas, true).to(device);
  AutoEncoder model;
  model.to(device);
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 3e-3});
  vg::optim::CosineAnnealingLR schedule(optimizer, {.t_max = steps});
  examples::Progress progress(0, steps, "step");
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor batch = deform(vg::index_select(training, 0, vg::randperm(kRegions).narrow(0, 0, 8).to(device)));
    const Tensor code = model.encoder(batch), noise = 0.05 * vg::randn_like(code);
    const Tensor loss = vg::binary_cross_entropy_with_logits(model.decode(code + noise), batch);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    schedule.step();
    progress.update(step, vg::concat("loss ", loss.item()));
  }

  const vg::NoGradGuard no_grad;
  const Tensor code = model.encoder(test), decoded = vg::sigmoid(model.decode(code));
  const Tensor nearest = vg::amax(dice(test.unsqueeze(1), training), {1});  // Dice of the most similar training region
  std::printf("Dice on the right half: %.3f; of the most similar left region: %.3f; results are in %s\n",
              dice(test, decoded).mean().item(), nearest.mean().item(), out.c_str());
  vg::save_safetensors(out / "shapes.safetensors", model.state_dict());
  const std::vector<std::string> names{"hippocampus", "insula",  "caudate",   "thalamus",
                                       "fusiform",    "lingual", "precentral"};
  const std::array pairs{18, 14, 35, 38, 27, 23, 0};
  examples::Panels panels{names, {"right region", "reconstructed", "interpolated"}, {}, 128, 128};
  for (const Tensor& shapes : {test, decoded})
    for (const int64_t pair : pairs) panels.slices.push_back(render(shapes[pair]));
  for (const double t : {0.0, 1 / 6.0, 2 / 6.0, 3 / 6.0, 4 / 6.0, 5 / 6.0, 1.0}) {
    const Tensor between = (1 - t) * code.narrow(0, pairs.front(), 1) + t * code.narrow(0, pairs.back(), 1);
    panels.slices.push_back(render(vg::sigmoid(model.decode(between))[0]));
  }
  examples::write_panels(out / "shapes.png", panels);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_short_program("shapes", "Trains an auto-encoder on the shapes of brain regions", 600, argc, argv,
                                     run);
}
