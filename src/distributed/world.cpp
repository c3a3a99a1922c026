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
#include "distributed/meeting_place.h"
#include "distributed/reminder.h"
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

struct World::Meeting {
  Store store;
  Store beats;  // a connection of its own: a beat never waits for what the training thread asks
  seconds timeout;
  at::Device device;
  std::string address;
  std::vector<Group> groups;
  std::vector<std::string> people;  // "host, process 123", by rank; on rank 0
  std::atomic<std::int64_t> step = 0;
  int talks = 0;       // counts what the ranks tell each other, for keys of their own
  std::string shared;  // the key of what was shared last
  bool lost = false;

  std::mutex guard;
  std::condition_variable ended;
  bool ending = false;
  std::thread heart;

  Meeting(Store given, seconds time, at::Device where) : store(std::move(given)), timeout(time), device(where) {}
  ~Meeting() {
    {
      const std::lock_guard lock(guard);
      ending = true;
    }
    ended.notify_all();
    if (heart.joinable()) heart.join();
  }

  void beat(int rank) {
    heart = std::thread([this, rank] {
      std::unique_lock lock(guard);
      for (std::int64_t n = 0; !ending; ++n) {
        lock.unlock();
        try {
          beats->set(beat_key(rank), fmt::format("{} {}", n, step.load()));
        } catch (const std::exception&) {
          return;  // the store is gone, and with it whoever would listen
        }
        lock.lock();
        ended.wait_for(lock, beat_every, [this] { return ending; });
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

  // Waits for another rank's word, unless a rank ends meanwhile. `busy`: a rank that may take longer than the timeout
  // before it speaks, as long as its heart beats.
  std::string get(const std::string& key, int ranks, std::optional<int> busy = std::nullopt) {
    return asking([&]() -> std::string {
      auto deadline = std::chrono::steady_clock::now() + timeout;
      std::string last_beat;
      while (std::chrono::steady_clock::now() < deadline) {
        try {
          store->wait({key}, beat_every);
          return text_of(store->get(key));
        } catch (const c10::DistStoreError&) {
          look_for_ends(ranks);
          if (!busy || !store->check({beat_key(*busy)})) continue;
          std::string beat = text_of(store->get(beat_key(*busy)));
          if (beat != last_beat) deadline = std::chrono::steady_clock::now() + timeout;
          last_beat = std::move(beat);
        }
      }
      lose(fmt::format("no answer for {} s", timeout.count()));
    });
  }

  std::string person(int rank) const {
    return static_cast<std::size_t>(rank) < people.size() ? people[static_cast<std::size_t>(rank)] : "unknown";
  }
};

namespace {

// LibTorch would write pages about every connection that breaks; what of it people need, explain() says in a line.
void hush_libtorch() {
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
}

}  // namespace

World::World() = default;
World::~World() = default;

World::World(const Seat& seat, seconds timeout, at::Device device) : seat_(seat), device_(device) {
  if (seat.ranks == 1) return;
  hush_libtorch();
  std::signal(SIGPIPE, SIG_IGN);  // a rank that is gone is an error of the exchange, not the end of this process
  report_closed_pipes();
  at_moment("meet");
  meeting_ = std::make_unique<Meeting>(join_meeting_place(seat, timeout), timeout, device);
  Meeting& m = *meeting_;
  m.address = own_address(seat.address, seat.port);
  m.store->set(here_key(rank()), fmt::format("{}, process {}", here(), ::getpid()));
  if (leads()) {
    wait_for_ranks();
    for (int r = 0; r < size(); ++r) m.people.push_back(excerpt(text_of(m.store->get(here_key(r)))));
    m.store->set(all_here, std::string("yes"));
  } else {
    wait_for_rank_0();
  }
  m.beats = m.store->clone();
  m.beat(rank());
  at_moment("met");
}

// Before all are there, one that was interrupted or has failed ends the meeting for all.
void World::end_meeting_early() {
  Meeting& m = *meeting_;
  for (int r = 0; r < size(); ++r) {
    if (!m.store->check({failed_key(r)})) continue;
    if (!leads()) throw Error("");  // rank 0 says it
    fail("ranks", "rank {} failed: {}", r, excerpt(text_of(m.store->get(failed_key(r)))));
  }
  if (interrupted()) m.store->set(interrupted_key, std::string("yes"));
  if (m.store->check({interrupted_key})) throw Interrupted(stopped_early);
}

void World::wait_for_ranks() {
  Meeting& m = *meeting_;
  // Rank 0 listens where it is told to.
  const bool loopback = seat_.address == "localhost" || seat_.address.starts_with("127.") || seat_.address == "::1";
  const std::string remedy =
      seat_.remedy +
      (loopback && !seat_.served ? "; ranks on other machines need MASTER_ADDR set to rank 0's address" : "");
  const auto begin = std::chrono::steady_clock::now();
  bool reminded = false;
  while (true) {
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (!m.store->check({here_key(r)})) missing.push_back(r);
    }
    if (missing.empty()) return;
    end_meeting_early();
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= m.timeout) {
      fail("launch", "timed out after {} s waiting for {} of {} at {}:{}; {}. Raise --timeout if they only start late.",
           m.timeout.count(), listed(missing), size(), seat_.address, seat_.port, remedy);
    }
    if (waited >= remind_after && !std::exchange(reminded, true)) {
      warn("still waiting for {} of {} at {}:{} after {} s; {}", listed(missing), size(), seat_.address, seat_.port,
           remind_after.count(), remedy);
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
}

void World::wait_for_rank_0() {
  Meeting& m = *meeting_;
  // Rank 0 gives up first, and says why.
  const auto until = std::chrono::steady_clock::now() + m.timeout + patience;
  try {
    while (std::chrono::steady_clock::now() < until) {
      try {
        m.store->wait({all_here}, beat_every);
        return;
      } catch (const c10::DistStoreError&) {
        end_meeting_early();
      }
    }
  } catch (const c10::Error&) {  // rank 0 is gone, and the store with it
  }
  fail("launch", "rank {}: timed out after {} s waiting for all {} ranks; see rank 0's message.", rank(),
       m.timeout.count(), size());
}

Group World::group(const std::string& name, int number) {
  if (!meeting_) return {};
  Meeting& m = *meeting_;
  // Everyone's number tells who belongs together, in the order of ranks.
  const std::string key = fmt::format("group/{}/", m.talks++);
  m.put(key + std::to_string(rank()), std::to_string(number));
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    const std::string text = m.get(key + std::to_string(r), size());
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
  const auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}", key, number), m.store);
  const int count = static_cast<int>(members.size());
  try {
#ifdef TAPETUNE_CUDA
    if (m.device.is_cuda()) {
      m.groups.emplace_back(name, connect_nccl(store, static_cast<int>(own), count, m.device, m.timeout), at::kCUDA);
      return m.groups.back();
    }
#endif
    m.groups.emplace_back(name, connect_gloo(store, static_cast<int>(own), count, m.address, m.timeout), at::kCPU);
  } catch (const std::exception& error) {
    m.lose(fmt::format("the ranks could not connect to each other: {}", error.what()));
  }
  return m.groups.back();
}

std::vector<std::string> World::collect(const std::string& text) {
  if (!meeting_) return {text};
  Meeting& m = *meeting_;
  const int talk = m.talks++;
  m.put(fmt::format("say/{}/{}", talk, rank()), text);
  std::vector<std::string> all;
  for (int r = 0; leads() && r < size(); ++r) {
    const std::string key = fmt::format("say/{}/{}", talk, r);
    all.push_back(m.get(key, size()));
    m.asking([&] { m.store->deleteKey(key); });
  }
  return all;
}

std::string World::announce(const std::string& text) {
  if (!meeting_) return text;
  Meeting& m = *meeting_;
  const std::string key = fmt::format("announce/{}", m.talks++);
  if (leads()) m.put(key, text);
  return m.get(key, size(), /*busy=*/0);
}

std::vector<std::string> World::share(const std::string& text) {
  if (!meeting_) return {text};
  Meeting& m = *meeting_;
  const std::vector<std::string> all = collect(text);
  // Whoever has said something this time has read what was shared the last time.
  if (leads() && !m.shared.empty()) m.asking([&] { m.store->deleteKey(m.shared); });
  m.shared = fmt::format("announce/{}", m.talks);
  // What ranks say need not be UTF-8, of which JSON consists.
  const std::string text_of_all = announce(leads() ? to_text(Json(all)) : "");
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
  if (!meeting_) return;
  const std::vector<std::string> all = collect(value);
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
                          meeting_->person(static_cast<int>(r)), what, line(all[r]), line(all[0]), remedy);
    break;
  }
  verdict = announce(verdict);
  if (!verdict.empty()) throw_error("launch", leads() ? verdict : excerpt(verdict));
}

void World::begin_step(std::int64_t step) {
  if (meeting_) meeting_->step = step;
}

namespace {

// c10d's Reducer exchanges by itself which parameters have gradients, and no call of ours sees that fail.
bool of_an_exchange(const std::string& error) {
  return error.find("gloo") != std::string::npos || error.find("NCCL") != std::string::npos;
}

}  // namespace

std::string World::explain(const std::string& error) {
  if (!meeting_) return error;
  Meeting& m = *meeting_;
  bool lost = m.lost || of_an_exchange(error);
  for (const Group& group : m.groups) lost = lost || group.lost();
  if (!lost) {
    // Without a new thread, for which there may be no memory.
    try {
      m.store->set(failed_key(rank()), error);
      m.store->set(heard_key(rank()), std::string("yes"));
    } catch (const std::exception&) {  // nobody is there to read it
    }
    return leads() ? error : "";
  }
  // In a thread of its own, because the store may be beyond a link that is cut and never answer.
  const auto asked = std::make_shared<std::promise<std::string>>();
  auto answer = asked->get_future();
  std::thread([asked, error, store = m.store, people = m.people, own = rank()] {
    try {
      if (own != 0) wait_until_told(store, own);
      asked->set_value(own == 0 ? find_culprit(store, people, error) : "");
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
  if (!meeting_) return;
  try {
    meeting_->store->set(interrupted_key, std::string("yes"));
  } catch (const std::exception&) {  // nobody is there to read it
  }
}

void World::leave(seconds longest) {
  if (!meeting_) return;
  try {
    if (!leads()) wait_for_rank_0_to_leave(meeting_->store);
    meeting_->store->set(left_key(rank()), std::string("yes"));
    if (leads()) wait_for_others(meeting_->store, size(), left_key, longest);
  } catch (const std::exception&) {  // whoever served the meeting is gone already
  }
}

void World::part() {
  if (!meeting_ || !leads()) return;
  try {
    stay_until_heard(meeting_->store, size());
  } catch (const std::exception&) {  // whoever served the meeting is gone already
  }
}

}  // namespace tapetune
