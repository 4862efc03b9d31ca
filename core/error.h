// The exception types of voxgrad, and the helpers that format and throw them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace voxgrad {

/// Thrown for invalid arguments, and when a device, a file or an allocation fails. `what()` names the operation first:
/// "conv_transpose3d: weight expects 64 input channels, ...".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Thrown when memory runs out. `what()` contains the requested size and the sizes in use and reserved.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// Returns the arguments, streamed one after another into a string. Throws std::bad_alloc if memory runs out; a stream
/// with default settings would silently drop the rest of the text.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  (out << ... << args);
  return out.str();
}

/// Throws an Error with the message "<op>: " and the arguments, streamed one after another.
template <class... Args>
[[noreturn]] void fail(const char* op, const Args&... args) {
  throw Error(concat(op, ": ", args...));
}

/// Calls fail() unless `condition` holds.
template <class... Args>
void check(bool condition, const char* op, const Args&... args) {
  if (!condition) [[unlikely]]
    fail(op, args...);
}

}  // namespace voxgrad
