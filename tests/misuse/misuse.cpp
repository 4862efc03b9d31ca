// Valid assignments to tensors, and statements that look useful but have no effect, such as an assignment to a
// temporary view or a guard without a name. check.cmake compiles this file twice. Without MISUSE it must compile. With
// MISUSE each line marked "// error: WORD" must give an error whose message contains WORD.
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/autocast.h"
#include "core/autograd.h"
#include "core/communicator.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/thread_pool.h"
#include "cuda/cuda.h"
#include "nn/init.h"

using namespace voxgrad;

static_assert(std::is_copy_assignable_v<Tensor> && std::is_nothrow_move_assignable_v<Tensor>);
static_assert(std::is_nothrow_move_constructible_v<Tensor> && std::is_nothrow_swappable_v<Tensor>);
static_assert(!std::is_assignable_v<Tensor, Tensor> && !std::is_assignable_v<Tensor, const Tensor&>);

Tensor made();

void assignments_to_handles(Tensor& a, Tensor& b, std::optional<Tensor>& maybe, Tensors& list, Selection& selection) {
  a = made();
  a = b;
  a = {};
  b = std::exchange(a, {});
  std::swap(a, b);
  std::tie(a, b) = std::pair(made(), made());
  auto [x, y] = std::pair(made(), b);
  x = y;
  maybe = a;
  *maybe = made();
  list.insert(list.begin(), b);
  list.erase(list.begin());
  list[0] = a;
  selection = Selection{x, y};
}

#ifdef MISUSE
void misuse(Tensor& x, const Tensor& y, Generator& generator, const cuda::Stream& stream) {
  x[0] = y;                                 // error: deleted
  x.narrow(0, 1, 2) = made();               // error: deleted
  x[0] = 1.0;                               // error: deleted
  x.grad() = y;                             // error: deleted
  NoGradGuard();                            // error: nodiscard
  GradModeGuard(false);                     // error: nodiscard
  autocast(bf16, true);                     // error: nodiscard
  distributed::SpatialGroupGuard(nullptr);  // error: nodiscard
  GeneratorGuard{generator};                // error: nodiscard
  SerialGuard();                            // error: nodiscard
  profiler::RecordFunction("name");         // error: nodiscard
  profiler::Session();                      // error: nodiscard
  nn::init::SkipInit();                     // error: nodiscard
  cuda::StreamGuard{stream};                // error: nodiscard
}
#endif
