// Detects a run whose ranks are processes of a launcher: torchrun, mpirun, srun.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace logitless::train {

struct LaunchedRank {
  int rank = 0, size = 1;
  int on_host = -1;  // index on its host; -1: the launcher does not give it
  std::string host;  // address and port of rank 0
  int port = 0;
  std::string output_of;  // the variable that gives the size
  std::string job =
      {};  // name of the run, if the launcher gives it; ranks of other runs have others
};

// Reads the environment (name -> value, null where there is none). The first pair of variables
// counts that has a rank and a size above 1:
//   RANK, WORLD_SIZE: torchrun                  OMPI_COMM_WORLD_RANK, _SIZE: Open MPI
//   PMI_RANK, PMI_SIZE: MPICH, Intel MPI        SLURM_PROCID, SLURM_NTASKS: srun (SLURM_STEP_ID)
// The run's name is that of LOGITLESS_JOB, or else the launcher's (TORCHELASTIC_RUN_ID,
// PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID). Returns none if this process trains by itself.
// Throws InvalidArgument naming a missing or wrong variable. These include MASTER_PORT, and
// MASTER_ADDR unless the launcher puts all ranks on one host.
std::optional<LaunchedRank> find_launched_rank(
    const std::function<const char*(const char*)>& environment);

// Returns the launched rank that this process is; none otherwise.
std::optional<LaunchedRank> launched_rank();

}  // namespace logitless::train
