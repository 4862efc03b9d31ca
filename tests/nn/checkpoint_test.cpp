// Tests of checkpoints: a resumed run is bitwise equal to an uninterrupted run, and invalid checkpoints are rejected.
#include "nn/checkpoint.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "nn/layers.h"
#include "nn/optim/clip.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/loss.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

struct Decoder : nn::Module {
  nn::ConvTranspose3d up{{.in_channels = 2, .out_channels = 4, .kernel_size = 4, .stride = 2, .padding = 1}};
  nn::GroupNorm norm{2, 4};
  nn::Dropout dropout{0.2};
  nn::ConvTranspose3d out{{.in_channels = 4, .out_channels = 1, .kernel_size = 3, .padding = 1}};
  VG_MODULE(up, norm, dropout, out)
  Tensor forward(const Tensor& x) { return out(dropout(relu(norm(up(x))))); }
};

const data::Dataset& samples() {
  static const data::FunctionDataset dataset(14, [](int64_t, Generator& random) {
    return data::Sample{randn({2, 3, 3, 3}, {}, &random), randn({1, 6, 6, 6}, {}, &random)};
  });
  return dataset;
}

/// A training run with all objects whose state a checkpoint can hold.
struct Training {
  explicit Training(Device on, MemoryFormat format = MemoryFormat::contiguous) : device(on) {
    model.to(device);
    model.to(format);
    optimizer = std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 1e-2, .amsgrad = true});
    schedule = std::make_unique<optim::CosineAnnealingLR>(
        *optimizer, optim::CosineAnnealingLROptions{.t_max = 12, .warmup_steps = 3});
    average = std::make_unique<optim::ExponentialMovingAverage>(model, optim::EmaOptions{.decay = 0.5, .warmup = 5});
  }

  void train(int steps) {
    while (steps > 0) {
      for (auto [x, y] : loader) {
        const Tensor loss = mse_loss(model.forward(x.to(device)), y.to(device));
        optimizer->zero_grad();
        scaler.scale(loss).backward();
        scaler.unscale_(*optimizer);
        optim::clip_grad_norm_(model.parameters(), 1);
        scaler.step(*optimizer);
        scaler.update();
        average->update();
        schedule->step();
        if (--steps == 0) return;
      }
    }
  }

  CheckpointParts parts() {
    return {.model = &model,
            .optimizer = optimizer.get(),
            .schedule = schedule.get(),
            .loader = &loader,
            .scaler = &scaler,
            .average = average.get()};
  }

  Device device;
  Decoder model;
  std::unique_ptr<optim::AdamW> optimizer;
  std::unique_ptr<optim::CosineAnnealingLR> schedule;
  optim::GradScaler scaler{{.init_scale = 64, .growth_interval = 4}};
  std::unique_ptr<optim::ExponentialMovingAverage> average;
  data::Loader loader{samples(), {.batch_size = 3, .shuffle = true, .num_workers = 1, .drop_last = true}};
};

std::vector<double> all_values(const TensorMap& state) {
  std::vector<double> values;
  for (const auto& [name, tensor] : state)
    for (double value : tensor.to_vector()) values.push_back(value);
  return values;
}

class Checkpoint : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path); }
  std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) /
      concat("voxgrad_", testing::UnitTest::GetInstance()->current_test_info()->name(), ".safetensors");
};

void expect_same_bits(Device device, MemoryFormat format, const std::filesystem::path& path) {
  constexpr int kSteps = 11, kStop = 6;  // an epoch has 4 steps, so both numbers are in the middle of an epoch
  manual_seed(20);
  Training straight(device, format);
  straight.train(kSteps);
  const GeneratorState straight_end = default_generator().state();

  manual_seed(20);
  Training stopped(device, format);
  stopped.train(kStop);
  save_checkpoint(path, stopped.parts(), {{"step", "6"}});

  manual_seed(99);
  Training resumed(device, format);
  EXPECT_EQ(load_checkpoint(path, resumed.parts()), (Metadata{{"step", "6"}}));
  resumed.train(kSteps - kStop);
  EXPECT_EQ(all_values(resumed.model.state_dict()), all_values(straight.model.state_dict()));
  EXPECT_EQ(all_values(resumed.optimizer->state_dict()), all_values(straight.optimizer->state_dict()));
  EXPECT_EQ(resumed.optimizer->lr(), straight.optimizer->lr());
  EXPECT_EQ(resumed.scaler.get_scale(), 256);
  EXPECT_EQ(straight.scaler.get_scale(), 256);
  EXPECT_EQ(all_values(resumed.average->state_dict()), all_values(straight.average->state_dict()));
  EXPECT_EQ(default_generator().state(), straight_end);
}

