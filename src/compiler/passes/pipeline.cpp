#include "compiler/passes/pipeline.h"

#include "compiler/passes/eliminate.h"
#include "compiler/passes/widen_sums.h"

namespace logitless::ir {
namespace {

constexpr Pass kPipeline[] = {
    {"eliminate-common", eliminate_common},
    {"eliminate-dead", eliminate_dead},
    {"widen-sums", widen_sums},
};

}  // namespace

std::span<const Pass> pipeline() { return kPipeline; }

}  // namespace logitless::ir
