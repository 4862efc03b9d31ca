// Error handling for the C interfaces in bench/ that Python scripts call.
#pragma once

#include <exception>
#include <string>

namespace voxgrad {

/// Calls `function`. Returns null on success, otherwise the message of the exception, which is valid until the next
/// call on this thread.
template <class F>
const char* run_caught(const F& function) {
  thread_local std::string message;
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace voxgrad
