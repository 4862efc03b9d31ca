// NonCopyable: base class of objects that cannot be copied.
#pragma once

namespace voxgrad {

/// Base class of classes whose objects can be neither copied nor moved.
struct NonCopyable {
  NonCopyable() = default;
  NonCopyable(const NonCopyable&) = delete;
  NonCopyable& operator=(const NonCopyable&) = delete;
};

}  // namespace voxgrad
