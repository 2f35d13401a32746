// The GPU memory of a run, computed before any of it is allocated.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace logitless::train {

struct MemoryItem {
  std::string name;
  std::size_t bytes = 0;
};

// The buffers of a run on a GPU, in bytes.
struct DeviceSizes {
  std::size_t weights = 0;  // parameters, f32
  std::size_t rounded = 0;  // bf16 copies of parameters
  std::size_t moments = 0;  // both moments
  std::size_t gradients = 0;
  std::size_t constants = 0;
  std::size_t arena = 0;  // that of the largest program
  std::size_t far = 0;    // far-field steps and a vocabulary order
  std::size_t head = 0;   // vocabulary-parallel heads, without the arena
  std::size_t optimizer = 0;
  std::size_t batches = 0;   // tokens, targets, losses, logits
  std::size_t exchange = 0;  // between ranks
};

// Allowance for libraries, loaded kernels and captured graphs; not measured.
inline constexpr std::size_t kLibraryBytes = std::size_t{256} << 20;
// NCCL's buffers at its default settings, measured on two H200s (docs/use/distributed.md).
inline constexpr std::size_t kNcclBytes = std::size_t{1400} << 20;

// Returns an item for each buffer of more than 0 bytes.
std::vector<MemoryItem> memory_statement(const DeviceSizes& sizes);
std::size_t total_bytes(const std::vector<MemoryItem>& items);

// Returns "", or why a run does not fit: its items, their sum, the free memory, and options that
// help.
std::string why_no_memory(const std::vector<MemoryItem>& items, std::size_t free_bytes);

}  // namespace logitless::train
