// Settings of a thread that last as long as a guard.
#pragma once

#include <utility>

namespace voxgrad {

/// A value that a thread uses while this object lives. The objects of a thread form a list, the newest first. They may
/// be destroyed in any order: each removes itself from the list, and the newest that remains is in effect. An object
/// must be destroyed by the thread that made it.
template <class T>
class ScopedValue {
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
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

  const T& value() const { return value_; }

 private:
  ScopedValue*& newest_;
  ScopedValue* older_;
  T value_;
};

}  // namespace voxgrad
