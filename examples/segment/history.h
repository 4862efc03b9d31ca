// What was measured on the way.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace segment {

struct History {
  std::vector<double> losses;                    ///< of each step
  std::vector<std::pair<int64_t, double>> dice;  ///< (step, mean Dice of the validation's cases)

  /// The mean of the last losses, which jump from batch to batch.
  double recent_loss() const;
};

/// "step,loss,dice", a line a step; Dice where it was measured.
void write_history(const std::filesystem::path& path, const History& history);
/// What write_history wrote of the first `steps` steps, for a run that goes on from there.
History read_history(const std::filesystem::path& path, int64_t steps);

/// With so many digits behind the point.
std::string fixed(double value, int digits);

}  // namespace segment
