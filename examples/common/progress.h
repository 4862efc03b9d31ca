// A progress bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace examples {

/// Reports steps `start` .. `total`: rate, a figure of the program's own, and the time left. Steps beyond `total`
/// are counted, with a full bar and no time left. Nothing is printed while nobody reads what was printed before: work
/// goes on, and can be stopped.
class Progress {
 public:
  /// `unit` names what is counted ("step"). Lines are printed about every `interval` off a terminal.
  Progress(int64_t start, int64_t total, std::string unit,
           std::chrono::milliseconds interval = std::chrono::seconds(5));
  /// Ends the bar's line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int64_t done, const std::string& figure);
  double seconds() const;

 private:
  int64_t start_, total_;
  std::string unit_;
  bool terminal_;
  std::chrono::steady_clock::time_point begin_, shown_{};
  std::chrono::milliseconds interval_;
};

/// `width` characters, of which done/total are filled.
std::string bar_text(int64_t done, int64_t total, int64_t width);

/// "1:05" for 65 seconds, "2:00:00" for two hours.
std::string clock_text(double seconds);

}  // namespace examples
