#include "compiler/search/search.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "compiler/plan/arena.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/lower.h"
#include "compiler/search/plan.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

// Bounds of the search. `kMostNodes` bounds the nodes of all lowered graphs, so large programs get
// fewer plans.
constexpr int kMostPlans = 64, kLeastPlans = 12, kSpacious = 40;
constexpr std::int64_t kMostNodes = 36000;

// A plan without a budget may take this factor of the time without loops.
constexpr double kMostFreeSeconds = 1.1;
constexpr double kSameWork = 1e-3;
constexpr double kSecondsForBytes = 10.0;  // 1 % more time must save 10 % of the memory
constexpr int kMostFlat = 4;               // consecutive moves that leave the peak equally high

constexpr const char* kInVain = "a loop would not lower the peak";

constexpr MoveKind kKinds[] = {
    {"form-loops", false, propose_loops},
    {"smaller-chunks", true, propose_chunks},
    {"smaller-heads", true, propose_heads},
};

std::int64_t nodes_of(const Graph& graph) {
  std::int64_t count = graph.size();
  for (const Node& n : graph.nodes())
    count += n.op == Op::loop ? n.attributes->loop->body.size() : 0;
  return count;
}

class Search final : public MoveSink {
 public:
  explicit Search(const SearchRequest& request)
      : request_(request), rates_(request.target.rates()) {}

  SearchResult run(const Graph& graph) {
    add({graph, {}});
    capacity_ = static_cast<int>(std::clamp<std::int64_t>(
        kMostNodes / std::max<std::int64_t>(nodes_of(graph), 1), kLeastPlans, kMostPlans));
    dive(0, /*free=*/true);
    SearchResult result;
    result.free = free_choice_ = free_choice();
    if (request_.paid) {
      dive(least(), /*free=*/false);
      for (int next = unexplored(); next >= 0 && !bounded_; next = unexplored())
        dive(next, /*free=*/false);
    }
    for (const std::unique_ptr<Plan>& p : plans_) {
      if (p->graph.size() == 0 || request_.with_scratch) continue;
      give_offsets(p->program);
      p->arena_bytes = p->program.arena_bytes;
    }
    result.plans = std::move(plans_);
    result.planned = planned_;
    result.bounded = bounded_;
    result.capacity = capacity_;
    return result;
  }

  // --- interface of moves
  const Target& target() const final { return request_.target; }
  std::int64_t chunks() const final { return request_.chunks; }
  bool begin(int node, std::uint64_t role) final {
    if (skip_ && in_vain_.contains(role)) return false;
    first_child_ = plans_.size();
    role_ = role;
    return asked_[expanding_].insert(node).second;
  }
  bool consider(Move move) final {
    const int twin = twin_of(move.graph);
    if (twin < 0 && planned_ >= capacity_) {
      bounded_ = true;
      return false;
    }
    add(std::move(move), twin);
    return true;
  }
  bool lowered() const final {
    return plans_.size() > first_child_ && lowers(*plans_.back(), plan(expanding_));
  }
  bool spacious() const final { return capacity_ >= kSpacious; }
  bool end(int node) final {
    if (free_) try_larger_chunks();
    const Plan& from = plan(expanding_);
    bool lower = false, works = false;
    double seconds = 0.0;
    for (std::size_t i = first_child_; i < plans_.size(); ++i) {
      if (!lowers(*plans_[i], from)) continue;
      if (is_free(*plans_[i], from)) {
        stopped_ = free_;
        return !free_;
      }
      const double more = plans_[i]->seconds / from.seconds - 1.0;
      const bool works_more = plans_[i]->work > from.work * (1.0 + kSameWork);
      if (!lower || (works && !works_more) || (works == works_more && more < seconds)) {
        works = works_more;
        seconds = more;
      }
      lower = true;
    }
    if (node < 0 || first_child_ == plans_.size()) return true;
    in_vain_.insert(role_);
    if (!lower) {
      refuse(node, kInVain);
    } else {
      note(plan(expanding_).paid_for, node,
           works ? "a loop would compute values again; name a budget to allow it"
                 : concat("a loop would take ", std::lround(100.0 * seconds),
                          " % more time; name a budget to allow it"));
    }
    return true;
  }
  void refuse(int node, const std::string& why) final {
    note(plan(expanding_).refusals, node, why);
  }

