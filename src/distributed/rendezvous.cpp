#include "distributed/rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/escape.h"
#include "core/log.h"
#include "core/signals.h"
#include "distributed/reminder.h"

namespace tapetune {

namespace {

using std::chrono::seconds;

struct Addresses {
  addrinfo* first = nullptr;
  Addresses() = default;
  ~Addresses() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
};

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address.ai_addr)->sin_addr.s_addr) >> 24) == 127;
  }
  return address.ai_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr);
}

// Whether it means the same wherever it is looked up. Other names may be loopback here and a network address elsewhere:
// Debian's installer enters a machine's own name as 127.0.1.1.
bool is_unambiguous(const std::string& address) {
  in_addr four{};
  in6_addr six{};
  return address == "localhost" || ::inet_pton(AF_INET, address.c_str(), &four) == 1 ||
         ::inet_pton(AF_INET6, address.c_str(), &six) == 1;
}

// A socket bound to this address; nothing where it is not one of this machine's.
std::optional<int> bound_socket(const addrinfo& address, int port) {
  const int descriptor = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return std::nullopt;  // IPv6 may be off
  const int yes = 1;
  ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(descriptor, address.ai_addr, address.ai_addrlen) == 0) return descriptor;
  const int error = errno;
  ::close(descriptor);
  if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) return std::nullopt;
  fail("launch", "port {} of this machine cannot be opened: {}; set MASTER_PORT to a free port.", port,
       errno_text(error));
}

std::uint16_t port_of(int descriptor) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size);
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                         : reinterpret_cast<sockaddr_in*>(&own)->sin_port);
}

// A socket on the interface that has this address; nothing where it takes all of them, which is said.
std::optional<int> socket_for(const std::string& address, int port) {
  Addresses found;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found.first);
  if (status != 0) {
    fail("launch", "MASTER_ADDR {} cannot be resolved: {}; set it to rank 0's address.", address,
         ::gai_strerror(status));
  }
  const bool as_given = is_unambiguous(address);
  for (const addrinfo* each = found.first; each != nullptr; each = each->ai_next) {
    if (is_loopback(*each) && !as_given) continue;
    if (const auto descriptor = bound_socket(*each, port)) return descriptor;
  }
  note(
      "MASTER_ADDR {} is not the address of a network interface of this machine, so that port {} is open on all of "
      "them; set it to an address in the ranks' private network",
      address, port);
  return std::nullopt;
}

c10::intrusive_ptr<c10d::TCPStore> serve(const std::string& address, int port, std::optional<seconds> timeout) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = socket_for(address, port);
  options.port = options.masterListenFd ? port_of(*options.masterListenFd) : static_cast<std::uint16_t>(port);
  if (timeout) options.timeout = *timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const std::exception& error) {
    fail("launch",
         "port {} of this machine cannot be opened: another process uses it, or {} does not lead here; set MASTER_PORT "
         "to a free port and MASTER_ADDR to rank 0's address.",
         port, address);
  }
}

