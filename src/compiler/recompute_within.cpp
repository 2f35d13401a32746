#include "compiler/recompute_within.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "compiler/ops/op.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lower.h"

namespace logitless::ir {
namespace {

constexpr int kMostCuts = 32;
constexpr int kSamples = 8;  // points of the curve in a report
// Resolution: the bisection ends at this fraction of the range.
constexpr std::int64_t kParts = 256;
constexpr std::int64_t kNear = 16;  // fraction of the range at which neighbours are compared

using Point = RecomputeCurve::Point;

int recomputed_values(const Graph& graph, const Point& point) {
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

// Returns the multiply-adds in 16 bit that the machine does in the time of one byte of traffic.
double multiply_adds_per_byte(const Rates& rates) { return rates.products16 / (2.0 * rates.bytes); }

// Returns a lower bound of the time of so many multiply-adds.
double least_seconds(double multiply_adds, const Rates& rates) {
  return 2.0 * multiply_adds / std::max(rates.products16, rates.products32);
}

// Bisection over the bytes that a choice may keep live at the peak. Each value of `kept` names the
// choice of least work that keeps at most so many bytes.
//
// The midpoints do not depend on the budget. A choice that fits into one budget fits into any
// larger one. There the bisection turns to the same half or to the one with less work, so no budget
// gets more work than a smaller one.
//
// The less is kept, the lower is the peak, until the recomputed values themselves live at the peak.
// Choices beyond that point need more memory again and are no use.
class Search {
 public:
  Search(const Graph& graph, const Program& program, const ChunkRequest& request,
         RecomputeCuts* cuts = nullptr)
      : graph_(graph),
        program_(program),
        request_(request),
        curve_(graph, multiply_adds_per_byte(request.target.rates()), stored_nodes(graph)),
        most_(curve_.cheapest()),
        least_(curve_.smallest()),
        cuts_(cuts != nullptr ? *cuts : own_cuts_) {
    if (cuts == nullptr || (cuts->curve && curve_.same_choices(*cuts->curve))) return;
    cuts->curve.emplace(curve_);
    cuts->between.clear();
  }

  std::optional<RecomputeChoice> within(double seconds) {
    if (most_.kept <= least_.kept) return std::nullopt;
    const double base = predicted_seconds(program_, request_.target.rates());
    const double more = keeping(most_kept_within(request_.budget)).multiply_adds;
    if (base + least_seconds(more, request_.target.rates()) >= seconds) return std::nullopt;
    const auto fitting = halve([&](const Point& point) {
      if (point.kept > most_kept_within(request_.budget)) return Way::less;
      return way(point, request_.budget);
    });
    return fitting && fitting->seconds < seconds ? std::optional(whole(*fitting)) : std::nullopt;
  }

  std::optional<RecomputeChoice> least() {
    if (most_.kept <= least_.kept) return std::nullopt;
    halve([&](const Point& point) { return way(point, /*budget=*/0); });
    const bool lower =
        smallest_ && bytes_of(smallest_->program, request_) < bytes_of(program_, request_);
    return lower ? std::optional(whole(*smallest_)) : std::nullopt;
  }

  std::vector<RecomputeChoice> sample() {
    std::vector<RecomputeChoice> choices;
    std::int64_t last = most_.kept;
    for (int i = 1; i <= kSamples; ++i) {
      const Point point = keeping(most_.kept - (most_.kept - least_.kept) * i / kSamples);
      if (point.kept >= last) continue;
      last = point.kept;
      choices.push_back(whole(*made(point)));
    }
    return choices;
  }

 private:
  enum class Way { fits, more, less };  // of the values kept, if the choice does not fit

  const Graph& graph_;
  const Program& program_;
  const ChunkRequest& request_;
  const RecomputeCurve curve_;
  const Point most_, least_;
  RecomputeCuts own_cuts_;
  RecomputeCuts& cuts_;
  std::map<std::int64_t, std::int64_t> bytes_;  // memory of choices, by `kept`
  // The choice lowered last, and the choice of the least memory.
  std::shared_ptr<const RecomputeChoice> last_, smallest_;

  // Returns the curve's choice between two others. Each bisection begins at the same ends, so
  // results are cached.
  const std::optional<Point>& between(const Point& more, const Point& less) {
    const auto [found, is_new] = cuts_.between.try_emplace({more.weight, less.weight});
    if (is_new) found->second = curve_.between(more, less);
    return found->second;
  }
  // Returns the choice of least work that keeps at most `kept` bytes, or the smallest choice if
  // none does.
  Point keeping(std::int64_t kept) {
    Point more = most_, less = least_;
    for (int i = 0; i < kMostCuts; ++i) {
      const std::optional<Point>& middle = between(more, less);
      if (!middle) break;
      (middle->kept > kept ? more : less) = *middle;
    }
    return less;
  }
  // Returns an upper bound of `kept`: giving up a value lowers the peak by at most its bytes.
  std::int64_t most_kept_within(std::int64_t budget) const {
    return most_.kept - (bytes_of(program_, request_) - budget);
  }

  // Lowers the choice of a point and predicts its time.
  std::shared_ptr<const RecomputeChoice> made(const Point& point) {
    auto choice = std::make_shared<RecomputeChoice>();
    choice->graph = curve_.graph_of(point);
    choice->program = lower_without_offsets(choice->graph, request_.target, request_.added,
                                            InstructionOrder::for_memory, request_.bodies);
    if (request_.with_scratch) give_offsets(choice->program);
    choice->seconds = predicted_seconds(choice->program, request_.target.rates());
    choice->values = recomputed_values(graph_, point);
    choice->given_up = most_.kept - point.kept;
    choice->multiply_adds = choice->program.multiply_adds - program_.multiply_adds;
    const std::int64_t bytes = bytes_[point.kept] = bytes_of(choice->program, request_);
    if (!smallest_ || bytes < bytes_of(smallest_->program, request_)) smallest_ = choice;
    return last_ = choice;
  }
  RecomputeChoice whole(RecomputeChoice choice) const {
    if (!request_.with_scratch) give_offsets(choice.program);
    return choice;
  }
  std::int64_t bytes_with(const Point& point) {
    const auto found = bytes_.find(point.kept);
    return found != bytes_.end() ? found->second : bytes_of(made(point)->program, request_);
  }

  Way way(const Point& point, std::int64_t budget) {
    const std::int64_t bytes = bytes_with(point);
    if (bytes <= budget) return Way::fits;
    return bytes > bytes_before(point) ? Way::more : Way::less;
  }
  // Returns the memory of a neighbouring choice that keeps more.
  std::int64_t bytes_before(const Point& point) {
    std::int64_t more = std::max<std::int64_t>((most_.kept - least_.kept) / kNear, 1);
    for (; point.kept + more < most_.kept; more *= 2) {
      const Point near = keeping(point.kept + more);
      if (near.kept > point.kept) return bytes_with(near);
    }
    return bytes_of(program_, request_);
  }

  // Bisects. `ask(point)` says whether a choice fits, or else which half is next. Returns the last
  // choice that fits, or null.
  template <typename Ask>
  std::shared_ptr<const RecomputeChoice> halve(Ask&& ask) {
    std::shared_ptr<const RecomputeChoice> fitting;
    const std::int64_t part = std::max<std::int64_t>((most_.kept - least_.kept) / kParts, 1);
    // Exclusive and inclusive bounds of `kept`.
    std::int64_t low = least_.kept - 1, high = most_.kept;
    while (high - low > part) {
      const std::int64_t middle = low + (high - low) / 2;
      const Point point = keeping(middle);
      const Way way = point.kept > low ? ask(point) : Way::more;
      if (point.kept > low && way == Way::fits)
        fitting = last_ && bytes_kept(*last_) == point.kept ? last_ : made(point);
      way == Way::less ? high = point.kept : low = middle;
    }
    return fitting;
  }
  std::int64_t bytes_kept(const RecomputeChoice& choice) const {
    return most_.kept - choice.given_up;
  }
};

}  // namespace

std::optional<RecomputeChoice> recompute_within(const Graph& graph, const Program& program,
                                                const ChunkRequest& request, double seconds,
                                                RecomputeCuts* cuts) {
  return Search(graph, program, request, cuts).within(seconds);
}

std::optional<RecomputeChoice> least_recomputed(const Graph& graph, const Program& program,
                                                const ChunkRequest& request) {
  return Search(graph, program, request).least();
}

std::vector<RecomputeChoice> sample_recomputed(const Graph& graph, const Program& program,
                                               const ChunkRequest& request) {
  return Search(graph, program, request).sample();
}

}  // namespace logitless::ir
