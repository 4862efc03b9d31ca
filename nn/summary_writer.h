// A writer of TensorBoard event files (https://www.tensorflow.org/tensorboard) with scalars and images.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "../core/tensor.h"

namespace voxgrad {

/// Writes an event file, as PyTorch's SummaryWriter does. Each object creates a new file in a folder that TensorBoard
/// watches, and each add_ function appends one record to the file. Each record is passed to the operating system
/// immediately, so the file is readable up to its last complete record after a crash of the process.
///
/// Tags are paths such as "loss/train", and `step` is the position on the horizontal axis. If a record cannot be
/// written, for example because the disk is full, the functions throw Error and the file keeps its previous records.
/// Not thread-safe.
class SummaryWriter : NonCopyable {
 public:
  /// Creates the folder if necessary, and the file events.out.tfevents.SECONDS.PROCESS.NUMBER in it. `purge_step`
  /// is for resumed runs: TensorBoard hides records of earlier files whose step is at least `purge_step`. Throws Error
  /// if the folder or the file cannot be created.
  explicit SummaryWriter(const std::filesystem::path& log_dir, std::optional<int64_t> purge_step = {});
  ~SummaryWriter();

  /// Adds a number, stored as f32. NaN and infinities are allowed.
  void add_scalar(const std::string& tag, double value, int64_t step = 0);
  /// Adds an image (H, W) or (C, H, W) with 1 (gray), 3 (RGB) or 4 (RGBA) channels, on any device, stored as a PNG.
  /// Floating-point values are clamped to [0, 1], and NaN becomes 0. u8 values range from 0 to 255. bool is also
  /// allowed. Throws Error for other shapes and dtypes, and for more than 2^30 elements.
  void add_image(const std::string& tag, const Tensor& image, int64_t step = 0);
  /// Waits until all records have been written to the disk.
  void flush();

  /// Returns the path of the event file.
  const std::filesystem::path& path() const { return path_; }

 private:
  /// Writes an event with one field. `field` is the number of the field, and `bytes` is its content.
  void write_event(int field, const std::string& bytes, int64_t step);
  /// Writes a summary with one value. `fields` contains the encoded fields of the value except the tag.
  void write_value(const std::string& tag, const std::string& fields, int64_t step);
  [[noreturn]] void fail_with(int error) const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;  ///< bytes of the complete records in the file
};

}  // namespace voxgrad
