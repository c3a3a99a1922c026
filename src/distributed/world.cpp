#include "distributed/world.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <optional>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/output.h"
#include "core/signals.h"
#include "distributed/failures.h"
#include "distributed/gloo.h"
#include "distributed/heartbeat.h"
#include "distributed/rendezvous.h"
#ifdef TAPETUNE_CUDA
#include "distributed/cuda/nccl.h"
#endif

namespace tapetune {

namespace {

using std::chrono::seconds;

// LibTorch would write pages about every connection that breaks; what of it people need, diagnose() says in a line.
void hush_libtorch() {
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
}

}  // namespace

struct World::Rendezvous {
  Store store;
  seconds timeout;
  at::Device device;
  std::string address;
  std::vector<Group> groups;
  std::vector<std::string> hosts;  // "host, process 123", by rank; on rank 0
  int next_message = 0;            // numbers what the ranks send each other, for keys of their own
  std::string shared;              // the key of the last all_gather's result
  bool lost = false;
  HeartbeatThread heartbeat_thread;

  Rendezvous(Store given, seconds time, at::Device where) : store(std::move(given)), timeout(time), device(where) {}

  // Whether a rank did not answer, here or in a collective.
  bool lost_rank() const { return lost || std::ranges::any_of(groups, &Group::lost); }

  [[noreturn]] void lose(const std::string& why) {
    lost = true;
    throw RankLost(why);
  }

  // Nobody answers any more where the store fails.
  template <typename Ask>
  auto asking(const Ask& ask) {
    try {
      return ask();
    } catch (const c10::Error& error) {
      lose(error.what_without_backtrace());
    }
  }
  void put(const std::string& key, const std::string& text) {
    asking([&] { store->set(key, text); });
  }

  // Whether a rank has failed, or ends because a signal asked for it, so that whoever waits for it ends too.
  void look_for_ends(int ranks) {
    for (int r = 0; r < ranks; ++r) {
      if (store->check({failed_key(r)})) lose("a rank failed");
    }
    if (store->check({interrupted_key})) throw Interrupted(stopped_early);
  }

  // Waits for another rank's message, unless a rank ends meanwhile. `busy`: a rank that may take longer than the
  // timeout to send it, as long as it sends heartbeats.
  std::string get(const std::string& key, int ranks, std::optional<int> busy = std::nullopt) {
    return asking([&]() -> std::string {
      auto deadline = std::chrono::steady_clock::now() + timeout;
      std::string last_heartbeat;
      while (std::chrono::steady_clock::now() < deadline) {
        try {
          store->wait({key}, heartbeat_every);
          return text_of(store->get(key));
        } catch (const c10::DistStoreError&) {
          look_for_ends(ranks);
          if (!busy || !store->check({heartbeat_key(*busy)})) continue;
          std::string heartbeat = text_of(store->get(heartbeat_key(*busy)));
          if (heartbeat != last_heartbeat) deadline = std::chrono::steady_clock::now() + timeout;
          last_heartbeat = std::move(heartbeat);
        }
      }
      lose(fmt::format("no answer for {} s", timeout.count()));
    });
  }

  std::string host(int rank) const {
    return static_cast<std::size_t>(rank) < hosts.size() ? hosts[static_cast<std::size_t>(rank)] : "unknown";
  }
};

World::World() = default;
World::~World() = default;

World::World(const RankInfo& info, seconds timeout, at::Device device) : rank_info_(info), device_(device) {
  if (info.ranks == 1) return;
  hush_libtorch();
  std::signal(SIGPIPE, SIG_IGN);  // a rank that is gone is an error of the collective, not the end of this process
  report_closed_pipes();
  at_moment("meet");
  rendezvous_ = std::make_unique<Rendezvous>(join_rendezvous(info, timeout), timeout, device);
  Rendezvous& rdzv = *rendezvous_;
  rdzv.address = own_address(info.address, info.port);
  rdzv.hosts = wait_for_ranks(rdzv.store, rank_info_, timeout);
  rdzv.heartbeat_thread.start(rdzv.store, rank());
  at_moment("met");
}

Group World::group(const std::string& name, int number) {
  if (!rendezvous_) return {};
  Rendezvous& rdzv = *rendezvous_;
  // Everyone's number tells who belongs together, in the order of ranks.
  const std::string key = fmt::format("group/{}/", rdzv.next_message++);
  rdzv.put(key + std::to_string(rank()), std::to_string(number));
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    const std::string text = rdzv.get(key + std::to_string(r), size());
    int theirs = -1;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), theirs);
    const bool whole = error == std::errc() && rest == text.data() + text.size();
    if (!whole || theirs < 0 || theirs >= size() || (r == rank() && theirs != number)) {
      fail("ranks", "rank {} has the group number {}, which is none; check that no other program uses the ranks' port.",
           r, excerpt(text.substr(0, 100)));
    }
    if (theirs == number) members.push_back(r);
  }
  if (members.size() == 1) return {};
  const auto own = std::find(members.begin(), members.end(), rank()) - members.begin();
  const auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}", key, number), rdzv.store);
  const int count = static_cast<int>(members.size());
  try {
#ifdef TAPETUNE_CUDA
    if (rdzv.device.is_cuda()) {
      rdzv.groups.emplace_back(name, connect_nccl(store, static_cast<int>(own), count, rdzv.device, rdzv.timeout),
                               at::kCUDA);
      return rdzv.groups.back();
    }
#endif
    rdzv.groups.emplace_back(name, connect_gloo(store, static_cast<int>(own), count, rdzv.address, rdzv.timeout),
                             at::kCPU);
  } catch (const std::exception& error) {
    rdzv.lose(fmt::format("the ranks could not connect to each other: {}", error.what()));
  }
  return rdzv.groups.back();
}

