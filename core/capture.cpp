#include "core/capture.h"

namespace voxgrad {
namespace {
thread_local Capture* current_capture = nullptr;
}  // namespace

Capture* Capture::current() noexcept { return current_capture; }
Capture::Scope::Scope(Capture* capture) noexcept { current_capture = capture; }
Capture::Scope::~Scope() { current_capture = nullptr; }

}  // namespace voxgrad
