// Implements the progress bar.
#include "examples/common/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "examples/common/output.h"

namespace examples {

Progress::Progress(int64_t start, int64_t total, std::string unit, std::chrono::milliseconds interval)
    : start_(start),
      total_(total),
      unit_(std::move(unit)),
      terminal_(isatty(STDOUT_FILENO) == 1),
      begin_(std::chrono::steady_clock::now()),
      interval_(terminal_ ? std::chrono::milliseconds(100) : interval) {}

Progress::~Progress() {
  if (!output_ready()) return;
  if (terminal_) std::printf("\n");
  std::fflush(stdout);
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

void Progress::update(int64_t done, const std::string& figure) {
  const auto now = std::chrono::steady_clock::now();
  if ((done < total_ && now - shown_ < interval_) || !output_ready()) return;
  shown_ = now;
  const double rate = static_cast<double>(done - start_) / std::max(seconds(), 1e-9);
  const double left = rate > 0 ? static_cast<double>(std::max<int64_t>(total_ - done, 0)) / rate : 0;
  if (terminal_) {
    std::printf("\r[%s] %lld/%lld %ss  %.1f %s/s  %s  %s left \x1b[K", bar_text(done, total_, 30).c_str(),
                static_cast<long long>(done), static_cast<long long>(total_), unit_.c_str(), rate, unit_.c_str(),
                figure.c_str(), clock_text(left).c_str());
  } else {
    std::printf("%s %lld/%lld  %.1f %s/s  %s  %s left\n", unit_.c_str(), static_cast<long long>(done),
                static_cast<long long>(total_), rate, unit_.c_str(), figure.c_str(), clock_text(left).c_str());
  }
  std::fflush(stdout);
}

std::string bar_text(int64_t done, int64_t total, int64_t width) {
  const int64_t filled = total > 0 && done < total ? std::max<int64_t>(width * done / total, 0) : width;
  return std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(width - filled), '.');
}

std::string clock_text(double seconds) {
  const auto total = static_cast<long long>(std::llround(seconds));
  char text[48];
  if (total >= 3600)
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60);
  else
    std::snprintf(text, sizeof text, "%lld:%02lld", total / 60, total % 60);
  return text;
}

}  // namespace examples
