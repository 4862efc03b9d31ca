// A check for programs that resume from checkpoints.
#pragma once

#include <string>

#include <voxgrad.h>

namespace examples {

/// Throws voxgrad::Error if a setting of the current run (`expected`) differs from the setting in the metadata of the
/// checkpoint (`saved`).
inline void check_same_run(const char* program, const voxgrad::Metadata& saved, const voxgrad::Metadata& expected) {
  for (const auto& [key, value] : expected) {
    const auto found = saved.find(key);
    const std::string was = found == saved.end() ? "(missing)" : found->second;
    voxgrad::check(was == value, program, "--resume: the checkpoint was written with ", key, " = ", was,
                   ", but this run has ", key, " = ", value);
  }
}

}  // namespace examples
