// NCCL, loaded at run time: exchanges of bytes between GPUs. It includes no CUDA headers; in a
// build without CUDA every call throws the reason.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/device/head.h"

namespace logitless::cuda {

inline constexpr std::size_t kNcclIdBytes = 128;

// Returns why there is no NCCL (not found by the loader, or older than 2.19), or empty.
const std::string& nccl_missing();

// Throws Unsupported where NCCL is missing, and DeviceError. `id` [kNcclIdBytes].
void make_nccl_id(std::byte* id);

// One rank's NCCL communicator, on the thread's current device. It is non-blocking: after the
// constructor and each call but abort(), poll ready() until it is true. Not movable. All functions
// throw DeviceError with NCCL's text, and the constructors Unsupported where NCCL is missing.
class NcclRank {
 public:
  // max_ctas: most CTAs of a call's kernel; 0: NCCL chooses.
  NcclRank(const std::byte* id, int rank, int size, int max_ctas);
  // Makes a separate communicator with the ranks of `parent` (ncclCommSplit).
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
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each, Stream stream);

  // Calls between the two are enqueued by end_group(); poll ready() after it.
  void begin_group();
  void end_group();

  // Shutdown: finalize(), poll ready(), destroy(). Otherwise the destructor aborts.
  void finalize();
  void destroy();
  // Ends kernels that wait for other ranks. No call may follow.
  void abort() noexcept;

 private:
  int rank_ = 0, size_ = 1;
  // Written by NCCL's thread until ready; leaked if a split never ends.
  std::unique_ptr<void*> comm_ = std::make_unique<void*>(nullptr);
  void* parent_ = nullptr;  // not null: the split is not complete
};

}  // namespace logitless::cuda
