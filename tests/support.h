// Helpers shared by all tests.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "core/profiler.h"
#include "core/tensor.h"
#include "cuda/cuda.h"

namespace voxgrad {

/// Expects that the statement throws voxgrad::Error with a message that contains `fragment`.
#define EXPECT_ERROR(statement, fragment)                                                                          \
  try {                                                                                                            \
    static_cast<void>(statement);                                                                                  \
    ADD_FAILURE() << "no error from " #statement;                                                                  \
  } catch (const ::voxgrad::Error& error) {                                                                        \
    EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << "the message was: " << error.what(); \
  }

/// Returns the CPU and, if there is one, the current GPU. Tests that run on every device loop over this list.
inline std::vector<Device> devices() {
  std::vector<Device> all{Device::cpu()};
  if (cuda::is_available()) all.push_back(Device::cuda());
  return all;
}

/// Returns the descriptions of the copies that changed the memory format of a tensor while `session` recorded.
inline std::vector<std::string> layout_copies(const profiler::Session& session) {
  std::vector<std::string> list;
  for (const profiler::Event& event : session.events())
    if (event.kind == profiler::Kind::layout_copy) list.push_back(*event.name);
  return list;
}

}  // namespace voxgrad
