// ScopedValue and Restore: the bases of guards that change a setting of a thread.
#pragma once

#include <utility>

#include "noncopyable.h"

namespace voxgrad {

/// The value of a thread's setting during the lifetime of this object, unless a newer object overrides the value. For
/// each setting, the objects of a thread form a linked list that starts with the newest object. The objects may be
/// destroyed in any order, but only by the thread that created them.
template <class T>
class ScopedValue : NonCopyable {
 public:
  /// Adds the value to the list that starts at `newest`, a thread_local pointer that is null at first.
  ScopedValue(ScopedValue*& newest, T value) : newest_(newest), older_(newest), value_(std::move(value)) {
    newest = this;
  }
  ~ScopedValue() {
    ScopedValue** link = &newest_;
    while (*link != this) link = &(*link)->older_;
    *link = older_;
  }

  const T& value() const { return value_; }

 private:
  ScopedValue*& newest_;
  ScopedValue* older_;
  T value_;
};

/// Sets a variable to a value. The destructor restores the previous value.
template <class T>
class [[nodiscard]] Restore : NonCopyable {
 public:
  [[nodiscard]] Restore(T& variable, T value) : variable_(variable), previous_(std::exchange(variable, value)) {}
  ~Restore() { variable_ = previous_; }

 private:
  T& variable_;
  T previous_;
};

}  // namespace voxgrad
