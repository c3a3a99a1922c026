#include "distributed/failures.h"

#include <future>
#include <memory>
#include <thread>

#include "core/error.h"

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

void report_failure(const Store& store, int rank, const std::string& error) {
  // Without a new thread, for which there may be no memory.
  try {
    store->set(failed_key(rank), error);
    store->set(heard_key(rank), std::string("yes"));
  } catch (const std::exception&) {  // nobody is there to read it
  }
}

std::string find_lost_rank(const Store& store, const std::vector<std::string>& hosts, int own,
                           const std::string& error) {
  // In a thread of its own, because the store may be beyond a link that is cut and never answer.
  const auto asked = std::make_shared<std::promise<std::string>>();
  auto answer = asked->get_future();
  std::thread([asked, error, store, hosts, own] {
    try {
      if (own != 0) wait_until_told(store, own);
      asked->set_value(own == 0 ? find_culprit(store, hosts, error) : "");
    } catch (const Error& found) {
      asked->set_value(found.what());
    } catch (const std::exception&) {
      constexpr const char* gone =
          "[ranks] {} stopped responding: it was killed, or its network is down; rerun the same command to resume from "
          "the last checkpoint.";
      asked->set_value(own > 1 ? "" : fmt::format(fmt::runtime(gone), own == 1 ? "rank 0" : "the ranks' store"));
    }
  }).detach();
  if (answer.wait_for(patience) != std::future_status::ready) {
    return fmt::format(
        "[ranks] rank {}: rank 0 does not answer: the network is down; rerun the same command to resume from the last "
        "checkpoint.",
        own);
  }
  return answer.get();
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
