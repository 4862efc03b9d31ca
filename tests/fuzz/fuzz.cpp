// Fuzz targets for libFuzzer, one for each reader of files and messages. The name of the program selects the target:
// CMake creates a link for each row of kTargets. tests/fuzz/fuzz.py runs the targets; docs/reliability.md describes the
// results.
//
// For any input, a reader must return or throw Error. libFuzzer reports other exceptions, leaks, inputs that take too
// long, and allocations above the limits that fuzz.py sets. An OutOfMemoryError also counts as a fault, because readers
// compare sizes with the size of the file before they allocate memory.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <voxgrad.h>

#include "core/io/detail/gzip_file.h"
#include "examples/nnunet/dataset_json.h"
#include "examples/nnunet/json.h"
#include "examples/nnunet/model_folder.h"
#include "nn/distributed/detail/rendezvous.h"
#include "tests/core/zip_support.h"

namespace voxgrad {
namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Calls f and catches an Error. Returns false if f threw an Error.
template <class F>
bool attempt(F f) {
  try {
    f();
  } catch (const OutOfMemoryError&) {
    std::abort();
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// A file in memory.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("input", 0)) { require(descriptor_ >= 0); }
  /// Replaces the contents, and returns the path.
  std::filesystem::path put(std::string_view bytes) const {
    require(ftruncate(descriptor_, 0) == 0 &&
            pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }

 private:
  int descriptor_;
};

/// Writes the input to a file, and returns its path.
std::filesystem::path file_of(std::string_view input) {
  static const MemoryFile file;
  return file.put(input);
}

/// Reads all elements of a tensor that is not too large.
void visit(const Tensor& tensor) {
  if (tensor.numel() <= 10'000) tensor.to_vector();
}
void visit(const TensorMap& tensors) {
  for (const auto& [name, tensor] : tensors) visit(tensor);
}

// ---- files

void safetensors(std::string_view input) {
  const auto path = file_of(input);
  attempt([&] { visit(load_safetensors(path)); });
}

void npy(std::string_view input) {
  const auto path = file_of(input);
  attempt([&] { visit(load_npy(path)); });
  attempt([&] {
    const NpyFile file(path);
    Dims start, size;
    for (const int64_t axis : file.shape()) {
      start.push_back(axis / 3);
      size.push_back(axis - axis / 2);
    }
    visit(file.read(start, size));
  });
}

void nifti(std::string_view input) {
  const auto path = file_of(input);
  attempt([&] { visit(load_nifti(path).data); });
}

void gzip(std::string_view input) {
  const auto path = file_of(input);
  attempt([&] {
    const InputFile file(path, "gzip");
    UnpackedFile unpacked(file);
    std::vector<char> bytes(1 << 16);
    while (unpacked.read(bytes.data(), bytes.size()) == bytes.size()) {
    }
  });
}

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
      case PtValue::Kind::tensor:
        visit(value.tensor());
        break;
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

/// Reads the input as a checkpoint of PyTorch. If the input is not a zip archive, it becomes the pickle of an archive
/// with two storages, so that mutations reach the pickle interpreter.
void pth(std::string_view input) {
  std::string bytes(input);
  if (!bytes.starts_with("PK"))
    bytes = zip_of({{"a/data.pkl", bytes}, {"a/data/0", std::string(32, '\1')}, {"a/data/1", std::string(8, '\1')}});
  const auto path = file_of(bytes);
  attempt([&] {
    const PtValue root = open_pt(path);
    attempt([&] { visit(root); });
    root.tensors();
  });
  attempt([&] { visit(load_pt(path)); });
  attempt([&] { const nnunet::Checkpoint weights(path); });
}

void dataset_json(std::string_view input) {
  const auto path = file_of(input);
  attempt([&] {
    const nnunet::Json dataset = nnunet::Json::load(path);
    attempt([&] { nnunet::read_channels(dataset); });
    attempt([&] { nnunet::read_labels(dataset); });
    attempt([&] { nnunet::read_file_ending(dataset); });
  });
}

void plans_json(std::string_view input) {
  static const MemoryFile dataset;
  const auto plans = file_of(input);
  const auto path = dataset.put(
      R"({"channel_names": {"0": "CT"}, "labels": {"background": 0, "tumor": 1}, "file_ending": ".nii.gz"})");
  attempt([&] { nnunet::read_plan(path, plans, input.size() % 2 == 0 ? "2d" : "3d_fullres"); });
}

// ---- states

/// Loads the input as the state of each loader, then loads a few batches.
void loader(std::string_view input) {
  static const data::TensorDataset few(arange(0, 10));
  static const data::FunctionDataset many(int64_t{1} << 52, [](int64_t index, Generator&) {
    return data::Sample{full({}, index, {.dtype = i64}), {}};
  });
  TensorMap state;
  if (!attempt([&, path = file_of(input)] { state = load_safetensors(path); })) return;
  const auto half =
      std::make_shared<data::DistributedSampler>(std::make_shared<data::RandomSampler>(10, 3),
                                                 data::DistributedSamplerOptions{.num_replicas = 2, .batch_size = 4});
  data::Loader loaders[] = {data::Loader(few, {.batch_size = 3, .shuffle = true, .seed = 3}),
                            data::Loader(many, {.batch_size = 3, .drop_last = true}),
                            data::Loader(few, {.batch_size = 2, .sampler = half})};
  for (data::Loader& each : loaders) {
    const bool is_valid = attempt([&] { each.check_state_dict(state); });
    require(attempt([&] { each.load_state_dict(state); }) == is_valid);
    if (!is_valid) continue;
    int batches = 0;
    for (const data::Sample& batch : each) {
      visit(batch.input);
      if (++batches == 3) break;
    }
    each.state_dict();
  }
}

/// Loads the input as the state of a GradScaler, and then runs a step with a scaled loss. The new state must be valid,
/// too.
void scaler(std::string_view input) {
  TensorMap state;
  if (!attempt([&, path = file_of(input)] { state = load_safetensors(path); })) return;
  optim::GradScaler scaler;
  if (!attempt([&] { scaler.load_state_dict(state); })) return;
  const Tensor parameter = ones({1}, {.requires_grad = true});
  optim::SGD optimizer({parameter}, 0.1);
  scaler.scale(sum(parameter)).backward();
  scaler.step(optimizer);
  scaler.update();
  scaler.load_state_dict(scaler.state_dict());
}

/// A training run whose checkpoint has entries of all parts.
struct Training {
  nn::Sequential model{nn::Linear(2, 2), nn::BatchNorm1d(2)};
  optim::Adam optimizer{model.parameters(), 0.1};
  optim::CosineAnnealingLR schedule{optimizer, {.t_max = 10}};
  data::TensorDataset dataset{reshape(arange(0, 20), {10, 2})};
  data::Loader loader{dataset, {.batch_size = 4, .shuffle = true}};
  Generator generator{5};
  optim::GradScaler scaler;
  optim::ExponentialMovingAverage average{model};
  int64_t step = 0;

  CheckpointParts parts() {
    return {.model = &model,
            .optimizer = &optimizer,
            .schedule = &schedule,
            .loader = &loader,
            .generator = &generator,
            .scaler = &scaler,
            .average = &average,
            .step = &step};
  }
  void train() {
    optimizer.zero_grad();
    scaler.scale(mean(model(loader.begin()->input))).backward();
    scaler.step(optimizer);
    scaler.update();
    schedule.step();
    average.update();
    ++step;
  }
};

/// Loads the input as a checkpoint and continues the training by one step, which throws Error if the schedule computes
/// an invalid learning rate.
void checkpoint(std::string_view input) {
  static Training training;
  const auto path = file_of(input);
  if (attempt([&] { load_checkpoint(path, training.parts()); })) attempt([&] { training.train(); });
}

// ---- messages of the rendezvous

/// Sends the input to a connection, and returns the frames that it receives.
std::vector<distributed::Frame> frames_of(std::string_view input, int64_t max_text) {
  std::array<int, 2> sockets{};
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets.data()) == 0);
  distributed::Connection from(sockets[0]), to(sockets[1]);
  to.set_max_text(max_text);
  require(send(sockets[0], input.data(), input.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(input.size()));
  from.close();
  std::vector<distributed::Frame> frames;
  while (to.is_open()) {
    to.transfer();
    while (auto frame = to.next()) frames.push_back(std::move(*frame));
  }
  return frames;
}

void hello(std::string_view input) {
  for (const distributed::Frame& frame : frames_of(input, 4096))
    if (const auto hello = distributed::parse_hello(frame))
      require(hello->size >= 0 && hello->token.size() <= frame.text.size() && hello->host.size() <= 4 * 255);
}

/// Interprets each frame as the calls of a rank, and compares the calls of all ranks.
void calls(std::string_view input) {
  std::vector<std::vector<distributed::Call>> ranks;
  size_t count = SIZE_MAX;
  for (const distributed::Frame& frame : frames_of(input, distributed::kMaxText)) {
    ranks.push_back(distributed::parse_calls(frame.text));
    count = std::min(count, ranks.back().size());
    std::string text;
    for (const distributed::Call& call : ranks.back()) distributed::append_call(text, call);
    require(text.size() <= frame.text.size() + 1);  // the last description may lack its line end
  }
  for (size_t i = 0; !ranks.empty() && i < count; ++i) {
    std::vector<distributed::Call> calls;
    for (const auto& rank : ranks) calls.push_back(rank[i]);
    distributed::escape(distributed::describe_disagreement(calls));
  }
}

struct Target {
  const char* name;
  void (*run)(std::string_view input);
};
constexpr Target kTargets[] = {
    {"safetensors", safetensors},
    {"npy", npy},
    {"nifti", nifti},
    {"gzip", gzip},
    {"pth", pth},
    {"dataset_json", dataset_json},
    {"plans_json", plans_json},
    {"checkpoint", checkpoint},
    {"loader", loader},
    {"scaler", scaler},
    {"hello", hello},
    {"calls", calls},
};

const Target* target = nullptr;

}  // namespace
}  // namespace voxgrad

extern "C" int LLVMFuzzerInitialize(const int*, char*** arguments) {
  using voxgrad::kTargets;
  const std::string name = std::filesystem::path((*arguments)[0]).filename();
  voxgrad::target = std::find_if(std::begin(kTargets), std::end(kTargets), [&](auto& t) { return t.name == name; });
  voxgrad::require(voxgrad::target != std::end(kTargets));
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  voxgrad::target->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
