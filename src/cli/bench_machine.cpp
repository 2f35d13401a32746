#include "cli/bench_machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cli/convert.h"
#include "cli/unfused.h"

namespace logitless::cli {
namespace {

ContextOptions options_of(bool on_gpu, int threads) {
  ContextOptions options;
  options.threads = threads;
  if (on_gpu) options.device = DeviceKind::cuda;
  return options;
}

}  // namespace

Machine::Machine(bool on_gpu, int threads, std::function<void(std::string_view)> trace)
    : trace_(std::move(trace)), context_(options_of(on_gpu, threads)) {
  if (on_gpu) stream_.emplace(context_);
}

Context Machine::make_context(const std::string& kernel) const {
  ContextOptions options = options_of(on_gpu(), context_.threads());
  options.kernel = kernel;
  options.stream = stream();
  options.trace = trace_;
  return Context(std::move(options));
}

std::size_t Machine::free_bytes() const {
  return on_gpu() ? device_status(context_).free_bytes : available_bytes();
}

DeviceMemory Machine::allocate(const Context& context, std::size_t bytes) const {
  DeviceMemory memory;
  memory.bytes = bytes;
  if (on_gpu()) {
    memory.device = DeviceBuffer(context, bytes);
  } else {
    memory.host = Buffer(bytes, &context.memory());
  }
  return memory;
}

void Machine::upload(const DeviceMemory& to, const void* from, std::size_t bytes) const {
  if (!on_gpu()) {
    std::memcpy(to.data(), from, bytes);
    return;
  }
  stream_->copy(to.data(), from, bytes);
  stream_->wait();
}

void Machine::fill_normal(const DeviceMemory& memory, DType dtype, double deviation,
                          std::uint64_t seed) const {
  constexpr std::int64_t kPeriod = (std::int64_t{1} << 22) - 3;  // a prime: no two rows are equal
  const auto item = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t count = std::min(kPeriod, static_cast<std::int64_t>(memory.bytes) / item);
  const std::int64_t shape[] = {count};
  const OwnedTensor numbers = random_normal(dtype, shape, deviation, seed);
  auto filled = static_cast<std::size_t>(count * item);
  upload(memory, numbers.view.data(), filled);
  auto* const data = static_cast<std::byte*>(memory.data());
  while (filled < memory.bytes) {
    const std::size_t more = std::min(filled, memory.bytes - filled);
    if (on_gpu()) {
      stream_->copy(data + filled, data, more);
    } else {
      std::memcpy(data + filled, data, more);
    }
    filled += more;
  }
  if (on_gpu()) stream_->wait();
}

double Machine::seconds(const std::function<void()>& enqueue) const {
  const auto start = std::chrono::steady_clock::now();
  enqueue();
  if (on_gpu()) stream_->wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

MachineProgram::MachineProgram(const Machine& machine, const std::string& text)
    : machine_(machine) {
  CompileOptions options;
  options.chunk = false;
  options.threads = machine.context().threads();
  if (machine.on_gpu()) options.device = machine.context().device();
  program_ = compile(Graph::parse(text), options);
  if (machine.on_gpu()) prepared_ = program_.prepare(machine.context());
  arena_ = machine.allocate(machine.context(), program_.arena_bytes());
}

void MachineProgram::run(std::span<const void* const> parameters, void* result) const {
  void* const results[] = {result};
  if (prepared_) {
    prepared_->run(parameters, results, arena_.data(), machine_.stream());
  } else {
    program_.run(parameters, results, arena_.data());
  }
}

}  // namespace logitless::cli
