// The device of a benchmark: memory, copies and times, on the CPU or the GPU alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "logitless/compiler.h"
#include "logitless/device.h"
#include "logitless/memory.h"

namespace logitless::cli {

// Memory of a device, counted by the meter of the context it was made for, which must outlive it.
struct DeviceMemory {
  Buffer host;
  DeviceBuffer device;
  std::size_t bytes = 0;
  void* data() const { return device.data() != nullptr ? device.data() : host.data(); }
};

class Machine {
 public:
  // threads: of the CPU; 0: the default. Throws Unsupported naming what is missing for a GPU.
  Machine(bool on_gpu, int threads, std::function<void(std::string_view)> trace);

  bool on_gpu() const { return stream_.has_value(); }
  const Context& context() const { return context_; }
  void* stream() const { return stream_ ? stream_->handle() : nullptr; }
  // Returns a context with a meter of its own, whose work runs on the machine's stream. `kernel`:
  // the one to use, or empty.
  Context make_context(const std::string& kernel) const;
  // Memory that can be allocated now; 0 where unknown.
  std::size_t free_bytes() const;

  DeviceMemory allocate(const Context& context, std::size_t bytes) const;
  void upload(const DeviceMemory& to, const void* from, std::size_t bytes) const;
  // Fills memory with normal numbers of a dtype that repeat after some millions.
  void fill_normal(const DeviceMemory& memory, DType dtype, double deviation,
                   std::uint64_t seed) const;
  // Returns the seconds until the enqueued work is done.
  double seconds(const std::function<void()>& enqueue) const;

 private:
  std::function<void(std::string_view)> trace_;
  Context context_;
  std::optional<DeviceStream> stream_;  // of a GPU
};

// A program without loops, ready to run on a machine.
class MachineProgram {
 public:
  MachineProgram(const Machine& machine, const std::string& text);
  // Enqueues it on the machine's stream of a GPU, runs it on a CPU.
  void run(std::span<const void* const> parameters, void* result) const;

 private:
  const Machine& machine_;
  CompiledProgram program_;
  std::optional<PreparedProgram> prepared_;
  DeviceMemory arena_;
};

}  // namespace logitless::cli
