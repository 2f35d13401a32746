// Private data of VocabOrder, including its copies on devices.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device/head.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Copies by device index; guarded by the mutex.
struct DeviceCopies {
  std::mutex mutex;
  std::map<int, cuda::DeviceMemory> memory;
};

struct VocabOrder::Data {
  std::vector<std::int64_t> vocab_ids;
  std::vector<std::int32_t> positions;
  std::vector<float> average;
  std::vector<float> share;
  std::int64_t dim = 0;
  std::vector<float> axes, variance, log2_caution;
  std::vector<std::int32_t> places;  // of share_order
  std::uint64_t common = 0;          // hash of the above; equal on ranks with equal orders
  bool identity = true;              // each entry is at the position of its id
  // Entries and positions i32, share f32 [vocab], share_order i32, consecutively.
  std::shared_ptr<DeviceCopies> on_devices = std::make_shared<DeviceCopies>();
  // axes and variance bf16, log2_caution f32.
  std::shared_ptr<DeviceCopies> moments_on_devices;
};

struct VocabOrderAccess {
  using Data = VocabOrder::Data;
  static const Data& of(const VocabOrder& order) { return *order.data_; }
  // Returns the same order, or an empty one, with this share_order.
  static VocabOrder with_positions(const VocabOrder& order, std::vector<std::int32_t> places);
};

}  // namespace logitless