c10::intrusive_ptr<c10d::TCPStore> connect(const RankInfo& info, seconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr seconds attempt{5};  // after which it looks whether it was interrupted
  std::optional<Reminder> reminder;
  if (info.rank == 1) {
    reminder.emplace(fmt::format("rank 1 of {} has been waiting for rank 0 at {}:{} for {} s; {}", info.ranks,
                                 info.address, info.port, remind_after.count(), info.remedy));
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(info.port);
  options.waitWorkers = false;
  const auto until = Clock::now() + timeout;
  for (auto left = timeout; left > seconds(0); left = std::chrono::ceil<seconds>(until - Clock::now())) {
    options.timeout = std::min(left, attempt);
    try {
      return c10::make_intrusive<c10d::TCPStore>(info.address, options);
    } catch (const std::exception&) {
      check_interrupted();
    }
  }
  fail("launch",
       "rank {} could not connect to {}:{} within {} s; check MASTER_ADDR and MASTER_PORT, that rank 0 runs there, and "
       "that no firewall blocks the port.",
       info.rank, info.address, info.port, timeout.count());
}

std::string here() {
  std::string name(256, '\0');
  ::gethostname(name.data(), name.size() - 1);
  name.resize(name.find('\0'));
  return fmt::format("{}, process {}", name, ::getpid());
}

std::string listed(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

constexpr const char* all_here = "all here";

// Before all are there, one that was interrupted or has failed ends the rendezvous for all.
void end_rendezvous_early(const Store& store, const RankInfo& info) {
  for (int r = 0; r < info.ranks; ++r) {
    if (!store->check({failed_key(r)})) continue;
    if (info.rank != 0) throw Error("");  // rank 0 says it
    fail("ranks", "rank {} failed: {}", r, excerpt(text_of(store->get(failed_key(r)))));
  }
  if (interrupted()) store->set(interrupted_key, std::string("yes"));
  if (store->check({interrupted_key})) throw Interrupted(stopped_early);
}

void wait_for_others_to_come(const Store& store, const RankInfo& info, seconds timeout) {
  // Rank 0 listens where it is told to.
  const bool loopback = info.address == "localhost" || info.address.starts_with("127.") || info.address == "::1";
  const std::string remedy =
      info.remedy +
      (loopback && !info.served ? "; ranks on other machines need MASTER_ADDR set to rank 0's address" : "");
  const auto begin = std::chrono::steady_clock::now();
  bool reminded = false;
  while (true) {
    std::vector<int> missing;
    for (int r = 0; r < info.ranks; ++r) {
      if (!store->check({here_key(r)})) missing.push_back(r);
    }
    if (missing.empty()) return;
    end_rendezvous_early(store, info);
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= timeout) {
      fail("launch", "timed out after {} s waiting for {} of {} at {}:{}; {}. Raise --timeout if they only start late.",
           timeout.count(), listed(missing), info.ranks, info.address, info.port, remedy);
    }
    if (waited >= remind_after && !std::exchange(reminded, true)) {
      warn("still waiting for {} of {} at {}:{} after {} s; {}", listed(missing), info.ranks, info.address, info.port,
           remind_after.count(), remedy);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

void wait_for_rank_0(const Store& store, const RankInfo& info, seconds timeout) {
  // Rank 0 gives up first, and says why.
  const auto until = std::chrono::steady_clock::now() + timeout + patience;
  try {
    while (std::chrono::steady_clock::now() < until) {
      try {
        store->wait({all_here}, heartbeat_every);
        return;
      } catch (const c10::DistStoreError&) {
        end_rendezvous_early(store, info);
      }
    }
  } catch (const c10::Error&) {  // rank 0 is gone, and the store with it
  }
  fail("launch", "rank {}: timed out after {} s waiting for all {} ranks; see rank 0's message.", info.rank,
       timeout.count(), info.ranks);
}

}  // namespace

c10::intrusive_ptr<c10d::TCPStore> open_rendezvous() { return serve("127.0.0.1", 0, std::nullopt); }

Store join_rendezvous(const RankInfo& info, seconds timeout) {
  const bool serves = info.rank == 0 && !info.served;
  const auto store = serves ? serve(info.address, info.port, timeout) : connect(info, timeout);
  store->setTimeout(timeout);
  return of_attempt(store, info.attempt);
}

std::vector<std::string> wait_for_ranks(const Store& store, const RankInfo& info, seconds timeout) {
  store->set(here_key(info.rank), here());
  std::vector<std::string> hosts;
  if (info.rank != 0) {
    wait_for_rank_0(store, info, timeout);
    return hosts;
  }
  wait_for_others_to_come(store, info, timeout);
  for (int r = 0; r < info.ranks; ++r) hosts.push_back(excerpt(text_of(store->get(here_key(r)))));
  store->set(all_here, std::string("yes"));
  return hosts;
}

Store of_attempt(const Store& store, const std::string& attempt) {
  return c10::make_intrusive<c10d::PrefixStore>("tapetune/" + attempt, store);
}

std::string own_address(const std::string& towards, int port) {
  Addresses found;
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  std::string address = towards;
  if (::getaddrinfo(towards.c_str(), std::to_string(port).c_str(), &hints, &found.first) != 0) return address;
  const int socket = ::socket(found.first->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  char text[NI_MAXHOST];
  // Nothing is sent: connecting only asks the routing table.
  if (socket >= 0 && ::connect(socket, found.first->ai_addr, found.first->ai_addrlen) == 0 &&
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
    address = text;
  }
  if (socket >= 0) ::close(socket);
  return address;
}

std::string here_key(int rank) { return fmt::format("here/{}", rank); }
std::string heartbeat_key(int rank) { return fmt::format("beat/{}", rank); }
std::string failed_key(int rank) { return fmt::format("failed/{}", rank); }
std::string heard_key(int rank) { return fmt::format("heard/{}", rank); }
std::string left_key(int rank) { return fmt::format("left/{}", rank); }

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string excerpt(const std::string& text) {
  constexpr std::size_t longest = 1000;
  std::string line = text.substr(0, longest);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return printable(line) + (text.size() > longest ? "..." : "");
}

Json json_of_rank(int rank, const std::string& text) {
  try {
    return parse_json(text, "ranks", "");
  } catch (const Error&) {
    fail("ranks", "rank {} sent what is not JSON: {}; check that no other program uses the ranks' port.", rank,
         excerpt(text.substr(0, 100)));
  }
}

}  // namespace tapetune
