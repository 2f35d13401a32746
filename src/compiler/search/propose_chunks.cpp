// smaller-chunks: reduces the chunks of the loops that run at the peak.
#include <algorithm>
#include <bit>

#include "compiler/passes/form_loops.h"
#include "compiler/search/plan.h"

namespace logitless::ir {

std::int64_t chunk_of(std::int64_t extent, std::int64_t rounds, const Target& target) {
  constexpr std::int64_t kLarge = 128;
  const std::int64_t chunk = (extent + rounds - 1) / rounds, multiple = target.chunk_multiple();
  return chunk < kLarge ? chunk : (chunk + multiple - 1) / multiple * multiple;
}

Move resized(const Plan& plan, std::size_t region, std::int64_t chunk) {
  Move move{resize_loops(plan.graph, plan.regions[region].group, chunk), plan.regions};
  move.regions[region].chunk = chunk;
  return move;
}

namespace {

// Returns the region of a loop, or the end if the search did not make it.
std::size_t region_of(const Plan& plan, const LoopRun& run) {
  std::size_t r = 0;
  while (r < plan.regions.size() && plan.regions[r].group != group_of(run.symbol)) ++r;
  return r;
}

// Returns the largest chunk below this one that cuts the axis into 2, 4, 8, ... equal parts.
std::int64_t even_below(std::int64_t extent, std::int64_t chunk, const Target& target) {
  std::int64_t rounds = 2;
  while (chunk_of(extent, rounds, target) >= chunk) rounds *= 2;
  return chunk_of(extent, rounds, target);
}

// Returns the largest chunk whose arena fits into the memory of a result that is made after the
// loop, or 0.
std::int64_t fitting_a_result(const Program& program, int instruction, const LoopRun& loop,
                              const Target& target) {
  const Buffer& values = program.buffers[static_cast<std::size_t>(loop.arena)];
  std::int64_t room = 0;
  for (const Buffer& b : program.buffers) {
    if (b.overwritten && b.first > instruction)
      room = std::max(room, b.bytes - 2 * program.alignment - (values.bytes - values.value_bytes));
  }
  constexpr std::int64_t kTile = 8;  // times the target's multiple
  const std::int64_t each = std::max<std::int64_t>(values.value_bytes / loop.chunk, 1),
                     multiple = kTile * target.chunk_multiple();
  return room / each / multiple * multiple;
}

}  // namespace

void propose_chunks(const Plan& plan, const Peak& peak, MoveSink& sink) {
  if (sink.chunks() > 0 || peak.instruction < 0) return;
  const Instruction& at = plan.program.instructions[static_cast<std::size_t>(peak.instruction)];
  const auto* loop = std::get_if<LoopRun>(&at.what);
  if (loop == nullptr || loop->arena < 0) return;
  const Buffer& values = plan.program.buffers[static_cast<std::size_t>(loop->arena)];
  if (values.value_bytes * kLeastShare < plan.bytes) return;
  const std::size_t region = region_of(plan, *loop);
  if (region == plan.regions.size() || loop->chunk < 2 || !sink.begin(kNoNode, 0)) return;
  const auto below =
      static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(loop->chunk - 1)));
  // Tries a power of two, which fills tiles of rows, then equal parts without a small remainder.
  const std::int64_t even = even_below(plan.regions[region].extent, loop->chunk, sink.target());
  if (sink.consider(resized(plan, region, below)) && even != below && sink.spacious())
    sink.consider(resized(plan, region, even));
  const std::int64_t fits = fitting_a_result(plan.program, peak.instruction, *loop, sink.target());
  if (below < fits && fits < loop->chunk) sink.consider(resized(plan, region, fits));
  sink.end(kNoNode);
}

}  // namespace logitless::ir
