// How far the ranks of a group have come, for those of one host: memory that their processes share.
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
  // has no name any more once close() is called, which all ranks do when all have been made.
  RankBoard(const std::string& name, int rank, int size);
  ~RankBoard();
  RankBoard(RankBoard&& other) noexcept;
  RankBoard& operator=(RankBoard&& other) noexcept;

  void close() noexcept;

  // This rank makes the call of this number.
  void arrive(std::uint64_t call) noexcept;

  // The ranks that have not made the call, in words: "rank 1 has made 2 calls, rank 3's process has
  // ended"; or that there are none, or none known.
  std::string missing(std::uint64_t call) const;

 private:
  struct Rank;

  Rank* ranks_ = nullptr;  // [size_], shared
  int rank_ = 0, size_ = 0;
  std::string path_;
};

}  // namespace logitless