 private:
  const SearchRequest& request_;
  const Rates rates_;
  std::vector<std::unique_ptr<Plan>> plans_;
  std::vector<std::set<int>> asked_;  // by plan: nodes whose moves were considered
  std::vector<bool> explored_;        // by plan: all moves were considered
  std::vector<int> first_;            // by plan: the first plan with an equal graph
  int planned_ = 0;                   // distinct graphs
  std::vector<double> mass_;          // by plan: bytes near the peak times their duration
  std::vector<std::int64_t> inside_;  // by plan: the memory with chunks of one element
  int capacity_ = 1;
  std::set<std::uint64_t> in_vain_;  // roles whose moves were not free or lowered nothing
  std::uint64_t role_ = 0;
  bool bounded_ = false, free_ = true, skip_ = false, stopped_ = false;
  std::size_t expanding_ = 0, first_child_ = 0, free_choice_ = 0;

  void note(std::vector<std::string>& list, int node, const std::string& why) const {
    std::string text = concat(shown(plan(expanding_).graph, node), ": ", why);
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
  }

  // Tries larger chunks in small programs, where many rounds cost time.
  void try_larger_chunks() {
    if (request_.chunks > 0) return;
    const std::size_t end = plans_.size();
    for (std::size_t i = first_child_; i < end; ++i) {
      const Plan& from = plan(expanding_);
      if (plan(i).regions.size() <= from.regions.size()) continue;
      const std::size_t last = plan(i).regions.size() - 1;
      std::size_t at = i;
      for (const std::int64_t chunks : {8, 4, 2}) {
        if (!lowers(plan(at), from) || !same_work(plan(at)) || is_free(plan(at), from)) break;
        const ChunkedRegion& r = plan(at).regions[last];
        const std::int64_t chunk = chunk_of(r.extent, chunks, target());
        if (chunk <= r.chunk) continue;
        if (!consider(resized(plan(at), last, chunk))) return;
        at = plans_.size() - 1;
      }
    }
  }

  Plan& plan(std::size_t i) { return *plans_[i]; }
  const Plan& plan(std::size_t i) const { return *plans_[i]; }
  const Plan& root() const { return *plans_.front(); }

