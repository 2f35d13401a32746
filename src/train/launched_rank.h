// A run whose ranks are processes that a launcher has started: torchrun, mpirun, srun.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace logitless::train {

struct LaunchedRank {
  int rank = 0, size = 1;
  int on_host = -1;  // its number among those of its host; -1: the launcher does not tell
  std::string host;  // where rank 0 is found, and at which port
  int port = 0;
  std::string said_by;   // the variable that has the size
  std::string job = {};  // which run it is of, as far as the launcher tells: other runs are others
};

// Reads the environment (name -> value, null where there is none). The first of these counts whose
// two variables of rank and size are there, with a size above 1:
//   RANK, WORLD_SIZE: torchrun                  OMPI_COMM_WORLD_RANK, _SIZE: Open MPI
//   PMI_RANK, PMI_SIZE: MPICH, Intel MPI        SLURM_PROCID, SLURM_NTASKS: srun (SLURM_STEP_ID)
// The run's name is LOGITLESS_JOB's, or what the launcher calls it (TORCHELASTIC_RUN_ID,
// PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID).
// None: this process trains by itself. Throws InvalidArgument naming the variable that is missing
// or wrong: MASTER_PORT, and MASTER_ADDR unless the launcher says that all ranks are on one host.
std::optional<LaunchedRank> find_launched_rank(
    const std::function<const char*(const char*)>& environment);

// Of this process.
std::optional<LaunchedRank> launched_rank();

}  // namespace logitless::train
