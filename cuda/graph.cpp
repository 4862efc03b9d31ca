// CUDA graphs: capture, replay, and the memory that a graph uses.
//
// A graph captures in its own stream, which no other code uses while the graph exists. The allocator's blocks belong to
// streams. The temporary memory of the graph is therefore private: a block that is freed during the capture is reused
// only within the capture. The graph keeps all other memory alive that its kernels read or write.
#include <array>
#include <atomic>
#include <set>
#include <typeindex>
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

std::array<std::atomic<int>, kMaxDevices> captures{};  // number of running captures of each device

}  // namespace

/// A captured graph, its memory and the optimizer steps in it.
class GraphRecording final : public Capture {
 public:
  explicit GraphRecording(int index) : stream_(index), numbers_stream_(index) {
    const DeviceGuard guard(index);
    check_cuda(cudaEventCreateWithFlags(&replayed_, cudaEventDisableTiming), kOp);
    Allocator::of(index).keep(handle());
  }
  /// Waits for running replays, because the destructor releases their memory.
  ~GraphRecording() {
    cudaEventSynchronize(replayed_);
    if (exec_) cudaGraphExecDestroy(exec_);
    cudaEventDestroy(replayed_);
    cudaGetLastError();
    Allocator::of(stream_.device()).release(handle());
  }

  /// Captures the work of `function` and instantiates the graph.
  void record(const std::function<void()>& function) {
    const DeviceGuard device_guard(stream_.device());
    cudaGraph_t graph = capture(function);
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(status, "CUDAGraph: instantiation");
    std::erase_if(own_, [](const std::weak_ptr<Storage>& own) { return own.expired(); });
  }

  /// Queues the graph on the current stream of the device, after the previous replay.
  void replay() {
    const DeviceGuard guard(stream_.device());
    const cudaStream_t stream = current_stream(stream_.device());
    check_cuda(cudaStreamWaitEvent(stream, replayed_, 0), "CUDAGraph::replay");
    refresh();
    check_cuda(cudaGraphLaunch(exec_, stream), "CUDAGraph::replay");
    check_cuda(cudaEventRecord(replayed_, stream), "CUDAGraph::replay");
    for (const auto& [storage, written] : used_)
      if (written) storage->bump_version();
    // The capture has already incremented the versions of the graph's own memory on behalf of the first replay. Only
    // later replays, which overwrite this memory, increment the versions again.
    for (const std::weak_ptr<Storage>& own : own_)
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
    const Restore stepping(stepping_, true);
    step(false);
    steps_.push_back(std::move(step));
  }

  /// Returns whether the numbers of the next replay are being written.
  bool refreshing() const { return refreshing_; }
  /// Returns memory for the numbers (such as the learning rate) that the next kernel of an optimizer step reads.
  ReplayNumbers numbers(size_t bytes, const std::type_info& type) {
    if (!refreshing_ && !stepping_) return {};
    if (!refreshing_) {
      const StreamGuard guard(numbers_stream_);
      numbers_.push_back({std::make_unique<Storage>(bytes, device()), type});
    }
    check(next_number_ < numbers_.size() && numbers_[next_number_].type == type, kOp,
          "an optimizer step differs from the captured step; capture the graph again");
    return {numbers_[next_number_++].memory->data(), refreshing_};
  }

 private:
  struct Numbers {
    std::unique_ptr<Storage> memory;
    std::type_index type;
  };

  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle()); }

  cudaGraph_t capture(const std::function<void()>& function) {
    const StreamGuard stream_guard(stream_);
    std::atomic<int>& count = captures[static_cast<size_t>(stream_.device())];
    ++count;
    cudaGraph_t graph = nullptr;
    try {
      // Relaxed mode allows allocations, and unrelated work of other threads.
      check_cuda(cudaStreamBeginCapture(handle(), cudaStreamCaptureModeRelaxed), "CUDAGraph::capture");
      const auto current = make_current();
      function();
    } catch (...) {
      cudaStreamEndCapture(handle(), &graph);
      --count;
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    const cudaError_t status = cudaStreamEndCapture(handle(), &graph);
    --count;
    check_cuda(status, "CUDAGraph::capture");
    return graph;
  }

  /// Runs the captured optimizer steps, which write the numbers of the next replay.
  void refresh() {
    if (steps_.empty()) return;
    next_number_ = 0;
    const Restore refreshing(refreshing_, true);
    const auto current = make_current();
    for (const auto& step : steps_) step(true);
  }

  Stream stream_;
  /// The stream that owns the memory of numbers_. If this memory belonged to stream_, captured kernels could reuse the
  /// memory and overwrite the numbers, which are written before each replay.
  Stream numbers_stream_;
  cudaEvent_t replayed_ = nullptr;  ///< recorded after the last replay
  cudaGraphExec_t exec_ = nullptr;
  /// Memory that the kernels use but that does not belong to the graph. The value is true if a kernel writes the
  /// memory.
  std::unordered_map<std::shared_ptr<Storage>, bool> used_;
  std::set<std::weak_ptr<Storage>, std::owner_less<>> own_;  ///< memory of the graph that its kernels write
  std::vector<std::function<void(bool)>> steps_;             ///< the captured optimizer steps
  std::vector<Numbers> numbers_;                             ///< the numbers of these steps, in kernel order
  size_t next_number_ = 0;                                   ///< index in numbers_ of the memory for the next kernel
  int64_t replays_ = 0;
  bool stepping_ = false;    ///< an optimizer step is being captured
  bool refreshing_ = false;  ///< see refreshing()
};

namespace {
/// Returns the recording that is being captured or refreshed on this thread, or null. GraphRecording is the only class
/// that implements Capture.
GraphRecording* current_recording() { return static_cast<GraphRecording*>(Capture::current()); }
}  // namespace

bool capture_under_way(int device) noexcept { return captures[static_cast<size_t>(device)] > 0; }

void refuse_in_capture(const char* op, int device, const char* why) {
  const GraphRecording* recording = current_recording();
  check(!recording || recording->refreshing() || recording->device() != Device::cuda(device), op, why,
        " while a CUDA graph is being captured");
}

ReplayNumbers replay_numbers(size_t bytes, const std::type_info& type) {
  GraphRecording* recording = current_recording();
  return recording ? recording->numbers(bytes, type) : ReplayNumbers{};
}

CUDAGraph::CUDAGraph(int device) : device_(device) { cuda_runtime().require(device); }
CUDAGraph::~CUDAGraph() = default;

void CUDAGraph::capture(const std::function<void()>& function) {
  check(static_cast<bool>(function), kOp, "the function is empty");
  check(Capture::current() == nullptr, kOp, "this thread is already capturing a graph");
  reset();
  // Return freed memory to the driver, to make room for the memory of the graph.
  synchronize(Device::cuda(device_));
  memory::empty_cache(Device::cuda(device_));
  auto recording = std::make_unique<GraphRecording>(device_);
  recording->record(function);
  recording_ = std::move(recording);
}

void CUDAGraph::replay() {
  check(recording_ != nullptr, kOp, "no graph was captured");
  check(Capture::current() == nullptr, kOp, "a replay cannot be captured, but this thread is capturing a graph");
  const profiler::Scope operation(profiler::Kind::op, "cuda_graph_replay", nullptr, Device::cuda(device_));
  recording_->replay();
}

void CUDAGraph::reset() { recording_.reset(); }

}  // namespace voxgrad::cuda
