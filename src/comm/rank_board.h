// Memory that the processes of a host share: how far the ranks of a group have come, and an
// exchange between all of them that takes a microsecond where they meet, and no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless {

// One rank's view. Where the host has no shared memory it knows of nobody, and says so.
class RankBoard {
 public:
  RankBoard() = default;
  // `name`: hexadecimal, the same on all ranks of the group and on those of no other one. The board
  // has no name any more once close() is called, which all ranks do when all have been made. Beside
  // it `more` bytes, whole pages, that are zeros at first.
  RankBoard(const std::string& name, int rank, int size, std::size_t more = 0);
  ~RankBoard();
  RankBoard(RankBoard&& other) noexcept;
  RankBoard& operator=(RankBoard&& other) noexcept;

  void close() noexcept;

  // This rank makes the call of this number.
  void arrive(std::uint64_t call) noexcept;

  // Whatever it makes, no rank is to wait for it any more.
  void give_up() noexcept;

  // Of those that will not make the call any more: processes that have ended, ranks that have given
  // up, communicators that were destroyed before it, or that were there when their process ended in
  // order. "": none known.
  std::string gone(std::uint64_t call) const;

  // Whether all ranks have made the call, and none has given up: what those of them that are gone
  // have told their GPUs may all be done.
  bool all_made(std::uint64_t call) const noexcept;

  // Whether all ranks are processes of this host that have joined the board.
  bool all_here() const noexcept;

  // Whether another rank is in this process, or nothing is known of them.
  bool may_share_process() const noexcept;

  // This rank has nothing of the other ones' memory open any more; whether none has, or is there.
  void close_memory() noexcept;
  bool all_closed_memory() const noexcept;

  // Rounds of an exchange between ranks that are all here, each the same ones: put() until all have
  // put(), then take(). At most kMostBytes of each rank.
  static constexpr std::size_t kMostBytes = 4096;
  void put(const void* mine, std::size_t bytes) noexcept;
  bool all_put() const noexcept;
  // all[r * stride] is what rank r has put. False: some other number of bytes than this rank.
  bool take(void* all, std::size_t stride) const noexcept;

  // The bytes beside it, at a whole page; null where it knows of nobody.
  void* more() const noexcept;

  // The ranks that have not made the call, in words: "rank 1 has made 2 calls, rank 3's process has
  // ended"; or that there are none, or none known.
  std::string missing(std::uint64_t call) const;

 private:
  struct Rank;
  static bool has_ended(const Rank& rank) noexcept;
  std::string text_of(int rank) const;

  std::size_t own_bytes() const noexcept;

  Rank* ranks_ = nullptr;  // [size_], shared
  std::size_t more_ = 0;   // bytes
  int rank_ = 0, size_ = 0;
  std::uint64_t round_ = 0;
  std::string path_;
};

}  // namespace logitless
