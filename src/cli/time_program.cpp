#include "cli/time_program.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "cli/args.h"
#include "cli/convert.h"
#include "logitless/device.h"

namespace logitless::cli {
namespace {

// Returns normal random numbers, or indices for integer dtypes.
OwnedTensor random_tensor(const CompiledProgram::Tensor& t, std::uint64_t seed) {
  if (t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16)
    return random_normal(t.dtype, t.shape, 0.02, seed);
  if (t.dtype != DType::i32 && t.dtype != DType::i64)
    throw UsageError(
        fmt::format("--time: parameter '{}' is {}, expected f32, bf16, f16, i32 or i64", t.name,
                    name_of(t.dtype)));
  OwnedTensor tensor = make_tensor(t.dtype, t.shape);
  const std::int64_t count = tensor.view.numel();
  const OwnedTensor indices = random_targets(count, 100, seed);
  const auto* from = static_cast<const std::int32_t*>(indices.view.data());
  if (t.dtype == DType::i32)
    std::copy_n(from, count, static_cast<std::int32_t*>(tensor.view.data()));
  else
    std::copy_n(from, count, static_cast<std::int64_t*>(tensor.view.data()));
  return tensor;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The program as compiled, and without loops.
struct Pair {
  CompiledProgram programs[2];
  std::size_t arena_bytes() const {
    return std::max(programs[0].arena_bytes(), programs[1].arena_bytes());
  }
};
Pair compile_both(const Graph& graph, const CompileOptions& options) {
  CompileOptions whole = options;
  whole.chunk = false;
  return {{compile(graph, options), compile(graph, whole)}};
}

// Times both programs, interleaved; run(program) waits for its end. The first run is not counted.
template <typename Run>
std::string times_of(int repeat, Run&& run) {
  std::vector<double> seconds[2];
  for (int r = -1; r < repeat; ++r) {
    for (std::size_t p = 0; p < 2; ++p) {
      const auto start = std::chrono::steady_clock::now();
      run(p);
      const double taken =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (r >= 0) seconds[p].push_back(taken);
    }
  }
  const double compiled = median(seconds[0]), whole = median(seconds[1]);
  return fmt::format("time: {:.4g} s, {:.4g} s without loops, ratio {:.3f} (medians of {})\n",
                     compiled, whole, compiled / whole, repeat);
}

}  // namespace

ProgramTimes time_program(const Graph& graph, const CompileOptions& options, int repeat,
                          bool profile) {
  const Pair pair = compile_both(graph, options);
  std::vector<OwnedTensor> memory;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const CompiledProgram::Tensor& t : pair.programs[0].parameters()) {
    memory.push_back(random_tensor(t, memory.size()));
    parameters.push_back(memory.back().view.data());
  }
  for (const CompiledProgram::Tensor& t : pair.programs[0].results()) {
    memory.push_back(make_tensor(t.dtype, t.shape));
    results.push_back(memory.back().view.data());
  }
  const OwnedTensor arena =
      make_tensor(DType::i8, std::array{static_cast<std::int64_t>(pair.arena_bytes())});
  ProgramTimes times{times_of(repeat, [&](std::size_t p) {
    pair.programs[p].run(parameters, results, arena.view.data());
  })};
  if (profile)
    times.profile = pair.programs[0].profile(parameters, results, arena.view.data(), repeat);
  return times;
}

ProgramTimes time_program_on_gpu(const Graph& graph, const CompileOptions& options, int repeat,
                                 bool profile) {
  const Pair pair = compile_both(graph, options);
  ContextOptions on_gpu;
  on_gpu.device = DeviceKind::cuda;
  const Context context(on_gpu);
  const PreparedProgram prepared[] = {pair.programs[0].prepare(context),
                                      pair.programs[1].prepare(context)};
  const DeviceStream stream(context);
  std::vector<DeviceBuffer> memory;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const CompiledProgram::Tensor& t : pair.programs[0].parameters()) {
    const OwnedTensor tensor = random_tensor(t, memory.size());
    memory.emplace_back(context, static_cast<std::size_t>(t.bytes()));
    stream.copy(memory.back().data(), tensor.view.data(), memory.back().bytes());
    stream.wait();
    parameters.push_back(memory.back().data());
  }
  for (const CompiledProgram::Tensor& t : pair.programs[0].results()) {
    memory.emplace_back(context, static_cast<std::size_t>(t.bytes()));
    results.push_back(memory.back().data());
  }
  const DeviceBuffer arena(context, pair.arena_bytes());
  ProgramTimes times{times_of(repeat, [&](std::size_t p) {
    prepared[p].run(parameters, results, arena.data(), stream.handle());
    stream.wait();
  })};
  if (profile) times.profile = prepared[0].profile(parameters, results, arena.data(), repeat);
  return times;
}

}  // namespace logitless::cli
