// Additions at indices on a GPU: they have the bits of the CPU's executor, which adds in order.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <random>
#include <string>

#include "compiler/run.h"
#include "core/check.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

// Numbers for floats, and indices of [-2, most); with `most` 1 nearly all are equal.
ir::Tensors made(const CompiledProgram& program, std::int64_t most, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> numbers;
  ir::Tensors inputs;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    ir::Tensor& x = inputs[t.name];
    x.shape = t.shape;
    x.data.resize(static_cast<std::size_t>(t.bytes()) / size_of(t.dtype));
    for (double& v : x.data) {
      v = t.name == "i" ? static_cast<double>(rng() % static_cast<std::uint64_t>(most + 2)) - 2.0
                        : std::round(numbers(rng) * 64.0) / 16.0;
    }
  }
  return inputs;
}

void check(const std::string& text, std::int64_t most) {
  SCOPED_TRACE(text);
  const Graph graph = Graph::parse(text, "test");
  const std::optional<DeviceLimits> device = gpu();
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  if (device) options.device = *device;
  const CompiledProgram plain = compile(graph, {}), program = compile(graph, options);
  if (!device) GTEST_SKIP() << "no CUDA device";  // the programs are compiled all the same
  const ir::Tensors inputs = made(plain, most, 1);
  const ir::Tensors want = execute(plain, inputs), got = execute_on_gpu(program, inputs, 2);
  for (const auto& [name, tensor] : want) {
    const std::vector<double>& found = got.at(name).data;
    ASSERT_EQ(found.size(), tensor.data.size());
    for (std::size_t i = 0; i < found.size(); ++i)
      ASSERT_EQ(found[i], tensor.data[i]) << name << " " << i;
  }
}
void check_all(const std::string& updates, const std::string& axis_and_size, std::int64_t most) {
  for (const std::string dtype : {"f32", "bf16", "f64", "i32", "i64"}) {
    for (const std::string index : {"i32", "i64"})
      check("graph g(%i: " + index + updates + ", %x: " + dtype + updates + ") { %y = put %i, %x " +
                axis_and_size + " return y: %y }",
            most);
  }
}

TEST(GpuPut, AddsInOrder) {
  check_all("[7, 4]", "axis(1) size(50)", 50);         // a thread for each row
  check_all("[7, 300]", "axis(1) size(50)", 50);       // a block for each
  check_all("[3, 2000]", "axis(1) size(9000)", 9010);  // in parts of the result
  check_all("[3, 1500]", "axis(1) size(9000)", 1);     // the same one
  check_all("[200, 3]", "axis(0) size(70)", 70);
  check_all("[2, 700, 3]", "axis(1) size(5)", 5);
}

TEST(GpuPut, DistinctIndices) {
  for (const std::string dtype : {"f32", "bf16", "f16", "f64", "i32", "i64"}) {
    const auto put = [&](const std::string& shape, int axis, int count, int size,
                         const std::string& updates) {
      check("graph g(%x: " + dtype + shape + ", %u: " + dtype + updates + ") { %v, %k = sort %x " +
                concat("axis(", axis, ") count(", count, ") descending(1) %y = put %k, %u axis(",
                       axis, ") size(", size, ") return y: %y, v: %v }"),
            0);
    };
    put("[5, 300]", 1, 300, 300, "[5, 300]");
    put("[5, 3000]", 1, 3000, 3000, "[5, 3000]");
    put("[5, 300]", 1, 20, 300, "[5, 20]");
    put("[300, 6]", 0, 300, 300, "[300, 6]");
    put("[2, 300, 6]", 1, 7, 300, "[2, 7, 6]");
  }
}

}  // namespace
}  // namespace logitless::test
