// Communicator over NCCL. Every wait of the host has a limit and ends in an abort. The exception is
// the split of a blocking communicator, which NCCL completes inside the call. On one host,
// exchanges into exchange_memory use the copy engines instead of NCCL.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
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
#include "kernels/device_exchange.h"
#include "kernels/device_module.h"
#include "kernels/device_peers.h"
#include "kernels/device_stream.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

// Returns whether NCCL_P2P_DISABLE forbids peer access, on hosts whose GPUs wrongly report it.
bool forbids_peers() {
  const char* const said = std::getenv("NCCL_P2P_DISABLE");
  return said != nullptr && *said != '\0' && std::string_view(said) != "0";
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
      // The GPU or the driver is gone.
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
  template <typename... Start>
  Nccl(const NcclOptions& options, const Start&... start)
      : limit_(options.limit),
        gpu_(cuda::current_device()),
        stream_(cuda::make_stream()),
        copies_(options.copy_engines && !forbids_peers()),
        rank_(start..., options.max_ctas) {
    poll("the group's making", limit_, [&] { return rank_.ready(); });
    join_board();
    if (board_.may_share_process()) cuda::load_kernels();
    if (options.watch && on_board_ && size() > 1)
      watch_ = std::jthread([this](auto stop) { watch(stop); });
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  ~Nccl() override {
    watch_ = {};
    const OnGpu here(gpu_);
    try {
      if (failure_.empty()) {
        poll("the group's end", limit_, [&] { return peers_ == nullptr || peers_->done(); });
        rank_.finalize();
        poll("the group's end", limit_, [&] { return rank_.ready(); });
        rank_.destroy();
      }
    } catch (const Error&) {
      // The destructor of NcclRank aborts the rest.
    }
    rank_.abort();
    if (peers_ == nullptr) return;
    wait_until(kFinish, [&] { return peers_->done(); });
    peers_->close();
    board_.close_memory();
    wait_until(kPause, [&] { return board_.all_closed_memory(); });
    peers_->free();
  }

  int rank() const override { return rank_.rank(); }
  int size() const override { return rank_.size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }

  void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream) override {
    enqueue("all_gather", bytes_each, [&] {
      if (copies(all, bytes_each)) return peers_->all_gather(mine, all, bytes_each, stream);
      rank_.all_gather(mine, all, bytes_each, stream);
    });
  }
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                  void* stream) override {
    enqueue("all_to_all", bytes_each, [&] {
      if (copies(slices_of_all, bytes_each))
        return peers_->all_to_all(slices, slices_of_all, bytes_each, stream);
      rank_.all_to_all(slices, slices_of_all, bytes_each, stream);
    });
  }

  void all_gather_host(const void* mine, void* all, std::size_t bytes_each) override {
    if (bytes_each == 0) return all_gather(mine, all, 0, nullptr);
    if (on_board_) return gather_on_board(mine, all, bytes_each);
    const auto ranks = static_cast<std::size_t>(size());
    const cuda::BesideCapture allowed;
    try {
      const cuda::DeviceMemory memory(bytes_each * (ranks + 1));
      auto* const gathered = static_cast<std::byte*>(memory.data());
      std::byte* const given = gathered + bytes_each * ranks;
      cuda::copy_to_device(given, mine, bytes_each, stream_.get());
      all_gather(given, gathered, bytes_each, stream_.get());
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
    rank_.begin_group();
    grouped_ = true;
  }
  void end_group() override {
    {
      // A begun NCCL group must be ended, even if this group has failed meanwhile.
      const std::lock_guard lock(mutex_);
      if (!std::exchange(grouped_, false)) return;
      try {
        rank_.end_group();
      } catch (const Error& e) {
        if (failure_.empty()) give_up(concat(last_, ": ", e.what()));
      }
      if (!failure_.empty()) rank_.abort();
    }
    poll(last_, limit_, [&] { return rank_.ready(); });
  }

  void* exchange_memory(std::size_t bytes) override {
    void* const held = peers_ == nullptr ? nullptr : peers_->memory_of(bytes);
    if (held != nullptr) return held;  // the result is the same on all ranks
    if (!copies_ || !on_board_ || size() == 1) return nullptr;
    if (bytes < kLeastShared * static_cast<std::size_t>(size())) return nullptr;
    require_gpu();
    // Grows by a quarter, so that plans of ever more tokens reallocate rarely.
    constexpr std::size_t kUnit = std::size_t{2} << 20;
    if (peers_ != nullptr) bytes = std::max(bytes, peers_->largest() / 4 * 5);
    return shared_memory((bytes + kUnit - 1) / kUnit * kUnit);
  }

  bool capturable() const override { return true; }

  void wait(void* stream, milliseconds limit) override {
    const std::string text = concat("wait after ", last_);
    poll(text, limit, [&] {
      if (!rank_.ready() || !cuda::stream_ready(stream)) return false;
      require_all_made();
      return true;
    });
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw DeviceError(failure_);
  }

  void abort(std::string_view reason) noexcept override {
    const std::lock_guard lock(mutex_);
    give_up(concat("gave up: ", reason));
  }

 private:
  void require_gpu() const {
    require(cuda::current_device() == gpu_, "communicator: of GPU ", gpu_,
            ", but the thread's current one is ", cuda::current_device());
  }

  // Throws if a rank that has aborted did not make all calls: NCCL ended the work without its data.
  // A failed group makes no later calls.
  void require_all_made() const {
    if (!has_board_ || board_.all_made(calls_)) return;
    const std::string gone = board_.gone(calls_);
    if (!gone.empty()) throw DeviceError(gone);
  }

  template <typename F>
  void enqueue(std::string_view kind, std::size_t bytes_each, const F& call) {
    require_gpu();
    last_ = call_text(++calls_, kind, bytes_each);
    bool begun = false;
    board_.arrive(calls_);
    poll(last_, limit_, [&] {
      if (!begun && bytes_each > 0) call();
      if (grouped_) return true;
      begun = true;
      return rank_.ready();
    });
  }

  // Polls until `done` returns true. Throws DeviceError when `done` throws or the limit is
  // exceeded; the group has failed then.
  template <typename F>
  void poll(std::string_view what, milliseconds limit, const F& done) {
    using Clock = std::chrono::steady_clock;
    // Within the clock's range.
    constexpr milliseconds kLongest = std::chrono::hours(24 * 365 * 100);
    limit = std::min(limit, kLongest);
    const Clock::time_point start = Clock::now();
    for (int asked = 0;; ++asked) {
      {
        const std::lock_guard lock(mutex_);  // abort() may be called from any thread
        if (!failure_.empty()) throw DeviceError(failure_);
        try {
          if (done()) return;
          if (asked % kLooks == kLooks - 1 && has_board_) {
            const std::string gone = board_.gone(calls_);
            if (!gone.empty() && (!board_.all_made(calls_) || Clock::now() - start >= kGrace))
              throw DeviceError(gone);
          }
          if (Clock::now() - start >= limit)
            throw DeviceError(concat("not done within ", limit.count(), " ms; ", missing()));
        } catch (const Error& e) {
          give_up(concat(what, ": ", e.what()));
          throw DeviceError(failure_);
        }
      }
      // NCCL's thread takes tens of microseconds for a call; other ranks may take long.
      if (asked < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  // Allocates exchange memory. Collective: null on all ranks if one cannot reach another's memory,
  // or has none.
  void* shared_memory(std::size_t bytes) {
    cuda::PeerMemory mine;
    try {
      if (peers_ == nullptr) {
        auto made = std::make_unique<cuda::PeerCopies>(rank(), size(), board_.more());
        const std::lock_guard lock(mutex_);
        peers_ = std::move(made);
      }
      mine = peers_->allocate(bytes);
    } catch (const DeviceError&) {
      // The missing handle reports the failure to the other ranks.
    }
    std::vector<cuda::PeerMemory> of_all(static_cast<std::size_t>(size()));
    all_gather_host(&mine, of_all.data(), sizeof(mine));
    const char open = peers_ != nullptr && peers_->open(of_all) ? 1 : 0;
    std::vector<char> all(of_all.size());
    all_gather_host(&open, all.data(), sizeof(open));
    if (std::find(all.begin(), all.end(), 0) == all.end()) return peers_->memory_of(bytes);
    if (peers_ != nullptr) peers_->drop();
    return nullptr;
  }

  bool copies(const void* to, std::size_t bytes_each) const {
    return peers_ != nullptr && peers_->holds(to, bytes_each * static_cast<std::size_t>(size()));
  }

  template <typename F>
  static void wait_until(milliseconds limit, const F& done) noexcept {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + limit;
    try {
      while (!done() && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    } catch (const Error&) {
      // The GPU has failed.
    }
  }

  void begin_to_let_go() {
    try {
      letting_go_ = std::jthread([this](auto stop) { let_go(stop); });
    } catch (const std::system_error&) {
      peers_->let_go();
    }
  }

  // Releases this GPU's waits for other GPUs after a group failure. It first gives ranks with all
  // their data kPause to finish, before their memory is overwritten.
  void let_go(const std::stop_token& stop) const {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    while (!stop.stop_requested()) {
      if (Clock::now() - start >= kPause) peers_->let_go();
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void watch(const std::stop_token& stop) {
    std::mutex sleeping;
    std::condition_variable_any woken;
    std::unique_lock lock(sleeping);
    milliseconds seen{0};
    while (!woken.wait_for(lock, stop, kWatch, [] { return false; }) && !stop.stop_requested()) {
      const std::string gone = board_.gone(calls_);
      if (gone.empty()) continue;
      seen += kWatch;
      if (board_.all_made(calls_) && seen < kGrace) continue;
      const std::lock_guard all(mutex_);
      return give_up(gone);
    }
  }

  // All-gather between ranks of one host by shared memory, independent of GPU work.
  void gather_on_board(const void* mine, void* all, std::size_t bytes_each) {
    last_ = call_text(++calls_, "all_gather", bytes_each);
    board_.arrive(calls_);
    for (std::size_t at = 0; at < bytes_each; at += RankBoard::kMostBytes) {
      board_.put(static_cast<const std::byte*>(mine) + at,
                 std::min(bytes_each - at, RankBoard::kMostBytes));
      poll(last_, limit_, [&] { return board_.all_put(); });
      if (board_.take(static_cast<std::byte*>(all) + at, bytes_each)) continue;
      const std::string what = concat(last_, ": the ranks give different numbers of bytes");
      abort(what);
      throw InvalidArgument(what);
    }
  }

  // NCCL itself does not report the missing ranks.
  std::string missing() const {
    return has_board_ ? board_.missing(calls_) : "other ranks have not arrived";
  }

  // Opens the shared board under rank 0's random name, which all ranks receive.
  void join_board() {
    std::vector<std::uint64_t> names(static_cast<std::size_t>(size()));
    std::random_device random;
    const std::uint64_t mine = (std::uint64_t{random()} << 32) | random();
    all_gather_host(&mine, names.data(), sizeof(mine));
    board_ = RankBoard(concat(std::hex, names[0]), rank(), size(),
                       copies_ ? cuda::PeerCopies::flag_bytes(size()) : 0);
    board_.arrive(calls_);
    const char joined = 1;
    std::vector<char> all(names.size());
    all_gather_host(&joined, all.data(), sizeof(joined));
    board_.close();
    has_board_ = true;
    // A property counts only if it holds on all ranks.
    const auto agreed = [&](bool here) {
      const char said = here ? 1 : 0;
      all_gather_host(&said, all.data(), sizeof(said));
      return std::find(all.begin(), all.end(), 0) == all.end();
    };
    copies_ = agreed(copies_);
    on_board_ = agreed(board_.all_arrived());
    calls_ = 0;  // only the caller's calls are counted
    last_ = "no call";
    board_.arrive(0);
  }

  void give_up(const std::string& why) {
    if (!failure_.empty()) return;
    failure_ = concat("communicator: rank ", rank(), " of ", size(), ": ", why);
    board_.give_up();
    if (peers_ != nullptr) begin_to_let_go();  // NCCL may wait for this GPU
    if (!grouped_) rank_.abort();              // else at the group's end
  }

  static constexpr milliseconds kWatch{200};
  // Grace period for slower GPUs when a rank's process has ended after the same calls.
  static constexpr milliseconds kGrace{5000};
  static constexpr milliseconds kPause{1000};
  static constexpr milliseconds kFinish{10000};  // released work still writes to other ranks
  // Bytes of each rank below which NCCL is faster.
  static constexpr std::size_t kLeastShared = std::size_t{1} << 20;
  static constexpr int kYields = 1000;
  // Polls between checks of other processes: 0.2 s while sleeping.
  static constexpr int kLooks = 4000;

  const milliseconds limit_;
  const int gpu_;
  const std::shared_ptr<void> stream_;  // for all_gather_host
  bool copies_;  // exchange_memory is possible: the GPUs reach each other's memory
  std::mutex mutex_;
  cuda::NcclRank rank_;
  RankBoard board_;
  bool has_board_ = false;
  bool on_board_ = false;  // all ranks are on this host
  bool grouped_ = false;   // between begin_group() and end_group()
  std::atomic<std::uint64_t> calls_ = 0;
  std::string last_ = "no call";  // text of the last call
  std::string failure_;
  std::unique_ptr<cuda::PeerCopies> peers_;
  std::jthread letting_go_;  // runs after the group has failed
  std::jthread watch_;       // last member: it reads all of the above
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
