// All processes that train together: their rendezvous, their agreement on what to do, and which of them failed.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "distributed/group.h"
#include "distributed/rank_env.h"

namespace tapetune {

class World {
 public:
  World();  // this process alone
  // Waits for the others; fails after `timeout`, naming those that did not come. A collective may take as long.
  World(const RankInfo& info, std::chrono::seconds timeout, at::Device device = at::kCPU);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_info_.rank; }
  int size() const { return rank_info_.ranks; }
  bool is_rank0() const { return rank_info_.rank == 0; }
  at::Device device() const { return device_; }  // that this rank computes on

  // Of the ranks that give the same number; all call it, in the same order.
  Group group(const std::string& name, int number = 0);

  // Fails on all ranks where one has another value than rank 0, and names it. `what` reads "the recipe".
  void require_same(const std::string& what, const std::string& value, const std::string& remedy);
  // The texts of all ranks, on rank 0; nothing elsewhere.
  std::vector<std::string> gather(const std::string& text);
  // The text of rank 0; the others wait for as long as it sends heartbeats, because it may pack or hash files first.
  std::string broadcast(const std::string& text);
  // The texts of all ranks, on every rank.
  std::vector<std::string> all_gather(const std::string& text);

  // For messages about a rank that falls behind.
  void begin_step(std::int64_t step);

  // What to tell the user of an error that ended this rank: on rank 0 one line that names the rank at fault and what to
  // do. Empty: rank 0 tells it.
  std::string diagnose(const std::string& error);
  // After diagnose: rank 0 waits until the others know that the failure was reported.
  void confirm_failure();
  // A signal ended this rank: those that wait for it end too, with Interrupted.
  void interrupt();
  // The last call of ranks that end alike. The others wait until rank 0 has shut down, which may be saving; rank 0
  // waits until they have, or for this long, because the store may end with it.
  void shutdown(std::chrono::seconds longest);

 private:
  struct Rendezvous;
  RankInfo rank_info_;
  at::Device device_ = at::kCPU;
  std::unique_ptr<Rendezvous> rendezvous_;  // null: alone
};

}  // namespace tapetune
