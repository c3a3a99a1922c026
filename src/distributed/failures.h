// How ranks that end wait for each other, and how rank 0 finds out who failed.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "distributed/heartbeat.h"
#include "distributed/rendezvous.h"

namespace tapetune {

// A rank that has sent no heartbeat for so long while others have is suspended, killed or cut off.
constexpr std::chrono::seconds stale_after{4};

// Until every other rank has set its key, or for this long.
void wait_for_others(const Store& store, int ranks, std::string (*key)(int), std::chrono::seconds longest);

// Tells the others why this rank ends.
void report_failure(const Store& store, int rank, const std::string& error);

// What to tell the user where a rank was lost: on rank 0 which one it was, on the others that rank 0 is gone, or
// nothing where it tells it.
std::string find_lost_rank(const Store& store, const std::vector<std::string>& hosts, int own,
                           const std::string& error);

// Rank 0 looks who it was: a rank that reported its failure, one without heartbeats, or the last of them. `hosts`:
// "host, process 123", by rank.
std::string find_culprit(const Store& store, const std::vector<std::string>& hosts, const std::string& error);
// The others wait until rank 0 has reported it. Throws where rank 0 is gone itself.
void wait_until_told(const Store& store, int own);
// Rank 0 stays until the others know, because the store may end with it.
void stay_until_heard(const Store& store, int ranks);
// Rank 0 may still be saving what all have computed, and a launcher that sees one rank end may end the others. So they
// stay until it is done, for as long as it sends heartbeats.
void wait_for_rank_0_to_leave(const Store& store);

}  // namespace tapetune
