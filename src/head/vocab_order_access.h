// What an order keeps beside what its users see: copies on devices.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device_head.h"
#include "logitless/vocab_order.h"

namespace logitless {

// By device; guarded by the mutex.
struct DeviceCopies {
  std::mutex mutex;
  std::map<int, cuda::DeviceMemory> memory;
};

struct VocabOrder::Data {
  std::vector<std::int64_t> words;
  std::vector<std::int32_t> positions;
  std::vector<float> average;
  std::vector<float> share;
  std::int64_t dim = 0;
  std::vector<float> axes, variance, log2_caution;
  std::vector<std::int32_t> places;  // of share_order
  std::uint64_t common = 0;          // a hash of them: the same on ranks that have the same
  bool identity = true;              // the words are their positions
  // Words and positions i32, share f32 [vocab], places i32, one after the other.
  std::shared_ptr<DeviceCopies> on_devices = std::make_shared<DeviceCopies>();
  // axes and variance bf16, log2_caution f32.
  std::shared_ptr<DeviceCopies> moments_on_devices;
};

struct VocabOrderAccess {
  using Data = VocabOrder::Data;
  static const Data& of(const VocabOrder& order) { return *order.data_; }
  // The same order, or one of no words, with these places.
  static VocabOrder with_places(const VocabOrder& order, std::vector<std::int32_t> places);
};

}  // namespace logitless
