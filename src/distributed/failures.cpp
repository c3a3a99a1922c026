#include "distributed/failures.h"

#include <thread>

namespace tapetune {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

}  // namespace

void wait_for_others(const Store& store, int ranks, std::string (*key)(int), seconds longest) {
  const auto until = std::chrono::steady_clock::now() + longest;
  for (int r = 1; r < ranks; ++r) {
    while (!store->check({key(r)}) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
}

std::string find_culprit(const Store& store, const std::vector<std::string>& hosts, const std::string& error) {
  const int ranks = static_cast<int>(hosts.size());
  const auto before = read_heartbeats(store, hosts);
  const auto until = std::chrono::steady_clock::now() + stale_after;
  while (std::chrono::steady_clock::now() < until) {
    for (int r = 1; r < ranks; ++r) {
      if (!store->check({failed_key(r)})) continue;
      const std::string why = excerpt(text_of(store->get(failed_key(r))));
      return fmt::format("[ranks] rank {} ({}) failed: {}", r, hosts[static_cast<std::size_t>(r)], why);
    }
    std::this_thread::sleep_for(milliseconds(100));
  }
  const auto after = read_heartbeats(store, hosts);
  std::size_t slowest = 1;
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (after[r].count == before[r].count) {
      store->set(heard_key(static_cast<int>(r)), std::string("no more"));
      return fmt::format(
          "[ranks] rank {} ({}) stopped responding (no heartbeat for {} s), last at step {}: it was killed or "
          "suspended, "
          "or its network is down; check that machine's memory and network, then rerun the same command to resume from "
          "the last checkpoint.",
          r, hosts[r], stale_after.count(), after[r].step);
    }
    if (after[r].step < after[slowest].step) slowest = r;
  }
  return fmt::format(
      "[ranks] timed out: rank {} ({}) is behind the others, at step {}; raise --timeout if it is only slow, and rerun "
      "the same command to resume from the last checkpoint. ({})",
      slowest, hosts[slowest], after[slowest].step, error);
}

void wait_until_told(const Store& store, int own) {
  const auto until = std::chrono::steady_clock::now() + patience - heartbeat_every;
  while (!store->check({"told"}) && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(100));
  }
  store->set(heard_key(own), std::string("yes"));
}

void stay_until_heard(const Store& store, int ranks) {
  store->set("told", std::string("yes"));
  wait_for_others(store, ranks, heard_key, patience);
}

void wait_for_rank_0_to_leave(const Store& store) {
  std::string last_heartbeat;
  auto changed = std::chrono::steady_clock::now();
  while (!store->check({left_key(0)}) && !store->check({failed_key(0)})) {
    std::string heartbeat = store->check({heartbeat_key(0)}) ? text_of(store->get(heartbeat_key(0))) : "";
    const auto now = std::chrono::steady_clock::now();
    if (std::exchange(last_heartbeat, heartbeat) != heartbeat) changed = now;
    if (now - changed > patience) return;
    std::this_thread::sleep_for(milliseconds(50));
  }
}

}  // namespace tapetune
