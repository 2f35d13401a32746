// What a run takes of a GPU's memory, said before any of it is allocated.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace logitless::train {

struct MemoryItem {
  std::string name;
  std::size_t bytes = 0;
};

// What a run on a GPU is made of.
struct DeviceSizes {
  std::size_t weights = 0;  // bytes of parameters, f32
  std::size_t rounded = 0;  // of copies of parameters in bf16
  std::size_t moments = 0;  // both
  std::size_t gradients = 0;
  std::size_t constants = 0;
  std::size_t arena = 0;  // of the largest program
  std::size_t far = 0;    // of far-field steps and an order
  std::size_t head = 0;   // of heads over ranks, beside the arena
  std::size_t optimizer = 0;
  std::size_t batches = 0;   // tokens, targets, losses, logits
  std::size_t exchange = 0;  // between ranks
};

// Libraries, loaded kernels and captured graphs beside what is allocated: allowed for, not
// measured.
inline constexpr std::size_t kLibraryBytes = std::size_t{256} << 20;
// NCCL's buffers where it chooses their number: measured on two H200s (docs/distributed.md).
inline constexpr std::size_t kNcclBytes = std::size_t{1400} << 20;

// One item for each thing, none of 0 bytes.
std::vector<MemoryItem> memory_statement(const DeviceSizes& sizes);
std::size_t total_bytes(const std::vector<MemoryItem>& items);

// Empty, or why a run does not fit: its items, their sum, what is free, and what would help.
std::string why_no_room(const std::vector<MemoryItem>& items, std::size_t free_bytes);

}  // namespace logitless::train
