// Writes preprocessed training cases to disk, and reuses intact files of an earlier run.
#include "examples/segment/store.h"

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "core/io/atomic_file.h"
#include "examples/common/output.h"
#include "examples/nnunet/pipeline.h"
#include "examples/segment/checksum.h"

namespace segment {
namespace vg = voxgrad;
namespace {
namespace fs = std::filesystem;

/// The files of a preprocessed case.
struct Files {
  fs::path image;
  fs::path label;

  /// Returns a source of patches. The source opens the files again for each patch, because the number of open files per
  /// process is limited.
  vg::data::PatchSource source() const {
    const auto open = [*this] { return vg::data::patch_source(vg::NpyFile(image), vg::NpyFile(label)); };
    return {open().shape, [open](const vg::Dims& start, const vg::Shape& size) { return open().image(start, size); },
            [open](const vg::Dims& start, const vg::Shape& size) { return open().label(start, size); }};
  }
};

/// Returns the line of contents.txt for a case. `origin` is the checksum of the original case and its preprocessing.
std::string describe(const std::string& name, uint32_t origin, const vg::Tensor& image, const vg::Tensor& label) {
  return vg::concat(name, ' ', origin, ' ', image.shape(), ' ', image.dtype(), ' ', label.shape(), ' ', label.dtype(),
                    ' ', checksum(label, checksum(image)));
}

/// Reads the files of a case and returns their line of contents.txt. Returns an empty string if a file is missing or
/// damaged.
std::string describe(const std::string& name, uint32_t origin, const Files& files) {
  try {
    return describe(name, origin, vg::load_npy(files.image), vg::load_npy(files.label));
  } catch (const vg::Error&) {
    return {};
  }
}

std::set<std::string> read_lines(const fs::path& path) {
  std::set<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.insert(line);
  return lines;
}

}  // namespace

std::vector<vg::data::PatchSource> store(const Task& task, const Survey& survey, const fs::path& folder, bool reuse) {
  examples::create_folder(folder);
  const std::set<std::string> before = reuse ? read_lines(folder / "contents.txt") : std::set<std::string>();
  std::string contents;
  std::vector<vg::data::PatchSource> sources;
  int64_t written = 0;
  for (size_t i = 0; i < task.training.size(); ++i) {
    const std::string& name = task.training[i].name;
    const Files files{folder / (name + "-image.npy"), folder / (name + "-label.npy")};
    const uint32_t origin = checksum(survey.plan, survey.checksums[i]);
    std::string line = before.empty() ? std::string() : describe(name, origin, files);
    if (line.empty() || !before.contains(line)) {
      const nnunet::TrainingVolume preprocessed = nnunet::prepare_for_training(task.training[i].load(), survey.plan);
      vg::save_npy(files.image, preprocessed.image);
      vg::save_npy(files.label, preprocessed.label);
      line = describe(name, origin, preprocessed.image, preprocessed.label);
      ++written;
    }
    contents += line + '\n';
    sources.push_back(files.source());
  }
  vg::write_file(folder / "contents.txt", contents, "store");
  std::printf("training cases preprocessed in %s: %lld written, %lld reused\n", folder.string().c_str(),
              static_cast<long long>(written), static_cast<long long>(std::ssize(sources) - written));
  return sources;
}

}  // namespace segment
