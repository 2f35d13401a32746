#include "compiler/plan/schedule.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <tuple>

#include "core/check.h"

namespace logitless::ir {
namespace {

using Order = std::vector<int>;
using Mask = std::uint64_t;

constexpr int kMostExact = 64;        // steps in a mask
constexpr int kWindow = 32;           // steps of a window that is ordered separately
constexpr int kMostSets = 1 << 14;    // sets visited for one order
constexpr int kMostWindowSets = 512;  // sets visited for a window
constexpr int kMostWindows = 64;
constexpr int kMostRounds = 4;

Lists<int> steps_by_value(const Schedule& s) {
  return Lists<int>::grouped(s.bytes.size(), [&](auto&& put) {
    for (std::size_t i = 0; i < s.steps(); ++i) {
      for (const int v : s.values[i]) put(static_cast<std::size_t>(v), static_cast<int>(i));
    }
  });
}

// The live values while steps run in an order.
class Memory {
 public:
  explicit Memory(const Schedule& s) : s_(s), steps_(s.bytes.size()) {
    for (std::size_t i = 0; i < s.steps(); ++i) {
      for (const int v : s.values[i]) ++steps_[static_cast<std::size_t>(v)];
    }
    left_ = steps_;
  }

  // Returns the live bytes while the step runs, and the growth after it.
  std::int64_t during(int step) const {
    std::int64_t bytes = live_;
    for (const int v : values(step)) bytes += begins(v) ? size(v) : 0;
    for (const auto& [from, to] : s_.takes[static_cast<std::size_t>(step)]) {
      if (left(from) == 1 && begins(to)) return bytes - size(to);
    }
    return bytes;
  }
  std::int64_t growth(int step) const {
    std::int64_t bytes = 0;
    for (const int v : values(step))
      bytes += (begins(v) ? size(v) : 0) - (left(v) == 1 ? size(v) : 0);
    return bytes;
  }
  // Runs a step. Reports values whose other steps may now grow memory by less.
  template <typename Tell>
  void run(int step, Tell&& tell) {
    live_ += growth(step);
    for (const int v : values(step)) {
      const bool first = begins(v);
      const bool one = --left_[static_cast<std::size_t>(v)] == 1;
      if (first || one) tell(v);
    }
  }

 private:
  const Schedule& s_;
  std::vector<int> steps_;  // by value: number of steps that name it
  std::vector<int> left_;   // by value: number of these steps that have not run
  std::int64_t live_ = 0;

  std::span<const int> values(int step) const { return s_.values[static_cast<std::size_t>(step)]; }
  std::int64_t size(int v) const { return s_.bytes[static_cast<std::size_t>(v)]; }
  int left(int v) const { return left_[static_cast<std::size_t>(v)]; }
  bool begins(int v) const { return left(v) == steps_[static_cast<std::size_t>(v)]; }
};

struct Peak {
  std::int64_t bytes = 0;
  int at = 0;  // its first position in the order
};
Peak find_peak(const Schedule& s, const Order& order) {
  Memory memory(s);
  Peak peak{-1, 0};
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t bytes = memory.during(order[i]);
    if (bytes > peak.bytes) peak = {bytes, static_cast<int>(i)};
    memory.run(order[i], [](int) {});
  }
  return peak;
}

// A lower bound of the peak of all orders: the bytes that one step names are live together.
std::int64_t least_peak(const Schedule& s) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < s.steps(); ++i) {
    std::int64_t bytes = 0, taken = 0;
    for (const int v : s.values[i]) bytes += s.bytes[static_cast<std::size_t>(v)];
    for (const auto& [from, to] : s.takes[i])
      taken = std::max(taken, s.bytes[static_cast<std::size_t>(to)]);
    most = std::max(most, bytes - taken);
  }
  return most;
}

// --- many steps

