#include "compiler/recompute_within.h"

#include <algorithm>

#include "compiler/ops/op.h"
#include "compiler/passes/recompute_segments.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lower.h"

namespace logitless::ir {
namespace {

constexpr int kMostCuts = 32;
constexpr int kCorrections = 4;  // of what a choice is expected to bring
constexpr int kSamples = 8;      // of the curve, where none is within the budget
constexpr int kRefinements = 3;

using Point = RecomputeCurve::Point;

int values_again(const Graph& graph, const Point& point) {
  int count = 0;
  for (std::size_t id = 0; id < point.again.size(); ++id) {
    if (point.again[id] && row_of(graph.node(static_cast<int>(id)).op).work == Work::full) ++count;
  }
  return count;
}

std::vector<bool> stored_nodes(const Graph& graph) {
  std::vector<bool> stored = inlined_nodes(graph);
  stored.flip();
  return stored;
}

// Choices are named by the bytes that they may keep over the peak.
class Search {
 public:
  Search(const Graph& graph, const Program& program, const Target& target, std::int64_t budget,
         const std::vector<bool>& added)
      : graph_(graph),
        program_(program),
        target_(target),
        budget_(budget),
        added_(added),
        curve_(graph, target.multiply_adds_per_byte(), stored_nodes(graph)),
        most_(curve_.cheapest()),
        least_(curve_.smallest()),
        failing_(most_.kept) {}

  std::optional<RecomputeChoice> run() {
    if (most_.kept <= least_.kept) return std::nullopt;
    // A value given up is expected to lower the peak by its bytes. What it does not, because it
    // lives at the peak where it is made again, is given up beside.
    std::int64_t kept = most_.kept - (program_.value_bytes - budget_);
    for (int i = 0; i < kCorrections && fitting_ < 0 && kept >= least_.kept; ++i)
      kept -= std::max<std::int64_t>(over(kept), 0);
    if (fitting_ < 0) sample();
    for (int i = 0; i < kRefinements && fitting_ >= 0; ++i) over((fitting_ + failing_) / 2);
    if (!best_ || best_->program.value_bytes >= program_.value_bytes) return std::nullopt;
    return std::move(best_);
  }

 private:
  const Graph& graph_;
  const Program& program_;
  const Target& target_;
  const std::int64_t budget_;
  const std::vector<bool>& added_;
  const RecomputeCurve curve_;
  const Point most_, least_;
  std::optional<RecomputeChoice> best_;
  std::int64_t best_kept_ = 0;
  std::int64_t fitting_ = -1, failing_;  // bytes kept by choices around the budget

  // The choice of least work that keeps at most `kept` bytes; the last where none does.
  Point keeping(std::int64_t kept) const {
    Point more = most_, less = least_;
    for (int i = 0; i < kMostCuts; ++i) {
      std::optional<Point> middle = curve_.between(more, less);
      if (!middle) break;
      (middle->kept > kept ? more : less) = std::move(*middle);
    }
    return less;
  }

  // Bytes over the budget of a choice, which is kept where it is the best.
  std::int64_t over(std::int64_t kept) {
    const Point point = keeping(kept);
    RecomputeChoice choice;
    choice.graph = curve_.graph_of(point);
    choice.program = lower(choice.graph, target_, added_);
    choice.values = values_again(graph_, point);
    choice.given_up = most_.kept - point.kept;
    choice.before = program_.value_bytes;
    choice.multiply_adds = choice.program.multiply_adds - program_.multiply_adds;
    const std::int64_t over = choice.program.value_bytes - budget_;
    if (over <= 0) fitting_ = std::max(fitting_, point.kept);
    if (over > 0 && point.kept > fitting_) failing_ = std::min(failing_, point.kept);
    if (!best_ || better(choice, *best_)) {
      best_ = std::move(choice);
      best_kept_ = point.kept;
    }
    return over;
  }
  bool better(const RecomputeChoice& a, const RecomputeChoice& b) const {
    const bool fits = a.program.value_bytes <= budget_;
    if (fits != (b.program.value_bytes <= budget_)) return fits;
    return fits ? a.multiply_adds < b.multiply_adds : a.program.value_bytes < b.program.value_bytes;
  }

  // The fewer are kept the more live where they are made again, so that at some point the peak
  // rises: the lowest is looked for between what is given up first and last.
  void sample() {
    std::int64_t step = (most_.kept - least_.kept) / kSamples;
    failing_ = most_.kept;
    for (int i = 1; i <= kSamples && fitting_ < 0; ++i) over(most_.kept - i * step);
    for (; step >= (most_.kept - least_.kept) / (kSamples << kRefinements) && step > 0; step /= 2) {
      const std::int64_t at = best_kept_;
      for (const std::int64_t kept : {at + step / 2, at - step / 2}) {
        if (fitting_ < 0 && kept >= least_.kept) over(kept);
      }
    }
  }
};

}  // namespace

std::optional<RecomputeChoice> recompute_within(const Graph& graph, const Program& program,
                                                const Target& target, std::int64_t budget,
                                                const std::vector<bool>& added) {
  return Search(graph, program, target, budget, added).run();
}

namespace {

constexpr double kCostsNothing = 1e-3;  // of all multiply-adds

// Loops that cost nothing, values computed again, then more loops while the budget asks for them.
ChunkChoice recomputed(const Graph& graph, const ChunkRequest& request) {
  ChunkRequest free = request;
  free.budget = 0;
  ChunkChoice choice = choose_chunks(graph, free);
  std::optional<RecomputeChoice> again =
      recompute_within(choice.graph, choice.program, request.target, request.budget, request.added);
  if (!again) return choice;
  choice.recomputed = {again->values, again->given_up, again->before, again->program.value_bytes,
                       again->multiply_adds / std::max(choice.program.multiply_adds, 1.0)};
  choice.graph = std::move(again->graph);
  choice.program = std::move(again->program);
  if (choice.program.value_bytes <= request.budget) return choice;
  ChunkChoice more = choose_chunks(choice.graph, request);
  if (more.program.value_bytes >= choice.program.value_bytes) return choice;
  more.regions.insert(more.regions.begin(), choice.regions.begin(), choice.regions.end());
  more.recomputed = choice.recomputed;
  return more;
}

}  // namespace

ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request) {
  const double work = lower(graph, request.target, request.added).multiply_adds;
  ChunkChoice loops = choose_chunks(graph, request);
  const auto fits = [&](const ChunkChoice& c) { return c.program.value_bytes <= request.budget; };
  const bool cheap = loops.program.multiply_adds <= (1.0 + kCostsNothing) * work;
  if (request.budget == 0 || request.chunks > 0 || (fits(loops) && cheap)) return loops;
  ChunkChoice again = recomputed(graph, request);
  const bool better = fits(again) != fits(loops) ? fits(again)
                      : fits(again) ? again.program.multiply_adds < loops.program.multiply_adds
                                    : again.program.value_bytes < loops.program.value_bytes;
  return better ? again : loops;
}

}  // namespace logitless::ir
