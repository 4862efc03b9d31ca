// The command line of benchmarks without options.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

/// Ends the program with `help` as output if it has arguments. The exit code is 0 for -h and --help, otherwise 2.
inline void take_no_options(int argc, char** argv, const char* help) {
  if (argc == 1) return;
  const bool asked = argv[1] == std::string_view("-h") || argv[1] == std::string_view("--help");
  std::fputs(help, asked ? stdout : stderr);
  std::exit(asked ? 0 : 2);
}
