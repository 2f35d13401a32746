#include "logitless/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdlib>
#include <utility>

#include "core/check.h"

namespace logitless {

void MemoryMeter::add(std::size_t bytes) {
  const std::size_t now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::size_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void MemoryMeter::remove(std::size_t bytes) {
  current_.fetch_sub(bytes, std::memory_order_relaxed);
}

void MemoryMeter::reset_peak() { peak_.store(current_bytes(), std::memory_order_relaxed); }

Buffer::Buffer(std::size_t bytes, MemoryMeter* meter) : bytes_(bytes), meter_(meter) {
  if (bytes == 0) return;
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  const std::size_t alignment = bytes >= kHuge ? kHuge : 64;
  if (bytes > SIZE_MAX - alignment || posix_memalign(&data_, alignment, bytes) != 0) {
    data_ = nullptr;
    throw DeviceError(concat("out of memory: ", bytes, " bytes were asked for"));
  }
  if (bytes >= kHuge)
    madvise(data_, bytes, MADV_HUGEPAGE);  // fewer TLB misses; failing is harmless
  if (meter_ != nullptr) meter_->add(bytes_);
}

Buffer::~Buffer() {
  std::free(data_);
  if (data_ != nullptr && meter_ != nullptr) meter_->remove(bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      meter_(std::exchange(other.meter_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(meter_, other.meter_);
  return *this;
}

std::size_t process_peak_bytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;  // Linux counts KiB
}

}  // namespace logitless
