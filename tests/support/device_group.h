// A group whose ranks are threads that share one GPU. It exchanges GPU memory without NCCL, which
// needs a GPU for each rank.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "logitless/communicator.h"

namespace logitless::test {

std::vector<std::shared_ptr<Communicator>> make_device_group(int size,
                                                             std::chrono::milliseconds limit);

}  // namespace logitless::test