// Renumbers the steps: step i of the result is order[i].
Schedule renumbered(const Schedule& s, const Order& order) {
  std::vector<int> place(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    place[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  Schedule to{s.bytes, {}, {}, {}};
  to.values.reserve(s.steps(), s.values.items());
  to.after.reserve(s.steps(), s.after.items());
  for (const int step : order) {
    const auto at = static_cast<std::size_t>(step);
    to.values.add(s.values[at]);
    to.takes.add(s.takes[at]);
    for (const int before : s.after[at]) to.after.put(place[static_cast<std::size_t>(before)]);
    to.after.end_list();
  }
  return to;
}

// Returns for each step the steps that wait for it.
Lists<int> steps_behind(const Schedule& s) {
  return Lists<int>::grouped(s.steps(), [&](auto&& put) {
    for (std::size_t i = 0; i < s.steps(); ++i) {
      for (const int before : s.after[i])
        put(static_cast<std::size_t>(before), static_cast<int>(i));
    }
  });
}

// Reverses time, which does not change the live values.
Schedule reversed(const Schedule& s) {
  const std::size_t count = s.steps();
  const Lists<int> behind = steps_behind(s);
  Schedule to{s.bytes, {}, {}, {}};
  to.values.reserve(count, s.values.items());
  to.after.reserve(count, s.after.items());
  for (std::size_t i = count; i-- > 0;) {
    to.values.add(s.values[i]);
    for (const auto& [from, into] : s.takes[i]) to.takes.put({into, from});
    to.takes.end_list();
    for (const int next : behind[i]) to.after.put(static_cast<int>(count) - 1 - next);
    to.after.end_list();
  }
  return to;
}

// Keeps the given order, but runs steps early that do not grow memory. They run as soon as they are
// ready and need no more than `most` bytes.
Order eager(const Schedule& s, std::int64_t most) {
  const std::size_t count = s.steps();
  std::vector<int> waiting(count);
  const Lists<int> next = steps_behind(s), steps_of = steps_by_value(s);
  std::vector<bool> ran(count), in_free(count);
  using Queue = std::priority_queue<int, std::vector<int>, std::greater<>>;
  Queue ready, free;  // subsets of the ready steps that may pay
  std::vector<int> put_off;
  const auto may_pay = [&](int step) {
    const auto at = static_cast<std::size_t>(step);
    if (waiting[at] > 0 || ran[at] || in_free[at]) return;
    in_free[at] = true;
    free.push(step);
  };
  for (std::size_t i = 0; i < count; ++i) {
    waiting[i] = static_cast<int>(s.after[i].size());
    if (waiting[i] == 0) ready.push(static_cast<int>(i));
    may_pay(static_cast<int>(i));
  }
  Memory memory(s);
  Order order;
  order.reserve(count);
  const auto run = [&](int step) {
    ran[static_cast<std::size_t>(step)] = true;
    order.push_back(step);
    memory.run(step, [&](int value) {
      for (const int other : steps_of[static_cast<std::size_t>(value)]) may_pay(other);
    });
    for (const int other : next[static_cast<std::size_t>(step)]) {
      if (--waiting[static_cast<std::size_t>(other)] > 0) continue;
      ready.push(other);
      may_pay(other);
    }
  };
  while (order.size() < count) {
    if (!free.empty()) {
      const int step = free.top();
      free.pop();
      in_free[static_cast<std::size_t>(step)] = false;
      if (ran[static_cast<std::size_t>(step)] || memory.growth(step) > 0) continue;
      if (memory.during(step) <= most) {
        run(step);
      } else {
        put_off.push_back(step);
      }
      continue;
    }
    const int step = ready.top();
    ready.pop();
    if (ran[static_cast<std::size_t>(step)]) continue;
    run(step);
    for (const int again : put_off) may_pay(again);
    put_off.clear();
  }
  return order;
}

Order composed(const Order& outer, const Order& inner) {
  Order order;
  order.reserve(inner.size());
  for (const int i : inner) order.push_back(outer[static_cast<std::size_t>(i)]);
  return order;
}

// --- few steps: the optimum

// A hash table from sets of steps to the lowest peak at which the set has run.
class Peaks {
 public:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  // Returns a reference that is valid until the next call; kNone for a new set.
  std::int64_t& of(Mask set) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    Slot& slot = slot_of(set);
    if (!slot.used) {
      slot = {set, kNone, true};
      ++count_;
    }
    return slot.peak;
  }

 private:
  struct Slot {
    Mask set = 0;
    std::int64_t peak = kNone;
    bool used = false;
  };
  // Size is a power of two, at most half of it used.
  std::vector<Slot> slots_ = std::vector<Slot>(64);
  std::size_t count_ = 0;

  Slot& slot_of(Mask set) {
    const Mask mixed = (set ^ set >> 32) * 0x9e3779b97f4a7c15u;
    std::size_t at = static_cast<std::size_t>(mixed ^ mixed >> 32) & (slots_.size() - 1);
    while (slots_[at].used && slots_[at].set != set) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }
  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    std::swap(old, slots_);
    for (const Slot& slot : old) {
      if (slot.used) slot_of(slot.set) = slot;
    }
  }
};

