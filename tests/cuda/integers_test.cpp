// Compiled programs of integers on a GPU: every bit is that of the CPU's executor, which
// special_values_test.cpp holds to the interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>
#include <logitless/context.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cuda/run_program.h"
#include "kernels/device/head.h"

namespace logitless::test {
namespace {

using Bytes = std::vector<std::byte>;

// Integers of the whole range, some of them often, so that there are equal ones.
Bytes integers_of(const CompiledProgram::Tensor& t, std::uint64_t seed) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kSome[] = {kLeast,
                                    kLeast + 1,
                                    -(kLeast + 1),
                                    (std::int64_t{1} << 53) + 1,
                                    std::int64_t{1} << 53,
                                    std::int64_t{1} << 33,
                                    (1 << 24) + 1,
                                    1 << 24,
                                    2,
                                    1,
                                    0,
                                    -1};
  std::mt19937_64 rng(seed);
  Bytes bytes(static_cast<std::size_t>(t.bytes()));
  const std::size_t size = size_of(t.dtype);
  for (std::size_t i = 0; i < bytes.size() / size; ++i) {
    const std::uint64_t draw = rng();
    std::int64_t number = draw % 4 != 0 ? kSome[draw % 12] : static_cast<std::int64_t>(rng());
    if (t.dtype == DType::f32) {
      const auto real = static_cast<float>(draw % 1000) / 8.0f;
      std::memcpy(bytes.data() + i * size, &real, size);
      continue;
    }
    if (t.dtype == DType::i32 && draw % 2 != 0) number >>= 32;
    std::memcpy(bytes.data() + i * size, &number, size);  // the low bytes
  }
  return bytes;
}

std::vector<Bytes> on_cpu(const CompiledProgram& program, const std::vector<Bytes>& given) {
  std::vector<const void*> parameters;
  std::vector<void*> results;
  std::vector<Bytes> out;
  for (const Bytes& bytes : given) parameters.push_back(bytes.data());
  for (const CompiledProgram::Tensor& t : program.results())
    out.emplace_back(static_cast<std::size_t>(t.bytes()));
  for (Bytes& bytes : out) results.push_back(bytes.data());
  const std::unique_ptr<void, decltype(&std::free)> arena(
      std::aligned_alloc(64, (program.arena_bytes() + 64) / 64 * 64), &std::free);
  program.run(parameters, results, arena.get());
  return out;
}

std::vector<Bytes> on_gpu(const CompiledProgram& program, const std::vector<Bytes>& given) {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  const Context context(options);
  const PreparedProgram prepared = program.prepare(context);
  std::list<cuda::DeviceMemory> memory;
  const auto block = [&](std::size_t bytes) {
    return memory.emplace_back(std::max<std::size_t>(bytes, 16)).data();
  };
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const Bytes& bytes : given) {
    void* const to = block(bytes.size());
    cuda::copy_to_device(to, bytes.data(), bytes.size(), nullptr);
    parameters.push_back(to);
  }
  for (const CompiledProgram::Tensor& t : program.results())
    results.push_back(block(static_cast<std::size_t>(t.bytes())));
  prepared.run(parameters, results, block(program.arena_bytes()), nullptr);
  cuda::synchronize(nullptr);
  std::vector<Bytes> out;
  for (std::size_t r = 0; r < results.size(); ++r) {
    out.emplace_back(static_cast<std::size_t>(program.results()[r].bytes()));
    cuda::copy_to_host(out.back().data(), results[r], out.back().size(), nullptr);
  }
  return out;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// T stands for i32 and i64. x, y and i are integers, i near the range of indices as well.
void check(const std::string& body, const std::string& results, std::int64_t chunks = 0) {
  const std::optional<DeviceLimits> device = gpu();
  for (const char* dtype : {"i32", "i64"}) {
    const std::string text = replaced(
        "graph g(%x: T[96, 40], %y: T[96, 40], %i: T[96], %k: T[96, 40], %f: f32[96, 40]) {\n" +
            body + "\n  return " + results + "\n}\n",
        "T[", std::string(dtype) + "[");
    SCOPED_TRACE(text);
    const Graph graph = Graph::parse(text, "test");
    CompileOptions options;
    options.chunks = chunks;
    options.memory_budget = chunks > 0 ? 1 : 0;
    const CompiledProgram plain = compile(graph, {});
    options.device.kind = DeviceKind::cuda;
    if (device) options.device = *device;
    const CompiledProgram program = compile(graph, options);
    std::vector<Bytes> given;
    for (const CompiledProgram::Tensor& t : plain.parameters())
      given.push_back(integers_of(t, given.size() + 1));
    const std::vector<Bytes> want = on_cpu(plain, given);
    if (!device) continue;  // the programs are compiled all the same
    const std::vector<Bytes> got = on_gpu(program, given);
    for (std::size_t r = 0; r < want.size(); ++r)
      EXPECT_TRUE(got[r] == want[r]) << plain.results()[r].name << "\n" << program.text();
  }
  if (!device) GTEST_SKIP() << "no CUDA device";
}

TEST(GpuIntegers, ArithmeticAndOrder) {
  check(R"(  %a = add %x, %y
  %s = sub %x, %y
  %m = mul %x, %y
  %n = neg %x
  %b = abs %x
  %lt = lt %a, %x
  %c = select %lt, %a, %y
  %most = max %m, %c)",
        "a: %a, s: %s, m: %m, n: %n, b: %b, lt: %lt, c: %c, most: %most");
}

TEST(GpuIntegers, LabelsBesideNumbers) {
  check(R"(  %one = constant value(1) : T[96, 40]
  %p = iota axis(1) : T[96, 40]
  %l = broadcast %i dims(0) : T[96, 40]
  %next = sub %l, %one
  %hit = eq %next, %p
  %same = eq %x, %next
  %n = neg %f
  %a = select %hit, %f, %n
  %b = select %same, %a, %n
  %top = reduce_max %b dims(1))",
        "a: %a, b: %b, top: %top");
}

TEST(GpuIntegers, Reductions) {
  for (const std::int64_t chunks : {0, 3}) {
    check(R"(  %m = mul %x, %y
  %rows = reduce_sum %m dims(1)
  %columns = reduce_sum %m dims(0)
  %all = reduce_sum %m dims(0, 1)
  %top = reduce_max %m dims(1)
  %high = reduce_max %x dims(0)
  %at = argmax %x dims(1)
  %where = argmax %m dims(0))",
          "rows: %rows, columns: %columns, all: %all, top: %top, high: %high, at: %at, "
          "where: %where",
          chunks);
  }
}

TEST(GpuIntegers, ReadsAndWritesByIndex) {
  check(R"(  %r = take %x, %i
  %p = pick %x, %i axis(1)
  %q = pick %x, %k axis(1)
  %s = scatter_add %i, %x rows(7)
  %u = put %k, %y axis(1) size(3))",
        "r: %r, p: %p, q: %q, s: %s, u: %u");
}

TEST(GpuIntegers, Conversions) {
  check(R"(  %a = add %x, %y
  %wide = cast %a : i64[96, 40]
  %narrow = cast %a : i32[96, 40]
  %real = cast %a : f32[96, 40]
  %double = cast %a : f64[96, 40]
  %half = cast %a : bf16[96, 40]
  %far = constant value(1e8) : f32[96, 40]
  %g = mul %f, %far
  %whole = cast %g : T[96, 40]
  %n = neg %whole)",
        "wide: %wide, narrow: %narrow, real: %real, double: %double, half: %half, whole: %whole, "
        "n: %n");
}

}  // namespace
}  // namespace logitless::test
