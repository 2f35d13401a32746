#include "comm/rank_board.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "core/check.h"

namespace logitless {

// A new file is zeros: nobody, who has made no call.
struct alignas(64) RankBoard::Rank {
  std::atomic<std::uint64_t> calls;
  std::atomic<std::int64_t> process;  // 0: not of this host; -1: the communicator is destroyed
};

RankBoard::RankBoard(const std::string& name, int rank, int size) : rank_(rank), size_(size) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  const std::string path = concat("/dev/shm/logitless-", name);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  path_ = path;
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(Rank);
  // Allocates, so that a full file system says so here.
  if (posix_fallocate(file, 0, static_cast<off_t>(bytes)) == 0) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) {
      ranks_ = static_cast<Rank*>(memory);
      ranks_[rank].process = getpid();
    }
  }
  ::close(file);
}

RankBoard::~RankBoard() {
  close();
  if (ranks_ == nullptr) return;
  ranks_[rank_].process = -1;
  munmap(ranks_, static_cast<std::size_t>(size_) * sizeof(Rank));
}

RankBoard::RankBoard(RankBoard&& other) noexcept { *this = std::move(other); }

RankBoard& RankBoard::operator=(RankBoard&& other) noexcept {
  std::swap(ranks_, other.ranks_);
  std::swap(rank_, other.rank_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

void RankBoard::close() noexcept {
  if (!path_.empty()) unlink(path_.c_str());
  path_.clear();
}

void RankBoard::arrive(std::uint64_t call) noexcept {
  if (ranks_ != nullptr) ranks_[rank_].calls = call;
}

std::string RankBoard::missing(std::uint64_t call) const {
  std::string text;
  int elsewhere = 0;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t process = ranks_ == nullptr ? 0 : ranks_[r].process.load();
    if (process == 0) ++elsewhere;
    if (process == 0 || ranks_[r].calls >= call) continue;
    const bool ended = process > 0 && kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH;
    text += concat(text.empty() ? "" : ", ", "rank ", r);
    if (ended) {
      text += "'s process has ended";
    } else {
      const std::uint64_t calls = ranks_[r].calls;
      text += concat(process < 0 ? " has left after " : " has made ", calls,
                     calls == 1 ? " call" : " calls");
    }
  }
  if (!text.empty()) return text;
  if (elsewhere > 0) return concat("of ", elsewhere, " ranks nothing is known on this host");
  return "all ranks have made the call, and one has not run it";
}

}  // namespace logitless
