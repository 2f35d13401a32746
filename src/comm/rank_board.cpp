#include "comm/rank_board.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/own_files.h"

namespace logitless {
namespace {

// Returns the PID namespace of this process, as the number of its file; 0 where the system has
// none.
std::uint64_t pid_namespace() noexcept {
  struct stat file = {};
  return stat("/proc/self/ns/pid", &file) == 0 ? file.st_ino : 0;
}

// Returns whether the file is regular and nobody else can write it: anyone can create files in the
// folder, under any name.
bool is_of_this_user(int descriptor) noexcept {
  struct stat file = {};
  return fstat(descriptor, &file) == 0 && S_ISREG(file.st_mode) && file.st_uid == geteuid() &&
         !may_be_written_by_others(file) && file.st_nlink == 1;
}

// Special values in place of a process number.
constexpr std::int64_t kLeft = -1;  // its communicator is destroyed
constexpr std::int64_t kAborted = -2;

// Marks the rank as left, unless this is a fork: the entry has the parent's number.
void leave(std::atomic<std::int64_t>& entry) noexcept {
  std::int64_t mine = getpid();
  entry.compare_exchange_strong(mine, kLeft);
}

// All board entries of this process. Plans may keep communicators until the process exits, without
// a destructor call. An atexit handler therefore marks the entries as left. The process must wait
// for its GPU work before that, as other ranks may depend on it.
class Entries {
 public:
  static Entries& of_process() {
    static auto* const entries = new Entries;  // outlives static objects
    return *entries;
  }
  void add(std::atomic<std::int64_t>* entry) {
    const std::lock_guard lock(mutex_);
    entries_.insert(entry);
  }
  void remove(std::atomic<std::int64_t>* entry) {
    const std::lock_guard lock(mutex_);
    entries_.erase(entry);
  }

 private:
  Entries() {
    std::atexit([] { of_process().leave_all(); });
  }
  void leave_all() {
    const std::lock_guard lock(mutex_);
    for (std::atomic<std::int64_t>* const entry : entries_) leave(*entry);
  }

  std::mutex mutex_;
  std::set<std::atomic<std::int64_t>*> entries_;
};

}  // namespace

// A new file is all zeros, which means no process and no calls.
struct alignas(64) RankBoard::Rank {
  std::atomic<std::uint64_t> calls;
  std::atomic<std::int64_t> process;  // 0: not on this host; or a special value above
  std::atomic<std::uint64_t> round;   // round of the current exchange
  std::atomic<std::uint64_t> space;   // PID namespace of `process`
  std::atomic<std::uint64_t> closed;  // 1: has closed all memory of other ranks
  // Slots of this round and the last one, which other ranks may still read. All ranks have entered
  // this round before the next slot is written.
  struct Slot {
    std::uint64_t bytes;
    std::byte data[kMostBytes];
  } slots[2];
};

// Rounded up to whole pages.
std::size_t RankBoard::local_bytes() const noexcept {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (static_cast<std::size_t>(size_) * sizeof(Rank) + page - 1) / page * page;
}

RankBoard::RankBoard(const std::string& name, int rank, int size, std::size_t more)
    : more_(more), rank_(rank), size_(size) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  const std::string path = concat("/dev/shm/logitless-", name);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (file < 0) return;
  if (!is_of_this_user(file)) {
    ::close(file);
    return;
  }
  path_ = path;
  const std::size_t bytes = local_bytes() + more;
  // Allocates now, so that a full file system is noticed here.
  if (posix_fallocate(file, 0, static_cast<off_t>(bytes)) == 0) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) {
      ranks_ = static_cast<Rank*>(memory);
      ranks_[rank].space = pid_namespace();
      ranks_[rank].process = getpid();
      Entries::of_process().add(&ranks_[rank].process);
    }
  }
  ::close(file);
}

RankBoard::~RankBoard() {
  remove_name();
  if (ranks_ == nullptr) return;
  Entries::of_process().remove(&ranks_[rank_].process);
  leave(ranks_[rank_].process);
  munmap(ranks_, local_bytes() + more_);
}

RankBoard::RankBoard(RankBoard&& other) noexcept { *this = std::move(other); }

RankBoard& RankBoard::operator=(RankBoard&& other) noexcept {
  std::swap(ranks_, other.ranks_);
  std::swap(more_, other.more_);
  std::swap(rank_, other.rank_);
  std::swap(size_, other.size_);
  std::swap(round_, other.round_);
  std::swap(path_, other.path_);
  return *this;
}

void RankBoard::remove_name() noexcept {
  if (!path_.empty()) unlink(path_.c_str());
  path_.clear();
}

