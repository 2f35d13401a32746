#include "compiler/recompute_within.h"

#include <algorithm>
#include <limits>
#include <map>

#include "compiler/ops/op.h"
#include "compiler/passes/recompute_segments.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lower.h"
#include "core/check.h"

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

// What the machine multiplies in 16 bit while it reads or writes a byte.
double multiply_adds_per_byte(const Rates& rates) { return rates.products16 / (2.0 * rates.bytes); }

// Choices are named by the bytes that they may keep over the peak.
class Search {
 public:
  Search(const Graph& graph, const Program& program, const Target& target, std::int64_t budget,
         const std::vector<bool>& added, LoweredBodies* bodies)
      : graph_(graph),
        program_(program),
        target_(target),
        budget_(budget),
        added_(added),
        bodies_(bodies),
        curve_(graph, multiply_adds_per_byte(target.rates()), stored_nodes(graph)),
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
  LoweredBodies* const bodies_;
  const RecomputeCurve curve_;
  const Point most_, least_;
  std::optional<RecomputeChoice> best_;
  std::map<std::pair<double, double>, std::optional<Point>> between_;  // by their weights
  std::int64_t best_kept_ = 0;
  std::int64_t fitting_ = -1, failing_;  // bytes kept by choices around the budget

  // That of the curve, once for the same two: each search of it begins at its ends.
  const std::optional<Point>& between(const Point& more, const Point& less) {
    const auto [found, is_new] = between_.try_emplace({more.weight, less.weight});
    if (is_new) found->second = curve_.between(more, less);
    return found->second;
  }
  // The choice of least work that keeps at most `kept` bytes; the last where none does.
  Point keeping(std::int64_t kept) {
    Point more = most_, less = least_;
    for (int i = 0; i < kMostCuts; ++i) {
      const std::optional<Point>& middle = between(more, less);
      if (!middle) break;
      (middle->kept > kept ? more : less) = *middle;
    }
    return less;
  }

  // Bytes over the budget of a choice, which is kept where it is the best.
  std::int64_t over(std::int64_t kept) {
    const Point point = keeping(kept);
    RecomputeChoice choice;
    choice.graph = curve_.graph_of(point);
    choice.program = lower(choice.graph, target_, added_, InstructionOrder::for_memory, bodies_);
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
                                                const std::vector<bool>& added,
                                                LoweredBodies* bodies) {
  return Search(graph, program, target, budget, added, bodies).run();
}

namespace {

constexpr double kCostsNothing = 1e-3;  // of all multiply-adds

std::int64_t bytes_of(const Program& p, const ChunkRequest& request) {
  return request.with_scratch ? p.arena_bytes : p.value_bytes;
}

// Loops that cost nothing, values computed again, then more loops while the budget asks for them.
ChunkChoice recomputed(const ChunkSearch& found, const ChunkRequest& request) {
  ChunkChoice choice = found.free_choice();
  // What kernels take beside the values is about the same in all choices.
  const std::int64_t scratch = bytes_of(choice.program, request) - choice.program.value_bytes;
  std::optional<RecomputeChoice> again = recompute_within(
      choice.graph, choice.program, request.target,
      std::max<std::int64_t>(request.budget - scratch, 1), request.added, request.bodies);
  if (!again) return choice;
  choice.recomputed = {again->values, again->given_up, again->before, again->program.value_bytes,
                       again->multiply_adds / std::max(choice.program.multiply_adds, 1.0)};
  choice.graph = std::move(again->graph);
  choice.program = std::move(again->program);
  if (bytes_of(choice.program, request) <= request.budget) return choice;
  ChunkChoice more = ChunkSearch(choice.graph, request).choice();
  if (bytes_of(more.program, request) >= bytes_of(choice.program, request)) return choice;
  more.regions.insert(more.regions.begin(), choice.regions.begin(), choice.regions.end());
  more.recomputed = choice.recomputed;
  return more;
}

// The front that the loops are part of, with a plan that computes values again in it.
std::vector<PlanPoint> front_with(std::vector<PlanPoint> plans, const ChunkChoice& again,
                                  const ChunkRequest& request, double work) {
  for (PlanPoint& p : plans) p.chosen = false;
  PlanPoint point;
  point.value_bytes = static_cast<std::size_t>(again.program.value_bytes);
  point.arena_bytes = static_cast<std::size_t>(again.program.arena_bytes);
  point.seconds = predicted_seconds(again.program, request.target.rates());
  point.extra_work = work > 0.0 ? again.program.multiply_adds / work - 1.0 : 0.0;
  point.what = concat(again.recomputed.values, " values computed again",
                      again.regions.empty() ? "" : ", and loops");
  point.chosen = true;
  const auto at = std::find_if(plans.begin(), plans.end(), [&](const PlanPoint& p) {
    return p.value_bytes > point.value_bytes;
  });
  plans.insert(at, std::move(point));
  // Slower plans of more bytes are not of the front.
  double least = std::numeric_limits<double>::infinity();
  std::erase_if(plans, [&](const PlanPoint& p) {
    if (p.seconds >= least && !p.chosen) return true;
    least = std::min(least, p.seconds);
    return false;
  });
  return plans;
}

}  // namespace

ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request) {
  const ChunkSearch found(graph, request);
  ChunkChoice loops = found.choice();
  if (request.budget == 0 || request.chunks > 0) return loops;
  const double work = found.multiply_adds();
  const auto fits = [&](const ChunkChoice& c) {
    return bytes_of(c.program, request) <= request.budget;
  };
  const bool cheap = loops.program.multiply_adds <= (1.0 + kCostsNothing) * work;
  if (fits(loops) && cheap) return loops;
  ChunkChoice again = recomputed(found, request);
  if (again.recomputed.values == 0) return loops;
  const auto seconds = [&](const ChunkChoice& c) {
    return predicted_seconds(c.program, request.target.rates());
  };
  const bool better = fits(again) != fits(loops) ? fits(again)
                      : fits(again)
                          ? seconds(again) < seconds(loops)
                          : bytes_of(again.program, request) < bytes_of(loops.program, request);
  if (!better) return loops;
  again.plans = front_with(std::move(loops.plans), again, request, work);
  again.search = std::move(loops.search);
  return again;
}

}  // namespace logitless::ir
