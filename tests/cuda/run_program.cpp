#include "cuda/run_program.h"

#include <gtest/gtest.h>
#include <logitless/device.h>

#include <cstring>
#include <functional>
#include <list>

#include "core/element.h"
#include "kernels/device/head.h"
#include "support/recording.h"

namespace logitless::test {

std::optional<DeviceLimits> gpu() {
  if (!cuda::device_missing(0).empty()) return std::nullopt;
  DeviceLimits device;
  device.kind = DeviceKind::cuda;
  device.compute_capability = cuda::compute_capability(cuda::current_device());
  return device;
}

namespace {

// A prepared program and its memory.
struct Run {
  const Context& context;
  const PreparedProgram& prepared;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  std::byte* arena;
};

// Calls run(Run) with inputs in memory, and returns what it leaves in the results.
ir::Tensors on_gpu(const CompiledProgram& program, const ir::Tensors& inputs,
                   const ir::Tensors& before, const std::function<void(const Run&)>& run) {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  const Context context(options);
  const PreparedProgram prepared = program.prepare(context);

  std::list<cuda::DeviceMemory> memory;
  const auto block = [&](std::size_t bytes) {
    memory.emplace_back(std::max<std::size_t>(bytes, 16));
    cuda::fill_device(memory.back().data(), 0xff, memory.back().bytes(), nullptr);
    return memory.back().data();
  };
  const auto put = [&](const CompiledProgram::Tensor& t, const ir::Tensor& from) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
    for (std::size_t i = 0; i < from.data.size(); ++i)
      store_element(bytes.data(), t.dtype, static_cast<std::int64_t>(i), from.data[i]);
    cuda::copy_to_device(memory.back().data(), bytes.data(), bytes.size(), nullptr);
  };
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    parameters.push_back(block(static_cast<std::size_t>(t.bytes())));
    put(t, inputs.at(t.name));
  }
  for (const CompiledProgram::Tensor& t : program.results()) {
    results.push_back(block(static_cast<std::size_t>(t.bytes())));
    if (const auto found = before.find(t.name); found != before.end()) put(t, found->second);
  }
  constexpr std::size_t kGuard = 4096;
  auto* const arena = static_cast<std::byte*>(block(program.arena_bytes() + 2 * kGuard)) + kGuard;
  cuda::synchronize(nullptr);
  run({context, prepared, parameters, results, arena});
  cuda::synchronize(nullptr);

  std::vector<std::byte> guards(2 * kGuard);
  cuda::copy_to_host(guards.data(), arena - kGuard, kGuard, nullptr);
  cuda::copy_to_host(guards.data() + kGuard, arena + program.arena_bytes(), kGuard, nullptr);
  for (const std::byte b : guards) {
    if (b == std::byte{0xff}) continue;
    ADD_FAILURE() << "written outside the arena";
    break;
  }
  ir::Tensors out;
  for (std::size_t r = 0; r < results.size(); ++r) {
    const CompiledProgram::Tensor& t = program.results()[r];
    std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
    cuda::copy_to_host(bytes.data(), results[r], bytes.size(), nullptr);
    record(t.name, bytes);
    ir::Tensor x;
    x.shape = t.shape;
    const std::size_t count = bytes.size() / size_of(t.dtype);
    for (std::size_t i = 0; i < count; ++i)
      x.data.push_back(load_element(bytes.data(), t.dtype, static_cast<std::int64_t>(i)));
    out[t.name] = std::move(x);
  }
  return out;
}

}  // namespace

ir::Tensors execute_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs, int times,
                           FarFieldHead* far, const ir::Tensors& before) {
  return on_gpu(program, inputs, before, [&](const Run& run) {
    for (int i = 0; i < times; ++i) {
      // A run that does nothing must not pass by the results of the one before.
      for (std::size_t r = 0; before.empty() && r < run.results.size(); ++r)
        cuda::fill_device(run.results[r], 0xff,
                          static_cast<std::size_t>(program.results()[r].bytes()), nullptr);
      if (far != nullptr) {
        run.prepared.run(run.parameters, run.results, run.arena, *far);
      } else {
        run.prepared.run(run.parameters, run.results, run.arena, nullptr);
      }
    }
  });
}

ir::Tensors replay_on_gpu(const CompiledProgram& program, const ir::Tensors& inputs) {
  return on_gpu(program, inputs, {}, [](const Run& run) {
    const DeviceStream stream(run.context);
    const DeviceGraph graph = stream.capture(
        [&] { run.prepared.run(run.parameters, run.results, run.arena, stream.handle()); });
    for (int launch = 0; launch < 2; ++launch) stream.launch(graph);
    stream.wait();
  });
}

}  // namespace logitless::test
