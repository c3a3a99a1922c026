// What every rank writes to the store once a second, so that the others know that it lives and where it is.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "distributed/rendezvous.h"

namespace tapetune {

// Sends this rank's heartbeats from a thread of its own for as long as it lives, or as the store does.
class HeartbeatThread {
 public:
  HeartbeatThread() = default;
  ~HeartbeatThread();
  HeartbeatThread(const HeartbeatThread&) = delete;
  HeartbeatThread& operator=(const HeartbeatThread&) = delete;

  // Once. The heartbeats have a connection to the store of their own, and never wait for what the training thread asks.
  void start(const Store& store, int rank);
  void set_step(std::int64_t step) { step_ = step; }

 private:
  void send(const Store& store, int rank);

  std::atomic<std::int64_t> step_ = 0;
  std::mutex guard_;
  std::condition_variable ended_;
  bool ending_ = false;
  std::thread thread_;
};

struct Heartbeat {
  std::int64_t count = -1, step = 0;  // count -1: none yet
};
// Fails with the rank's name where one is not two numbers. `hosts`: "host, process 123", by rank.
std::vector<Heartbeat> read_heartbeats(const Store& store, const std::vector<std::string>& hosts);

}  // namespace tapetune
