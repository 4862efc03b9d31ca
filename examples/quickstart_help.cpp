// The help of quickstart. quickstart.cpp itself is the program of README.md and reads no arguments. glibc passes the
// arguments of main also to constructors, which run before main.
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

[[gnu::constructor]] void print_help(int argc, char** argv) {
  if (argc == 1 || (argv[1] != std::string_view("-h") && argv[1] != std::string_view("--help"))) return;
  std::puts(
      "Usage: quickstart\n\n"
      "Trains a decoder that draws a ball, prints the loss, and writes decoder.safetensors in the current folder.");
  std::exit(0);
}

}  // namespace