TEST_F(Checkpoint, ResumesBitwise) {
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
    expect_same_bits(Device::cpu(), format, path);
}

TEST_F(Checkpoint, ResumesBitwiseOnCuda) {
  if (!cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  for (const MemoryFormat format : {MemoryFormat::contiguous, MemoryFormat::channels_last})
    expect_same_bits(Device::cuda(), format, path);
}

TEST_F(Checkpoint, PartsAreOptional) {
  Training run(Device::cpu());
  run.train(2);
  save_checkpoint(path, run.parts());
  Decoder model;
  default_generator().manual_seed(4);
  load_checkpoint(path, {.model = &model, .generator = nullptr});
  EXPECT_EQ(all_values(model.state_dict()), all_values(run.model.state_dict()));
  EXPECT_EQ(default_generator().state(), (GeneratorState{4, 0}));

  save_checkpoint(path, {.model = &model});
  EXPECT_ERROR(load_checkpoint(path, run.parts()), "has no optimizer");
  nn::ReLU empty;
  EXPECT_ERROR(save_checkpoint(path, {.model = &empty}), "save_checkpoint: the model has no parameters");
}

TEST_F(Checkpoint, ChangesNothingIfOnePartDoesNotFit) {
  Training run(Device::cpu());
  run.train(3);
  save_checkpoint(path, run.parts());

  Training other(Device::cpu());
  const std::vector<double> before = all_values(other.model.state_dict());
  nn::Linear linear(2, 2);
  const GeneratorState generator = default_generator().state();
  optim::SGD sgd(other.model.parameters());
  CheckpointParts parts = other.parts();
  parts.optimizer = &sgd;
  EXPECT_ERROR(load_checkpoint(path, parts), "SGD: this is not the state of an SGD");
  parts = other.parts();
  data::Loader loader(samples(), {.batch_size = 5});
  parts.loader = &loader;
  EXPECT_ERROR(load_checkpoint(path, parts), "data::Loader: the state has seed 0, batch size 3");
  parts.model = &linear;
  EXPECT_ERROR(load_checkpoint(path, parts), "load_state_dict: missing bias, weight; unexpected norm.bias");
  EXPECT_EQ(all_values(other.model.state_dict()), before);
  EXPECT_EQ(other.schedule->steps(), 0);
  EXPECT_EQ(default_generator().state(), generator);
}

TEST_F(Checkpoint, DetectsOneFlippedBit) {
  Training run(Device::cpu()), other(Device::cpu());
  run.train(2);
  save_checkpoint(path, run.parts());
  const std::vector<double> before = all_values(other.model.state_dict());
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  std::string text(header, '\0');
  file.read(text.data(), static_cast<std::streamsize>(header));
  const std::string key = "\"data_offsets\":[";
  const size_t begin = text.find(key, text.find("\"model.up.weight\"")) + key.size();
  const auto position = static_cast<std::streamoff>(sizeof(header) + header) + std::stol(text.substr(begin)) + 9;
  const int byte = file.seekg(position).get();
  file.seekp(position).put(static_cast<char>(byte ^ 1));
  file.close();
  EXPECT_ERROR(load_checkpoint(path, other.parts()), "load_checkpoint: '" + path.string() + "': the file is damaged");
  EXPECT_ERROR(load_safetensors(path), "the file is damaged");
  EXPECT_EQ(all_values(other.model.state_dict()), before);
}

TEST_F(Checkpoint, WarnsIfThereIsNoChecksum) {
  Training run(Device::cpu());
  run.train(2);
  save_checkpoint(path, run.parts(), {{"step", "2"}});
  Metadata metadata;
  const TensorMap tensors = load_safetensors(path, Device::cpu(), &metadata);
  EXPECT_EQ(metadata, (Metadata{{"step", "2"}}));
  testing::internal::CaptureStderr();
  EXPECT_EQ(load_checkpoint(path, run.parts()), (Metadata{{"step", "2"}}));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

  save_safetensors(path, tensors, metadata);
  testing::internal::CaptureStderr();
  EXPECT_EQ(load_checkpoint(path, run.parts()), (Metadata{{"step", "2"}}));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "load_checkpoint: warning: '" + path.string() + "' has no checksum; damaged data cannot be detected\n");
}

