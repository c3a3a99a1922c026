// Rank and world size of this process, and where the rendezvous is, from the environment that a launcher has set.
#pragma once

#include <string>

namespace tapetune {

struct RankInfo {
  int rank = 0, ranks = 1;
  int local_rank = 0;  // among those on this machine: which GPU
  std::string address = "127.0.0.1";
  int port = 29500;          // of the store of rank 0
  bool served = false;       // by the launcher, which outlives rank 0
  std::string attempt = "";  // of a launcher that restarts all ranks when one fails
  std::string remedy = "";   // how to start the ranks that are missing
};

// From RANK, WORLD_SIZE, LOCAL_RANK (torchrun, Kubernetes, tapetune launch), SLURM_* (srun), OMPI_* or PMI_* (mpirun),
// with MASTER_ADDR and MASTER_PORT; alone where there is none of them. Fails where they contradict each other.
RankInfo rank_info_from_environment();

}  // namespace tapetune
