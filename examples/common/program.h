// Helpers of the main functions of programs that train.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>

#include "examples/common/output.h"

namespace examples {

/// Runs a program and returns its exit code: that of `parse` unless it is negative, otherwise that of `run`. Prints an
/// exception that `run` throws, and returns 1.
template <class Options>
int run_program(const char* name, int argc, char** argv, int (*parse)(int, char**, Options&),
                int (*run)(const Options&)) {
  Options options;
  if (const int code = parse(argc, argv, options); code >= 0) return code;
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << '\n';
    return 1;
  }
}

/// Prints how to continue a run that Ctrl-C ended. Returns the exit code.
inline int report_stop(int64_t steps, const std::filesystem::path& checkpoint) {
  if (!output_ready()) std::_Exit(130);  // flushing the output would wait for a reader
  std::printf("stopped after step %lld; --resume continues from %s\n", static_cast<long long>(steps),
              checkpoint.c_str());
  return 130;
}

}  // namespace examples
