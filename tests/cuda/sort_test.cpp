// Sorting and running results on a GPU: sorts and maxima have the bits of the CPU's executor,
// running sums and products differ from it by the order of f64 operations.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "compiler/run.h"
#include "core/check.h"
#include "cuda/run_program.h"

namespace logitless::test {
namespace {

// Numbers with many equal ones, both zeros, infinities and NaN; of integers without the last.
ir::Tensors with_ties(const CompiledProgram& program, std::uint64_t seed) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kSome[] = {
      0.0, -0.0, kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN(), 1.0, -1.0, 0.5};
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> numbers;
  ir::Tensors inputs;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    ir::Tensor& x = inputs[t.name];
    x.shape = t.shape;
    x.data.resize(static_cast<std::size_t>(t.bytes()) / size_of(t.dtype));
    for (double& v : x.data) {
      const std::uint64_t draw = rng();
      const bool is_float = t.dtype != DType::i32 && t.dtype != DType::i64;
      v = is_float ? std::ldexp(std::round(std::ldexp(numbers(rng), 5)), -5)
                   : static_cast<double>(static_cast<std::int64_t>(draw % 4001) - 2000);
      if (is_float && draw % 8 == 0) v = kSome[draw / 8 % 8];
    }
  }
  return inputs;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// T stands for each of the dtypes. difference: the largest relative to the result, or 0.
void check(const std::string& shape, const std::string& statement, const std::string& results,
           double difference = 0.0, std::int64_t chunks = 0) {
  const std::optional<DeviceLimits> device = gpu();
  for (const std::string dtype : {"f32", "bf16", "f16", "f64", "i32", "i64"}) {
    if (statement.find("cumlse") != std::string::npos && dtype[0] == 'i') continue;
    const std::string text =
        concat("graph g(%x: ", dtype, shape, ") { ", statement, " return ", results, " }");
    SCOPED_TRACE(text);
    const Graph graph = Graph::parse(text, "test");
    CompileOptions options;
    options.chunks = chunks;
    options.memory_budget = chunks > 0 ? 1 : 0;
    const CompiledProgram plain = compile(graph, {});
    options.device.kind = DeviceKind::cuda;
    if (device) options.device = *device;
    const CompiledProgram program = compile(graph, options);
    if (!device) continue;  // the programs are compiled all the same
    const ir::Tensors inputs = with_ties(plain, 1);
    const ir::Tensors want = execute(plain, inputs), got = execute_on_gpu(program, inputs, 2);
    for (const auto& [name, tensor] : want) {
      const std::vector<double>& found = got.at(name).data;
      ASSERT_EQ(found.size(), tensor.data.size());
      const double rounding = dtype == "f64" ? 1e-12 : dtype == "f32" ? 1e-6 : 1e-2;
      for (std::size_t i = 0; i < found.size(); ++i) {
        const double w = tensor.data[i];
        const bool near = difference > 0.0 && dtype[0] != 'i' &&
                          std::abs(found[i] - w) <= difference * rounding * (1.0 + std::abs(w));
        ASSERT_TRUE(same(found[i], w) || near)
            << name << " " << i << ": " << found[i] << ", expected " << w;
      }
    }
  }
  if (!device) GTEST_SKIP() << "no CUDA device";
}

std::string sorted(int axis, int count, bool descending) {
  return concat("%v, %i = sort %x axis(", axis, ") count(", count, ") descending(",
                descending ? 1 : 0, ")");
}

TEST(GpuOrder, SortsRowsOfAnyLength) {
  for (const int size : {1, 3, 31, 64, 65, 700, 1024, 2048, 2049, 5000}) {
    for (const bool descending : {false, true})
      check(concat("[7, ", size, "]"), sorted(1, size, descending), "v: %v, i: %i");
  }
}

TEST(GpuOrder, FindsTheFirstOfLongRows) {
  for (const int kept : {1, 8, 100, 1500}) {
    for (const bool descending : {false, true})
      check("[3, 9000]", sorted(1, kept, descending), "v: %v, i: %i");
  }
}

// Sorts by digits, in ranges of 8 and of 32 warps, and with lists too long for shared memory.
TEST(GpuOrder, SortsLongRows) {
  for (const int size : {1025, 4096, 8193, 20000, 70001}) {
    for (const bool descending : {false, true})
      check(concat("[2, ", size, "]"), sorted(1, size, descending), "v: %v, i: %i");
  }
  check("[3, 20000]", sorted(1, 5000, true), "v: %v, i: %i");
  check("[1500, 3]", sorted(0, 1500, true), "v: %v, i: %i");
  check("[2, 66000, 2]", sorted(1, 66000, false), "v: %v, i: %i");
}

TEST(GpuOrder, SortsAlongAnyAxis) {
  check("[5, 300, 6]", sorted(1, 300, true), "v: %v, i: %i");
  check("[40, 3, 2]", sorted(0, 11, false), "v: %v, i: %i");
  check("[0, 12]", sorted(1, 3, false), "v: %v, i: %i");
}

// The worst case: each element is before all of those so far.
TEST(GpuOrder, SortsRowsInTheOppositeOrder) {
  const std::optional<DeviceLimits> device = gpu();
  if (!device) GTEST_SKIP() << "no CUDA device";
  CompileOptions options;
  options.device = *device;
  const Graph graph = Graph::parse(
      concat("graph g(%x: f32[2, 9000]) { ", sorted(1, 2500, true), " return i: %i }"), "test");
  ir::Tensors inputs;
  inputs["x"].shape = {2, 9000};
  for (int i = 0; i < 2 * 9000; ++i) inputs["x"].data.push_back(i % 9000);
  const ir::Tensors got = execute_on_gpu(compile(graph, options), inputs);
  for (std::size_t i = 0; i < 2 * 2500; ++i)
    ASSERT_EQ(got.at("i").data[i], 8999.0 - static_cast<double>(i % 2500));
}

TEST(GpuOrder, RunningSums) {
  for (const char* op : {"cumsum", "cumlse"}) {
    for (const int reverse : {0, 1}) {
      const auto along = [&](int axis) {
        return concat("%y = ", op, " %x axis(", axis, ") reverse(", reverse, ")");
      };
      for (const int size : {1, 20, 256, 257, 3000})
        check(concat("[5, ", size, "]"), along(1), "y: %y", 4.0);
      check("[300, 5000]", along(0), "y: %y", 4.0);  // a thread for each row
      check("[4, 70, 3]", along(1), "y: %y", 4.0);
    }
  }
}

TEST(GpuOrder, FindsTheFirstOfTheLargest) {
  for (const int size : {1, 20, 257, 9000})
    check(concat("[7, ", size, "]"), "%y = argmax %x dims(1)", "y: %y");
  check("[300, 70]", "%y = argmax %x dims(0)", "y: %y");
}

TEST(GpuOrder, RunningMaxima) {
  for (const int reverse : {0, 1}) {
    const auto along = [&](int axis) {
      return concat("%y = cummax %x axis(", axis, ") reverse(", reverse, ")");
    };
    for (const int size : {1, 20, 257, 3000}) check(concat("[5, ", size, "]"), along(1), "y: %y");
    check("[300, 5000]", along(0), "y: %y");
  }
}

// Compares results on a GPU with the CPU's, given x and y.
void check_running(const std::string& statement, const ir::Tensor& x, const ir::Tensor& y,
                   const std::string& dtype) {
  const std::optional<DeviceLimits> device = gpu();
  const std::string shape = concat("[", x.shape[0], ", ", x.shape[1], "]");
  const std::string text = concat("graph g(%x: ", dtype, shape, ", %y: ", dtype, shape, ") { ",
                                  statement, " return r: %r }");
  SCOPED_TRACE(text);
  const Graph graph = Graph::parse(text, "test");
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  if (device) options.device = *device;
  const CompiledProgram program = compile(graph, options);
  if (!device) return;
  ir::Tensors inputs = {{"x", x}, {"y", y}};
  const ir::Tensors want = execute(compile(graph, {}), inputs);
  const ir::Tensors got = execute_on_gpu(program, inputs, 2);
  const double rounding = dtype == "f64" ? 1e-11 : dtype == "f32" ? 1e-6 : 1e-2;
  const double least = statement.find("recurrence") != std::string::npos ? 1e-13 : 0.0;
  for (std::size_t i = 0; i < x.data.size(); ++i) {
    const double w = want.at("r").data[i], g = got.at("r").data[i];
    ASSERT_TRUE(same(g, w) || std::abs(g - w) <= rounding * std::abs(w) + least)
        << i << ": " << g << ", expected " << w;
  }
}

TEST(GpuOrder, RunningProductsAndRecurrences) {
  std::mt19937_64 rng(3);
  const auto tensor = [](std::int64_t rows, std::int64_t size, auto&& draw) {
    ir::Tensor t{{rows, size}, {}};
    for (std::int64_t i = 0; i < rows * size; ++i) t.data.push_back(draw());
    return t;
  };
  // Powers of two are exact in every dtype.
  const auto factor = [&] {
    return std::ldexp(rng() % 2 != 0 ? 1.0 : -1.0, static_cast<int>(rng() % 3) - 1);
  };
  const auto seldom = [&](double other) { return rng() % 700 == 0 ? other : factor(); };
  for (const char* dtype : {"f32", "bf16", "f16", "f64"}) {
    for (const char* along : {"axis(1) reverse(0)", "axis(1) reverse(1)", "axis(0) reverse(0)"}) {
      for (const auto& [rows, size] : {std::pair{3, 20}, {3, 257}, {2, 5000}, {40, 4100}}) {
        const ir::Tensor x = tensor(rows, size, factor),
                         zeros = tensor(rows, size, [&] { return seldom(0.0); }),
                         nans = tensor(rows, size, [&] { return seldom(NAN); });
        for (const ir::Tensor& in : {x, zeros, nans}) {
          check_running(concat("%r = cumprod %x ", along), in, x, dtype);
          // Factors of 1/2 keep what is added before in range.
          check_running(concat("%h = constant value(0.25) : ", dtype, "[", rows, ", ", size,
                               "] %a = mul %x, %h %r = recurrence %a, %y ", along),
                        in, x, dtype);
        }
      }
    }
  }
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
}

// Parts of these rows overflow or vanish where their running results do not.
TEST(GpuOrder, RunningResultsOfGreatNumbersInParts) {
  constexpr std::int64_t kSize = 4000;
  ir::Tensor huge{{1, kSize}, std::vector<double>(kSize, 1e30)},
      none{{1, kSize}, std::vector<double>(kSize, 0.0)};
  for (std::size_t i = 1; i < kSize; i += 2) huge.data[i] = 1e-30;
  check_running("%r = cumprod %x axis(1) reverse(0)", huge, none, "f32");
  ir::Tensor tail = huge;  // 0 before numbers whose product overflows
  for (std::size_t i = 0; i < kSize; ++i) tail.data[i] = i == 0 ? 0.0 : 1e30;
  check_running("%r = cumprod %x axis(1) reverse(0)", tail, none, "f32");
  check_running("%r = recurrence %x, %y axis(1) reverse(0)", tail, none, "f32");
  ir::Tensor small{{1, kSize}, std::vector<double>(kSize, 1e-30)};
  none.data[0] = std::numeric_limits<double>::infinity();
  check_running("%r = recurrence %x, %y axis(1) reverse(0)", small, none, "f32");
  if (!gpu()) GTEST_SKIP() << "no CUDA device";
}

TEST(GpuOrder, InLoops) {
  check("[96, 500]", sorted(1, 20, true) + " %w = cumsum %v axis(1) reverse(0)", "w: %w, i: %i",
        4.0, 5);
}

}  // namespace
}  // namespace logitless::test
