// Helpers of programs that resume from checkpoints.
#pragma once

#include <string>

#include <voxgrad.h>

namespace examples {

/// Throws unless the checkpoint was made with the values in `wanted`.
inline void check_same_run(const char* program, const voxgrad::Metadata& saved, const voxgrad::Metadata& wanted) {
  for (const auto& [key, value] : wanted) {
    const auto found = saved.find(key);
    const std::string was = found == saved.end() ? "nothing" : found->second;
    voxgrad::check(was == value, program, "--resume: the checkpoint was made with ", key, " ", was, ", now it is ",
                   value);
  }
}

}  // namespace examples
