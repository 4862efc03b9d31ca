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
Capture::Scope::Scope(Capture* capture) noexcept { current_capture = capture; }
Capture::Scope::~Scope() { current_capture = nullptr; }

}  // namespace voxgrad
