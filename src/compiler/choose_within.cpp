#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "compiler/choose_chunks.h"
#include "compiler/plan/cost.h"
#include "compiler/recompute_within.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

bool fits(const ChunkChoice& choice, const ChunkRequest& request) {
  return bytes_of(choice.program, request) <= request.budget;
}

double seconds_of(const ChunkChoice& choice, const ChunkRequest& request) {
  return predicted_seconds(choice.program, request.target.rates());
}

bool is_better(const ChunkChoice& a, const ChunkChoice& b, const ChunkRequest& request) {
  const bool fits_a = fits(a, request);
  if (fits_a != fits(b, request)) return fits_a;
  const std::int64_t bytes_a = bytes_of(a.program, request), bytes_b = bytes_of(b.program, request);
  const double seconds_a = seconds_of(a, request), seconds_b = seconds_of(b, request);
  return fits_a ? std::pair(seconds_a, bytes_a) < std::pair(seconds_b, bytes_b)
                : std::pair(bytes_a, seconds_a) < std::pair(bytes_b, seconds_b);
}

ChunkChoice with(const ChunkChoice& base, RecomputeChoice again) {
  ChunkChoice choice{
      std::move(again.graph), std::move(again.program), base.regions, base.refusals, {}, {}};
  choice.recomputed = {again.values, again.given_up, base.program.value_bytes,
                       choice.program.value_bytes,
                       again.multiply_adds / std::max(base.program.multiply_adds, 1.0)};
  return choice;
}

// Adds loops to a choice that recomputes values.
ChunkChoice with_loops(const ChunkChoice& again, const ChunkRequest& request) {
  ChunkChoice more = ChunkSearch(again.graph, request).choice();
  more.regions.insert(more.regions.begin(), again.regions.begin(), again.regions.end());
  more.recomputed = again.recomputed;
  return more;
}

PlanPoint point_of(const ChunkChoice& again, const ChunkRequest& request, double work) {
  PlanPoint point;
  point.value_bytes = static_cast<std::size_t>(again.program.value_bytes);
  point.arena_bytes = static_cast<std::size_t>(again.program.arena_bytes);
  point.seconds = seconds_of(again, request);
  point.extra_work = work > 0.0 ? again.program.multiply_adds / work - 1.0 : 0.0;
  point.what = concat(again.recomputed.values, " values computed again",
                      again.regions.empty() ? "" : ", and loops");
  return point;
}

// Sorts out the plans that another plan beats; the chosen plan stays.
std::vector<PlanPoint> front_of(std::vector<PlanPoint> plans) {
  std::stable_sort(plans.begin(), plans.end(), [](const PlanPoint& a, const PlanPoint& b) {
    return std::tuple(a.value_bytes, a.seconds, !a.chosen) <
           std::tuple(b.value_bytes, b.seconds, !b.chosen);
  });
  double least = std::numeric_limits<double>::infinity();
  std::erase_if(plans, [&](const PlanPoint& p) {
    if (p.seconds >= least && !p.chosen) return true;
    least = std::min(least, p.seconds);
    return false;
  });
  return plans;
}

// Returns the best choice that recomputes values if it is better than loops alone.
std::optional<ChunkChoice> recomputed(const ChunkSearch& found, const ChunkChoice& loops,
                                      const ChunkRequest& request) {
  std::optional<ChunkChoice> best;
  const auto so_far = [&]() -> const ChunkChoice& { return best ? *best : loops; };
  const auto keep = [&](ChunkChoice choice) {
    if (is_better(choice, so_far(), request)) best = std::move(choice);
  };
  const std::vector<ChunkChoice> bases = found.bases();
  RecomputeCuts cuts;
  for (const ChunkChoice& base : bases) {
    const double seconds = fits(so_far(), request) ? seconds_of(so_far(), request)
                                                   : std::numeric_limits<double>::infinity();
    if (seconds_of(base, request) >= seconds) break;
    if (auto again = recompute_within(base.graph, base.program, request, seconds, &cuts))
      keep(with(base, *std::move(again)));
  }
  if (fits(so_far(), request)) return best;
  const auto smallest =
      std::min_element(bases.begin(), bases.end(), [&](const ChunkChoice& a, const ChunkChoice& b) {
        return bytes_of(a.program, request) < bytes_of(b.program, request);
      });
  if (auto again = least_recomputed(smallest->graph, smallest->program, request)) {
    ChunkChoice choice = with(*smallest, *std::move(again));
    if (!fits(choice, request)) keep(with_loops(choice, request));
    keep(std::move(choice));
  }
  return best;
}

}  // namespace

ChunkChoice choose_within(const Graph& graph, const ChunkRequest& request) {
  const ChunkSearch found(graph, request);
  ChunkChoice choice = found.choice();
  if (request.chunks > 0 || (request.budget == 0 && !request.explore)) return choice;
  std::vector<PlanPoint> plans = choice.plans;
  const double work = found.multiply_adds();
  if (request.budget > 0) {
    if (std::optional<ChunkChoice> again = recomputed(found, choice, request)) {
      again->plans = std::move(choice.plans);
      again->search = std::move(choice.search);
      for (PlanPoint& p : plans) p.chosen = false;
      choice = *std::move(again);
      plans.push_back(point_of(choice, request, work));
      plans.back().chosen = true;
    }
  }
  if (request.explore) {
    const ChunkChoice base = found.free_choice();
    for (RecomputeChoice& again : sample_recomputed(base.graph, base.program, request))
      plans.push_back(point_of(with(base, std::move(again)), request, work));
  }
  choice.plans = front_of(std::move(plans));
  return choice;
}

}  // namespace logitless::ir
