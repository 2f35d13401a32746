// Copies into the memory of other GPUs of the host. A flag is 1 from when another rank signals it
// until its rank has seen it. There are no counters, so captured graphs can be relaunched.
#include "kernels/device/peers.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/device/driver_function.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/device/stream.h"

namespace logitless::cuda {
namespace {

constexpr std::size_t kFlagBytes = 64;  // one cache line of host memory each

using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

BatchMemOp batch_mem_op() {
  static const auto function = driver_function<BatchMemOp>("cuStreamBatchMemOp");
  return function;
}

// The write becomes visible after all earlier writes of the stream.
CUstreamBatchMemOpParams write_op(CUdeviceptr address, cuuint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address;
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return op;
}
CUstreamBatchMemOpParams wait_op(CUdeviceptr address) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address;
  op.waitValue.value = 1;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return op;
}

void enqueue(std::vector<CUstreamBatchMemOpParams> ops, Stream stream) {
  const CUresult result = batch_mem_op()(static_cast<CUstream>(stream),
                                         static_cast<unsigned>(ops.size()), ops.data(), 0);
  if (result != CUDA_SUCCESS)
    throw DeviceError(concat("cuStreamBatchMemOp: error ", static_cast<int>(result)));
}

std::size_t flags_size(std::size_t ranks) { return ranks * 2 * ranks * kFlagBytes; }

// Allocations of this process's ranks by address, for other ranks of the process.
std::mutex allocated_mutex;
std::map<std::uint64_t, std::weak_ptr<std::byte>>& allocated() {
  static auto* const of_process = new std::map<std::uint64_t, std::weak_ptr<std::byte>>;
  return *of_process;  // outlives static objects
}
void free_allocated(std::byte* memory) noexcept {
  {
    const std::lock_guard lock(allocated_mutex);
    allocated().erase(reinterpret_cast<std::uint64_t>(memory));
  }
  cudaFree(memory);
  cudaGetLastError();
}
void unmap(std::byte* memory) noexcept {
  cudaIpcCloseMemHandle(memory);
  cudaGetLastError();
}

bool reaches(std::byte* memory) {
  cudaPointerAttributes of{};
  int device = 0, can = 0;
  if (cudaPointerGetAttributes(&of, memory) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess)
    return false;
  if (of.device == device) return true;
  if (cudaDeviceCanAccessPeer(&can, device, of.device) != cudaSuccess || can == 0) return false;
  const cudaError_t status = cudaDeviceEnablePeerAccess(of.device, 0);
  return status == cudaSuccess || status == cudaErrorPeerAccessAlreadyEnabled;
}

}  // namespace

std::size_t PeerCopies::flag_bytes(int size) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (flags_size(static_cast<std::size_t>(size)) + page - 1) / page * page;
}

PeerCopies::PeerCopies(int rank, int size, void* flags)
    : rank_(static_cast<std::size_t>(rank)),
      size_(static_cast<std::size_t>(size)),
      flags_(static_cast<std::byte*>(flags)),
      last_(make_event()) {
  batch_mem_op();
  require_cuda(cudaHostRegister(flags, flag_bytes(size), cudaHostRegisterMapped),
               "the group's flags");
  void* of_device = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&of_device, flags, 0);
  if (status != cudaSuccess) cudaHostUnregister(flags);
  require_cuda(status, "the group's flags");
  device_flags_ = reinterpret_cast<std::uint64_t>(of_device);
  try {
    try_flags();
  } catch (...) {
    cudaHostUnregister(flags);
    throw;
  }
}

// Tests flag operations with this rank's own flag, which no other rank writes.
void PeerCopies::try_flags() const {
  const int rank = static_cast<int>(rank_);
  const CUdeviceptr flag = device_flags_ + flag_of(rank, kReady, rank);
  const std::shared_ptr<void> stream = make_stream();
  enqueue({write_op(flag, 1), wait_op(flag), write_op(flag, 0)}, stream.get());
  require_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.get())), "the group's flags");
}

PeerCopies::~PeerCopies() {
  free();
  cudaHostUnregister(flags_);
  cudaGetLastError();
}

void PeerCopies::free() noexcept {
  close();
  while (!parts_.empty()) free_latest();
}

PeerMemory PeerCopies::allocate(std::size_t bytes) {
  PeerMemory shared;
  Part part;
  part.bytes = bytes;
  part.of_rank.resize(size_);
  void* memory = nullptr;
  cudaIpcMemHandle_t handle;
  static_assert(sizeof(handle) == sizeof(shared.handle));
  if (cudaMalloc(&memory, bytes) == cudaSuccess) {
    part.of_rank[rank_] =
        Memory(static_cast<std::byte*>(memory), [](std::byte* held) { free_allocated(held); });
    {
      const std::lock_guard lock(allocated_mutex);
      allocated()[reinterpret_cast<std::uint64_t>(memory)] = part.of_rank[rank_];
    }
    if (cudaIpcGetMemHandle(&handle, memory) == cudaSuccess) {
      std::memcpy(shared.handle.data(), &handle, sizeof(handle));
      shared.address = reinterpret_cast<std::uint64_t>(memory);
      shared.process = getpid();
      shared.bytes = bytes;
    }
  }
  cudaGetLastError();
  parts_.push_back(std::move(part));
  return shared;
}

