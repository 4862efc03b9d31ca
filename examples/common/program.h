// Helpers for the main functions of training programs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <string_view>

#include "examples/common/output.h"

namespace examples {

/// Parses the command line with `parse`, runs a program with `run` and returns the exit code. If the result of `parse`
/// is not negative, it is the exit code, and `run` is not called. If a function throws an exception, prints its message
/// after the name of the program and returns 1. Does not allocate memory to print the message.
template <class Options>
int run_program(const char* name, int argc, char** argv, int (*parse)(int, char**, Options&),
                int (*run)(const Options&)) {
  try {
    Options options;
    const int code = parse(argc, argv, options);
    return code >= 0 ? code : run(options);
  } catch (const std::bad_alloc&) {
    std::cerr << name << ": out of memory\n";
  } catch (const std::exception& error) {
    const std::string_view message = error.what(), own = name;
    const bool named = message.starts_with(own) && message.substr(own.size()).starts_with(": ");
    std::cerr << (named ? "" : name) << (named ? "" : ": ") << message << '\n';
  }
  return 1;
}

/// Prints how to resume a run that Ctrl-C stopped, and returns the exit code 130. If printing would block, ends the
/// program with this exit code immediately.
inline int report_stop(int64_t steps, const std::filesystem::path& checkpoint) {
  if (!output_ready()) std::_Exit(130);  // printing would block until another program reads the pipe
  std::printf("stopped after step %lld; --resume continues from %s\n", static_cast<long long>(steps),
              checkpoint.c_str());
  return 130;
}

}  // namespace examples