std::vector<std::string> World::gather(const std::string& text) {
  if (!rendezvous_) return {text};
  Rendezvous& rdzv = *rendezvous_;
  const int message = rdzv.next_message++;
  rdzv.put(fmt::format("say/{}/{}", message, rank()), text);
  std::vector<std::string> all;
  for (int r = 0; is_rank0() && r < size(); ++r) {
    const std::string key = fmt::format("say/{}/{}", message, r);
    all.push_back(rdzv.get(key, size()));
    rdzv.asking([&] { rdzv.store->deleteKey(key); });
  }
  return all;
}

std::string World::broadcast(const std::string& text) {
  if (!rendezvous_) return text;
  Rendezvous& rdzv = *rendezvous_;
  const std::string key = fmt::format("announce/{}", rdzv.next_message++);
  if (is_rank0()) rdzv.put(key, text);
  return rdzv.get(key, size(), /*busy=*/0);
}

std::vector<std::string> World::all_gather(const std::string& text) {
  if (!rendezvous_) return {text};
  Rendezvous& rdzv = *rendezvous_;
  const std::vector<std::string> all = gather(text);
  // A rank that has sent a text this time has read the result of the last time.
  if (is_rank0() && !rdzv.shared.empty()) rdzv.asking([&] { rdzv.store->deleteKey(rdzv.shared); });
  rdzv.shared = fmt::format("announce/{}", rdzv.next_message);
  // The texts need not be UTF-8, of which JSON consists.
  const std::string text_of_all = broadcast(is_rank0() ? to_text(Json(all)) : "");
  const Json list = json_of_rank(0, text_of_all);
  const bool texts =
      list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& j) { return j.is_string(); });
  if (!texts || list.size() != static_cast<std::size_t>(size())) {
    fail("ranks", "rank 0 sent no list of {} texts: {}; check that no other program uses the ranks' port.", size(),
         excerpt(text_of_all.substr(0, 100)));
  }
  return list.get<std::vector<std::string>>();
}

void World::require_same(const std::string& what, const std::string& value, const std::string& remedy) {
  if (!rendezvous_) return;
  const std::vector<std::string> all = gather(value);
  std::string verdict;
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    // The first line that differs says more than two long texts.
    std::size_t begin = 0, at = 0;
    while (at < all[0].size() && at < all[r].size() && all[0][at] == all[r][at]) {
      if (all[0][at++] == '\n') begin = at;
    }
    const auto line = [&](const std::string& text) {
      return excerpt(text.substr(begin, text.find('\n', begin) - begin));
    };
    verdict = fmt::format("rank {} ({}) has {} different from rank 0's: {} there, {} here; {}.", r,
                          rendezvous_->host(static_cast<int>(r)), what, line(all[r]), line(all[0]), remedy);
    break;
  }
  verdict = broadcast(verdict);
  if (!verdict.empty()) throw_error("launch", is_rank0() ? verdict : excerpt(verdict));
}

void World::begin_step(std::int64_t step) {
  if (rendezvous_) rendezvous_->heartbeat_thread.set_step(step);
}

std::string World::diagnose(const std::string& error) {
  if (!rendezvous_) return error;
  const Rendezvous& rdzv = *rendezvous_;
  if (rdzv.lost_rank()) return find_lost_rank(rdzv.store, rdzv.hosts, rank(), error);
  report_failure(rdzv.store, rank(), error);
  return is_rank0() ? error : "";
}

void World::interrupt() {
  if (!rendezvous_) return;
  try {
    rendezvous_->store->set(interrupted_key, std::string("yes"));
  } catch (const std::exception&) {  // nobody is there to read it
  }
}

void World::shutdown(seconds longest) {
  if (!rendezvous_) return;
  try {
    if (!is_rank0()) wait_for_rank_0_to_leave(rendezvous_->store);
    rendezvous_->store->set(left_key(rank()), std::string("yes"));
    if (is_rank0()) wait_for_others(rendezvous_->store, size(), left_key, longest);
  } catch (const std::exception&) {  // whoever served the store is gone already
  }
}

void World::confirm_failure() {
  if (!rendezvous_ || !is_rank0()) return;
  try {
    stay_until_heard(rendezvous_->store, size());
  } catch (const std::exception&) {  // whoever served the store is gone already
  }
}

}  // namespace tapetune
