// Metered, aligned memory. Everything the library allocates passes through a MemoryMeter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "logitless/export.h"

namespace logitless {

// Bytes in use and their peak. Safe to share between threads.
class LOGITLESS_API MemoryMeter {
 public:
  void add(std::size_t bytes);
  void remove(std::size_t bytes);
  std::size_t current_bytes() const { return current_.load(std::memory_order_relaxed); }
  std::size_t peak_bytes() const { return peak_.load(std::memory_order_relaxed); }
  // Sets the peak to the bytes in use now.
  void reset_peak();

 private:
  std::atomic<std::size_t> current_{0};
  std::atomic<std::size_t> peak_{0};
};

// Memory aligned to 64 bytes (2 MiB for large blocks), uninitialised. It moves and does not copy.
// The meter, if any, must outlive the buffer. Throws DeviceError when memory is short.
class LOGITLESS_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes, MemoryMeter* meter = nullptr);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  MemoryMeter* meter_ = nullptr;
};

// Returns the highest resident size of this process so far in bytes, as the operating system counts
// it; 0 where unknown.
LOGITLESS_API std::size_t process_peak_bytes();

}  // namespace logitless
