// The ranks of a run: threads of this process, each with a GPU of its own, or a share of the CPU.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "logitless/communicator.h"
#include "logitless/context.h"

namespace logitless::train {

// Empty, or why there are no GPUs for so many ranks.
std::string ranks_missing(int ranks);

// Runs body(communicator) on a thread for each rank, whose current GPU is the one of its number.
// Where one throws, the others' calls end; what the first of them threw is thrown here, when all
// have ended.
void run_on_ranks(int ranks, DeviceKind device,
                  const std::function<void(const std::shared_ptr<Communicator>&)>& body);

}  // namespace logitless::train
