// Memory that the GPUs of a host write into each other's, by their copy engines, with flags in the
// host's memory by which they meet. No CUDA headers here: a build without CUDA has none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/device_head.h"

namespace logitless::cuda {

// By what other ranks find a part of a rank's memory; told to them as bytes.
struct PeerMemory {
  std::array<std::byte, 64> handle{};  // of another process's memory; zeros: there is none
  std::uint64_t address = 0;           // in its own process
  std::int64_t process = 0;
  std::uint64_t bytes = 0;
};

// One rank's end. Exchanges run one after another on the device. What waits in
// one for a rank that does not come is ended by let_go(), and writes what it would have written
// had that rank come.
class PeerCopies {
 public:
  // Of `size` ranks: bytes that all of them see, zeros at first, whole pages at a whole page.
  static std::size_t flag_bytes(int size);
  // On the thread's current device, which the rank's calls are made on. Throws DeviceError where
  // the device cannot see `flags`, or wait for them.
  PeerCopies(int rank, int size, void* flags);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Of this rank's GPU; without a handle where it is short of memory or has no way to tell others.
  PeerMemory allocate(std::size_t bytes);
  // What all ranks have just allocated, in their order. False: this rank cannot reach one of them,
  // and nothing is open.
  bool open(std::span<const PeerMemory> of_all);
  // What was allocated last goes.
  void drop() noexcept;
  // This rank's first of so many bytes or more; null: there is none. Bytes of the largest.
  void* memory_of(std::size_t bytes) const;
  std::size_t largest() const { return parts_.empty() ? 0 : parts_.back().bytes; }

  // Whether so many bytes from an address on are in one part of open memory.
  bool holds(const void* address, std::size_t bytes) const;

  // Enqueue. What is written is held, at the same offset on all ranks; what is read is anywhere.
  void all_gather(const void* mine, void* all, std::size_t bytes_each, Stream stream) const;
  void all_to_all(const void* pieces, void* pieces_of_all, std::size_t bytes_each,
                  Stream stream) const;

  // Whether the last exchange is done, which a graph may have launched.
  bool done() const;
  // What waits on this GPU goes on, once: said again and again until its streams are done.
  void let_go() const noexcept;
  // Closes what this rank has of the others: no exchange is in flight, and none follows.
  void close() noexcept;
  // The same, and this rank's memory goes. Waits for the GPU.
  void free() noexcept;

 private:
  // Memory that goes with its last holder: of this rank, of another one in this process, which may
  // still be written to when that rank has ended, or what is mapped of another process's.
  using Memory = std::shared_ptr<std::byte>;
  struct Part {
    std::size_t bytes = 0;
    std::vector<Memory> of_rank;  // null: not open
  };
  static Memory of_this_process(std::uint64_t address);
  enum Meeting { kReady, kDone };

  void try_flags() const;

  const Part* part_of(const void* address, std::size_t bytes) const;
  std::size_t flag_of(int rank, Meeting meeting, int from) const;
  void meet(Meeting meeting, Stream stream) const;
  void exchange(const void* mine, std::size_t step, void* to, std::size_t bytes_each,
                Stream stream) const;
  void close(Part& part) noexcept;

  std::size_t rank_, size_;
  std::byte* flags_;
  std::uint64_t device_flags_ = 0;  // the same memory as the device sees it
  std::vector<Part> parts_;         // ascending
  std::shared_ptr<void> last_;      // event
};

}  // namespace logitless::cuda
