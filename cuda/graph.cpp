// CUDA graphs: capture, memory, replay.
//
// A graph captures in a stream of its own, which nobody else gets while the graph lives. The allocator files blocks
// under streams, so that the graph's temporary memory is its own without more ado: a block freed within the capture is
// handed out again in it, and to nobody else. Memory from elsewhere that captured kernels read or write is kept alive.
#include <array>
#include <atomic>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/capture.h"
#include "core/error.h"
#include "core/profiler.h"
#include "cuda/cuda.h"
#include "cuda/detail/allocator.h"
#include "cuda/detail/graph.h"
#include "cuda/detail/launch.h"

namespace voxgrad::cuda {
namespace {

constexpr const char* kOp = "CUDAGraph";

std::array<std::atomic<int>, kMaxDevices> captures{};

template <class F>
class OnExit {
 public:
  explicit OnExit(F function) : function_(std::move(function)) {}
  ~OnExit() { function_(); }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;

 private:
  F function_;
};

}  // namespace

class GraphRecording final : public Capture {
 public:
  explicit GraphRecording(int index) : stream_(index), numbers_stream_(index) {
    const DeviceGuard guard(index);
    check_cuda(cudaEventCreateWithFlags(&replayed_, cudaEventDisableTiming), kOp);
    Allocator::of(index).keep(handle());
  }
  /// Waits for replays: their memory goes to others.
  ~GraphRecording() {
    cudaEventSynchronize(replayed_);
    if (exec_) cudaGraphExecDestroy(exec_);
    cudaEventDestroy(replayed_);
    cudaGetLastError();
    Allocator::of(stream_.device()).release(handle());
  }

  void record(const std::function<void()>& function) {
    const DeviceGuard device_guard(stream_.device());
    cudaGraph_t graph = capture(function);
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(status, "CUDAGraph: instantiation");
    std::erase_if(own_, [](const std::weak_ptr<Storage>& own) { return own.expired(); });
  }

  void replay() {
    const DeviceGuard guard(stream_.device());
    const cudaStream_t stream = current_stream(stream_.device());
    check_cuda(cudaStreamWaitEvent(stream, replayed_, 0), "CUDAGraph::replay");
    refresh();
    check_cuda(cudaGraphLaunch(exec_, stream), "CUDAGraph::replay");
    check_cuda(cudaEventRecord(replayed_, stream), "CUDAGraph::replay");
    for (const auto& [storage, written] : used_)
      if (written) storage->bump_version();
    for (const std::weak_ptr<Storage>& own : own_)  // which the first replay fills as it was recorded
      if (const auto storage = replays_ > 0 ? own.lock() : nullptr) storage->bump_version();
    ++replays_;
  }

  Device device() const override { return Device::cuda(stream_.device()); }
  void use(const std::shared_ptr<Storage>& storage, bool write) override {
    if (refreshing_ || storage->device() != device() || storage->data() == nullptr) return;
    if (!Allocator::of(stream_.device()).belongs_to(storage->data(), handle()))
      used_[storage] |= write;
    else if (write)
      own_.insert(storage);
  }
  void optimizer_step(std::function<void(bool)> step) override {
    stepping_ = true;
    const OnExit done([this] { stepping_ = false; });
    step(false);
    steps_.push_back(std::move(step));
  }

  bool refreshing() const { return refreshing_; }
  ReplayNumbers numbers(size_t bytes) {
    if (!refreshing_ && !stepping_) return {};
    if (!refreshing_) {
      const StreamGuard guard(numbers_stream_);
      numbers_.push_back(std::make_unique<Storage>(bytes, device()));
    }
    check(next_number_ < numbers_.size() && numbers_[next_number_]->bytes() == bytes, kOp,
          "an optimizer's step differs from the one that was captured");
    return {numbers_[next_number_++]->data(), refreshing_};
  }

 private:
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle()); }

  cudaGraph_t capture(const std::function<void()>& function) {
    const StreamGuard stream_guard(stream_);
    std::atomic<int>& count = captures[static_cast<size_t>(stream_.device())];
    ++count;
    const OnExit done([&count] { --count; });
    // Relaxed: allocations are allowed, and what other threads do is none of the capture's business.
    check_cuda(cudaStreamBeginCapture(handle(), cudaStreamCaptureModeRelaxed), "CUDAGraph::capture");
    cudaGraph_t graph = nullptr;
    try {
      const Scope scope(this);
      function();
    } catch (...) {
      cudaStreamEndCapture(handle(), &graph);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    check_cuda(cudaStreamEndCapture(handle(), &graph), "CUDAGraph::capture");
    return graph;
  }

  /// Gives the kernels the numbers of the replay to come.
  void refresh() {
    if (steps_.empty()) return;
    next_number_ = 0;
    refreshing_ = true;
    const OnExit done([this] { refreshing_ = false; });
    const Scope scope(this);
    for (const auto& step : steps_) step(true);
  }

  Stream stream_;
  Stream
      numbers_stream_;  // numbers_ are filed under it: written before a replay, they must not lie in temporary memory
  cudaEvent_t replayed_ = nullptr;  // after the last replay
  cudaGraphExec_t exec_ = nullptr;
  std::unordered_map<std::shared_ptr<Storage>, bool> used_;  // whether it is written
  std::set<std::weak_ptr<Storage>, std::owner_less<>> own_;  // of the graph's memory, written
  std::vector<std::function<void(bool)>> steps_;
  std::vector<std::unique_ptr<Storage>> numbers_;
  size_t next_number_ = 0;
  int64_t replays_ = 0;
  bool stepping_ = false, refreshing_ = false;  // an optimizer's step is being captured; replayed
};

namespace {
/// The recording or the replay under way on this thread; there is no other Capture.
GraphRecording* current_recording() { return static_cast<GraphRecording*>(Capture::current()); }
}  // namespace

bool capture_under_way(int device) noexcept { return captures[static_cast<size_t>(device)] > 0; }

void refuse_in_capture(const char* op, int device, const char* why) {
  const GraphRecording* recording = current_recording();
  check(!recording || recording->refreshing() || recording->device() != Device::cuda(device), op, why,
        " while a CUDA graph is being captured");
}

ReplayNumbers replay_numbers(size_t bytes) {
  GraphRecording* recording = current_recording();
  return recording ? recording->numbers(bytes) : ReplayNumbers{};
}

CUDAGraph::CUDAGraph(int device) : device_(device) { cuda_runtime().require(device); }
CUDAGraph::~CUDAGraph() = default;

void CUDAGraph::capture(const std::function<void()>& function) {
  check(static_cast<bool>(function), kOp, "the function is empty");
  check(Capture::current() == nullptr, kOp, "a capture is under way on this thread already");
  reset();
  // What was freed before is out of use then, and makes room for the graph's own memory.
  synchronize(Device::cuda(device_));
  memory::empty_cache(Device::cuda(device_));
  auto recording = std::make_unique<GraphRecording>(device_);
  recording->record(function);
  recording_ = std::move(recording);
}

void CUDAGraph::replay() {
  check(recording_ != nullptr, kOp, "nothing was captured");
  check(Capture::current() == nullptr, kOp, "a capture is under way on this thread: a replay cannot be part of it");
  const profiler::Scope operation(profiler::Kind::op, "cuda_graph_replay", nullptr, Device::cuda(device_));
  recording_->replay();
}

void CUDAGraph::reset() { recording_.reset(); }

}  // namespace voxgrad::cuda