void RankBoard::post_abort() noexcept {
  if (ranks_ != nullptr) ranks_[rank_].process = kAborted;
}

void RankBoard::post_call(std::uint64_t call) noexcept {
  if (ranks_ != nullptr) ranks_[rank_].calls = call;
}

bool RankBoard::all_called(std::uint64_t call) const noexcept {
  return ranks_ == nullptr || std::all_of(ranks_, ranks_ + size_, [&](const Rank& rank) {
           return rank.process != kAborted && rank.calls >= call;
         });
}

bool RankBoard::all_joined() const noexcept {
  return ranks_ != nullptr && std::all_of(ranks_, ranks_ + size_, [](const Rank& rank) {
           return rank.process > 0 && rank.space == pid_namespace();
         });
}

bool RankBoard::may_share_process() const noexcept {
  return ranks_ == nullptr || std::count_if(ranks_, ranks_ + size_, [](const Rank& rank) {
                                return rank.process == getpid() && rank.space == pid_namespace();
                              }) > 1;
}

void RankBoard::post_memory_closed() noexcept {
  if (ranks_ != nullptr) ranks_[rank_].closed = 1;
}

bool RankBoard::all_closed_memory() const noexcept {
  return ranks_ == nullptr || std::all_of(ranks_, ranks_ + size_, [](const Rank& rank) {
           return rank.closed > 0 || rank.process <= 0 || has_ended(rank);
         });
}

void RankBoard::put(const void* mine, std::size_t bytes) noexcept {
  Rank& rank = ranks_[rank_];
  Rank::Slot& slot = rank.slots[++round_ % 2];
  slot.bytes = bytes;
  if (bytes > 0) std::memcpy(slot.data, mine, bytes);
  rank.round = round_;
}

bool RankBoard::all_put() const noexcept {
  return std::all_of(ranks_, ranks_ + size_,
                     [&](const Rank& rank) { return rank.round >= round_; });
}

bool RankBoard::take(void* all, std::size_t stride) const noexcept {
  const std::size_t bytes = ranks_[rank_].slots[round_ % 2].bytes;
  auto* to = static_cast<std::byte*>(all);
  for (int r = 0; r < size_; ++r, to += stride) {
    const Rank::Slot& slot = ranks_[r].slots[round_ % 2];
    if (slot.bytes != bytes) return false;
    if (bytes > 0) std::memcpy(to, slot.data, bytes);
  }
  return true;
}

void* RankBoard::more() const noexcept {
  return ranks_ == nullptr ? nullptr : reinterpret_cast<std::byte*>(ranks_) + local_bytes();
}

bool RankBoard::has_ended(const Rank& rank) noexcept {
  const std::int64_t process = rank.process;
  if (process <= 0 || rank.space != pid_namespace()) return false;
  if (kill(static_cast<pid_t>(process), 0) != 0) return errno == ESRCH;
  // A zombie, which has ended but has not been reaped by its parent, still has its number.
  std::ifstream file(concat("/proc/", process, "/stat"));
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name = stat.rfind(')');
  return name != std::string::npos && name + 2 < stat.size() &&
         (stat[name + 2] == 'Z' || stat[name + 2] == 'X');
}

std::string RankBoard::text_of(int r) const {
  if (has_ended(ranks_[r])) return concat("rank ", r, "'s process has ended");
  if (ranks_[r].process == kAborted) return concat("rank ", r, " gave up");
  const std::uint64_t calls = ranks_[r].calls;
  return concat("rank ", r, ranks_[r].process < 0 ? " has left after " : " has made ", calls,
                calls == 1 ? " call" : " calls");
}

std::string RankBoard::lost_ranks(std::uint64_t call) const {
  std::string text;
  for (int r = 0; r < (ranks_ == nullptr ? 0 : size_); ++r) {
    const std::int64_t process = ranks_[r].process;
    const bool left = process == kLeft && ranks_[r].calls < call;
    if (r == rank_) continue;
    if (left || process == kAborted || has_ended(ranks_[r]))
      text += concat(text.empty() ? "" : ", ", text_of(r));
  }
  return text;
}

std::string RankBoard::late_ranks(std::uint64_t call) const {
  std::string text;
  int elsewhere = 0;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t process = ranks_ == nullptr ? 0 : ranks_[r].process.load();
    if (process == 0) ++elsewhere;
    if (process == 0 || ranks_[r].calls >= call) continue;
    text += concat(text.empty() ? "" : ", ", text_of(r));
  }
  if (!text.empty()) return text;
  if (elsewhere > 0) return concat("of ", elsewhere, " ranks nothing is known on this host");
  return "all ranks have made the call, and one has not run it";
}

}  // namespace logitless
