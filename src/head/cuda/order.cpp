#include <mutex>
#include <vector>

#include "head/cuda/views.h"
#include "head/vocab_order_access.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"

namespace logitless::cuda {

DeviceOrder device_order(const VocabOrder& order) {
  const VocabOrderAccess::Data& data = VocabOrderAccess::of(order);
  const auto vocab = static_cast<std::size_t>(order.vocab());
  const std::lock_guard lock(data.on_devices->mutex);
  DeviceMemory& memory = data.on_devices->memory[current_device()];
  if (memory.data() == nullptr) {
    DeviceMemory made(vocab * 12 + data.places.size() * 4);
    const std::vector<std::int32_t> vocab_ids(data.vocab_ids.begin(), data.vocab_ids.end());
    auto* to = static_cast<std::byte*>(made.data());
    for (const void* const from : {static_cast<const void*>(vocab_ids.data()),
                                   static_cast<const void*>(data.positions.data()),
                                   static_cast<const void*>(data.share.data())}) {
      copy_to_device(to, from, vocab * 4, nullptr);
      to += vocab * 4;
    }
    copy_to_device(to, data.places.data(), data.places.size() * 4, nullptr);
    memory = std::move(made);
  }
  const auto* const vocab_ids = static_cast<const std::int32_t*>(memory.data());
  DeviceOrder out{vocab_ids, vocab_ids + vocab,
                  reinterpret_cast<const float*>(vocab_ids + 2 * vocab), data.identity};
  if (!data.places.empty()) {
    out.places = vocab_ids + 3 * vocab;
    out.position_count = static_cast<std::int64_t>(data.places.size());
  }
  return out;
}

DeviceMoments device_moments(const VocabOrder& order) {
  const VocabOrderAccess::Data& data = VocabOrderAccess::of(order);
  const std::lock_guard lock(data.moments_on_devices->mutex);
  DeviceMemory& memory = data.moments_on_devices->memory[current_device()];
  const std::size_t narrow = (data.axes.size() + data.variance.size()) * 2;
  const std::size_t caution = round_up(static_cast<std::int64_t>(narrow), 16);
  if (memory.data() == nullptr) {
    DeviceMemory made(caution + data.log2_caution.size() * 4);
    std::vector<std::uint16_t> values(narrow / 2);
    from_f32(DType::bf16, data.axes.data(), values.data(),
             static_cast<std::int64_t>(data.axes.size()));
    from_f32(DType::bf16, data.variance.data(), values.data() + data.axes.size(),
             static_cast<std::int64_t>(data.variance.size()));
    copy_to_device(made.data(), values.data(), narrow, nullptr);
    copy_to_device(static_cast<std::byte*>(made.data()) + caution, data.log2_caution.data(),
                   data.log2_caution.size() * 4, nullptr);
    memory = std::move(made);
  }
  const auto* const first = static_cast<const std::byte*>(memory.data());
  return {first, first + data.axes.size() * 2, reinterpret_cast<const float*>(first + caution)};
}

}  // namespace logitless::cuda
