// Implements Capture, which identifies the CUDA graph that is being captured.
#include "core/capture.h"

#include <atomic>

namespace voxgrad {
namespace {
thread_local Capture* current_capture = nullptr;
std::atomic<uint64_t> next_id{1};
}  // namespace

Capture::Capture() noexcept : id_(next_id++) {}
Capture* Capture::current() noexcept { return current_capture; }
Restore<Capture*> Capture::make_current() noexcept { return {current_capture, this}; }

}  // namespace voxgrad