TEST_F(Checkpoint, KeepsTheLastGoodFileOfADivergedRun) {
  Training run(Device::cpu());
  run.train(2);
  save_checkpoint(path, run.parts());
  const TensorMap good = load_safetensors(path);
  const auto expect_rejected = [&](const CheckpointParts& parts, const char* message) {
    EXPECT_ERROR(save_checkpoint(path, parts), message);
    EXPECT_EQ(all_values(load_safetensors(path)), all_values(good)) << message;
  };
  // One NaN gradient makes the weights, the optimizer's state and the average NaN.
  run.model.out.weight.set_grad(full(run.model.out.weight.shape(), std::nan("")));
  run.optimizer->step();
  run.average->update();
  const CheckpointParts parts = run.parts();
  expect_rejected(parts, "save_checkpoint: model.out.weight must be finite, but contains NaN");
  run.model.out.weight.detach().fill_(INFINITY);
  expect_rejected(parts, "save_checkpoint: model.out.weight must be finite, but contains infinities");
  Metadata metadata;
  EXPECT_EQ(load_checkpoint(path, run.parts()), metadata);
  EXPECT_EQ(all_values(run.model.state_dict()), all_values(nn::with_prefix(good, "model.")));
}

struct Masked : nn::Module {
  nn::Linear linear{2, 2};
  nn::Buffer mask = full({3}, -INFINITY), counts = zeros({2}, {.dtype = i64});
  VG_MODULE(linear, mask, counts)
};

TEST_F(Checkpoint, BuffersMayHoldInfinitiesButNotNan) {
  Masked saved, loaded;
  optim::ExponentialMovingAverage average(saved);
  loaded.mask.fill_(0);
  save_checkpoint(path, {.model = &saved, .average = &average});
  load_checkpoint(path, {.model = &loaded, .average = &average});
  EXPECT_EQ(loaded.mask.at({1}), -INFINITY);
  saved.mask.set({2}, std::nan(""));
  EXPECT_ERROR(save_checkpoint(path, {.model = &saved}), "save_checkpoint: model.mask must not contain NaN");
  // Loading checks the values too: another program may have written the file.
  TensorMap tensors = load_safetensors(path);
  tensors["model.linear.weight"].set({0, 1}, std::nan(""));
  save_safetensors(path, tensors, {}, {.checksum = true});
  EXPECT_ERROR(load_checkpoint(path, {.model = &loaded}), "load_checkpoint: model.linear.weight must be finite");
}

TEST_F(Checkpoint, SavesAndLoadsTheStep) {
  Masked model;
  int64_t step = 1234;
  save_checkpoint(path, {.model = &model, .step = &step});
  step = 0;
  load_checkpoint(path, {.model = &model, .step = &step});
  EXPECT_EQ(step, 1234);
  save_checkpoint(path, {.model = &model});
  EXPECT_ERROR(load_checkpoint(path, {.model = &model, .step = &step}), "load_checkpoint: the state has no step");
  EXPECT_EQ(step, 1234);
}

TEST_F(Checkpoint, RejectsMissingAndTruncatedFiles) {
  Training run(Device::cpu());
  EXPECT_ERROR(load_checkpoint(path, run.parts()), path.filename().string());
  save_checkpoint(path, run.parts());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_ERROR(load_checkpoint(path, run.parts()), path.filename().string());
}

}  // namespace
}  // namespace voxgrad
