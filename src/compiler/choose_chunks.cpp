#include "compiler/choose_chunks.h"

#include <algorithm>
#include <set>

#include "compiler/analysis/region.h"
#include "compiler/passes/eliminate.h"
#include "compiler/passes/form_loops.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/lower.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr int kMostRegions = 64;
constexpr int kMostSeeds = 8;  // big values tried at one peak
constexpr std::int64_t kLeastShare =
    256;  // a value below this part of the peak is not worth a loop

constexpr const char* kInVain = "a loop would not lower the peak";

struct Candidate {
  Graph graph;  // before loops; tangents made 1 where that saves phases
  Region region;
  bool unit = false;
};

// The region around a value, with as few phases as the tangents allow.
Candidate candidate_of(const Graph& graph, Value seed, const Split& split) {
  Candidate c{graph, grow_region(graph, seed, split), false};
  for (int round = 0; round < 4 && c.region.phases > 1; ++round) {
    std::optional<UnitTangents> unit = unit_tangents(c.graph, c.region);
    if (!unit) break;
    Region region = grow_region(unit->graph, unit->seed, split);
    if (region.nodes.empty() || region.phases >= c.region.phases) break;
    c = {std::move(unit->graph), std::move(region), true};
  }
  return c;
}

std::vector<Split> splits_of(const Type& type) {
  const std::vector<std::int64_t> sizes = sizes_of(type);
  const int rank = static_cast<int>(sizes.size());
  std::vector<Split> splits;
  for (int d = 0; d < rank; ++d) {
    std::int64_t extent = 1;
    for (int count = 1; d + count <= rank; ++count) {
      extent *= sizes[static_cast<std::size_t>(d + count - 1)];
      const Split s = normalized(sizes, {d, count, 1});
      // All of a value at once is no cut of rows: the last dimension joins no group.
      if (s != Split{d, count, 1} || extent < 2 || (count > 1 && d + count == rank)) continue;
      splits.push_back(s);
    }
  }
  return splits;
}

std::string shown(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  return concat(title_of(n), n.name.empty() ? "" : " %" + n.name, " ", text_of(n.results[0]));
}

struct Trial {
  std::int64_t chunk = 0;
  Graph graph;
  Program program;
};

class Chooser {
 public:
  Chooser(const Graph& graph, const ChunkRequest& request) : request_(request) {
    choice_.graph = graph;
    choice_.program = lower(graph, request.target, request.added);
  }

  ChunkChoice run() {
    while (static_cast<int>(choice_.regions.size()) < kMostRegions && !done() && step()) {
    }
    return std::move(choice_);
  }

 private:
  const ChunkRequest request_;
  ChunkChoice choice_;
  std::set<std::string> refused_;

  std::int64_t peak() const { return choice_.program.value_bytes; }
  bool done() const { return request_.budget > 0 && peak() <= request_.budget; }

  void refuse(int node, const std::string& why) {
    const std::string text = concat(shown(choice_.graph, node), ": ", why);
    if (refused_.insert(text).second) choice_.refusals.push_back(text);
  }

  Trial tried(const Candidate& c, std::int64_t chunk) const {
    Trial t;
    t.chunk = chunk;
    t.graph = eliminate_common_of_loops(form_loops(c.graph, c.region, chunk));
    t.program = lower(t.graph, request_.target, request_.added);
    return t;
  }

  // One more region, or false when none lowers the peak.
  bool step() {
    const std::vector<std::int64_t> bytes = live_bytes(choice_.program);
    if (bytes.empty()) return false;
    const int at = static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
    std::vector<int> seeds;
    for (const int b : live_at(choice_.program, at)) {
      const Buffer& buffer = choice_.program.buffers[static_cast<std::size_t>(b)];
      if (buffer.bytes * kLeastShare < peak() || static_cast<int>(seeds.size()) == kMostSeeds)
        break;
      if (buffer.node >= 0) seeds.push_back(buffer.node);
    }
    // Candidates, each region once.
    std::vector<Candidate> candidates;
    std::vector<Trial> trials;
    for (const int node : seeds) {
      if (choice_.graph.node(node).op == Op::loop || choice_.graph.node(node).op == Op::head) {
        refuse(node, choice_.graph.node(node).op == Op::loop ? "it is the result of a loop"
                                                             : "the head engine makes it");
        continue;
      }
      // What was in vain for one value is for its like: the layers of a network.
      if (refused_.contains(concat(shown(choice_.graph, node), ": ", kInVain))) continue;
      bool any = false, lower_peak = false;
      for (const Split& split : splits_of(choice_.graph.node(node).results[0])) {
        const bool seen =
            std::any_of(candidates.begin(), candidates.end(), [&](const Candidate& c) {
              const Split* s = c.unit ? nullptr : c.region.split({node, 0});
              return s != nullptr && *s == split;
            });
        if (seen) {
          any = lower_peak = true;
          continue;
        }
        Candidate c = candidate_of(choice_.graph, {node, 0}, split);
        if (c.region.nodes.empty() || c.region.extent < 2) continue;
        any = true;
        Trial t = tried(c, first_chunk(c));
        if (request_.budget > 0) t = sized(c, std::move(t));
        if (t.program.value_bytes >= peak() - peak() / kLeastShare) continue;
        lower_peak = true;
        candidates.push_back(std::move(c));
        trials.push_back(std::move(t));
      }
      if (!any) refuse(node, "it cannot be cut along any dimension");
      if (any && !lower_peak) refuse(node, kInVain);
      // The biggest value that can be chunked is.
      if (best_of(candidates, trials) < candidates.size()) break;
      if (any && lower_peak)
        refuse(node, "a loop would compute values again; name a budget to allow it");
    }
    const std::size_t best = best_of(candidates, trials);
    if (best == candidates.size()) return false;
    Trial final = std::move(trials[best]);
    if (request_.budget == 0) final = sized(candidates[best], std::move(final));
    ChunkedRegion region;
    region.seed = shown(candidates[best].graph, candidates[best].region.seed.node);
    region.cut = text_of(*candidates[best].region.split(candidates[best].region.seed));
    region.extent = candidates[best].region.extent;
    region.chunk = final.chunk;
    region.phases = candidates[best].region.phases;
    region.unit_tangents = candidates[best].unit;
    region.before = peak();
    region.after = final.program.value_bytes;
    region.extra_work = extra(final.program);
    region.boundaries = candidates[best].region.boundaries;
    choice_.regions.push_back(std::move(region));
    choice_.graph = std::move(final.graph);
    choice_.program = std::move(final.program);
    return true;
  }

