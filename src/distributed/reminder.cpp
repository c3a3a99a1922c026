#include "distributed/reminder.h"

#include "core/log.h"

namespace tapetune {

Reminder::Reminder(const std::string& text) {
  thread_ = std::thread([this, text] {
    std::unique_lock lock(guard_);
    if (!gone_.wait_for(lock, remind_after, [this] { return over_; })) log_warning(text);
  });
}

Reminder::~Reminder() {
  {
    const std::lock_guard lock(guard_);
    over_ = true;
  }
  gone_.notify_all();
  thread_.join();
}

}  // namespace tapetune
