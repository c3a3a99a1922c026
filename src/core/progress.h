// Progress of long work: a bar with rate and time left on a terminal, a plain line now and then elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tapetune {

class Progress {
 public:
  // total in the unit's own measure; the unit is printed with SI prefixes (bytes, tokens).
  Progress(std::string what, std::uint64_t total, std::string unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is shown behind the rest until the next one.
  void advance(std::uint64_t amount, std::string note = {});

 private:
  void print(bool last);
  std::string what_;
  std::string unit_;
  std::string note_;
  std::uint64_t total_;
  std::uint64_t done_ = 0;
  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point printed_;
};

}  // namespace tapetune
