// Tests of captured optimizer steps on the CPU. The class Recorder below replaces a CUDA graph: it records the step
// functions and calls them at each replay.
#include <algorithm>
#include <memory>

#include "core/capture.h"
#include "nn/conv_layers.h"
#include "nn/optim/ema.h"
#include "nn/optim/optimizers.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "tests/support.h"

namespace voxgrad {
namespace {

class Recorder final : public Capture {
 public:
  explicit Recorder(Device device = Device::cpu()) : device_(device) {}
  Device device() const override { return device_; }
  void use(const std::shared_ptr<Storage>& storage, bool) override { used.push_back(storage); }
  void optimizer_step(std::function<void(bool)> step) override { steps_.push_back(std::move(step)); }

  void record(const std::function<void()>& function) {
    const auto current = make_current();
    function();
  }
  void replay() {
    for (const auto& step : steps_) step(true);
  }
  std::vector<std::shared_ptr<Storage>> used;

 private:
  Device device_;
  std::vector<std::function<void(bool)>> steps_;
};

Tensor parameter() {
  const Tensor p = arange(0, 6, 1);
  p.requires_grad_();
  p.set_grad(sin(arange(1, 7, 1)));
  return p;
}

TEST(OptimizerCapture, ReplaysUseTheCurrentOptionsAndStep) {
  const Tensor eager = parameter(), replayed = parameter();
  optim::Adam a({eager}, {.lr = 0.1}), b({replayed}, {.lr = 0.1});
  a.step();
  b.step();
  Recorder recorder;
  recorder.record([&] { b.step(); });
  EXPECT_EQ(replayed.to_vector(), eager.to_vector());
  for (int i = 1; i < 5; ++i) {
    for (optim::Adam* optimizer : {&a, &b}) optimizer->set_lr(0.1 / i);
    a.step();
    recorder.replay();
    EXPECT_EQ(replayed.to_vector(), eager.to_vector());
    EXPECT_EQ(b.state_dict().at("state.0.step").item(), i + 1);
  }
  a.step();
  b.step();  // an eager step between replays
  a.step();
  recorder.replay();
  EXPECT_EQ(replayed.to_vector(), eager.to_vector());
}

TEST(OptimizerCapture, RejectsCapturingAFirstStepThatAllocatesState) {
  const Tensor p = parameter();
  optim::Adam adam({p});
  Recorder recorder;
  EXPECT_ERROR(recorder.record([&] { adam.step(); }),
               "Adam: the first step allocates the optimizer's state; run one step before the capture");
  adam.step();
  recorder.record([&] { adam.step(); });
  const Tensor q = parameter();
  optim::SGD sgd({q}, {.lr = 1});  // has no state, so its first step can be captured
  recorder.record([&] { sgd.step(); });
  recorder.replay();
  EXPECT_NE(q.to_vector(), arange(0, 6, 1).to_vector());
  Recorder elsewhere(Device::cuda());
  EXPECT_ERROR(elsewhere.record([&] { adam.step(); }), "Adam: a parameter on cpu cannot be updated by a graph");
}

TEST(OptimizerCapture, RejectsReplaysAfterTheOptimizerChanged) {
  const Tensor p = parameter(), q = parameter();
  auto adam = std::make_unique<optim::Adam>(Tensors{p, q});
  adam->step();
  Recorder recorder;
  recorder.record([&] { adam->step(); });
  q.set_grad({});
  adam->step();  // updates only p
  EXPECT_ERROR(recorder.replay(), "Adam: parameters have taken different numbers of steps");
  Recorder other;
  other.record([&] { adam->step(); });
  other.replay();
  adam->load_state_dict(adam->state_dict());
  EXPECT_ERROR(other.replay(), "Adam: parameters or state were replaced since the step was captured");
  adam.reset();
  EXPECT_ERROR(other.replay(), "Adam: the optimizer was destroyed after its step was captured");
}

TEST(OptimizerCapture, RejectsCapturingTheFirstStepAfterAFormatChange) {
  nn::Conv3d conv{{.in_channels = 2, .out_channels = 3, .kernel_size = 2}};
  for (const Tensor& p : conv.parameters()) p.set_grad(ones(p.shape()));
  optim::Adam adam(conv.parameters(), {.lr = 0.1});
  optim::ExponentialMovingAverage average(conv);
  adam.step();
  Recorder before, recorder;
  before.record([&] { average.update(); });
  conv.to(MemoryFormat::channels_last);
  EXPECT_ERROR(before.replay(), "its entry in averages is [3, 2, 2, 2, 2] f32 on cpu, in another memory format");
  EXPECT_ERROR(recorder.record([&] { adam.step(); }), "Adam: the first step in another memory format");
  EXPECT_ERROR(recorder.record([&] { average.update(); }), "ExponentialMovingAverage: the first step in another");
  adam.step();
  average.update();
  recorder.record([&] {
    adam.step();
    average.update();
  });
  recorder.replay();
  EXPECT_EQ(adam.state_dict().at("state.0.step").item(), 3);
  EXPECT_EQ(average.updates(), 2);
}

TEST(Capture, RecordsTheMemoryThatKernelsUse) {
  const Tensor a = ones({3}), b = ones({3}), c = ones({3});
  Recorder recorder;
  Tensor y;
  recorder.record([&] { y = a + b; });
  const auto was_used = [&](const Tensor& t) {
    return std::count(recorder.used.begin(), recorder.used.end(), t.storage()) > 0;
  };
  EXPECT_TRUE(was_used(a) && was_used(b) && was_used(y));
  EXPECT_FALSE(was_used(c));
  EXPECT_EQ(Capture::current(), nullptr);
}

}  // namespace
}  // namespace voxgrad
