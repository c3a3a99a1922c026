// The place of this process among those that train together, as a launcher tells it through the environment.
#pragma once

#include <string>

namespace tapetune {

struct Seat {
  int rank = 0, ranks = 1;
  int local_rank = 0;  // among those on this machine: which GPU
  std::string address = "127.0.0.1";
  int port = 29500;          // where rank 0 is met
  bool served = false;       // by the launcher, which outlives rank 0
  std::string attempt = "";  // that of a launcher that starts all anew when one fails
  std::string remedy = "";   // how to start the ranks that are missing
};

// From RANK, WORLD_SIZE, LOCAL_RANK (torchrun, Kubernetes, tapetune launch), SLURM_* (srun), OMPI_* or PMI_* (mpirun),
// with MASTER_ADDR and MASTER_PORT; alone where there is none of them. Fails where they contradict each other.
Seat seat_from_environment();

}  // namespace tapetune
