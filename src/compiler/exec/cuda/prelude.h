// The functions that every generated kernel may use.
#pragma once

#include <string_view>

namespace logitless::ir {

// Returns 16-bit numbers, functions that CUDA lacks, and reductions. They need only what
// prelude_machine() defines, so tests may substitute the host's versions.
std::string_view prelude();

// Returns the merging of states over the blocks of a cluster, which GPUs from compute capability
// 9.0 on have. It needs only what prelude_cluster_machine() defines.
std::string_view prelude_cluster();
std::string_view prelude_cluster_machine();

// Returns conversions by PTX and shuffles between lanes.
std::string_view prelude_machine();

}  // namespace logitless::ir
