// Fuzzes open_pt() and load_pt() with libFuzzer. If an input is not a zip archive, the program writes an archive with
// two storages whose pickle is the input, so that mutations reach the pickle interpreter. Build and run the program
// with Clang:
//
//   cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DVOXGRAD_CUDA=OFF -DVOXGRAD_SANITIZE=address \
//     -DCMAKE_CXX_FLAGS=-fsanitize=fuzzer-no-link
//   ninja -C build/fuzz load_pt_fuzz
//   mkdir corpus && build/fuzz/tests/load_pt_fuzz -max_total_time=1800 -rss_limit_mb=4096 corpus tests/core/data
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/io/pt.h"
#include "tests/core/zip_support.h"

namespace voxgrad {
namespace {

/// Visits `root` and the values that it contains, at most 1000 in total, and calls their accessors. Throws if a value
/// is invalid.
void visit(const PtValue& root) {
  std::vector<PtValue> pending{root};
  for (int i = 0; i < 1000 && !pending.empty(); ++i) {
    const PtValue value = pending.back();
    pending.pop_back();
    switch (value.kind()) {
      case PtValue::Kind::list:
      case PtValue::Kind::tuple:
        for (const PtValue& item : value.items()) pending.push_back(item);
        break;
      case PtValue::Kind::dict:
        for (const auto& [key, item] : value.members()) {
          pending.push_back(key);
          pending.push_back(item);
          if (key.kind() == PtValue::Kind::text) value.at(key.text());
        }
        break;
      case PtValue::Kind::tensor: {
        const Tensor tensor = value.tensor();
        if (tensor.numel() <= 10'000) tensor.to_vector();
        break;
      }
      case PtValue::Kind::boolean:
        value.boolean();
        break;
      case PtValue::Kind::integer:
        value.integer();
        break;
      case PtValue::Kind::number:
        value.number();
        break;
      default:
        static_cast<void>(value.text());
    }
  }
}

/// Calls f and catches an Error. Ends the process on an OutOfMemoryError, which libFuzzer reports.
template <class F>
void expect_error_or_success(F f) {
  try {
    f();
  } catch (const OutOfMemoryError&) {
    std::abort();  // the reader must allocate memory only for bytes that the file contains
  } catch (const Error&) {
  }
}

}  // namespace
}  // namespace voxgrad

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace voxgrad;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (!bytes.starts_with("PK"))
    bytes = zip_of({{"a/data.pkl", bytes}, {"a/data/0", std::string(32, '\1')}, {"a/data/1", std::string(8, '\1')}});
  static const int file = memfd_create("input", 0);
  if (ftruncate(file, 0) != 0 || pwrite(file, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    std::abort();
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  expect_error_or_success([&] {
    const PtValue root = open_pt(path);
    expect_error_or_success([&] { visit(root); });
    root.tensors();
  });
  expect_error_or_success([&] { load_pt(path); });
  return 0;
}
