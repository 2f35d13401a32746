// Communicator over NCCL. On one host, exchanges into exchange_memory use the copy engines instead.
//
//            options.limit exceeded, NCCL's error, abort(),
//            another rank aborted or ended without this call
//   working ------------------------------------------------> failed
//      | ~Nccl                                                  | ~Nccl
//      v                                                        v
//   finalize (NCCL completes its work), close, free          close, free
//
// fail() makes the transition, once. It posts it on the board, for the other ranks; it aborts NCCL,
// which ends NCCL kernels that wait for them; and a thread begins to release this GPU's waits for
// their copies. Later calls throw. Closing unmaps the other ranks' memory; this rank's own is freed
// once they have closed it, too.
//
// The board (rank_board.h) is a table in shared memory, where ranks post the number of their last
// call, and whether they have aborted. So a rank that waits learns which others will never come.
//
// The host waits for other ranks in poll(), up to a limit that fails the group. The exception is
// the split of a blocking communicator, which NCCL completes inside the call.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "comm/call_text.h"
#include "comm/rank_board.h"
#include "core/check.h"
#include "kernels/device/exchange.h"
#include "kernels/device/module.h"
#include "kernels/device/peers.h"
#include "kernels/device/stream.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

// Returns whether NCCL_P2P_DISABLE forbids peer access, on hosts whose GPUs wrongly report it.
bool forbids_peers() {
  const char* const value = std::getenv("NCCL_P2P_DISABLE");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

// Sets the thread's current GPU in a scope.
class OnGpu {
 public:
  explicit OnGpu(int gpu) noexcept { set(gpu); }
  ~OnGpu() { set(before_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  static void set(int gpu) noexcept {
    try {
      cuda::set_current_device(gpu);
    } catch (const Error&) {
      // The GPU or the driver has failed, and so will the calls of this scope.
    }
  }
  static int current() noexcept {
    try {
      return cuda::current_device();
    } catch (const Error&) {
      return 0;
    }
  }
  const int before_ = current();
};

class Nccl final : public Communicator {
 public:
  // nccl: the arguments of a constructor of NcclRank, before max_ctas.
  template <typename... NcclArguments>
  Nccl(const NcclOptions& options, const NcclArguments&... nccl)
      : limit_(options.limit),
        gpu_(cuda::current_device()),
        stream_(cuda::make_stream()),
        copies_(options.copy_engines && !forbids_peers()),
        nccl_(nccl..., options.max_ctas) {
    poll("creation of the group", limit_, [&] { return nccl_.ready(); });
    join_board();
    // CUDA would load a kernel at its first launch. That may wait for the GPU, which may wait for a
    // rank that is another thread of this process and cannot launch meanwhile.
    if (board_.may_share_process()) cuda::load_kernels();
    if (options.watch && all_on_host_ && size() > 1)
      watching_ = std::jthread([this](auto stop) { watch(stop); });
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  ~Nccl() override {
    watching_ = {};
    const OnGpu here(gpu_);
    const std::string_view text = "destruction of the group";
    try {
      if (failure_.empty()) {
        poll(text, limit_, [&] { return peers_ == nullptr || peers_->done(); });
        nccl_.finalize();
        poll(text, limit_, [&] { return nccl_.ready(); });
        nccl_.destroy();
      }
    } catch (const Error&) {
      // The group has failed, and no call is left to report it: the other ranks read it on the
      // board.
    }
    nccl_.abort();  // does nothing after destroy()
    if (peers_ == nullptr) return;
    wait_at_most(kReleaseLimit, [&] { return peers_->done(); });
    peers_->close();
    board_.post_memory_closed();
    wait_at_most(kCloseLimit, [&] { return board_.all_closed_memory(); });
    // The thread that releases waits may still run: free() waits for the GPU, and that for it.
    peers_->free();
  }

  int rank() const override { return nccl_.rank(); }
  int size() const override { return nccl_.size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }

  void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream) override {
    enqueue("all_gather", bytes_each, [&] {
      if (copies(all, bytes_each)) return peers_->all_gather(mine, all, bytes_each, stream);
      nccl_.all_gather(mine, all, bytes_each, stream);
    });
  }
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                  void* stream) override {
    enqueue("all_to_all", bytes_each, [&] {
      if (copies(slices_of_all, bytes_each))
        return peers_->all_to_all(slices, slices_of_all, bytes_each, stream);
      nccl_.all_to_all(slices, slices_of_all, bytes_each, stream);
    });
  }

  void all_gather_host(const void* mine, void* all, std::size_t bytes_each) override {
    if (bytes_each == 0) return all_gather(mine, all, 0, nullptr);
    if (all_on_host_) return gather_on_board(mine, all, bytes_each);
    const auto ranks = static_cast<std::size_t>(size());
    const cuda::BesideCapture allowed;
    try {
      const cuda::DeviceMemory memory(bytes_each * (ranks + 1));
      auto* const gathered = static_cast<std::byte*>(memory.data());
      std::byte* const sent = gathered + bytes_each * ranks;
      cuda::copy_to_device(sent, mine, bytes_each, stream_.get());
      all_gather(sent, gathered, bytes_each, stream_.get());
      wait(stream_.get(), limit_);
      cuda::copy_to_host(all, gathered, bytes_each * ranks, stream_.get());
    } catch (const DeviceError& e) {
      abort(e.what());  // the other ranks wait for this one
      throw;
    }
  }

  void begin_group() override {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw DeviceError(failure_);
    nccl_.begin_group();
    grouped_ = true;
  }
  void end_group() override {
    {
      // A begun NCCL group must be ended, even if the communicator has failed meanwhile.
      const std::lock_guard lock(mutex_);
      if (!std::exchange(grouped_, false)) return;
      try {
        nccl_.end_group();
      } catch (const Error& e) {
        fail(concat(last_call_, ": ", e.what()));
      }
      if (!failure_.empty()) nccl_.abort();  // fail() does not within a group
    }
    poll(last_call_, limit_, [&] { return nccl_.ready(); });
  }

  void* exchange_memory(std::size_t bytes) override {
    void* const held = peers_ == nullptr ? nullptr : peers_->memory_of(bytes);
    if (held != nullptr) return held;  // the result is the same on all ranks
    if (!copies_ || !all_on_host_ || size() == 1) return nullptr;
    if (bytes < kLeastPeerBytes * static_cast<std::size_t>(size())) return nullptr;
    require_gpu();
    // Grows by a quarter, so that plans of ever more tokens reallocate rarely.
    constexpr std::size_t kUnit = std::size_t{2} << 20;
    if (peers_ != nullptr) bytes = std::max(bytes, peers_->largest() / 4 * 5);
    return allocate_peer_memory((bytes + kUnit - 1) / kUnit * kUnit);
  }

  bool capturable() const override { return true; }

  void wait(void* stream, milliseconds limit) override {
    const std::string text = concat("wait after ", last_call_);
    poll(text, limit, [&] {
      if (!nccl_.ready() || !cuda::stream_ready(stream)) return false;
      require_complete();
      return true;
    });
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw DeviceError(failure_);
  }

  void abort(std::string_view reason) noexcept override {
    const std::lock_guard lock(mutex_);
    fail(concat("gave up: ", reason));
  }

 private:
  void require_gpu() const {
    require(cuda::current_device() == gpu_, "communicator: of GPU ", gpu_,
            ", but the thread's current one is ", cuda::current_device());
  }

  // Throws if work that is done lacks data: that of a rank which has aborted before its last call.
  // Its NCCL then ended this rank's work, too.
  void require_complete() const {
    if (!joined_board_ || board_.all_called(calls_)) return;
    const std::string lost = board_.lost_ranks(calls_);
    if (!lost.empty()) throw DeviceError(lost);
  }

  // Issues a collective and waits until NCCL has enqueued it; in a group, end_group() waits. The
  // call is issued inside of poll() since that holds the mutex, has seen no abort, and makes the
  // call's error the group's.
  template <typename F>
  void enqueue(std::string_view kind, std::size_t bytes_each, const F& call) {
    require_gpu();
    last_call_ = call_text(++calls_, kind, bytes_each);
    bool issued = false;
    board_.post_call(calls_);
    poll(last_call_, limit_, [&] {
      if (!issued && bytes_each > 0) call();
      if (grouped_) return true;
      issued = true;
      return nccl_.ready();
    });
  }

  // Calls `done` under the mutex until it returns true. Throws DeviceError, and the group has
  // failed, when `done` throws, the limit is exceeded, or another rank is lost. A lost rank that
  // has made all calls may have delivered its data: the work then gets kGrace to end.
  template <typename F>
  void poll(std::string_view what, milliseconds limit, const F& done) {
    using Clock = std::chrono::steady_clock;
    // Within the clock's range.
    constexpr milliseconds kLongest = std::chrono::hours(24 * 365 * 100);
    limit = std::min(limit, kLongest);
    const Clock::time_point start = Clock::now();
    for (int polls = 0;; ++polls) {
      {
        const std::lock_guard lock(mutex_);  // abort() may be called from any thread
        if (!failure_.empty()) throw DeviceError(failure_);
        try {
          if (done()) return;
          if (polls % kPollsPerCheck == kPollsPerCheck - 1 && joined_board_) {
            const std::string lost = board_.lost_ranks(calls_);
            if (!lost.empty() && (!board_.all_called(calls_) || Clock::now() - start >= kGrace))
              throw DeviceError(lost);
          }
          if (Clock::now() - start >= limit)
            throw DeviceError(concat("not done within ", limit.count(), " ms; ", late_ranks()));
        } catch (const Error& e) {
          fail(concat(what, ": ", e.what()));
          throw DeviceError(failure_);
        }
      }
      // NCCL's thread takes tens of microseconds for a call; other ranks may take long.
      if (polls < kYieldingPolls) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  // Allocates exchange memory. Collective: null on all ranks if one cannot reach another's memory,
  // or has none.
  void* allocate_peer_memory(std::size_t bytes) {
    cuda::PeerMemory mine;
    try {
      if (peers_ == nullptr) {
        auto made = std::make_unique<cuda::PeerCopies>(rank(), size(), board_.more());
        const std::lock_guard lock(mutex_);
        peers_ = std::move(made);
      }
      mine = peers_->allocate(bytes);
    } catch (const DeviceError&) {
      // This rank has no peers_ then, and sends no handle: all ranks return null.
    }
    std::vector<cuda::PeerMemory> of_all(static_cast<std::size_t>(size()));
    all_gather_host(&mine, of_all.data(), sizeof(mine));
    const char open = peers_ != nullptr && peers_->open(of_all) ? 1 : 0;
    std::vector<char> all(of_all.size());
    all_gather_host(&open, all.data(), sizeof(open));
    if (std::find(all.begin(), all.end(), 0) == all.end()) return peers_->memory_of(bytes);
    if (peers_ != nullptr) peers_->free_latest();  // the one that allocate() has just added
    return nullptr;
  }

  bool copies(const void* to, std::size_t bytes_each) const {
    return peers_ != nullptr && peers_->holds(to, bytes_each * static_cast<std::size_t>(size()));
  }

  // Waits until `done` returns true or throws, or the limit is exceeded. Unlike poll() it fails
  // nothing: the destructor goes on in each case.
  template <typename F>
  static void wait_at_most(milliseconds limit, const F& done) noexcept {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + limit;
    try {
      while (!done() && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    } catch (const Error&) {
      // The GPU has failed, so there is nothing left to wait for.
    }
  }

  void start_releasing() {
    try {
      releasing_ = std::jthread([this](auto stop) { release_waits(stop); });
    } catch (const std::system_error&) {
      peers_->release_waits();  // without a thread, at least those of this moment
    }
  }

  // Releases this GPU's waits for other GPUs, again and again: a released exchange may be followed
  // by others. It also writes to other ranks' memory, so ranks that have all their data get
  // kReleaseDelay to finish first. It touches only the board's flags: peers_ may have freed its
  // memory.
  void release_waits(const std::stop_token& stop) const {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    while (!stop.stop_requested()) {
      if (Clock::now() - start >= kReleaseDelay) peers_->release_waits();
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  // Fails the group when another rank is lost, also while no call of this rank polls.
  void watch(const std::stop_token& stop) {
    std::mutex sleeping;
    std::condition_variable_any woken;
    std::unique_lock lock(sleeping);
    milliseconds lost_for{0};
    while (!woken.wait_for(lock, stop, kWatchPeriod, [] { return false; }) &&
           !stop.stop_requested()) {
      const std::string lost = board_.lost_ranks(calls_);
      if (lost.empty()) continue;
      lost_for += kWatchPeriod;
      if (board_.all_called(calls_) && lost_for < kGrace) continue;
      const std::lock_guard all(mutex_);
      return fail(lost);
    }
  }

  // All-gather between ranks of one host by shared memory, independent of GPU work.
  void gather_on_board(const void* mine, void* all, std::size_t bytes_each) {
    last_call_ = call_text(++calls_, "all_gather", bytes_each);
    board_.post_call(calls_);
    for (std::size_t at = 0; at < bytes_each; at += RankBoard::kMostBytes) {
      board_.put(static_cast<const std::byte*>(mine) + at,
                 std::min(bytes_each - at, RankBoard::kMostBytes));
      poll(last_call_, limit_, [&] { return board_.all_put(); });
      if (board_.take(static_cast<std::byte*>(all) + at, bytes_each)) continue;
      const std::string what = concat(last_call_, ": the ranks give different numbers of bytes");
      abort(what);
      throw InvalidArgument(what);
    }
  }

  // Describes the ranks that have not made the last call, which NCCL does not report.
  std::string late_ranks() const {
    return joined_board_ ? board_.late_ranks(calls_) : "other ranks have not arrived";
  }

  // Opens the board under rank 0's random name, which all ranks receive. Until the ranks know that
  // all are on this host, NCCL all-gathers.
  void join_board() {
    std::vector<std::uint64_t> names(static_cast<std::size_t>(size()));
    std::random_device random;
    const std::uint64_t mine = (std::uint64_t{random()} << 32) | random();
    all_gather_host(&mine, names.data(), sizeof(mine));
    board_ = RankBoard(concat(std::hex, names[0]), rank(), size(),
                       copies_ ? cuda::PeerCopies::flag_bytes(size()) : 0);
    board_.post_call(calls_);
    const char joined = 1;
    std::vector<char> all(names.size());
    all_gather_host(&joined, all.data(), sizeof(joined));
    board_.remove_name();
    joined_board_ = true;
    const auto holds_on_all_ranks = [&](bool here) {
      const char value = here ? 1 : 0;
      all_gather_host(&value, all.data(), sizeof(value));
      return std::find(all.begin(), all.end(), 0) == all.end();
    };
    copies_ = holds_on_all_ranks(copies_);
    all_on_host_ = holds_on_all_ranks(board_.all_joined());
    calls_ = 0;  // only the caller's calls are counted
    last_call_ = "no call";
    board_.post_call(0);
  }

  // Makes the group fail; the first reason stands. The caller holds the mutex.
  void fail(const std::string& why) {
    if (!failure_.empty()) return;
    failure_ = concat("communicator: rank ", rank(), " of ", size(), ": ", why);
    board_.post_abort();
    if (peers_ != nullptr) start_releasing();  // before the abort, which may wait for this GPU
    if (!grouped_) nccl_.abort();              // else in end_group()
  }

  static constexpr milliseconds kWatchPeriod{200};
  // Time for slower GPUs when a rank's process has ended after the same calls.
  static constexpr milliseconds kGrace{5000};
  static constexpr milliseconds kReleaseDelay{1000};
  static constexpr milliseconds kReleaseLimit{10000};  // released work still writes to other ranks
  static constexpr milliseconds kCloseLimit{1000};
  // Bytes of each rank below which NCCL is faster.
  static constexpr std::size_t kLeastPeerBytes = std::size_t{1} << 20;
  static constexpr int kYieldingPolls = 1000;  // before polls sleep
  // Polls for each check of other processes: 0.2 s while sleeping.
  static constexpr int kPollsPerCheck = 4000;

  const milliseconds limit_;
  const int gpu_;
  const std::shared_ptr<void> stream_;  // for all_gather_host
  bool copies_;  // exchange_memory is possible: the GPUs reach each other's memory
  // Guards nccl_, failure_, grouped_ and the pointer peers_: abort() may come from any thread.
  // Everything else belongs to the thread of the calls, or is atomic.
  std::mutex mutex_;
  cuda::NcclRank nccl_;
  RankBoard board_;
  bool joined_board_ = false;
  bool all_on_host_ = false;  // all ranks have joined the board
  bool grouped_ = false;      // between begin_group() and end_group()
  std::atomic<std::uint64_t> calls_ = 0;
  std::string last_call_ = "no call";  // its text
  std::string failure_;                // empty while working
  std::unique_ptr<cuda::PeerCopies> peers_;
  // Threads come last: they are joined before the members that they read are destroyed.
  std::jthread releasing_;  // since the group has failed
  std::jthread watching_;
};

void check_options(const char* what, const NcclOptions& options) {
  require(options.max_ctas >= 0, what, ": max_ctas: expected 0 or more, got ", options.max_ctas);
  require(options.limit.count() >= 1, what, ": limit: expected 1 ms or more, got ",
          options.limit.count());
  const std::string missing = nccl_missing();
  if (!missing.empty()) throw Unsupported(concat(what, ": ", missing));
}

}  // namespace

std::string nccl_missing() { return cuda::nccl_missing(); }

NcclId make_nccl_id() {
  NcclId id;
  cuda::make_nccl_id(id.data());
  return id;
}

std::shared_ptr<Communicator> make_nccl(std::span<const std::byte, 128> id, int rank, int size,
                                        const NcclOptions& options) {
  require(size >= 1, "make_nccl: size: expected 1 or more, got ", size);
  require(rank >= 0 && rank < size, "make_nccl: rank: expected one in [0, ", size, "), got ", rank);
  check_options("make_nccl", options);
  return std::make_shared<Nccl>(options, id.data(), rank, size);
}

std::shared_ptr<Communicator> borrow_nccl(void* nccl_comm, const NcclOptions& options) {
  require(nccl_comm != nullptr, "borrow_nccl: nccl_comm: expected a communicator, got null");
  check_options("borrow_nccl", options);
  return std::make_shared<Nccl>(options, nccl_comm);
}

}  // namespace logitless
