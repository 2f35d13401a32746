// The ranks of a run as threads of this process, each with a GPU, or a share of the CPU.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "logitless/communicator.h"
#include "logitless/context.h"

namespace logitless::train {

// Returns "", or why there are not enough GPUs for `ranks`.
std::string ranks_missing(int ranks);

// Runs body(communicator) on a thread for each rank, with the GPU of the rank's index current. When
// one throws, the others' calls end. Rethrows the first exception when all threads have ended.
void run_on_ranks(int ranks, DeviceKind device,
                  const std::function<void(const std::shared_ptr<Communicator>&)>& body);

}  // namespace logitless::train
