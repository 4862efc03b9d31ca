// Helpers for the main functions of training programs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>

#include "examples/common/output.h"

namespace examples {

/// Parses the command line and runs a program. Returns the exit code: the result of `parse` if that is not negative,
/// otherwise the result of `run`. If `run` throws an exception, prints its message and returns 1.
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

/// Prints how to resume a run that Ctrl-C stopped. Returns the exit code 130. If the message cannot be printed without
/// blocking, ends the program with this code instead.
inline int report_stop(int64_t steps, const std::filesystem::path& checkpoint) {
  if (!output_ready()) std::_Exit(130);  // writing would block until the pipe is read
  std::printf("stopped after step %lld; --resume continues from %s\n", static_cast<long long>(steps),
              checkpoint.c_str());
  return 130;
}

}  // namespace examples
