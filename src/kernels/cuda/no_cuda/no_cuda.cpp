// Stands in for the CUDA kernels in a build without CUDA.
#include "core/check.h"
#include "kernels/device_head.h"

namespace logitless::cuda {
namespace {

constexpr const char* kReason = "this build has no CUDA";

[[noreturn]] void refuse() { throw Unsupported(kReason); }

}  // namespace

int device_count() { return 0; }
std::string device_missing(int) { return kReason; }

DeviceMemory::DeviceMemory(std::size_t) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

void copy_to_device(void*, const void*, std::size_t, Stream) { refuse(); }
void copy_to_host(void*, const void*, std::size_t, Stream) { refuse(); }
void fill_device(void*, int, std::size_t, Stream) { refuse(); }
void synchronize(Stream) { refuse(); }

Timer::Timer() { refuse(); }
Timer::~Timer() = default;
void Timer::start(Stream) { refuse(); }
float Timer::stop(Stream) { refuse(); }

std::string forward_unsupported(const ForwardCall&) { return kReason; }
std::size_t forward_workspace_bytes(const ForwardShape&) { refuse(); }
void forward(const ForwardCall&) { refuse(); }

}  // namespace logitless::cuda
