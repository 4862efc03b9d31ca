// Reads the environment variables that a launcher sets.
#include "nn/distributed/environment.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <system_error>

#include "core/error.h"

namespace voxgrad::distributed {
namespace {

constexpr const char* kOp = "distributed::environment";

/// Returns the value of a variable. Throws if the variable is not set or is empty.
const char* text_of(const char* name) {
  const char* text = std::getenv(name);
  check(text && *text, kOp, name,
        " is not set; if RANK, WORLD_SIZE or LOCAL_RANK is set, then RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT are required");
  return text;
}

/// Returns the value of a variable as an integer in [low, high].
int number_of(const char* name, int low, int high) {
  const char* text = text_of(name);
  const char* end = text + std::strlen(text);
  int value = 0;
  const auto [stop, error] = std::from_chars(text, end, value);
  check(error == std::errc() && stop == end && value >= low && value <= high, kOp, name, " must be a whole number in [",
        low, ", ", high, "], got '", text, '\'');
  return value;
}

}  // namespace

std::optional<Environment> environment() {
  if (!std::getenv("RANK") && !std::getenv("WORLD_SIZE") && !std::getenv("LOCAL_RANK")) return std::nullopt;
  Environment e;
  e.world_size = number_of("WORLD_SIZE", 1, std::numeric_limits<int>::max());
  e.rank = number_of("RANK", 0, e.world_size - 1);
  e.local_rank = number_of("LOCAL_RANK", 0, e.rank);
  e.master_addr = text_of("MASTER_ADDR");
  e.master_port = number_of("MASTER_PORT", 1, 65535);
  if (const char* token = std::getenv("VOXGRAD_TOKEN")) e.token = token;
  return e;
}

}  // namespace voxgrad::distributed
