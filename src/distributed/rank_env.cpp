#include "distributed/rank_env.h"

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "core/error.h"

namespace tapetune {

namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

std::optional<int> number(const char* name) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [rest, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || rest != text->data() + text->size() || value < 0) {
    fail("launch", "{} is {}, but must be a whole number, 0 or larger; is it set by hand?", name, *text);
  }
  return value;
}

// What a kind of launcher calls a rank, their number, and the rank on this machine.
struct Names {
  const char *rank, *ranks, *local, *remedy;
};

// "node[03-07,12]" and "node03,node04" begin with node03.
std::string first_host(const std::string& list) {
  const auto bracket = list.find('['), comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const auto end = list.find_first_of("-,]", bracket + 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

}  // namespace

RankInfo rank_info_from_environment() {
  constexpr const char* mpi = "check that mpirun started them, and their machines for error messages";
  constexpr Names kinds[] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK",
       "start one process for each RANK from 0 to WORLD_SIZE - 1, or unset both variables to run one process"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", mpi},
      {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", mpi},
      {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
       "an sbatch script starts one task only: put srun before tapetune in it, or ask for one task (--ntasks=1)"}};
  RankInfo info;
  const Names* kind = nullptr;
  for (const Names& names : kinds) {
    if (variable(names.rank) && variable(names.ranks)) {
      kind = &names;
      break;
    }
  }
  if (kind == nullptr) {
    if (variable("RANK") || variable("WORLD_SIZE")) {
      fail("launch", "RANK and WORLD_SIZE belong together, but only one of them is set; set or unset both.");
    }
    return info;
  }
  info.rank = *number(kind->rank);
  info.ranks = *number(kind->ranks);
  info.local_rank = number(kind->local).value_or(0);
  info.remedy = kind->remedy;
  if (info.ranks < 1 || info.rank >= info.ranks) {
    fail("launch", "{} is {}, but with {} = {} it must be from 0 to {}; give every process its own.", kind->rank,
         info.rank, kind->ranks, info.ranks, info.ranks - 1);
  }
  const bool slurm = std::string_view(kind->rank).starts_with("SLURM");
  if (const auto address = variable("MASTER_ADDR")) {
    info.address = *address;
  } else if (const auto hosts = variable("SLURM_STEP_NODELIST"); slurm && hosts) {
    info.address = first_host(*hosts);
  } else if (const auto all_hosts = variable("SLURM_JOB_NODELIST"); slurm && all_hosts) {
    info.address = first_host(*all_hosts);
  } else if (const auto here = number("OMPI_COMM_WORLD_LOCAL_SIZE"); here && *here < info.ranks) {
    fail("launch", "{} ranks run on several machines, but MASTER_ADDR is not set; set it to rank 0's address.",
         info.ranks);
  }
  if (const auto port = number("MASTER_PORT")) {
    info.port = *port;
  } else if (const auto job = number("SLURM_JOB_ID"); slurm && job) {
    info.port += *job % 1000;  // jobs that share a machine do not collide
  }
  if (info.port < 1 || info.port > 65535) fail("launch", "MASTER_PORT is {}, but must be from 1 to 65535.", info.port);
  info.served = variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  info.attempt = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return info;
}

}  // namespace tapetune
