#include "distributed/world.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "distributed/gloo.h"
#ifdef TAPETUNE_CUDA
#include "distributed/cuda/nccl.h"
#endif

namespace tapetune {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr seconds beat_every{1};
// A rank whose heart has not beaten for so long while others' did is stopped, killed or cut off.
constexpr seconds silence{4};
// Longer than any answer of a store that is there.
constexpr seconds patience{15};
// Ranks that have not come by then are named, while the others wait on.
constexpr seconds remind_after{10};

std::string here() {
  std::string name(256, '\0');
  ::gethostname(name.data(), name.size() - 1);
  name.resize(name.find('\0'));
  return name;
}

// The address under which this machine reaches another, and so is reached by it.
std::string own_address(const std::string& towards, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  std::string address = towards;
  if (::getaddrinfo(towards.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return address;
  const int socket = ::socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  char text[NI_MAXHOST];
  // Nothing is sent: connecting only asks the routing table.
  if (socket >= 0 && ::connect(socket, found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
    address = text;
  }
  if (socket >= 0) ::close(socket);
  ::freeaddrinfo(found);
  return address;
}

std::string listed(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

// Prints a warning unless it is gone by then, because connecting to rank 0 blocks.
class Reminder {
 public:
  explicit Reminder(const std::string& text) {
    thread_ = std::thread([this, text] {
      std::unique_lock lock(guard_);
      if (!gone_.wait_for(lock, remind_after, [this] { return over_; })) warn("{}", text);
    });
  }
  ~Reminder() {
    {
      const std::lock_guard lock(guard_);
      over_ = true;
    }
    gone_.notify_all();
    thread_.join();
  }
  Reminder(const Reminder&) = delete;
  Reminder& operator=(const Reminder&) = delete;

 private:
  std::mutex guard_;
  std::condition_variable gone_;
  bool over_ = false;
  std::thread thread_;
};

Store open_store(const Seat& seat, seconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(seat.port);
  options.isServer = seat.rank == 0 && !seat.served;
  options.waitWorkers = false;
  options.timeout = timeout;
  std::optional<Reminder> reminder;
  if (seat.rank == 1) {
    reminder.emplace(fmt::format("rank 1 of {} has been waiting for rank 0 at {}:{} for {} s; {}", seat.ranks,
                                 seat.address, seat.port, remind_after.count(), seat.remedy));
  }
  try {
    return c10::make_intrusive<c10d::PrefixStore>("tapetune/" + seat.attempt,
                                                  c10::make_intrusive<c10d::TCPStore>(seat.address, options));
  } catch (const std::exception& error) {
    if (options.isServer) {
      fail("launch",
           "port {} of this machine cannot be opened: another process uses it, or it needs privileges; set MASTER_PORT "
           "to "
           "a free port.",
           seat.port);
    }
    fail("launch",
         "rank {} could not connect to {}:{} within {} s; check MASTER_ADDR and MASTER_PORT, that rank 0 runs there, "
         "and "
         "that no firewall blocks the port.",
         seat.rank, seat.address, seat.port, timeout.count());
  }
}

std::string beat_key(int rank) { return fmt::format("beat/{}", rank); }

std::string failed_key(int rank) { return fmt::format("failed/{}", rank); }

std::string heard_key(int rank) { return fmt::format("heard/{}", rank); }

std::string left_key(int rank) { return fmt::format("left/{}", rank); }

// Until every other rank has set its key, or for this long.
void wait_for_others(const Store& store, int ranks, std::string (*key)(int), seconds longest) {
  const auto until = std::chrono::steady_clock::now() + longest;
  for (int r = 1; r < ranks; ++r) {
    while (!store->check({key(r)}) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
}

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

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

  // Waits for another rank's word, unless a rank fails meanwhile. `busy`: a rank that may take longer than the timeout
  // before it speaks, as long as its heart beats.
  std::string get(const std::string& key, int ranks, std::optional<int> busy = std::nullopt) {
    auto deadline = std::chrono::steady_clock::now() + timeout;
    std::string last_beat;
    try {
      while (std::chrono::steady_clock::now() < deadline) {
        try {
          store->wait({key}, beat_every);
          return text_of(store->get(key));
        } catch (const c10::DistStoreError&) {
          for (int r = 0; r < ranks; ++r) {
            if (store->check({failed_key(r)})) lose("a rank failed");
          }
          if (!busy || !store->check({beat_key(*busy)})) continue;
          std::string beat = text_of(store->get(beat_key(*busy)));
          if (beat != last_beat) deadline = std::chrono::steady_clock::now() + timeout;
          last_beat = std::move(beat);
        }
      }
    } catch (const c10::Error& error) {
      lose(error.what_without_backtrace());
    }
    lose(fmt::format("no answer for {} s", timeout.count()));
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
  meeting_ = std::make_unique<Meeting>(open_store(seat, timeout), timeout, device);
  Meeting& m = *meeting_;
  m.store->setTimeout(timeout);
  m.address = own_address(seat.address, seat.port);
  m.store->set(fmt::format("here/{}", rank()), fmt::format("{}, process {}", here(), ::getpid()));
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (!leads()) {
    try {
      // Rank 0 gives up first, and says why.
      m.store->wait({"all here"}, timeout + patience);
    } catch (const std::exception&) {
      fail("launch", "rank {}: timed out after {} s waiting for all {} ranks; see rank 0's message.", rank(),
           timeout.count(), size());
    }
  } else {
    std::vector<int> missing;
    bool reminded = false;
    do {
      missing.clear();
      for (int r = 0; r < size(); ++r) {
        if (!m.store->check({fmt::format("here/{}", r)})) missing.push_back(r);
      }
      if (!missing.empty()) std::this_thread::sleep_for(milliseconds(50));
      const bool late = std::chrono::steady_clock::now() >= deadline - timeout + remind_after;
      if (!missing.empty() && late && !std::exchange(reminded, true)) {
        warn("still waiting for {} of {} at {}:{} after {} s; {}", listed(missing), size(), seat.address, seat.port,
             remind_after.count(), seat.remedy);
      }
    } while (!missing.empty() && std::chrono::steady_clock::now() < deadline);
    if (!missing.empty()) {
      fail("launch", "timed out after {} s waiting for {} of {} at {}:{}; {}. Raise --timeout if they only start late.",
           timeout.count(), listed(missing), size(), seat.address, seat.port, seat.remedy);
    }
    for (int r = 0; r < size(); ++r) m.people.push_back(text_of(m.store->get(fmt::format("here/{}", r))));
    m.store->set("all here", std::string("yes"));
  }
  m.beats = m.store->clone();
  m.beat(rank());
}

Group World::group(const std::string& name, int number) {
  if (!meeting_) return {};
  Meeting& m = *meeting_;
  // Everyone's number tells who belongs together, in the order of ranks.
  const std::string key = fmt::format("group/{}/", m.talks++);
  m.store->set(key + std::to_string(rank()), std::to_string(number));
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (m.get(key + std::to_string(r), size()) == std::to_string(number)) members.push_back(r);
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
  m.store->set(fmt::format("say/{}/{}", talk, rank()), text);
  std::vector<std::string> all;
  for (int r = 0; leads() && r < size(); ++r) {
    const std::string key = fmt::format("say/{}/{}", talk, r);
    all.push_back(m.get(key, size()));
    m.store->deleteKey(key);
  }
  return all;
}

std::string World::announce(const std::string& text) {
  if (!meeting_) return text;
  Meeting& m = *meeting_;
  const std::string key = fmt::format("announce/{}", m.talks++);
  if (leads()) m.store->set(key, text);
  return m.get(key, size(), /*busy=*/0);
}

std::vector<std::string> World::share(const std::string& text) {
  if (!meeting_) return {text};
  Meeting& m = *meeting_;
  const std::vector<std::string> all = collect(text);
  // Whoever has said something this time has read what was shared the last time.
  if (leads() && !m.shared.empty()) m.store->deleteKey(m.shared);
  m.shared = fmt::format("announce/{}", m.talks);
  return from_text(announce(to_text(Json(all)))).get<std::vector<std::string>>();
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
    const auto line = [&](const std::string& text) { return text.substr(begin, text.find('\n', begin) - begin); };
    verdict = fmt::format("rank {} ({}) has {} different from rank 0's: {} there, {} here; {}.", r,
                          meeting_->person(static_cast<int>(r)), what, line(all[r]), line(all[0]), remedy);
    break;
  }
  verdict = announce(verdict);
  if (!verdict.empty()) throw_error("launch", verdict);
}

void World::begin_step(std::int64_t step) {
  if (meeting_) meeting_->step = step;
}

namespace {

struct Beat {
  std::int64_t count = -1, step = 0;
};

std::vector<Beat> read_beats(const Store& store, int ranks) {
  std::vector<Beat> all(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    const std::string key = beat_key(r);
    if (!store->check({key})) continue;
    const std::string text = text_of(store->get(key));
    const auto space = text.find(' ');
    all[static_cast<std::size_t>(r)] = {std::stoll(text.substr(0, space)), std::stoll(text.substr(space))};
  }
  return all;
}

// Rank 0 looks who it was: a rank that told its failure, one whose heart has stopped, or the last of them.
std::string find_culprit(const Store& store, const std::vector<std::string>& people, const std::string& error) {
  const int ranks = static_cast<int>(people.size());
  const auto before = read_beats(store, ranks);
  const auto until = std::chrono::steady_clock::now() + silence;
  while (std::chrono::steady_clock::now() < until) {
    for (int r = 1; r < ranks; ++r) {
      if (!store->check({failed_key(r)})) continue;
      const std::string why = text_of(store->get(failed_key(r)));
      return fmt::format("[ranks] rank {} ({}) failed: {}", r, people[static_cast<std::size_t>(r)], why);
    }
    std::this_thread::sleep_for(milliseconds(100));
  }
  const auto after = read_beats(store, ranks);
  std::size_t slowest = 1;
  for (std::size_t r = 1; r < people.size(); ++r) {
    if (after[r].count == before[r].count) {
      store->set(heard_key(static_cast<int>(r)), std::string("no more"));
      return fmt::format(
          "[ranks] rank {} ({}) stopped responding (no heartbeat for {} s), last at step {}: it was killed or "
          "suspended, "
          "or its network is down; check that machine's memory and network, then rerun the same command to resume from "
          "the last checkpoint.",
          r, people[r], silence.count(), after[r].step);
    }
    if (after[r].step < after[slowest].step) slowest = r;
  }
  return fmt::format(
      "[ranks] timed out: rank {} ({}) is behind the others, at step {}; raise --timeout if it is only slow, and rerun "
      "the same command to resume from the last checkpoint. ({})",
      slowest, people[slowest], after[slowest].step, error);
}

// The others wait until rank 0 has told it. Throws where rank 0 is gone itself.
void wait_until_told(const Store& store, int own) {
  const auto until = std::chrono::steady_clock::now() + patience - beat_every;
  while (!store->check({"told"}) && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(100));
  }
  store->set(heard_key(own), std::string("yes"));
}

// Rank 0 stays until the others know, because the store may end with it.
void stay_until_heard(const Store& store, int ranks) {
  store->set("told", std::string("yes"));
  wait_for_others(store, ranks, heard_key, patience);
}

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
    } catch (const std::exception&) {
      asked->set_value(
          own == 1
              ? "[ranks] rank 0 stopped responding: it was killed, or its network is down; rerun the same command to "
                "resume from the last checkpoint."
              : "");
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

void World::leave(seconds longest) {
  if (!meeting_) return;
  try {
    meeting_->store->set(left_key(rank()), std::string("yes"));
    if (leads()) wait_for_others(meeting_->store, size(), left_key, longest);
  } catch (const std::exception&) {  // whoever served the meeting is gone already
  }
}

void World::part() {
  if (meeting_ && leads()) stay_until_heard(meeting_->store, size());
}

}  // namespace tapetune
