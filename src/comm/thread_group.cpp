// Communicator of threads. Each copies its data from the other ranks' memory between two barriers:
// one when all have arrived, one when all have copied.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/call_text.h"
#include "core/check.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

struct Call {
  std::string_view kind;
  const std::byte* mine = nullptr;
  std::size_t bytes_each = 0;
};

class ThreadGroup {
 public:
  ThreadGroup(int size, milliseconds limit)
      : limit_(limit), ranks_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(ranks_.size()); }

  // Barrier that runs copy(), when all have arrived and none has left.
  template <typename Copy>
  void rendezvous(int rank, const Call& call, const Copy& copy) {
    std::unique_lock lock(mutex_);
    throw_if_failed();
    Rank& self = ranks_[static_cast<std::size_t>(rank)];
    self.call = call;
    const std::uint64_t number = ++self.arrived;
    const auto all_arrived = [&] { return all_at(&Rank::arrived, number); };
    if (all_arrived()) changed_.notify_all();
    const auto stop = [&] { return all_arrived() || !failure_.empty(); };
    if (!stop()) check_gone(number);
    if (!changed_.wait_for(lock, limit_, stop)) {
      set_failure(concat(ranks_text(missing(number)), " of ", size(), " did not arrive within ",
                         limit_.count(), " ms"),
                  number);
    }
    // A failure before the last arrival makes the last rank throw: either all continue or none.
    if (!all_arrived()) throw_if_failed();
    const std::string difference = difference_of_calls(number);
    if (!difference.empty()) {
      if (failure_.empty()) failure_ = difference;
      changed_.notify_all();
    }
    lock.unlock();
    // The other ranks' entries do not change until this rank has copied.
    if (difference.empty()) copy();
    lock.lock();
    self.copied = number;
    const auto all_copied = [&] { return all_at(&Rank::copied, number); };
    if (all_copied()) changed_.notify_all();
    // There is no limit, since all are copying. Memory must not be read after its owner's call has
    // returned.
    changed_.wait(lock, all_copied);
    if (!difference.empty()) throw InvalidArgument(difference);
  }

  const Call& call_of(int rank) const { return ranks_[static_cast<std::size_t>(rank)].call; }

  void leave(int rank) noexcept {
    const std::lock_guard lock(mutex_);
    Rank& self = ranks_[static_cast<std::size_t>(rank)];
    self.gone = true;
    std::uint64_t furthest = 0;
    for (const Rank& r : ranks_) furthest = std::max(furthest, r.arrived);
    if (furthest > self.arrived) check_gone(furthest);
  }

  void abort(int rank, std::string_view reason) noexcept {
    const std::lock_guard lock(mutex_);
    const Rank& self = ranks_[static_cast<std::size_t>(rank)];
    set_failure(concat("rank ", rank, " gave up: ", reason), self.arrived + 1);
  }

  void check() const {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }

 private:
  struct Rank {
    Call call;
    std::uint64_t arrived = 0, copied = 0;  // numbers of calls
    bool gone = false;
  };

  bool all_at(std::uint64_t Rank::*progress, std::uint64_t number) const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](const Rank& r) { return r.*progress >= number; });
  }

  std::vector<int> missing(std::uint64_t number) const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (ranks_[static_cast<std::size_t>(r)].arrived < number) ranks.push_back(r);
    }
    return ranks;
  }

  void check_gone(std::uint64_t number) {
    std::vector<int> gone;
    for (const int r : missing(number)) {
      if (ranks_[static_cast<std::size_t>(r)].gone) gone.push_back(r);
    }
    if (!gone.empty())
      set_failure(concat(ranks_text(gone), " of ", size(), " left before it"), number);
  }

  // Records the first failure, in or before the call of this number.
  void set_failure(const std::string& what, std::uint64_t number) {
    if (failure_.empty()) {
      const auto waits = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) {
        return r.arrived == number && r.copied < number;
      });
      failure_ = concat("communicator: ",
                        waits == ranks_.end()
                            ? concat("call ", number)
                            : call_text(number, waits->call.kind, waits->call.bytes_each),
                        ": ", what);
    }
    changed_.notify_all();
  }

  void throw_if_failed() const {
    if (!failure_.empty()) throw DeviceError(failure_);
  }

  // Returns "" when all ranks make the same call, else the first difference. The same on every
  // rank.
  std::string difference_of_calls(std::uint64_t number) const {
    const Call& first = ranks_.front().call;
    for (std::size_t r = 1; r < ranks_.size(); ++r) {
      const Call& call = ranks_[r].call;
      if (call.kind == first.kind && call.bytes_each == first.bytes_each) continue;
      return concat("communicator: call ", number, ": rank ", r, ": ",
                    exchange_text(call.kind, call.bytes_each),
                    ", rank 0: ", exchange_text(first.kind, first.bytes_each));
    }
    return "";
  }

  const milliseconds limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::string failure_;  // not empty: the group has failed
};

class ThreadRank final : public Communicator {
 public:
  ThreadRank(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;
  ~ThreadRank() override { group_->leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  DeviceKind device() const override { return DeviceKind::cpu; }

  void all_gather(const void* mine, void* all, std::size_t bytes_each, void*) override {
    group_->rendezvous(rank_, {"all_gather", static_cast<const std::byte*>(mine), bytes_each},
                       [&] { copy_from_all(all, bytes_each, 0); });
  }

  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each, void*) override {
    group_->rendezvous(
        rank_, {"all_to_all", static_cast<const std::byte*>(slices), bytes_each}, [&] {
          copy_from_all(slices_of_all, bytes_each, static_cast<std::size_t>(rank_) * bytes_each);
        });
  }

  bool capturable() const override { return false; }
  void wait(void*, milliseconds) override { group_->check(); }
  void check() override { group_->check(); }
  void abort(std::string_view reason) noexcept override { group_->abort(rank_, reason); }

 private:
  void copy_from_all(void* to, std::size_t bytes_each, std::size_t offset) const {
    if (bytes_each == 0) return;
    std::byte* out = static_cast<std::byte*>(to);
    for (int r = 0; r < group_->size(); ++r, out += bytes_each) {
      const std::byte* const from = group_->call_of(r).mine + offset;
      if (from != out) std::memcpy(out, from, bytes_each);
    }
  }

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_thread_group(int size, milliseconds limit) {
  require(size >= 1, "make_thread_group: size: expected 1 or more, got ", size);
  require(limit.count() >= 1, "make_thread_group: limit: expected 1 ms or more, got ",
          limit.count());
  // Limits the wait to a century, within the clock's range.
  const auto most = std::chrono::duration_cast<milliseconds>(std::chrono::years(100));
  const auto group = std::make_shared<ThreadGroup>(size, std::min(limit, most));
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(std::make_shared<ThreadRank>(group, rank));
  return ranks;
}

}  // namespace logitless
