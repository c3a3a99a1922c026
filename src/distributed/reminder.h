// A warning about work that takes longer than it should, while it blocks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace tapetune {

// Ranks that have not come by then are named, while the others wait on.
constexpr std::chrono::seconds remind_after{10};

// Prints a warning unless it is gone by then.
class Reminder {
 public:
  explicit Reminder(const std::string& text);
  ~Reminder();
  Reminder(const Reminder&) = delete;
  Reminder& operator=(const Reminder&) = delete;

 private:
  std::mutex guard_;
  std::condition_variable gone_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace tapetune
