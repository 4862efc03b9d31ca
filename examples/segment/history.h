// The losses and Dice coefficients that are measured during training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace segment {

/// The measurements of a training run.
struct History {
  std::vector<double> losses;                    ///< training loss of each step
  std::vector<std::pair<int64_t, double>> dice;  ///< (step, mean Dice of the validation data)

  /// Returns the mean of the last 20 losses. Single losses vary too much from batch to batch.
  double recent_loss() const;
};

/// Writes a CSV file with the columns step, training_loss and validation_dice. The last column is empty for steps
/// without a validation.
void write_history(const std::filesystem::path& path, const History& history);
/// Reads the first `steps` steps of a file that write_history wrote, for a run that resumes after these steps. Returns
/// fewer steps if the file is shorter or damaged.
History read_history(const std::filesystem::path& path, int64_t steps);

/// Formats a number with `digits` digits after the decimal point.
std::string fixed(double value, int digits);

}  // namespace segment
