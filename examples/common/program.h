// What the main functions of programs that train share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>

#include "examples/common/output.h"

namespace examples {

/// The exit code of a program of that name: what `parse` says unless it is negative, else what `run` says; 1 if that
/// throws, which is printed.
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

/// Tells how a run that Ctrl-C ended goes on. Returns the exit code.
inline int report_stop(int64_t steps, const std::filesystem::path& checkpoint) {
  if (!output_ready()) std::_Exit(130);  // nobody reads, and what is still to be printed must not wait
  std::printf("stopped after step %lld; --resume goes on from %s\n", static_cast<long long>(steps), checkpoint.c_str());
  return 130;
}

}  // namespace examples
