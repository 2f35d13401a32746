#include "compiler/choose_chunks.h"

#include <algorithm>
#include <set>

#include "compiler/search/search.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

bool kept(const Plan& plan) { return plan.graph.size() > 0; }

// Returns the fastest plan within the budget, of equally fast ones the smaller; without one, the
// smallest plan.
std::size_t within(const SearchResult& found, const ChunkRequest& request) {
  const auto bytes = [&](std::size_t i) {
    const Plan& p = *found.plans[i];
    return request.with_scratch ? p.arena_bytes : p.bytes;
  };
  const auto better = [&](std::size_t a, std::size_t b) {
    const bool fits_a = bytes(a) <= request.budget, fits_b = bytes(b) <= request.budget;
    if (fits_a != fits_b) return fits_a;
    const double seconds_a = found.plans[a]->seconds, seconds_b = found.plans[b]->seconds;
    return fits_a ? std::pair(seconds_a, bytes(a)) < std::pair(seconds_b, bytes(b))
                  : std::pair(bytes(a), seconds_a) < std::pair(bytes(b), seconds_b);
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < found.plans.size(); ++i) {
    if (kept(*found.plans[i]) && better(i, best)) best = i;
  }
  return best;
}

// Returns a plan's loops as text: "no loops", "2 loops: gelu %h f32[N, V] in 16 chunks, ...".
std::string text_of(const Plan& plan) {
  std::int64_t head = 0;
  for (const Node& n : plan.graph.nodes())
    head = std::max(head, n.op == Op::head ? n.attributes->head.workspace : 0);
  std::string text;
  for (const ChunkedRegion& r : plan.regions) {
    text += concat(text.empty() ? "" : ", ", r.count > 1 ? concat(r.count, " of ") : std::string(),
                   r.seed, " in ", (r.extent + r.chunk - 1) / r.chunk, " chunks");
  }
  if (text.empty()) text = "no loops";
  if (head > 0) text += concat("; heads in ", format_bytes(static_cast<std::size_t>(head)));
  return text;
}

std::vector<PlanPoint> front_of(const SearchResult& found, std::size_t chosen) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < found.plans.size(); ++i) {
    if (kept(*found.plans[i])) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const Plan &x = *found.plans[a], &y = *found.plans[b];
    return std::pair(x.bytes, x.seconds) < std::pair(y.bytes, y.seconds);
  });
  const double work = found.plans.front()->work;
  std::vector<PlanPoint> points;
  for (const std::size_t i : order) {
    const Plan& p = *found.plans[i];
    if (i != chosen && !points.empty() && p.seconds >= points.back().seconds) continue;
    points.push_back({static_cast<std::size_t>(p.bytes), static_cast<std::size_t>(p.arena_bytes),
                      p.seconds, work > 0.0 ? p.work / work - 1.0 : 0.0, text_of(p), i == chosen});
  }
  return points;
}

// Collects the refusals of the chosen plan and of the plans it was derived from.
std::vector<std::string> refusals_of(const SearchResult& found, std::size_t chosen, bool free) {
  std::vector<std::string> list;
  std::set<std::string> seen;
  for (int at = static_cast<int>(chosen); at >= 0;
       at = found.plans[static_cast<std::size_t>(at)]->from) {
    const Plan& plan = *found.plans[static_cast<std::size_t>(at)];
    for (const std::string& r : plan.refusals) {
      if (seen.insert(r).second) list.push_back(r);
    }
    for (const std::string& r : plan.paid_for) {
      if (free && seen.insert(r).second) list.push_back(r);
    }
  }
  return list;
}

std::string text_of(const SearchResult& found) {
  return concat(found.planned, " programs planned",
                found.bounded ? concat(", as many as its size leaves room for: there may be better "
                                       "ones between them, and smaller ones")
                              : std::string(", and no move is left"));
}

}  // namespace

ChunkSearch::ChunkSearch(const Graph& graph, const ChunkRequest& request)
    : request_(request),
      found_(search(graph, {request.target, request.chunks, request.added,
                            /*paid=*/request.budget > 0 || request.explore, request.with_scratch,
                            request.bodies})) {}

ChunkChoice ChunkSearch::made_of(std::size_t chosen, bool free) const {
  const Plan& plan = *found_.plans[chosen];
  ChunkChoice choice{plan.graph, plan.program, plan.regions, {}, {}, {}};
  choice.plans = front_of(found_, chosen);
  choice.refusals = refusals_of(found_, chosen, free);
  choice.search = text_of(found_);
  return choice;
}

ChunkChoice ChunkSearch::choice() const {
  const bool free = request_.budget == 0;
  return made_of(free ? found_.free : within(found_, request_), free);
}

ChunkChoice ChunkSearch::free_choice() const { return made_of(found_.free, request_.budget == 0); }

std::vector<ChunkChoice> ChunkSearch::bases() const {
  const auto same_loops = [&](const Plan& a, const Plan& b) {
    return std::equal(a.regions.begin(), a.regions.end(), b.regions.begin(), b.regions.end(),
                      [](const ChunkedRegion& x, const ChunkedRegion& y) {
                        return x.group == y.group && x.chunk == y.chunk;
                      });
  };
  std::vector<std::size_t> list;
  for (std::size_t i = 0; i < found_.plans.size(); ++i) {
    const bool alike = same_loops(*found_.plans[i], *found_.plans[found_.free]);
    if (i == found_.free || (kept(*found_.plans[i]) && alike)) list.push_back(i);
  }
  std::stable_sort(list.begin(), list.end(), [&](std::size_t a, std::size_t b) {
    return found_.plans[a]->seconds < found_.plans[b]->seconds;
  });
  std::vector<ChunkChoice> choices;
  for (const std::size_t i : list) choices.push_back(made_of(i, request_.budget == 0));
  return choices;
}

}  // namespace logitless::ir
