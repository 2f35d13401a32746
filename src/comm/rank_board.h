// A table in shared memory of a host: each rank of a group posts the number of its last call, and
// whether it has aborted. It also serves all-gathers that take a microsecond once all ranks have
// arrived, without the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless {

// One rank's view. Without shared memory it knows of no other rank.
class RankBoard {
 public:
  RankBoard() = default;
  // `name` is hexadecimal, the same on all ranks of the group and different for every other group.
  // All ranks call remove_name() when all have joined. The board is followed by `more` bytes in
  // whole pages, initially zero.
  RankBoard(const std::string& name, int rank, int size, std::size_t more = 0);
  ~RankBoard();
  RankBoard(RankBoard&& other) noexcept;
  RankBoard& operator=(RankBoard&& other) noexcept;

  // Removes the name from the file system; the board stays.
  void remove_name() noexcept;

  // Posts that this rank makes the call of this number.
  void post_call(std::uint64_t call) noexcept;

  // Posts that this rank has aborted: no other rank should wait for it.
  void post_abort() noexcept;

  // Describes the ranks that will not make the call. Their process has ended, they have aborted, or
  // their communicator was destroyed before it or at a normal exit. "" if none is known.
  std::string lost_ranks(std::uint64_t call) const;

  // Returns whether all ranks have made the call and none has aborted. GPU work of ended ranks may
  // then still be complete.
  bool all_called(std::uint64_t call) const noexcept;

  // Returns whether all ranks are processes of this host that have joined the board.
  bool all_joined() const noexcept;

  // Returns whether another rank is in this process, or may be.
  bool may_share_process() const noexcept;

  // Post that this rank has closed the memory of other ranks; return whether all have, or have
  // ended.
  void post_memory_closed() noexcept;
  bool all_closed_memory() const noexcept;

  // Rounds of an all-gather between ranks that are all on the board: put() until all_put(), then
  // take(). At most kMostBytes of each rank.
  static constexpr std::size_t kMostBytes = 4096;
  void put(const void* mine, std::size_t bytes) noexcept;
  bool all_put() const noexcept;
  // Writes rank r's data to all[r * stride]. Returns false if a rank has put another number of
  // bytes.
  bool take(void* all, std::size_t stride) const noexcept;

  // Returns the page-aligned bytes after the board; null without shared memory.
  void* more() const noexcept;

  // Describes the ranks that have not made the call: "rank 1 has made 2 calls, rank 3's process has
  // ended". It also says if there are none, or none known.
  std::string late_ranks(std::uint64_t call) const;

 private:
  struct Rank;
  static bool has_ended(const Rank& rank) noexcept;
  std::string text_of(int rank) const;

  std::size_t local_bytes() const noexcept;

  Rank* ranks_ = nullptr;  // [size_], shared memory
  std::size_t more_ = 0;   // bytes
  int rank_ = 0, size_ = 0;
  std::uint64_t round_ = 0;
  std::string path_;
};

}  // namespace logitless
