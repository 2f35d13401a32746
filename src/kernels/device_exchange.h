// NCCL, which is found at run time: bytes between GPUs. No CUDA headers here: a build without CUDA
// answers every call with the reason.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/device_head.h"

namespace logitless::cuda {

inline constexpr std::size_t kNcclIdBytes = 128;

// Empty, or why there is no NCCL: not found by the loader, or older than 2.19.
const std::string& nccl_missing();

// Throws Unsupported where NCCL is missing, DeviceError. `id` [kNcclIdBytes].
void make_nccl_id(std::byte* id);

// One rank's end of a group, on the thread's current device; non-blocking: after the constructor
// and after each call but abort(), ready() is asked until it says yes. Stays where it is. All
// throw DeviceError with NCCL's text, and the constructors Unsupported where NCCL is missing.
class NcclRank {
 public:
  // max_ctas: the most thread blocks of a call's kernel; 0: NCCL chooses.
  NcclRank(const std::byte* id, int rank, int size, int max_ctas);
  // A group of its own with the ranks of another one (ncclCommSplit).
  NcclRank(void* parent, int max_ctas);
  ~NcclRank() {
    abort();
    if (parent_ != nullptr) (void)comm_.release();
  }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // False while NCCL still works on the last call.
  bool ready();

  // Enqueue. bytes_each is more than 0.
  void all_gather(const void* mine, void* all, std::size_t bytes_each, Stream stream);
  void all_to_all(const void* pieces, void* pieces_of_all, std::size_t bytes_each, Stream stream);

  // What is between the two is enqueued at the end; ready() is asked then.
  void begin_group();
  void end_group();

  // finalize(), ready() until it says yes, destroy(): or else the destructor aborts.
  void finalize();
  void destroy();
  // Ends the kernels that wait for other ranks. Nothing may be called afterwards.
  void abort() noexcept;

 private:
  int rank_ = 0, size_ = 1;
  // Written by NCCL's thread until it is ready; of a split that never ended it stays for ever.
  std::unique_ptr<void*> comm_ = std::make_unique<void*>(nullptr);
  void* parent_ = nullptr;  // not null: being split off
};

}  // namespace logitless::cuda
