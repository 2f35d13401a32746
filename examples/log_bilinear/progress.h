// Progress output.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace log_bilinear {

// Prints lines to standard output at once, each with the time since the program began.
class Progress {
 public:
  void say(std::string_view line) const;
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// Total of a time with breaks.
class Timer {
 public:
  void start() { begun_ = Clock::now(); }
  void stop() { total_ += std::chrono::duration<double>(Clock::now() - begun_).count(); }
  double seconds() const { return total_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begun_;
  double total_ = 0.0;
};

// Formats seconds: 75.2 becomes "1:15".
std::string format_duration(double seconds);
// Formats a count: 1234567 becomes "1,234,567".
std::string format_count(std::int64_t count);

}  // namespace log_bilinear
