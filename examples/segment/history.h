// The figures measured during training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace segment {

struct History {
  std::vector<double> losses;                    ///< training loss of each step
  std::vector<std::pair<int64_t, double>> dice;  ///< (step, mean Dice of the validation data)

  /// The mean of the last 20 losses, which vary from batch to batch.
  double recent_loss() const;
};

/// Writes "step,training_loss,validation_dice" and a line for each step, with Dice where it was measured.
void write_history(const std::filesystem::path& path, const History& history);
/// Reads what write_history wrote about the first `steps` steps, for a run that continues from there.
History read_history(const std::filesystem::path& path, int64_t steps);

/// The value with `digits` digits after the decimal point.
std::string fixed(double value, int digits);

}  // namespace segment
