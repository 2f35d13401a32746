// smaller-heads: reduces the workspace of a head that runs at the peak.
#include "compiler/passes/passes.h"
#include "compiler/search/plan.h"

namespace logitless::ir {

void propose_heads(const Plan& plan, const Peak& peak, MoveSink& sink) {
  constexpr std::int64_t kLeastHead = 1 << 16;  // no plan of the head engine takes less
  if (peak.instruction < 0) return;
  const Instruction& at = plan.program.instructions[static_cast<std::size_t>(peak.instruction)];
  const auto* head = std::get_if<HeadRun>(&at.what);
  if (head == nullptr) return;
  const std::int64_t bytes =
      plan.program.buffers[static_cast<std::size_t>(head->scratch)].value_bytes / 2;
  if (bytes < kLeastHead || bytes * kLeastShare < plan.bytes || !sink.begin(kNoNode - 1, 0)) return;
  sink.consider({limit_heads(plan.graph, bytes), plan.regions});
  sink.end(kNoNode - 1);
}

}  // namespace logitless::ir
