// Random losses under random settings, against the interpreter. `compiler_random_test --first 1000
// --count 500` runs so many of each kind from that seed on, instead of a few.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/random_losses.h"
#include "compiler/run.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

struct Seeds {
  std::uint64_t first = 1, count = 0;  // 0: the test's default
} asked;

// Most indices are valid; some are outside the range.
ir::Tensors inputs_of(const ir::Graph& graph, std::uint64_t seed) {
  ir::Tensors inputs = random_inputs(graph, seed);
  std::mt19937_64 rng(seed);
  for (auto& [name, tensor] : inputs) {
    const std::size_t limit = name.find('_');
    if (limit == std::string::npos) continue;
    const std::uint64_t count = std::stoull(name.substr(limit + 1));
    for (double& x : tensor.data) x = rng() % 16 == 0 ? -100.0 : static_cast<double>(rng() % count);
  }
  return inputs;
}

CompileOptions random_options(std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<int>(rng() % n); };
  CompileOptions options;
  options.threads = 1 + below(3);
  if (below(3) == 0) options.chunks = 1 + below(7);
  if (below(3) == 0) options.memory_budget = below(2) == 0 ? 1 : std::size_t{1} << (10 + below(12));
  options.budget_with_scratch = below(4) == 0;
  options.explore = below(6) == 0;
  options.head_engine = below(5) != 0;
  options.chunk = below(12) != 0;
  return options;
}

double norm(const std::vector<double>& x) {
  double squares = 0.0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}
// Returns the largest relative error of a result in the 2-norm. Where the parts of a result cancel,
// its error is that of the parts, and these are up to the size of the largest result: errors are
// relative to at least the part `least` of that.
double error(const ir::Tensors& a, const ir::Tensors& b, double least) {
  double worst = 0.0, largest = 0.0;
  for (const auto& [name, y] : b) largest = std::max(largest, norm(y.data));
  for (const auto& [name, y] : b) {
    std::vector<double> apart = a.at(name).data;
    for (std::size_t i = 0; i < y.data.size(); ++i) apart[i] -= y.data[i];
    const double e = norm(apart) / std::max({norm(y.data), least * largest, 1e-30});
    worst = std::isnan(e) ? HUGE_VAL : std::max(worst, e);
  }
  return worst;
}

// The error must be within `bound`, that of the contract (docs/explain/losses.md) for floats, or
// 2^-24 of the largest result: one rounding of it to a float. The interpreter does not round to 16
// bits, so there the error may also be that of the program run without changes.
void check(DType dtype, LossSize size, std::uint64_t count, double bound) {
  const double least = std::max(1e-3, dtype == DType::f32 ? 0x1p-24 / bound : 0.0);
  for (std::uint64_t i = 0; i < (asked.count > 0 ? asked.count : count); ++i) {
    const std::uint64_t seed = asked.first + i;
    SCOPED_TRACE("--first " + std::to_string(seed) + " --count 1");
    const Graph source = random_loss(seed, dtype, size);
    const ir::Graph& graph = GraphAccess::of(source);
    const ir::Tensors inputs = inputs_of(graph, seed), wanted = ir::interpret(graph, inputs);
    CompileOptions options = random_options(seed);
    const CompiledProgram compiled = compile(source, options);
    const double found = error(execute(compiled, inputs), wanted, least);
    if (seed % 4 == 0) {
      const ir::Tensors before = random_sums(compiled, seed);
      options.added = names_of(before);
      EXPECT_LE(error(execute(compile(source, options), inputs, nullptr, before),
                      sum(wanted, before), least),
                size_of(dtype) > 2 ? bound : std::max(found, bound))
          << source.text();
      options.added.clear();
    }
    options.chunk = false;
    const double plain = error(execute(compile(source, options), inputs), wanted, least);
    const double most = size_of(dtype) > 2 ? bound : std::max(plain, bound);
    EXPECT_LE(plain, most) << source.text();
    EXPECT_LE(found, most) << source.text() << compiled.explain();
    if (dtype == DType::f64) {
      EXPECT_LT(error(ir::interpret(ir::parse(compiled.text()).graph, inputs), wanted, least),
                bound);
    }
  }
}

TEST(RandomLosses, InDouble) {
  check(DType::f64, LossSize::small, kAddressSanitizer ? 20 : 60, 1e-11);
}
TEST(RandomLosses, InFloat) {
  check(DType::f32, LossSize::small, kAddressSanitizer ? 10 : 30, 1e-5);
}
TEST(RandomLosses, InSixteenBits) {
  check(DType::bf16, LossSize::small, kAddressSanitizer ? 5 : 15, 2e-2);
}
TEST(RandomLosses, OfManyLogits) {
  check(DType::f32, LossSize::head, kAddressSanitizer ? 3 : 6, 1e-5);
}

}  // namespace
}  // namespace logitless::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::uint64_t number = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--first") == 0) logitless::test::asked.first = number;
    if (std::strcmp(argv[i], "--count") == 0) logitless::test::asked.count = number;
  }
  return RUN_ALL_TESTS();
}
