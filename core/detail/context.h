// The settings of a thread that affect recorded operations and random numbers.
#pragma once

#include <optional>

#include "../autocast.h"
#include "../communicator.h"
#include "../random.h"

namespace voxgrad {

/// The settings of one thread, such as the dtype of autocast. The engine sets the defaults during a backward pass,
/// because gradients must not depend on the settings of the thread that calls backward(). recompute() restores the
/// settings of the forward pass.
struct Context {
  std::optional<DType> autocast_dtype{};
  distributed::Communicator* spatial_group = nullptr;
  std::optional<GeneratorState> random{};  ///< state of the default generator; if empty, the generator keeps its state

  /// Returns the settings of this thread.
  static Context current() { return {autocast::dtype(), distributed::spatial_group(), default_generator().state()}; }
};

/// Sets `context` on this thread during its lifetime.
class [[nodiscard]] ContextGuard : NonCopyable {
 public:
  [[nodiscard]] explicit ContextGuard(const Context& context)
      : autocast_(context.autocast_dtype.value_or(f32), context.autocast_dtype.has_value()),
        spatial_group_(context.spatial_group) {
    if (!context.random) return;
    previous_ = default_generator().state();
    default_generator().set_state(*context.random);
  }
  ~ContextGuard() {
    if (previous_) default_generator().set_state(*previous_);
  }

 private:
  autocast autocast_;
  distributed::SpatialGroupGuard spatial_group_;
  std::optional<GeneratorState> previous_;
};

}  // namespace voxgrad