  // The end where none will do.
  std::size_t best_of(const std::vector<Candidate>& candidates,
                      const std::vector<Trial>& trials) const {
    std::size_t best = candidates.size();
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (request_.budget == 0 && extra(trials[i].program) > 1e-3) continue;
      if (best == candidates.size() || better(trials[i].program, trials[best].program)) best = i;
    }
    return best;
  }

  double extra(const Program& p) const {
    const double before = choice_.program.multiply_adds;
    return before > 0.0 ? p.multiply_adds / before - 1.0 : 0.0;
  }
  // Within the budget comes first, then less work, then the lower peak. While none is within it,
  // work weighs twice what memory does.
  bool better(const Program& a, const Program& b) const {
    const bool fits_a = request_.budget == 0 || a.value_bytes <= request_.budget;
    const bool fits_b = request_.budget == 0 || b.value_bytes <= request_.budget;
    if (fits_a != fits_b) return fits_a;
    const double work_a = std::max(extra(a), 0.0), work_b = std::max(extra(b), 0.0);
    if (fits_a && std::abs(work_a - work_b) > 1e-3) return work_a < work_b;
    // Of candidates alike the first stays: it cuts the outer dimension.
    return static_cast<double>(a.value_bytes) * (1.0 + 2.0 * work_a) <
           0.999 * static_cast<double>(b.value_bytes) * (1.0 + 2.0 * work_b);
  }

  std::int64_t first_chunk(const Candidate& c) const {
    const Region& region = c.region;
    if (request_.chunks > 0)
      return std::max<std::int64_t>((region.extent + request_.chunks - 1) / request_.chunks, 1);
    const std::int64_t sixteenth = (region.extent + 15) / 16;
    return std::min(std::max(sixteenth, least(c)), region.extent);
  }
  // Elements of the axis whose products are thick enough: rows of the seed, or columns where those
  // are cut. Fewer only for a budget.
  std::int64_t least(const Candidate& c) const {
    const Region& region = c.region;
    const Split& split = *region.split(region.seed);
    const std::vector<std::int64_t> sizes = sizes_of(c.graph.type(region.seed));
    std::int64_t rows = split.factor;
    if (split.dim + split.count < static_cast<int>(sizes.size())) {
      std::int64_t elements = 1;
      for (const std::int64_t s : sizes) elements *= s;
      rows = elements / std::max<std::int64_t>(region.extent * sizes.back(), 1);
    }
    return std::max<std::int64_t>(1,
                                  request_.target.thick_rows() / std::max<std::int64_t>(rows, 1));
  }

  // Time of adding to results in memory, as a fraction of that of the products: each byte of a sum
  // is read and written.
  double sums_cost(const Program& p) const {
    const Rates rates = request_.target.rates();
    const double byte = rates.products16 / (2.0 * rates.bytes);
    return p.multiply_adds > 0.0 ? 2.0 * byte * p.merged_bytes / p.multiply_adds : 0.0;
  }
  static constexpr double kMostSums = 0.025;

  // The largest chunk within the budget; without one, the largest that brings nearly all there is.
  Trial sized(const Candidate& c, Trial first) const {
    if (request_.chunks > 0) return first;
    const std::int64_t extent = c.region.extent;
    const std::int64_t near = peak() / kLeastShare;
    const auto fits = [&](const Trial& t) {
      return request_.budget > 0 && t.program.value_bytes <= request_.budget;
    };
    // Larger chunks, while they cost nothing, or the sums of small ones cost too much.
    for (std::int64_t chunk = (extent + 1) / 2; chunk > first.chunk; chunk = (chunk + 1) / 2) {
      Trial t = tried(c, chunk);
      if (request_.budget == 0 && sums_cost(t.program) > kMostSums / 2) return t;
      if (fits(t) || (!fits(first) && t.program.value_bytes <= first.program.value_bytes + near))
        return t;
    }
    if (fits(first)) return first;
    // Smaller ones, while they bring something.
    const std::int64_t least_chunk = request_.budget > 0 ? 1 : std::min(least(c), extent);
    for (std::int64_t chunk = first.chunk / 2; chunk >= least_chunk; chunk /= 2) {
      Trial t = tried(c, chunk);
      if (t.program.value_bytes >= first.program.value_bytes - near) break;
      if (request_.budget == 0 && sums_cost(t.program) > kMostSums) break;
      first = std::move(t);
      if (fits(first)) break;
    }
    return first;
  }
};

}  // namespace

ChunkChoice choose_chunks(const Graph& graph, const ChunkRequest& request) {
  return Chooser(graph, request).run();
}

}  // namespace logitless::ir
