// A progress bar on a terminal; plain lines if standard output is not a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace examples {

/// Prints the number of completed steps, their rate, a text from the caller, and the remaining time. After more than
/// `total` steps, the bar is full and the remaining time is 0. If standard output is a pipe whose reader is too slow,
/// update() prints nothing, so that the program does not block and can handle Ctrl-C.
class Progress {
 public:
  /// `start` is the number of steps that earlier runs completed. `unit` is the word for a step in the output, such as
  /// "step" or "window". A terminal is updated at most every 100 ms. If standard output is not a terminal, a line is
  /// printed at most every `interval`.
  Progress(int64_t start, int64_t total, std::string unit,
           std::chrono::milliseconds interval = std::chrono::seconds(5));
  /// Ends the line of the bar.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Changes the total number of steps, for runs whose length is not known at construction.
  void set_total(int64_t total) { total_ = total; }
  /// Prints the progress after `done` steps with the text `figure`. Prints nothing if the last update was too recent,
  /// except when all steps are done.
  void update(int64_t done, const std::string& figure);
  /// Returns the seconds since construction.
  double seconds() const;

 private:
  int64_t start_;
  int64_t total_;
  std::string unit_;
  bool terminal_;                                  // true if standard output is a terminal
  std::chrono::steady_clock::time_point begin_;    // time of construction
  std::chrono::steady_clock::time_point shown_{};  // time of the last update
  std::chrono::milliseconds interval_;
};

/// Returns a bar of `width` characters: '#' for the fraction done / total, '.' for the rest.
std::string bar_text(int64_t done, int64_t total, int64_t width);

/// Formats a duration: "1:05" for 65 seconds, "2:00:00" for two hours.
std::string clock_text(double seconds);

}  // namespace examples
