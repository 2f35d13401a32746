// Devices, device memory and copies.
#include <cstring>
#include <utility>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/device/cards.h"
#include "kernels/device/head.h"
#include "kernels/device/stream.h"

namespace logitless::cuda {
namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }

struct Values {
  uint4 parts[4];
};
__global__ void write_values(Values* to, const Values values) { *to = values; }

}  // namespace

void put_values(void* to, const void* values, Stream stream) {
  Values copy;
  std::memcpy(&copy, values, sizeof copy);
  write_values<<<1, 1, 0, stream_of(stream)>>>(static_cast<Values*>(to), copy);
  require_cuda(cudaGetLastError(), "writing values");
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // without a driver: clears the error, which later calls must not see
    return 0;
  }
  return count;
}

std::string device_missing(int index) {
  const int count = device_count();
  if (count == 0) return "this machine has no CUDA device or no driver for it";
  if (index < 0 || index >= count)
    return concat("device ", index, " is not there: expected 0 to ", count - 1);
  const int capability = compute_capability(index);
  if (capability >= 75) return {};
  return concat("device ", index, " has compute capability ", capability / 10, ".", capability % 10,
                ", the kernels need 7.5 or more");
}

int compute_capability(int index) {
  int major = 0;
  int minor = 0;
  require_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
               "compute capability");
  require_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
               "compute capability");
  return 10 * major + minor;
}

CardFacts card_facts(int index) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    require_cuda(cudaDeviceGetAttribute(&value, which, index), "properties of the GPU");
    return value;
  };
  cudaDeviceProp properties;
  require_cuda(cudaGetDeviceProperties(&properties, index), "properties of the GPU");
  CardFacts facts;
  facts.name = properties.name;
  facts.compute_capability = compute_capability(index);
  facts.sms = attribute(cudaDevAttrMultiProcessorCount);
  facts.clock_hz = 1e3 * attribute(cudaDevAttrClockRate);
  // Two transfers a clock, of so many bits.
  facts.bytes_per_second =
      2e3 / 8 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth);
  facts.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  facts.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  int version = 0;  // 1000 * major + 10 * minor
  require_cuda(cudaDriverGetVersion(&version), "version of the driver");
  facts.driver = concat(version / 1000, ".", version % 1000 / 10);
  return facts;
}

int current_device() {
  int device = 0;
  require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (cudaMalloc(&data_, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError(concat("out of device memory: ", bytes, " bytes were asked for"));
  }
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) cudaFree(data_);
}
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream)),
               "copy to the device");
  synchronize(stream);
}
void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream) {
  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)),
               "copy from the device");
  synchronize(stream);
}
void fill_device(void* to, int byte, std::size_t bytes, Stream stream) {
  require_cuda(cudaMemsetAsync(to, byte, bytes, stream_of(stream)), "fill device memory");
}
std::size_t memory_in_use() {
  std::size_t free = 0;
  std::size_t total = 0;
  require_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return total - free;
}
void synchronize(Stream stream) {
  require_cuda(cudaStreamSynchronize(stream_of(stream)), "CUDA stream");
}

Timer::Timer() {
  for (void*& event : events_) {
    cudaEvent_t made;
    require_cuda(cudaEventCreate(&made), "event");
    event = made;
  }
}
Timer::~Timer() {
  for (void* event : events_) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}
void Timer::start(Stream stream) {
  require_cuda(cudaEventRecord(static_cast<cudaEvent_t>(events_[0]), stream_of(stream)), "event");
}
float Timer::stop(Stream stream) {
  require_cuda(cudaEventRecord(static_cast<cudaEvent_t>(events_[1]), stream_of(stream)), "event");
  require_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(events_[1])), "event");
  float milliseconds = 0.0f;
  require_cuda(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(events_[0]),
                                    static_cast<cudaEvent_t>(events_[1])),
               "event");
  return milliseconds;
}

}  // namespace logitless::cuda
