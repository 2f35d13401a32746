#include "train/device/memory.h"

#include <fmt/format.h>

#include "logitless/bytes.h"

namespace logitless::train {
namespace {

constexpr const char* kArena = "arena";

}  // namespace

std::vector<MemoryItem> memory_statement(const DeviceSizes& sizes) {
  std::vector<MemoryItem> items;
  const auto add = [&](const char* name, std::size_t bytes) {
    if (bytes > 0) items.push_back({name, bytes});
  };
  add("weights", sizes.weights);
  add("bf16 copies", sizes.rounded);
  add("moments", sizes.moments);
  add("gradients", sizes.gradients);
  add("tables of positions", sizes.constants);
  add(kArena, sizes.arena);
  add("far field", sizes.far);
  add("head over ranks", sizes.head);
  add("optimizer", sizes.optimizer);
  add("batches", sizes.batches);
  add("exchange between ranks", sizes.exchange);
  if (sizes.exchange > 0) add("NCCL", kNcclBytes);
  add("libraries and kernels", kLibraryBytes);
  return items;
}

std::size_t total_bytes(const std::vector<MemoryItem>& items) {
  std::size_t total = 0;
  for (const MemoryItem& item : items) total += item.bytes;
  return total;
}

std::string why_no_memory(const std::vector<MemoryItem>& items, std::size_t free_bytes) {
  const std::size_t total = total_bytes(items);
  if (total <= free_bytes) return {};
  std::string list;
  std::size_t arena = 0;
  for (const MemoryItem& item : items) {
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", item.name, format_bytes(item.bytes));
    if (item.name == kArena) arena = item.bytes;
  }
  const std::size_t rest = total - arena;
  const std::string advice =
      rest < free_bytes
          ? fmt::format("a --budget of {} bytes is what is left for the arena", free_bytes - rest)
          : "a budget of the arena cannot make up for it";
  return fmt::format("training takes {} of the GPU's memory ({}), and {} are free: {}",
                     format_bytes(total), list, format_bytes(free_bytes), advice);
}

}  // namespace logitless::train
