#include <algorithm>
#include <cmath>

#include "compiler/plan/arena.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/fuse.h"

namespace logitless::ir {
namespace {

constexpr int kMostRounds = 4;
constexpr std::int64_t kLeastShare = 16;   // least fraction of the peak that a value takes
constexpr double kSecondsForBytes = 10.0;  // 1 % more time must save 10 % of the memory

// Returns values at the peak that are not recomputed yet.
std::vector<int> candidates(const Graph& graph, const Program& program,
                            const std::vector<int>& again) {
  std::vector<int> nodes;
  const auto worth = [&](const Buffer& b) {
    return b.place == Place::arena && b.node >= 0 && b.value_bytes > 0 &&
           b.value_bytes * kLeastShare >= program.value_bytes && is_elementwise(graph.node(b.node));
  };
  if (std::none_of(program.buffers.begin(), program.buffers.end(), worth)) return nodes;
  const std::vector<std::int64_t> bytes = live_bytes(program, Counted::values);
  if (bytes.empty()) return nodes;
  const auto peak = static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
  for (const int buffer : live_at(program, peak, Counted::values)) {
    const Buffer& b = program.buffers[static_cast<std::size_t>(buffer)];
    if (worth(b) && std::find(again.begin(), again.end(), b.node) == again.end() &&
        may_be_recomputed(graph, b.node))
      nodes.push_back(b.node);
  }
  return nodes;
}

}  // namespace

Program recomputing(const Graph& graph, const Target& target,
                    const std::function<Program(const std::vector<int>& again)>& lower) {
  Program best = lower({});
  std::vector<int> again;
  for (int round = 0; round < kMostRounds; ++round) {
    const std::vector<int> more = candidates(graph, best, again);
    if (more.empty()) break;
    again.insert(again.end(), more.begin(), more.end());
    Program program = lower(again);
    if (program.value_bytes >= best.value_bytes) break;
    const double bytes = std::log(static_cast<double>(program.value_bytes) /
                                  static_cast<double>(best.value_bytes)),
                 seconds = predicted_seconds(program, target.rates()) /
                           predicted_seconds(best, target.rates());
    if (bytes + kSecondsForBytes * (seconds - 1.0) >= 0.0) break;
    best = std::move(program);
  }
  return best;
}

}  // namespace logitless::ir