  // Returns an existing plan with an equal graph, made by the same moves in another order; -1:
  // none.
  int twin_of(const Graph& graph) const {
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      if (plan(i).graph.size() == graph.size() && same_graph(plan(i).graph, graph))
        return first_[i];
    }
    return -1;
  }

  void add(Move move, int twin = -1) {
    auto p = std::make_unique<Plan>();
    const bool known = twin >= 0 && plan(static_cast<std::size_t>(twin)).graph.size() > 0;
    p->program = known ? plan(static_cast<std::size_t>(twin)).program
                       : lower_without_offsets(move.graph, request_.target, request_.added,
                                               InstructionOrder::for_memory, request_.bodies);
    // Other plans get their offsets at the end if they are still needed.
    if (request_.with_scratch && !known) give_offsets(p->program);
    first_.push_back(twin >= 0 ? twin : static_cast<int>(plans_.size()));
    planned_ += twin < 0;
    p->graph = std::move(move.graph);
    p->regions = std::move(move.regions);
    p->bytes = p->program.value_bytes;
    p->arena_bytes = p->program.arena_bytes;
    p->work = p->program.multiply_adds;
    p->seconds = predicted_seconds(p->program, rates_);
    p->from = plans_.empty() ? -1 : static_cast<int>(expanding_);
    const std::size_t known_regions = p->from >= 0 ? plan(expanding_).regions.size() : 0;
    for (std::size_t i = known_regions; i < p->regions.size(); ++i) {
      ChunkedRegion& r = p->regions[i];
      const double before = plan(expanding_).work;
      r.before = plan(expanding_).bytes;
      r.extra_work = before > 0.0 ? p->work / before - 1.0 : 0.0;
    }
    for (ChunkedRegion& r : p->regions) {  // regions made by one move count as one
      if (r.before == p->regions.back().before) r.after = p->bytes;
    }
    mass_.push_back(mass_of(p->program));
    inside_.push_back(bytes_inside(*p));
    plans_.push_back(std::move(p));
    asked_.emplace_back();
    explored_.push_back(false);
  }

  static double mass_of(const Program& program) {
    constexpr double kNear = 0.9;
    const std::vector<std::int64_t> bytes = live_bytes(program, Counted::values);
    double mass = 0.0;
    if (bytes.empty()) return mass;
    const auto top = static_cast<double>(*std::max_element(bytes.begin(), bytes.end()));
    for (const std::int64_t b : bytes) mass += std::max(static_cast<double>(b) - kNear * top, 0.0);
    return mass;
  }

  // Returns the bytes that neither other loops nor smaller chunks can reduce; all bytes without a
  // loop.
  static std::int64_t bytes_inside(const Plan& p) {
    std::int64_t most = -1;
    for (const Instruction& i : p.program.instructions) {
      const auto* loop = std::get_if<LoopRun>(&i.what);
      if (loop == nullptr || loop->arena < 0) continue;
      const Buffer& values = p.program.buffers[static_cast<std::size_t>(loop->arena)];
      most = std::max(most, values.value_bytes / loop->chunk);
    }
    return most < 0 ? p.bytes : most;
  }

  // --- comparisons
  static bool lowers(const Plan& a, const Plan& from) {
    return a.bytes < from.bytes - from.bytes / kLeastShare;
  }
  bool same_work(const Plan& a) const { return a.work <= root().work * (1.0 + kSameWork); }
  bool is_free(const Plan& a, const Plan& from) const {
    if (!same_work(a)) return false;
    return request_.chunks > 0 || (a.seconds <= kMostFreeSeconds * root().seconds &&
                                   a.seconds <= kMostFreeSeconds * from.seconds);
  }
  bool beats(const Plan& a, const Plan& b) const {
    if (request_.with_scratch && a.arena_bytes > b.arena_bytes) return false;
    const bool less_scratch = request_.with_scratch && a.arena_bytes < b.arena_bytes;
    return a.bytes <= b.bytes && a.seconds <= b.seconds && a.work <= b.work * (1.0 + kSameWork) &&
           (a.bytes < b.bytes || less_scratch || a.seconds < b.seconds);
  }
  // Returns whether plan `i` may reach less memory than plan `than`, whose loops take much even
  // with chunks of one element. So plans with another cut of the same values stay beside it: pairs
  // of sequences, cut by rows.
  bool may_come_lower(std::size_t i, std::size_t than) const {
    constexpr std::int64_t kMuch = 16;
    return spacious() && inside_[than] * kMuch >= root().bytes && inside_[i] < inside_[than] / 2;
  }
  bool beaten(std::size_t i) const {
    for (std::size_t p = 0; p < plans_.size(); ++p) {
      if (p != i && beats(plan(p), plan(i)) && !may_come_lower(i, p)) return true;
    }
    return false;
  }
  // Score of a plan without a budget, the less the better: bytes and time on one logarithmic scale.
  double free_score(const Plan& p) const {
    return std::log(static_cast<double>(std::max<std::int64_t>(p.bytes, 1))) +
           kSecondsForBytes * p.seconds / root().seconds;
  }
  // Benefit of a move, the more the better: the fraction of bytes saved per fraction of time lost.
  static double gain(const Plan& p, const Plan& from) {
    constexpr double kNothing = 0.005;
    return std::log(static_cast<double>(from.bytes) /
                    static_cast<double>(std::max<std::int64_t>(p.bytes, 1))) /
           (std::max(p.seconds / from.seconds - 1.0, 0.0) + kNothing);
  }

  // --- descent
  void dive(std::size_t at, bool free) {
    for (int flat = 0; !bounded_;) {
      expand(at, free);
      std::size_t next = best_child(at, free);
      flat = next != at ? 0 : flat + 1;
      if (next == at && flat <= kMostFlat) next = flattest_child(at, free);
      if (next == at) break;
      next = with_fewer_chunks(next, free);
      forget(next);
      at = next;
      // Ends at a plan that another one beats. While only one of two equally high peaks is lowered
      // (flat > 0), the parent beats it, so the descent goes on.
      if (!free && flat == 0 && beaten(at)) break;
    }
    forget(at);
  }

  // Copies the findings of an explored plan to another plan of the same graph.
  void share_findings(std::size_t from, std::size_t to) {
    explored_[to] = true;
    if (from == to) return;
    plan(to).refusals = plan(from).refusals;
    plan(to).paid_for = plan(from).paid_for;
  }

  void expand(std::size_t at, bool free) {
    // Reuses the findings of the first plan with the same graph, if it has been explored.
    const auto first = static_cast<std::size_t>(first_[at]);
    if (explored_[first]) share_findings(first, at);
    if (explored_[at] || plan(at).graph.size() == 0) return;
    expanding_ = at;
    free_ = free;
    const std::vector<std::int64_t> bytes = live_bytes(plan(at).program, Counted::values);
    if (bytes.empty()) return;
    Peak peak;
    peak.instruction =
        static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
    peak.live = live_at(plan(at).program, peak.instruction, Counted::values);
    // Moves for an instruction's own memory come first if that is the largest buffer at the peak.
    const bool itself =
        !peak.live.empty() &&
        plan(at).program.buffers[static_cast<std::size_t>(peak.live.front())].node < 0;
    stopped_ = false;
    const auto ask = [&](bool of_instructions) {
      for (const MoveKind& kind : kKinds) {
        if (kind.of_instructions == of_instructions && !stopped_)
          kind.propose(plan(at), peak, *this);
      }
    };
    for (const bool skip : {true, false}) {
      skip_ = skip && free;
      ask(itself);
      ask(!itself);
      if (!free) break;
    }
    explored_[at] = explored_[at] || !free;
    if (explored_[at]) share_findings(at, first);
  }

  template <typename Wanted>
  std::vector<std::size_t> children(std::size_t at, Wanted&& wanted) const {
    std::vector<std::size_t> list;
    for (std::size_t i = at + 1; i < plans_.size(); ++i) {
      if (plan(i).from == static_cast<int>(at) && plan(i).graph.size() > 0 && wanted(plan(i)))
        list.push_back(i);
    }
    return list;
  }
  // Returns the child with the best score, or the plan itself if no child improves on it.
  std::size_t best_child(std::size_t at, bool free) const {
    const Plan& from = plan(at);
    std::size_t best = at;
    for (const std::size_t i : children(at, [&](const Plan& p) { return lowers(p, from); })) {
      const Plan& p = plan(i);
      if (free && !is_free(p, from)) continue;
      // The first of equal candidates wins: it cuts the outer dimension.
      const bool better = best == at || (free ? free_score(p) < free_score(plan(best)) - 1e-3
                                              : gain(p, from) > 1.001 * gain(plan(best), from));
      if (better) best = i;
    }
    return best;
  }
  // Returns a child whose peak is equally high: of two equal peaks the move lowered one.
  std::size_t flattest_child(std::size_t at, bool free) const {
    constexpr double kLess = 0.9;
    const Plan& from = plan(at);
    std::size_t best = at;
    for (const std::size_t i : children(at, [&](const Plan& p) { return p.bytes <= from.bytes; })) {
      if (free && !is_free(plan(i), from)) continue;
      if (mass_[i] < kLess * mass_[at] && (best == at || mass_[i] < mass_[best])) best = i;
    }
    return best;
  }

  // Returns a plan with larger chunks in the latest loops, as long as that costs almost no memory.
  std::size_t with_fewer_chunks(std::size_t at, bool free) {
    if (request_.chunks > 0 || plan(at).from < 0 ||
        plan(at).regions.size() <= plan(static_cast<std::size_t>(plan(at).from)).regions.size())
      return at;
    const std::size_t last = plan(at).regions.size() - 1;
    const std::int64_t most = plan(at).bytes + root().bytes / kLeastShare / 4;
    for (const std::int64_t chunks : {8, 4, 2}) {
      const ChunkedRegion& r = plan(at).regions[last];
      const std::int64_t chunk = chunk_of(r.extent, chunks, target());
      if (chunk <= r.chunk) continue;
      expanding_ = static_cast<std::size_t>(plan(at).from);
      if (!consider(resized(plan(at), last, chunk))) break;
      const std::size_t made = plans_.size() - 1;
      if (plan(made).bytes > most || (free && !is_free(plan(made), plan(expanding_)))) break;
      at = made;
    }
    return at;
  }

  // Drops graphs and programs of plans that will be neither chosen nor explored.
  void forget(std::size_t but) {
    for (std::size_t i = 1; i < plans_.size(); ++i) {
      if (i == but || i == free_choice_ || plan(i).graph.size() == 0 || !beaten(i)) continue;
      plan(i).graph = {};
      plan(i).program = {};
    }
  }

  // --- results
  std::size_t least() const {
    std::size_t least = 0;
    for (std::size_t i = 1; i < plans_.size(); ++i) {
      if (same_work(plan(i)) && is_free(plan(i), root()) && plan(i).bytes < plan(least).bytes &&
          plan(i).graph.size() > 0)
        least = i;
    }
    return least;
  }
  // Returns the first unexplored plan that no other plan beats.
  int unexplored() const {
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      if (!explored_[i] && plan(i).graph.size() > 0 && !beaten(i)) return static_cast<int>(i);
    }
    return -1;
  }
  std::size_t free_choice() const {
    std::size_t best = 0;
    for (std::size_t i = 1; i < plans_.size(); ++i) {
      const bool better = request_.chunks > 0 ? plan(i).bytes < plan(best).bytes
                                              : free_score(plan(i)) < free_score(plan(best));
      if (plan(i).graph.size() > 0 && is_free(plan(i), root()) && better) best = i;
    }
    return best;
  }
};

}  // namespace

std::span<const MoveKind> move_kinds() { return kKinds; }

std::string shown(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  const std::string& place = n.attributes->location;
  return concat(title_of(n), n.name.empty() ? "" : " %" + n.name, " ", text_of(n.results[0]),
                place.empty() ? "" : ", " + place);
}

SearchResult search(const Graph& graph, const SearchRequest& request) {
  return Search(request).run(graph);
}

}  // namespace logitless::ir
