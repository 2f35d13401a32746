#include "compiler/run.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>

#include "core/element.h"
#include "support/recording.h"

namespace logitless::test {
ir::Tensors random_inputs(const ir::Graph& graph, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  ir::Tensors inputs;
  for (const int id : graph.parameters()) {
    const ir::Node& n = graph.node(id);
    ir::Tensor t;
    std::size_t count = 1;
    for (const Dim& dim : n.results[0].shape) {
      t.shape.push_back(dim.value());
      count *= static_cast<std::size_t>(dim.value());
    }
    const DType dtype = n.results[0].dtype;
    for (std::size_t i = 0; i < count; ++i) {
      std::byte bits[8];
      store_element(bits, dtype, 0, is_index(dtype) ? static_cast<double>(rng() % 7) : normal(rng));
      t.data.push_back(load_element(bits, dtype, 0));
    }
    inputs[n.attributes->name] = std::move(t);
  }
  return inputs;
}

ir::Tensors random_sums(const CompiledProgram& program, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  ir::Tensors sums;
  for (const CompiledProgram::Tensor& t : program.results()) {
    if (t.dtype != DType::f32 && t.dtype != DType::f64) continue;
    ir::Tensor x;
    x.shape = t.shape;
    x.data.resize(static_cast<std::size_t>(t.bytes()) / size_of(t.dtype));
    for (double& value : x.data) value = static_cast<double>(normal(rng));
    sums[t.name] = std::move(x);
  }
  return sums;
}
std::vector<std::string> names_of(const ir::Tensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}
ir::Tensors sum(ir::Tensors a, const ir::Tensors& b) {
  for (const auto& [name, tensor] : b) {
    for (std::size_t i = 0; i < tensor.data.size(); ++i) a.at(name).data[i] += tensor.data[i];
  }
  return a;
}

ir::Tensors execute(const CompiledProgram& program, const ir::Tensors& inputs, FarFieldHead* far,
                    const ir::Tensors& before) {
  // Each tensor has a block of its exact size, so that sanitizers see accesses outside.
  std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> memory;
  const auto block = [&](std::size_t bytes) {
    const std::size_t rounded = (bytes + 63) / 64 * 64;
    memory.emplace_back(
        static_cast<std::byte*>(std::aligned_alloc(64, std::max<std::size_t>(rounded, 64))),
        &std::free);
    std::memset(memory.back().get(), 0xff, std::max<std::size_t>(rounded, 64));
    return memory.back().get();
  };
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    const ir::Tensor& from = inputs.at(t.name);
    std::byte* to = block(static_cast<std::size_t>(t.bytes()));
    for (std::size_t i = 0; i < from.data.size(); ++i)
      store_element(to, t.dtype, static_cast<std::int64_t>(i), from.data[i]);
    parameters.push_back(to);
  }
  for (const CompiledProgram::Tensor& t : program.results()) {
    results.push_back(block(static_cast<std::size_t>(t.bytes())));
    const auto found = before.find(t.name);
    for (std::size_t i = 0; found != before.end() && i < found->second.data.size(); ++i)
      store_element(results.back(), t.dtype, static_cast<std::int64_t>(i), found->second.data[i]);
  }
  constexpr std::size_t kGuard = 256;
  std::byte* arena = block(program.arena_bytes() + kGuard);
  const std::string decisions = program.explain();
  record("explain",
         std::string_view(decisions).substr(0, decisions.find("compiled in ")));  // times
  if (far != nullptr) {
    program.run(parameters, results, arena, *far);
  } else {
    program.run(parameters, results, arena);
  }
  for (std::size_t i = 0; i < kGuard; ++i)
    EXPECT_EQ(arena[program.arena_bytes() + i], std::byte{0xff})
        << "written behind the arena at " << i;
  ir::Tensors out;
  for (std::size_t r = 0; r < results.size(); ++r) {
    const CompiledProgram::Tensor& t = program.results()[r];
    ir::Tensor x;
    x.shape = t.shape;
    std::size_t count = 1;
    for (const std::int64_t s : t.shape) count *= static_cast<std::size_t>(s);
    for (std::size_t i = 0; i < count; ++i)
      x.data.push_back(load_element(results[r], t.dtype, static_cast<std::int64_t>(i)));
    record(t.name,
           {static_cast<const std::byte*>(results[r]), static_cast<std::size_t>(t.bytes())});
    out[t.name] = std::move(x);
  }
  return out;
}

double difference(const ir::Tensors& a, const ir::Tensors& b) {
  double worst = 0.0;
  for (const auto& [name, y] : b) {
    const ir::Tensor& x = a.at(name);
    if (x.shape != y.shape) return HUGE_VAL;
    double squares = 0.0;
    for (const double v : y.data) squares += v * v;
    const double scale =
        std::sqrt(squares / std::max<double>(static_cast<double>(y.data.size()), 1.0)) + 1e-30;
    for (std::size_t i = 0; i < y.data.size(); ++i) {
      const double d = std::abs(x.data[i] - y.data[i]) / (scale + std::abs(y.data[i]));
      if (!(d <= worst)) worst = std::isnan(d) ? HUGE_VAL : d;
    }
  }
  return worst;
}

}  // namespace logitless::test
