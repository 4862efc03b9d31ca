// Trains a conditional variational auto-encoder (VAE) on videos of moving shapes. The encoder maps a video of a shape
// to a latent video. The decoder maps the latent video and a condition to a video of the shape that the condition
// selects, on the same path. The picture and the weights are written to out/video.
#include <cmath>
#include <cstdio>

#include "examples/common/short_program.h"
#include "examples/video/model.h"

namespace {
using namespace video;

constexpr int64_t kFrames = 9;
constexpr int64_t kSize = 32;   // height and width of a frame
constexpr int64_t kShapes = 3;  // disc, cross, ring
constexpr int64_t kLatent = 8;  // channels of the latent video

/// Returns `count` videos (N, 3, 9, 32, 32) of shapes on random paths. The channels show a disc, a cross and a ring.
Tensor draw(int64_t count, vg::Device device) {
  const Tensor random = vg::rand({9, count, 1, 1, 1, 1}, {.device = device});
  const auto uniform = [&](int64_t i, double low, double high) { return low + (high - low) * random[i]; };
  const Tensor time = vg::arange(0, kFrames, 1, {.device = device}).reshape({kFrames, 1, 1});
  const Tensor x = vg::arange(0, kSize, 1, {.device = device}), y = x.reshape({kSize, 1});
  const auto path = [&](int64_t i) {  // an oscillation with random center, amplitude, phase and frequency
    return uniform(i, 12, 19) +
           uniform(i + 1, 3, 7) * vg::sin(uniform(i + 2, 0, 6.28) + uniform(i + 3, 0.2, 0.7) * time);
  };
  const Tensor dx = vg::abs(x - path(0)), dy = vg::abs(y - path(4)), radius = uniform(8, 6, 7);
  const Tensor disc = vg::sqrt(dx * dx + dy * dy) - radius, ring = vg::abs(disc) - 1.5;
  const Tensor cross = vg::maximum(vg::minimum(dx, dy) - 0.4 * radius, vg::maximum(dx, dy) - 1.2 * radius);
  return vg::clamp(0.5 - vg::cat({disc, cross, ring}, 1), 0, 1);  // converts signed distances to gray values
}

/// The encoder's result holds the means and the logarithms of the variances of the latent video.
struct Vae : nn::Module {
  nn::Sequential encoder{causal_conv(1, 16, 2), nn::SiLU(), causal_conv(16, 32, 2), nn::SiLU(),
                         causal_conv(32, 2 * kLatent)};
  Decoder<kLatent, 16, kShapes> decoder;
  VG_MODULE(encoder, decoder)
};

void run(int64_t steps, const std::filesystem::path& out, vg::Device device) {
  Vae model;
  model.to(device);
  vg::optim::AdamW optimizer(model.parameters(), {.lr = 1e-2, .betas = {0.9, 0.99}});
  vg::optim::CosineAnnealingLR schedule(optimizer, {.t_max = steps});
  examples::Progress progress(0, steps, "step");
  const Tensor one_hot = vg::one_hot(vg::arange(0, kShapes, 1, {.dtype = vg::i64})).to(device, vg::f32);
  const auto random_shapes = [&](int64_t count) {
    return vg::index_select(one_hot, 0, (vg::rand({count}) * kShapes).to(device, vg::i64));
  };
  const auto select = [](const Tensor& videos, const Tensor& shapes) {
    return vg::sum(videos * shapes.reshape({-1, kShapes, 1, 1, 1}), {1}, /*keepdim=*/true);
  };
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor videos = draw(4, device), shown = random_shapes(4), condition = random_shapes(4);
    const vg::Tensors latent = model.encoder(select(videos, shown)).chunk(2, 1);
    const Tensor sample = latent[0] + vg::exp(0.5 * latent[1]) * vg::randn_like(latent[0]);
    const Tensor divergence = 0.5 * vg::mean(latent[0] * latent[0] + vg::exp(latent[1]) - latent[1] - 1);
    const Tensor logits = model.decoder(sample, condition);
    const Tensor loss = vg::binary_cross_entropy_with_logits(logits, select(videos, condition)) + 1e-4 * divergence;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    schedule.step();
    progress.update(step, vg::concat("loss ", loss.item()));
  }

  const vg::NoGradGuard no_grad;
  const Tensor videos = draw(64, device), shown = random_shapes(64), condition = random_shapes(64);
  const auto decode = [&](const Tensor& input, const Tensor& shapes) {
    return vg::sigmoid(model.decoder(model.encoder(input).narrow(1, 0, kLatent), shapes));
  };
  const double error = vg::mse_loss(decode(select(videos, shown), condition), select(videos, condition)).item();
  std::printf("PSNR %.1f dB on new paths; results are in %s\n", -10 * std::log10(error), out.c_str());
  vg::save_safetensors(out / "video.safetensors", model.state_dict());
  const Tensor disc = videos.narrow(0, 0, 1).narrow(1, 0, 1);
  const Tensor redrawn = decode(disc.expand({kShapes, 1, kFrames, kSize, kSize}), one_hot);
  examples::Panels panels{{}, {"input", "as disc", "as cross", "as ring"}, {}, 96, 96};
  for (int64_t t = 1; t <= kFrames; ++t) panels.columns.push_back(vg::concat("frame ", t));
  const Tensor frames = vg::cat({disc, redrawn}).flatten(0, 2);  // (36, 32, 32)
  for (int64_t i = 0; i < frames.size(0); ++i) panels.slices.push_back(frames[i]);
  examples::write_panels(out / "video.png", panels);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_short_program("video", "Trains a conditional video VAE on moving shapes", 2500, argc, argv, run);
}
