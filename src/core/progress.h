// Progress of long work: a bar with rate and time left on a terminal, a plain line now and then elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tapetune {

struct ProgressState {
  std::string what, unit, note;
  double done = 0, total = 0;
  double rate = 0;  // units per second; 0: not known yet
};

// The bar in less than this many columns, so that the terminal does not wrap it; the note matters most, then the time
// left, the rate, the amount done, and the bar itself.
std::string progress_bar(const ProgressState& state, int columns);
// All of it without a bar, for files.
std::string progress_text(const ProgressState& state);

class Progress {
 public:
  // total in the unit's own measure; the unit is printed with SI prefixes (bytes, tokens). `already` of it was done
  // before and does not count for the rate.
  Progress(std::string what, std::uint64_t total, std::string unit, std::uint64_t already = 0);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows the bar on a terminal before anything is done, with this note.
  void begin(std::string note);
  // `note` is shown behind the rest until the next one.
  void advance(std::uint64_t amount, std::string note = {});

 private:
  void print(bool last);
  ProgressState state_;
  double already_;
  bool terminal_;
  bool shown_ = false;
  double printed_done_ = -1;  // the amount that the last line told
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point printed_;
};

}  // namespace tapetune
