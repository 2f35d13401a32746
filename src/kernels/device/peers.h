// Peer-to-peer memory of the GPUs of a host, written by copy engines, with barrier flags in host
// memory. It includes no CUDA headers; a build without CUDA has no peers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/device/head.h"

namespace logitless::cuda {

// Describes a part of a rank's memory so that other ranks can map it; exchanged as bytes.
struct PeerMemory {
  std::array<std::byte, 64> handle{};  // IPC handle for other processes; zeros: none
  std::uint64_t address = 0;           // in its own process
  std::int64_t process = 0;
  std::uint64_t bytes = 0;
};

// One rank's end. Exchanges run one after another on the device. release_waits() ends an exchange
// that waits for a missing rank; it then writes as if that rank had arrived.
class PeerCopies {
 public:
  // Bytes of the flags for `size` ranks: shared, initially zero, page-aligned full pages.
  static std::size_t flag_bytes(int size);
  // Binds to the thread's current device, as the rank's later calls do. Throws DeviceError where
  // the device cannot map `flags` or wait for them.
  PeerCopies(int rank, int size, void* flags);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Allocates on this rank's GPU. Without a handle if memory is short or cannot be exported.
  PeerMemory allocate(std::size_t bytes);
  // Maps the latest allocations of all ranks, in rank order. Returns false if one of them is out of
  // reach; nothing is mapped then.
  bool open(std::span<const PeerMemory> of_all);
  // Frees the latest allocation.
  void free_latest() noexcept;
  // Returns this rank's first part of at least so many bytes, or null.
  void* memory_of(std::size_t bytes) const;
  std::size_t largest() const { return parts_.empty() ? 0 : parts_.back().bytes; }

  // Returns true if the address and so many bytes after it lie in one mapped part.
  bool holds(const void* address, std::size_t bytes) const;

  // Enqueue. The destination is in mapped memory, at the same offset on all ranks; the source is
  // anywhere.
  void all_gather(const void* mine, void* all, std::size_t bytes_each, Stream stream) const;
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                  Stream stream) const;

  // Returns true if the last exchange is done; a graph may have launched it.
  bool done() const;
  // Releases the current waits on this GPU; call it until its streams are done.
  void release_waits() const noexcept;
  // Unmaps the other ranks' memory: no exchange is in flight, and none follows.
  void close() noexcept;
  // close(), then frees this rank's memory. Waits for the GPU.
  void free() noexcept;

 private:
  // Memory that is freed with its last holder. It is this rank's, another rank's of this process
  // (which may still be written after that rank has ended), or mapped from another process.
  using Memory = std::shared_ptr<std::byte>;
  struct Part {
    std::size_t bytes = 0;
    std::vector<Memory> of_rank;  // null: not mapped
  };
  static Memory of_this_process(std::uint64_t address);
  enum Barrier { kReady, kDone };

  void try_flags() const;

  const Part* part_of(const void* address, std::size_t bytes) const;
  std::size_t flag_of(int rank, Barrier barrier, int from) const;
  void wait_for_peers(Barrier barrier, Stream stream) const;
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
