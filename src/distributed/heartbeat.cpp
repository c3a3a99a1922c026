#include "distributed/heartbeat.h"

#include <charconv>

#include "core/error.h"

namespace tapetune {

HeartbeatThread::~HeartbeatThread() {
  {
    const std::lock_guard lock(guard_);
    ending_ = true;
  }
  ended_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HeartbeatThread::start(const Store& store, int rank) {
  thread_ = std::thread([this, own = store->clone(), rank] { send(own, rank); });
}

void HeartbeatThread::send(const Store& store, int rank) {
  std::unique_lock lock(guard_);
  for (std::int64_t n = 0; !ending_; ++n) {
    lock.unlock();
    try {
      store->set(heartbeat_key(rank), fmt::format("{} {}", n, step_.load()));
    } catch (const std::exception&) {
      return;  // the store is gone, and with it whoever would listen
    }
    lock.lock();
    ended_.wait_for(lock, heartbeat_every, [this] { return ending_; });
  }
}

std::vector<Heartbeat> read_heartbeats(const Store& store, const std::vector<std::string>& hosts) {
  std::vector<Heartbeat> all(hosts.size());
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    const std::string key = heartbeat_key(static_cast<int>(r));
    if (!store->check({key})) continue;
    const std::string text = text_of(store->get(key));
    const char* const end = text.data() + text.size();
    const auto count = std::from_chars(text.data(), end, all[r].count);
    const bool parted = count.ec == std::errc() && count.ptr != end && *count.ptr == ' ';
    const auto step = std::from_chars(parted ? count.ptr + 1 : end, end, all[r].step);
    if (!parted || step.ec != std::errc() || step.ptr != end) {
      fail("ranks",
           "rank {} ({}) sent a heartbeat that is not a number: {}; check that no other program uses the ranks' port, "
           "and rerun the same command to resume from the last checkpoint.",
           r, hosts[r], excerpt(text.substr(0, 100)));
    }
  }
  return all;
}

}  // namespace tapetune
