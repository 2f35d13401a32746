// Products with generated epilogues, one or two: where they are found and where not, and what
// remains behind them.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>

#include "compiler/compiled.h"
#include "compiler/exec/cuda/codegen.h"
#include "compiler/plan/group_rows.h"
#include "compiler/product_programs.h"
#include "core/check.h"

namespace logitless::test {
namespace {

const ir::Program& program_of(const CompiledProgram& compiled) {
  return CompilerAccess::state(compiled).program;
}

int fused(const std::string& text, const CompileOptions& options) {
  return generated_epilogues(program_of(compile(Graph::parse(text), options)));
}

DeviceLimits of(int capability) {
  DeviceLimits device;
  device.compute_capability = capability;
  return device;
}

TEST(FuseProducts, LeavesNoMemoryOfTheProduct) {
  for (const int capability : {90, 80}) {
    for (const ProductProgram& p : product_programs(capability == 90 ? DType::bf16 : DType::f16)) {
      SCOPED_TRACE(p.name);
      const CompiledProgram compiled =
          compile(Graph::parse(p.text), slow_memory(product_sizes()[0], of(capability)));
      const ir::Program& program = program_of(compiled);
      EXPECT_EQ(generated_epilogues(program), 1) << compiled.explain();
      for (const ProductSizes& n : product_sizes())
        EXPECT_EQ(fused(p.text, slow_memory(n, of(capability))), 1) << n.rows;
      EXPECT_NE(compiled.explain().find("products with epilogues:\n  "), std::string::npos);
      for (const ir::RowGroup* group : groups_of_products(program)) {
        EXPECT_EQ(group->engine,
                  capability == 90 ? ir::ProductEngine::sm90 : ir::ProductEngine::sm80);
        EXPECT_EQ(pair_of(*group), p.pair);
        for (const std::optional<ir::Gemm>* product : {&group->product, &group->other}) {
          if (!*product) continue;
          const int c = (*product)->c.buffer;
          const bool stored = std::any_of(group->stages.begin(), group->stages.end(),
                                          [&](auto& s) { return s.loop.store.view.buffer == c; });
          EXPECT_EQ(stored, p.name == "gated");
          EXPECT_TRUE(stored || program.buffers[static_cast<std::size_t>(c)].first < 0);
        }
      }
    }
  }
}

// Time decides: little arithmetic for each element, and enough of it.
TEST(FuseProducts, AsksWhetherItPays) {
  const std::string text = product_programs(DType::bf16)[0].text;
  CompileOptions options = slow_memory({4096, 65536, 2048});
  options.device.card = gpu_card("H200");
  EXPECT_EQ(fused(text, options), 1);
  options.sizes = {{"N", 64}, {"V", 256}, {"D", 64}};
  EXPECT_EQ(fused(text, options), 0);
  // A log-sum-exp takes longer there than a pass over fp32 sums.
  options = slow_memory({2048, 32768, 1024});
  options.device.card = gpu_card("H200");
  options.head_engine = false;
  EXPECT_EQ(fused(product_programs(DType::bf16)[1].text, options), 0);
  // The second of two products needs no pass over memory, unless cuBLAS is much faster.
  const std::string gated =
      "graph g(%h: bf16[N, D], %w: bf16[V, D], %u: bf16[V, D]) {\n"
      "  %a = dot %h, %w contract(1; 1) : bf16[N, V]\n"
      "  %b = dot %h, %u contract(1; 1) : bf16[N, V]\n"
      "  %s = sigmoid %a\n  %d = mul %a, %s\n  %y = mul %d, %b\n  return y: %y\n}\n";
  for (const int capability : {90, 80}) {
    options = slow_memory({2048, 32768, 1024}, of(capability));
    options.device.card = gpu_card(capability == 90 ? "H200" : "A100");
    const CompiledProgram compiled = compile(Graph::parse(gated), options);
    const auto groups = groups_of_products(program_of(compiled));
    EXPECT_EQ(std::count_if(groups.begin(), groups.end(),
                            [](const auto* g) { return pair_of(*g) == Pair::beside; }),
              capability == 90 ? 1 : 0);
  }
  // Products by mma.sync lose more time to cuBLAS's, the deeper they are.
  const std::string square =
      "graph g(%h: bf16[N, D], %w: bf16[V, D]) {\n  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"
      "  %m = mul %z, %z\n  %o = cast %m : bf16[N, V]\n  return o: %o\n}\n";
  for (const std::int64_t depth : {1024, 4096}) {
    CompileOptions a100 = slow_memory({2048, 32768, depth}, of(80));
    a100.device.card = gpu_card("A100");
    EXPECT_EQ(fused(square, a100), depth == 1024 ? 1 : 0);
  }
}

// Two products in one kernel: what it needs of them and of their readers.
TEST(FuseProducts, TakesTwoProducts) {
  const auto pair = [](const std::string& steps, const std::string& left = "%h") {
    const std::string text =
        "graph g(%h: bf16[N, D], %t: bf16[N, D], %w: bf16[V, D], %u: bf16[V, D]) {\n"
        "  %a = dot %h, %w contract(1; 1) : f32[N, V]\n  %b = dot " +
        left + ", %u contract(1; 1) : f32[N, V]\n" + steps + "\n}\n";
    const CompiledProgram compiled = compile(Graph::parse(text), slow_memory({1024, 2048, 64}));
    const auto groups = groups_of_products(program_of(compiled));
    EXPECT_EQ(groups.size(), 1u) << text;
    return pair_of(*groups.at(0));
  };
  // A norm before both products is computed and stored once, though recomputed to end its life.
  const std::string norm =
      "graph g(%x: bf16[N, D], %w: bf16[V, D], %u: bf16[V, D], %d: bf16[V, D]) {\n"
      "  %q = mul %x, %x\n  %s = reduce_sum %q dims(1) : f32[N]\n  %r = rsqrt %s\n"
      "  %t = cast %r : bf16[N]\n  %m = broadcast %t dims(0) : bf16[N, D]\n  %h = mul %x, %m\n"
      "  %a = dot %h, %w contract(1; 1) : f32[N, V]\n  %k = sigmoid %a\n"
      "  %g = mul %a, %k\n  %e = cast %g : bf16[N, V]\n"
      "  %b = dot %h, %u contract(1; 1) : bf16[N, V]\n  %y = mul %e, %b\n"
      "  %z = dot %y, %d contract(1; 0) : bf16[N, D]\n"
      "  return z: %z\n}\n";
  const CompiledProgram normed = compile(Graph::parse(norm), slow_memory({1024, 2048, 64}));
  const auto groups = groups_of_products(program_of(normed));
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(pair_of(*groups[0]), Pair::beside) << normed.explain();

  const std::string product = "  %y = mul %a, %b\n  return y: %y", minus = "  %y = sub %b, %a\n";
  EXPECT_EQ(pair(product), Pair::beside);
  EXPECT_EQ(pair(product, "%t"), Pair::none);  // a second left operand, and both are read
  EXPECT_EQ(pair(minus + "  return y: %y", "%t"), Pair::difference);
  // a result that is read elsewhere too
  EXPECT_EQ(pair(minus + "  %e = add %y, %a\n  return e: %e", "%t"), Pair::none);
  EXPECT_EQ(pair(minus + "  %e = sub %a, %b\n  return y: %y, e: %e", "%t"), Pair::none);
  EXPECT_EQ(pair(minus + "  return y: %y, b: %b", "%t"), Pair::none);
  EXPECT_EQ(pair(minus + "  return y: %y, b: %b"), Pair::beside);
}

// Stages that an epilogue cannot compute stay loops over the stored product.
TEST(FuseProducts, LeavesOtherReadersAlone) {
  const std::string begin =
      "graph g(%h: bf16[N, D], %w: bf16[V, D]) {\n  %z = dot %h, %w contract(1; 1) : f32[N, V]\n";
  const CompileOptions options = slow_memory({1024, 2048, 64});
  EXPECT_EQ(fused(begin + "  %e = exp %z\n  return e: %e\n}\n", options), 1);
  // elements that need a sum of their row, sums of columns
  EXPECT_EQ(fused(begin + "  %l = reduce_lse %z dims(1)\n  %b = broadcast %l dims(0) : f32[N, V]\n"
                          "  %e = sub %z, %b\n  return e: %e\n}\n",
                  options),
            0);
  EXPECT_EQ(
      fused(begin + "  %e = exp %z\n  %s = reduce_sum %e dims(0)\n  return s: %s\n}\n", options),
      0);
  // rows that are not aligned, and the options
  EXPECT_EQ(fused(begin + "  %e = exp %z\n  return e: %e\n}\n", slow_memory({1024, 2047, 64})), 0);
  CompileOptions other = options;
  other.externs = true;  // the caller runs the program
  EXPECT_EQ(fused(begin + "  %e = exp %z\n  return e: %e\n}\n", other), 0);
  other = options;
  other.epilogues = false;
  EXPECT_EQ(fused(begin + "  %e = exp %z\n  return e: %e\n}\n", other), 0);
}

TEST(FuseProducts, LeavesEmptyProductsAlone) {
  const std::string text = product_programs(DType::bf16)[0].text;
  EXPECT_EQ(fused(text, slow_memory({0, 2048, 64})), 0);
  EXPECT_EQ(fused(text, slow_memory({1024, 0, 64})), 0);
  EXPECT_EQ(fused(text, slow_memory({1024, 2048, 0})), 0);
}

// A kernel takes as many arguments as a launch passes (Steps).
TEST(FuseProducts, BoundsTheOperandsOfAKernel) {
  const auto sums = [](int biases) {
    std::string parameters, steps, last = "z";
    for (int i = 0; i < biases; ++i) {
      parameters += concat(", %b", i, ": f32[V]");
      steps += concat("  %y", i, " = broadcast %b", i, " dims(1) : f32[N, V]\n  %x", i, " = add %",
                      i % 8 == 0 ? std::string("z") : last, ", %y", i, "\n");
      last = concat("x", i);
      if (i % 8 == 7) steps += concat("  %s", i, " = reduce_sum %", last, " dims(1)\n");
    }
    std::string results;
    for (int i = 7; i < biases; i += 8) results += concat(i > 7 ? ", " : "", "s", i, ": %s", i);
    return concat("graph g(%h: bf16[N, D], %w: bf16[V, D]", parameters,
                  ") {\n  %z = dot %h, %w contract(1; 1) : f32[N, V]\n", steps, "  return ",
                  results, "\n}\n");
  };
  const CompileOptions options = slow_memory({1024, 2048, 64});
  EXPECT_EQ(fused(sums(40), options), 1);
  EXPECT_EQ(fused(sums(80), options), 0);
}

// TMA reads memory from multiples of 16 bytes, which slices of a loop's operands need not be.
TEST(FuseProducts, ReadsAlignedSlicesOfLoops) {
  const auto of_loops = [](int first) {
    return concat(
        "graph g(%q: bf16[N, D], %w: bf16[V, 72]) {\n  %u = tanh %q\n  %h = slice %u begin(0, ",
        first, ") end(N, ", first + 72,
        ")\n  %z = dot %h, %w contract(1; 1) : f32[N, V]\n  %p = sigmoid %z\n"
        "  %g = cast %p : bf16[N, V]\n  %dh = dot %g, %w contract(1; 0) : bf16[N, 72]\n"
        "  return dh: %dh, u: %u\n}\n");
  };
  CompileOptions options = slow_memory({300, 520, 152});
  options.chunk = true;
  options.chunks = 4;
  EXPECT_EQ(fused(of_loops(8), options), 1);
  EXPECT_EQ(fused(of_loops(3), options), 0);
}

}  // namespace
}  // namespace logitless::test
