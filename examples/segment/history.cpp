// Reads and writes the file with the losses and Dice coefficients of a run.
#include "examples/segment/history.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <numeric>

#include "core/io/atomic_file.h"

namespace segment {

double History::recent_loss() const {
  const auto count = std::min<std::ptrdiff_t>(std::ssize(losses), 20);
  return count > 0 ? std::accumulate(losses.end() - count, losses.end(), 0.0) / static_cast<double>(count) : 0;
}

void write_history(const std::filesystem::path& path, const History& history) {
  std::string text = "step,training_loss,validation_dice\n";
  auto dice = history.dice.begin();
  for (int64_t step = 1; step <= std::ssize(history.losses); ++step) {
    std::array<char, 64> line{};
    std::snprintf(line.data(), line.size(), "%lld,%.9g,", static_cast<long long>(step),
                  history.losses[static_cast<size_t>(step - 1)]);
    text += line.data();
    if (dice != history.dice.end() && dice->first == step) text += fixed((dice++)->second, 6);
    text += '\n';
  }
  voxgrad::write_file(path, text, "write_history");
}

History read_history(const std::filesystem::path& path, int64_t steps) {
  History history;
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  while (std::ssize(history.losses) < steps && std::getline(file, text)) {
    long long step = 0;
    double loss = 0, dice = 0;
    const int found = std::sscanf(text.c_str(), "%lld,%lf,%lf", &step, &loss, &dice);
    if (found < 2 || step != std::ssize(history.losses) + 1) break;
    history.losses.push_back(loss);
    if (found == 3) history.dice.emplace_back(step, dice);
  }
  return history;
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

}  // namespace segment
