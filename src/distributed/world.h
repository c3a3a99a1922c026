// All processes that train together: how they meet, that they mean the same, and who was lost when one is.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "distributed/group.h"
#include "distributed/seat.h"

namespace tapetune {

class World {
 public:
  World();  // this process alone
  // Meets the others; fails after `timeout` naming those who did not come. The same time is how long an exchange may
  // take.
  World(const Seat& seat, std::chrono::seconds timeout, at::Device device = at::kCPU);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return seat_.rank; }
  int size() const { return seat_.ranks; }
  bool leads() const { return seat_.rank == 0; }
  at::Device device() const { return device_; }  // that this rank computes on

  // Of the ranks that give the same number; all call it, in the same order.
  Group group(const std::string& name, int number = 0);

  // Fails on all ranks where one has another value than rank 0, and names it. `what` reads "the recipe".
  void require_same(const std::string& what, const std::string& value, const std::string& remedy);
  // What each rank says, on rank 0; nothing elsewhere.
  std::vector<std::string> collect(const std::string& text);
  // What rank 0 says; the others wait for as long as its heart beats, because it may have packed or hashed files first.
  std::string announce(const std::string& text);
  // What each rank says, on all of them.
  std::vector<std::string> share(const std::string& text);

  // For messages about a rank that falls behind.
  void begin_step(std::int64_t step);

  // What to tell the user of an error that ended this rank: on rank 0 one line that names the rank at fault and what to
  // do. Empty: rank 0 tells it.
  std::string explain(const std::string& error);
  // After that: rank 0 stays until the others know that it was told.
  void part();
  // A signal ended this rank: those that wait for it end too, with Interrupted.
  void interrupt();
  // The last call of ranks that end alike. The others stay until rank 0 leaves, which may be saving; rank 0 stays until
  // they have left, or for this long, because their meeting place may end with it.
  void leave(std::chrono::seconds longest);

 private:
  struct Meeting;
  void wait_for_ranks();
  void wait_for_rank_0();
  void end_meeting_early();
  Seat seat_;
  at::Device device_ = at::kCPU;
  std::unique_ptr<Meeting> meeting_;  // null: alone
};

}  // namespace tapetune
