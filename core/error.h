// The one exception type of voxgrad and the helper that words it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace voxgrad {

/// Thrown by every function that refuses its arguments or meets a failing device, file or allocation.
/// `what()` names the operation first: "conv_transpose3d: weight expects 64 input channels, ...".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Thrown when memory runs out; `what()` carries the sizes asked for, in use and reserved.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// The arguments streamed one after the other into a string. Throws std::bad_alloc if memory runs out: by default a
/// stream would ignore that and return a part of the text.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  (out << ... << args);
  return out.str();
}

/// Throws Error("<op>: <args streamed>").
template <class... Args>
[[noreturn]] void fail(const char* op, const Args&... args) {
  throw Error(concat(op, ": ", args...));
}

/// fail() unless `condition` holds.
template <class... Args>
void check(bool condition, const char* op, const Args&... args) {
  if (!condition) [[unlikely]]
    fail(op, args...);
}

}  // namespace voxgrad