// A window of an order: steps first .. first + count - 1, by their positions in it.
class Window {
 public:
  // `steps`: steps_by_value(s). `most`: the peak to improve on.
  Window(const Schedule& s, const Lists<int>& steps, const Order& order, int first, int count,
         std::int64_t most)
      : count_(count), most_(most) {
    std::vector<int> place(order.size());
    for (std::size_t i = 0; i < order.size(); ++i)
      place[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
    const auto inside = [&](int at) { return at >= first && at < first + count; };
    std::vector<int> number(s.bytes.size(), -1);
    for (std::size_t v = 0; v < s.bytes.size(); ++v) {
      Inner inner{s.bytes[v], 0, false, false};
      for (const int step : steps[v]) {
        const int at = place[static_cast<std::size_t>(step)];
        if (inside(at)) inner.steps |= Mask{1} << (at - first);
        inner.lives = inner.lives || at < first;
        inner.stays = inner.stays || at >= first + count;
      }
      if (inner.lives && (inner.stays || inner.steps != 0)) live_ += inner.bytes;
      if (inner.steps == 0) continue;
      number[v] = static_cast<int>(values_.size());
      values_.push_back(inner);
    }
    for (int i = 0; i < count; ++i) {
      const auto from = static_cast<std::size_t>(order[static_cast<std::size_t>(first + i)]);
      Step& step = steps_.emplace_back();
      for (const int v : s.values[from]) step.values.push_back(number[static_cast<std::size_t>(v)]);
      for (const auto& [a, b] : s.takes[from])
        step.takes.emplace_back(number[static_cast<std::size_t>(a)],
                                number[static_cast<std::size_t>(b)]);
      for (const int before : s.after[from]) {
        const int at = place[static_cast<std::size_t>(before)];
        if (inside(at)) step.after |= Mask{1} << (at - first);
      }
    }
  }

  // Returns the order of the lowest peak, as positions in the window. Searches sets of finished
  // steps by increasing peak (Dijkstra). Returns nothing if no peak is below `most`, or if more
  // than `sets` sets are needed.
  std::optional<Order> best(int sets) {
    push({0, 0, live_, -1, -1});
    while (!queue_.empty() && static_cast<int>(found_.size()) <= sets) {
      const int at = std::get<2>(queue_.top());
      queue_.pop();
      const Found now = found_[static_cast<std::size_t>(at)];
      if (now.peak > seen_.of(now.ran)) continue;  // found with a lower peak meanwhile
      if (std::popcount(now.ran) == count_) return way_to(at);
      extend(now, at);
    }
    return std::nullopt;
  }
  // After best(): returns whether the search was complete, so that no lower order exists.
  bool seen_all() const { return queue_.empty(); }

 private:
  struct Inner {
    std::int64_t bytes;
    Mask steps;         // steps of the window that name it
    bool lives, stays;  // named before, after the window
  };
  struct Step {
    std::vector<int> values;
    std::vector<std::pair<int, int>> takes;
    Mask after = 0;
  };
  struct Found {
    Mask ran;
    std::int64_t peak, live;
    int from, step;  // predecessor of the state
  };
  const int count_;
  const std::int64_t most_;
  std::vector<Inner> values_;
  std::vector<Step> steps_;
  std::int64_t live_ = 0;
  std::vector<Found> found_;
  std::vector<Found> all_;  // extend(): possible next states
  Peaks seen_;              // lowest peak of each set
  using Entry = std::tuple<std::int64_t, int, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;

  bool begins(Mask ran, int v) const {
    const Inner& inner = values_[static_cast<std::size_t>(v)];
    return !inner.lives && (inner.steps & ran) == 0;
  }
  bool ends(Mask ran, int v, int step) const {
    const Inner& inner = values_[static_cast<std::size_t>(v)];
    return !inner.stays && (inner.steps & ~ran) == Mask{1} << step;
  }
  std::int64_t size(int v) const { return values_[static_cast<std::size_t>(v)].bytes; }

  Found after(const Found& now, int at, int step) const {
    const Step& what = steps_[static_cast<std::size_t>(step)];
    std::int64_t during = now.live, live = now.live, taken = 0;
    for (const int v : what.values) {
      during += begins(now.ran, v) ? size(v) : 0;
      live += (begins(now.ran, v) ? size(v) : 0) - (ends(now.ran, v, step) ? size(v) : 0);
    }
    for (const auto& [from, to] : what.takes) {
      if (taken == 0 && ends(now.ran, from, step) && begins(now.ran, to)) taken = size(to);
    }
    return {now.ran | Mask{1} << step, std::max(now.peak, during - taken), live, at, step};
  }

  void push(const Found& to) {
    if (to.peak >= most_) return;
    std::int64_t& lowest = seen_.of(to.ran);
    if (lowest <= to.peak) return;
    lowest = to.peak;
    queue_.emplace(to.peak, -std::popcount(to.ran), static_cast<int>(found_.size()));
    found_.push_back(to);
  }

  void extend(const Found& now, int at) {
    all_.clear();
    for (int step = 0; step < count_; ++step) {
      if ((now.ran >> step & 1) != 0) continue;
      if ((steps_[static_cast<std::size_t>(step)].after & ~now.ran) != 0) continue;
      all_.push_back(after(now, at, step));
      // A step that neither grows memory nor raises the peak can go first.
      if (all_.back().live <= now.live && all_.back().peak == now.peak) {
        push(all_.back());
        return;
      }
    }
    for (const Found& to : all_) push(to);
  }

  Order way_to(int at) const {
    Order order;
    for (; found_[static_cast<std::size_t>(at)].step >= 0;
         at = found_[static_cast<std::size_t>(at)].from)
      order.push_back(found_[static_cast<std::size_t>(at)].step);
    std::reverse(order.begin(), order.end());
    return order;
  }
};

// Orders windows around the peak, each optimally, as long as that lowers the peak.
void order_windows(const Schedule& s, Order& order, Peak& peak) {
  const int count = static_cast<int>(order.size());
  const Lists<int> steps = steps_by_value(s);
  for (int round = 0; round < kMostWindows; ++round) {
    const int size = std::min(kWindow, count);
    const int first = std::clamp(peak.at - size / 2, 0, count - size);
    const std::optional<Order> better =
        Window(s, steps, order, first, size, peak.bytes).best(kMostWindowSets);
    if (!better) return;
    const Order before(order.begin() + first, order.begin() + first + size);
    const Order now = composed(before, *better);
    std::copy(now.begin(), now.end(), order.begin() + first);
    peak = find_peak(s, order);
  }
}

}  // namespace

