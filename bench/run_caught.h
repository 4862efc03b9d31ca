// What the C interfaces for Python in bench/ share.
#pragma once

#include <exception>
#include <string>

namespace voxgrad {

/// Calls `function`; null, or what went wrong, until the next call on this thread.
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
