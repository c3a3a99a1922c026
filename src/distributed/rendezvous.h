// The rendezvous of the ranks: c10d's store, who may reach it, and what the ranks write there for each other. Anybody
// who reaches it can write there, so that whatever is read is checked, and escaped before it is printed.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "core/json.h"
#include "distributed/rank_env.h"

namespace tapetune {

using Store = c10::intrusive_ptr<c10d::Store>;

constexpr std::chrono::seconds heartbeat_every{1};
// Longer than any answer of a store that is there.
constexpr std::chrono::seconds patience{15};

// For whoever starts ranks on this machine: at any free port of the loopback interface, for as long as somebody holds
// it.
c10::intrusive_ptr<c10d::TCPStore> open_rendezvous();
// For a rank. Rank 0 serves the store unless the launcher does, on the interface of the address; the others connect to
// it.
Store join_rendezvous(const RankInfo& info, std::chrono::seconds timeout);
// What ranks of one attempt share, in the store of whoever serves it.
Store of_attempt(const Store& store, const std::string& attempt);

// Says that this rank is here and waits for the others. Rank 0 gets who they are, "host, process 123", by rank, and
// fails after `timeout`, naming those that did not come. Where a rank fails or is interrupted before, all end.
std::vector<std::string> wait_for_ranks(const Store& store, const RankInfo& info, std::chrono::seconds timeout);

// The address under which this machine reaches another, and so is reached by it.
std::string own_address(const std::string& towards, int port);

std::string here_key(int rank);                         // who it is
std::string heartbeat_key(int rank);                    // its heartbeat: a count, and the step that it is at
std::string failed_key(int rank);                       // why it ended
std::string heard_key(int rank);                        // it knows that the failure was reported
std::string left_key(int rank);                         // it ends
constexpr const char* interrupted_key = "interrupted";  // a rank ends because a signal asked for it
constexpr const char* stopped_early = "interrupted; no partial files were left";

std::string text_of(const std::vector<std::uint8_t>& bytes);
// What another rank wrote, for a message: one line of a reasonable length.
std::string excerpt(const std::string& text);
// What this rank wrote as JSON; fails with its number where it is none.
Json json_of_rank(int rank, const std::string& text);

}  // namespace tapetune
