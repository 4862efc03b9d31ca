// Event files for TensorBoard (https://www.tensorflow.org/tensorboard): figures, pictures and texts of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "../core/tensor.h"

namespace voxgrad {

/// PyTorch's SummaryWriter: each add_ function appends one record to a file of its own in a folder that TensorBoard
/// watches. A record is handed to the system whole and at once: of a process that is killed, the file can be read to
/// its last whole record. Tags are paths ("loss/train"); `step` is the place on the horizontal axis, `wall_time` in
/// seconds since 1970 (default: now). All throw Error where the file cannot be written, as on a full disk, and leave
/// it as it was. Not for use from several threads at once.
class SummaryWriter {
 public:
  using WallTime = std::optional<double>;
  using HParams = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

  /// Makes the folder, if it is not there, and in it a file events.out.tfevents.<seconds>.<process>.<number>.
  /// With `purge_step`, of a run that goes on, TensorBoard forgets what earlier files say of steps from there on.
  explicit SummaryWriter(const std::filesystem::path& log_dir, std::optional<int64_t> purge_step = {});
  ~SummaryWriter();
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  /// Kept as float32; NaN and infinities are kept too.
  void add_scalar(const std::string& tag, double value, int64_t step = 0, WallTime wall_time = {});
  /// (H, W) or (C, H, W) with 1 (grey), 3 (RGB) or 4 (RGBA) channels, from any device, as a PNG: floats from 0 to 1,
  /// limited to these (NaN is 0), u8 from 0 to 255, or bool.
  void add_image(const std::string& tag, const Tensor& image, int64_t step = 0, WallTime wall_time = {});
  /// How all elements are distributed, over buckets that grow by a tenth from 1e-12 on, on both sides of 0; NaN and
  /// infinities are left out. Throws for a tensor without elements.
  void add_histogram(const std::string& tag, const Tensor& values, int64_t step = 0, WallTime wall_time = {});
  /// Markdown.
  void add_text(const std::string& tag, const std::string& text, int64_t step = 0, WallTime wall_time = {});
  /// What the run was made with, and what came out, for the table of runs. Of PyTorch's it differs in that all is kept
  /// in this folder: the metrics are scalars of this run.
  void add_hparams(const HParams& hparams, const std::map<std::string, double>& metrics, int64_t step = 0,
                   WallTime wall_time = {});
  /// Waits until the disk has all that was added.
  void flush();

  /// The event file.
  const std::filesystem::path& path() const { return path_; }

 private:
  /// An event with one field: number, and its bytes.
  void write_event(int field, const std::string& bytes, int64_t step, WallTime wall_time);
  void write_value(const std::string& tag, const std::string& fields, int64_t step, WallTime wall_time);
  [[noreturn]] void fail_with(int error) const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;  ///< of the records in the file
};

}  // namespace voxgrad
