#include "head/program_head.h"

namespace logitless {

ProgramHeadScratch program_head_scratch(DeviceKind device, std::int64_t tokens) {
  const auto aligned = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  if (device == DeviceKind::cpu) return {.deltas = 0, .workspace = (tokens * 8 + 63) / 64 * 64};
  const std::int64_t deltas = aligned(tokens * 8);
  return {.deltas = deltas, .workspace = deltas + aligned(tokens * 4)};
}

std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, HeadCall call,
                                                   FarRun far) {
  call.in.targets = ConstTensorView(head.scratch, DType::i64, {head.call.shape.tokens});
  call.in.ignore_index = -1;
  return call.context->device().kind == DeviceKind::cuda ? cuda::run_program_head(head, call, far)
                                                         : cpu::run_program_head(head, call, far);
}

}  // namespace logitless
