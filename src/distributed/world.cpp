#include "distributed/world.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <csignal>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/output.h"
#include "core/signals.h"
#include "distributed/failures.h"
#include "distributed/gloo.h"
#include "distributed/reminder.h"
#include "distributed/rendezvous.h"
#ifdef TAPETUNE_CUDA
#include "distributed/cuda/nccl.h"
#endif

namespace tapetune {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string here() {
  std::string name(256, '\0');
  ::gethostname(name.data(), name.size() - 1);
  name.resize(name.find('\0'));
  return name;
}

constexpr const char* all_here = "all here";
constexpr const char* stopped_early = "interrupted; no partial files were left";

std::string listed(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

struct World::Rendezvous {
  Store store;
  Store heartbeat_store;  // a connection of its own: a heartbeat never waits for what the training thread asks
  seconds timeout;
  at::Device device;
  std::string address;
  std::vector<Group> groups;
  std::vector<std::string> hosts;  // "host, process 123", by rank; on rank 0
  std::atomic<std::int64_t> step = 0;
  int next_message = 0;  // numbers what the ranks send each other, for keys of their own
  std::string shared;    // the key of the last all_gather's result
  bool lost = false;

  std::mutex guard;
  std::condition_variable ended;
  bool ending = false;
  std::thread heartbeat_thread;

  Rendezvous(Store given, seconds time, at::Device where) : store(std::move(given)), timeout(time), device(where) {}
  ~Rendezvous() {
    {
      const std::lock_guard lock(guard);
      ending = true;
    }
    ended.notify_all();
    if (heartbeat_thread.joinable()) heartbeat_thread.join();
  }

  void start_heartbeat(int rank) {
    heartbeat_thread = std::thread([this, rank] {
      std::unique_lock lock(guard);
      for (std::int64_t n = 0; !ending; ++n) {
        lock.unlock();
        try {
          heartbeat_store->set(heartbeat_key(rank), fmt::format("{} {}", n, step.load()));
        } catch (const std::exception&) {
          return;  // the store is gone, and with it whoever would listen
        }
        lock.lock();
        ended.wait_for(lock, heartbeat_every, [this] { return ending; });
      }
    });
  }

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

namespace {

// LibTorch would write pages about every connection that breaks; what of it people need, diagnose() says in a line.
void hush_libtorch() {
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
}

}  // namespace

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
  rdzv.store->set(here_key(rank()), fmt::format("{}, process {}", here(), ::getpid()));
  if (is_rank0()) {
    wait_for_ranks();
    for (int r = 0; r < size(); ++r) rdzv.hosts.push_back(excerpt(text_of(rdzv.store->get(here_key(r)))));
    rdzv.store->set(all_here, std::string("yes"));
  } else {
    wait_for_rank_0();
  }
  rdzv.heartbeat_store = rdzv.store->clone();
  rdzv.start_heartbeat(rank());
  at_moment("met");
}

// Before all are there, one that was interrupted or has failed ends the rendezvous for all.
void World::end_rendezvous_early() {
  Rendezvous& rdzv = *rendezvous_;
  for (int r = 0; r < size(); ++r) {
    if (!rdzv.store->check({failed_key(r)})) continue;
    if (!is_rank0()) throw Error("");  // rank 0 says it
    fail("ranks", "rank {} failed: {}", r, excerpt(text_of(rdzv.store->get(failed_key(r)))));
  }
  if (interrupted()) rdzv.store->set(interrupted_key, std::string("yes"));
  if (rdzv.store->check({interrupted_key})) throw Interrupted(stopped_early);
}

void World::wait_for_ranks() {
  Rendezvous& rdzv = *rendezvous_;
  // Rank 0 listens where it is told to.
  const bool loopback =
      rank_info_.address == "localhost" || rank_info_.address.starts_with("127.") || rank_info_.address == "::1";
  const std::string remedy =
      rank_info_.remedy +
      (loopback && !rank_info_.served ? "; ranks on other machines need MASTER_ADDR set to rank 0's address" : "");
  const auto begin = std::chrono::steady_clock::now();
  bool reminded = false;
  while (true) {
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (!rdzv.store->check({here_key(r)})) missing.push_back(r);
    }
    if (missing.empty()) return;
    end_rendezvous_early();
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= rdzv.timeout) {
      fail("launch", "timed out after {} s waiting for {} of {} at {}:{}; {}. Raise --timeout if they only start late.",
           rdzv.timeout.count(), listed(missing), size(), rank_info_.address, rank_info_.port, remedy);
    }
    if (waited >= remind_after && !std::exchange(reminded, true)) {
      warn("still waiting for {} of {} at {}:{} after {} s; {}", listed(missing), size(), rank_info_.address,
           rank_info_.port, remind_after.count(), remedy);
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
}

void World::wait_for_rank_0() {
  Rendezvous& rdzv = *rendezvous_;
  // Rank 0 gives up first, and says why.
  const auto until = std::chrono::steady_clock::now() + rdzv.timeout + patience;
  try {
    while (std::chrono::steady_clock::now() < until) {
      try {
        rdzv.store->wait({all_here}, heartbeat_every);
        return;
      } catch (const c10::DistStoreError&) {
        end_rendezvous_early();
      }
    }
  } catch (const c10::Error&) {  // rank 0 is gone, and the store with it
  }
  fail("launch", "rank {}: timed out after {} s waiting for all {} ranks; see rank 0's message.", rank(),
       rdzv.timeout.count(), size());
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
  if (rendezvous_) rendezvous_->step = step;
}

namespace {

// c10d's Reducer all-reduces by itself which parameters have gradients, and no call of ours sees that fail.
bool of_an_exchange(const std::string& error) {
  return error.find("gloo") != std::string::npos || error.find("NCCL") != std::string::npos;
}

}  // namespace

std::string World::diagnose(const std::string& error) {
  if (!rendezvous_) return error;
  Rendezvous& rdzv = *rendezvous_;
  bool lost = rdzv.lost || of_an_exchange(error);
  for (const Group& group : rdzv.groups) lost = lost || group.lost();
  if (!lost) {
    // Without a new thread, for which there may be no memory.
    try {
      rdzv.store->set(failed_key(rank()), error);
      rdzv.store->set(heard_key(rank()), std::string("yes"));
    } catch (const std::exception&) {  // nobody is there to read it
    }
    return is_rank0() ? error : "";
  }
  // In a thread of its own, because the store may be beyond a link that is cut and never answer.
  const auto asked = std::make_shared<std::promise<std::string>>();
  auto answer = asked->get_future();
  std::thread([asked, error, store = rdzv.store, hosts = rdzv.hosts, own = rank()] {
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
        rank());
  }
  return answer.get();
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