std::int64_t peak_of(const Schedule& schedule, const std::vector<int>& order) {
  return std::max<std::int64_t>(find_peak(schedule, order).bytes, 0);
}

std::vector<int> order_of_least_peak(const Schedule& s) {
  const int count = static_cast<int>(s.steps());
  Order best(s.steps());
  std::iota(best.begin(), best.end(), 0);
  Peak peak = find_peak(s, best);
  const std::int64_t least = least_peak(s);
  if (peak.bytes <= least) return best;
  if (count <= kMostExact) {
    Window all(s, steps_by_value(s), best, 0, count, peak.bytes);
    if (std::optional<Order> order = all.best(kMostSets)) return *order;
    if (all.seen_all()) return best;
  }
  const auto keep = [&](Order order) {
    const Peak now = find_peak(s, order);
    if (now.bytes >= peak.bytes) return false;
    best = std::move(order);
    peak = now;
    return true;
  };
  for (int round = 0; round < kMostRounds && peak.bytes > least; ++round) {
    const Order early = composed(best, eager(renumbered(s, best), peak.bytes));
    const Order backwards(early.rbegin(), early.rend());
    Order late = composed(backwards, eager(reversed(renumbered(s, early)), peak.bytes));
    std::reverse(late.begin(), late.end());
    const bool lower = keep(early);
    if (!keep(std::move(late)) && !lower) break;
  }
  order_windows(s, best, peak);
  return best;
}

}  // namespace logitless::ir