bool PeerCopies::open(std::span<const PeerMemory> of_all) {
  Part& part = parts_.back();
  const auto open_one = [&](std::size_t r) {
    const PeerMemory& shared = of_all[r];
    if (shared.bytes != part.bytes) return false;
    if (r == rank_) return true;
    if (shared.process == getpid()) {
      part.of_rank[r] = of_this_process(shared.address);
      return part.of_rank[r] != nullptr && reaches(part.of_rank[r].get());
    }
    void* memory = nullptr;
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, shared.handle.data(), sizeof(handle));
    if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess)
      return false;
    part.of_rank[r] = Memory(static_cast<std::byte*>(memory), [](std::byte* held) { unmap(held); });
    return true;
  };
  for (std::size_t r = 0; r < size_; ++r) {
    if (open_one(r)) continue;
    cudaGetLastError();
    close(part);
    return false;
  }
  cudaGetLastError();
  return true;
}

PeerCopies::Memory PeerCopies::of_this_process(std::uint64_t address) {
  const std::lock_guard lock(allocated_mutex);
  const auto found = allocated().find(address);
  return found == allocated().end() ? nullptr : found->second.lock();
}

void PeerCopies::free_latest() noexcept {
  close(parts_.back());
  parts_.pop_back();
}

void PeerCopies::close() noexcept {
  for (Part& part : parts_) close(part);
}

void PeerCopies::close(Part& part) noexcept {
  for (std::size_t r = 0; r < size_; ++r) {
    if (r != rank_) part.of_rank[r].reset();
  }
}

void* PeerCopies::memory_of(std::size_t bytes) const {
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const Part& part) { return part.bytes >= bytes; });
  return found == parts_.end() ? nullptr : found->of_rank[rank_].get();
}

const PeerCopies::Part* PeerCopies::part_of(const void* address, std::size_t bytes) const {
  const auto found = std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) {
    const std::byte* const begin = part.of_rank[rank_].get();
    return begin != nullptr && address >= begin &&
           static_cast<const std::byte*>(address) + bytes <= begin + part.bytes;
  });
  return found == parts_.end() ? nullptr : &*found;
}

bool PeerCopies::holds(const void* address, std::size_t bytes) const {
  return part_of(address, bytes) != nullptr;
}

// Offset of the flag that `rank` waits for and `from` sets.
std::size_t PeerCopies::flag_of(int rank, Barrier barrier, int from) const {
  const auto r = static_cast<std::size_t>(rank), f = static_cast<std::size_t>(from);
  return ((r * 2 + static_cast<std::size_t>(barrier)) * size_ + f) * kFlagBytes;
}

// A flag is 0 again before it can be signalled next: its rank has seen it, and only then signals
// the other rank, which waits for that signal in the next barrier.
void PeerCopies::wait_for_peers(Barrier barrier, Stream stream) const {
  const int rank = static_cast<int>(rank_), size = static_cast<int>(size_);
  std::vector<CUstreamBatchMemOpParams> ops;
  ops.reserve(3 * (size_ - 1));
  const auto each_other = [&](const auto& op) {
    for (int k = 1; k < size; ++k) ops.push_back(op((rank + k) % size));
  };
  each_other([&](int r) { return write_op(device_flags_ + flag_of(r, barrier, rank), 1); });
  each_other([&](int r) { return wait_op(device_flags_ + flag_of(rank, barrier, r)); });
  each_other([&](int r) { return write_op(device_flags_ + flag_of(rank, barrier, r), 0); });
  enqueue(std::move(ops), stream);
}

// Copies mine + r * step to rank r, as this rank's part of `to` there. Each rank starts with the
// next one, so that no GPU is written by all others at once.
void PeerCopies::exchange(const void* mine, std::size_t step, void* to, std::size_t bytes_each,
                          Stream stream) const {
  const Part& part = *part_of(to, bytes_each * size_);
  const auto offset =
      static_cast<std::size_t>(static_cast<std::byte*>(to) - part.of_rank[rank_].get());
  wait_for_peers(kReady, stream);
  for (std::size_t k = 1; k <= size_; ++k) {
    const std::size_t r = (rank_ + k) % size_;
    const auto* const from = static_cast<const std::byte*>(mine) + r * step;
    std::byte* const there = part.of_rank[r].get() + offset + rank_ * bytes_each;
    if (from == there) continue;
    require_cuda(cudaMemcpyAsync(there, from, bytes_each, cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(stream)),
                 "copy to another GPU");
  }
  wait_for_peers(kDone, stream);
  record_event_of_graph(last_.get(), stream);
}

bool PeerCopies::done() const { return event_passed(last_.get()); }

void PeerCopies::all_gather(const void* mine, void* all, std::size_t bytes_each,
                            Stream stream) const {
  exchange(mine, 0, all, bytes_each, stream);
}

void PeerCopies::all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                            Stream stream) const {
  exchange(slices, bytes_each, slices_of_all, bytes_each, stream);
}

void PeerCopies::release_waits() const noexcept {
  for (std::size_t r = 0; r < size_; ++r) {
    for (const Barrier barrier : {kReady, kDone}) {
      std::byte* const flag =
          flags_ + flag_of(static_cast<int>(rank_), barrier, static_cast<int>(r));
      std::atomic_ref(*reinterpret_cast<std::uint32_t*>(flag)).store(1);
    }
  }
}

}  // namespace logitless::cuda
