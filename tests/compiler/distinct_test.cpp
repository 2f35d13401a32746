// Indices that are distinct by the operation that makes them, and the puts that use this.
#include <gtest/gtest.h>

#include <string>

#include "compiler/analysis/values.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "compiler/target/cuda.h"

namespace logitless::test {
namespace {

// The statement makes %k from %x and %i.
std::string putting(const std::string& statement, int axis, int size, const std::string& updates,
                    const std::string& type = "f32") {
  return "graph g(%x: " + type + "[5, 6], %i: i64[5, 6], %u: " + type + updates + ") { " +
         statement + " %y = put %k, %u axis(" + std::to_string(axis) + ") size(" +
         std::to_string(size) + ") return y: %y }";
}
const std::string kSort = "%v, %k = sort %x axis(1) count(6) descending(1)";

struct Found {
  int puts = 0, fills = 0, others = 0;  // instructions; others: loops over elements
  ir::Put put;
};
Found lowered(const std::string& text, const ir::Target& target = ir::CpuTarget(1)) {
  Found found;
  for (const ir::Instruction& i : ir::lower(ir::parse(text).graph, target).instructions) {
    if (const auto* put = std::get_if<ir::Put>(&i.what)) {
      ++found.puts;
      found.put = *put;
    }
    found.fills += std::holds_alternative<ir::Fill>(i.what) ? 1 : 0;
    found.others += std::holds_alternative<ir::Pointwise>(i.what) ? 1 : 0;
  }
  return found;
}

TEST(Distinct, IsFoundByTheSortThatMakesIndices) {
  struct {
    std::string statement;
    int axis;
    std::string updates;
    bool distinct;
  } const cases[] = {
      {kSort, 1, "[5, 6]", true},
      {kSort, 0, "[5, 6]", false},  // distinct along the other axis
      {"%v, %k = sort %x axis(0) count(5) descending(0)", 0, "[5, 6]", true},
      {"%v, %k = sort %x axis(1) count(2) descending(0)", 1, "[5, 2]", true},
      {"%v, %j = sort %x axis(1) count(6) descending(0) %k = slice %j begin(1, 2) end(5, 5)", 1,
       "[4, 3]", true},
      {"%v, %j = sort %x axis(1) count(6) descending(0) %k = flip %j axis(1)", 1, "[5, 6]", true},
      {"%v, %j = sort %x axis(1) count(6) descending(0) %k = transpose %j dims(1, 0)", 0, "[6, 5]",
       true},
      {"%v, %j = sort %x axis(1) count(6) descending(0) %k = transpose %j dims(1, 0)", 1, "[6, 5]",
       false},
      // The values of a sort of indices, and an operation that might make them equal.
      {"%k, %j = sort %i axis(1) count(6) descending(0)", 1, "[5, 6]", false},
      {"%v, %j = sort %x axis(1) count(6) descending(0) %k = mul %j, %i", 1, "[5, 6]", false},
      {"%k = neg %i", 1, "[5, 6]", false},
  };
  for (const auto& c : cases) {
    const std::string text = putting(c.statement, c.axis, 8, c.updates);
    SCOPED_TRACE(text);
    EXPECT_EQ(lowered(text).put.distinct, c.distinct);
    EXPECT_FALSE(lowered(text).put.whole);  // some of 8 have no update
  }
  EXPECT_FALSE(lowered("graph g(%i: i64[5, 6], %u: f32[5, 6]) { %y = put %i, %u axis(1) size(6) "
                       "return y: %y }")
                   .put.distinct);
}

TEST(Distinct, AllIndicesNeedNoFill) {
  for (const std::string type : {"f32", "bf16", "i64"}) {
    const Found all = lowered(putting(kSort, 1, 6, "[5, 6]", type), ir::CudaTarget(90));
    EXPECT_TRUE(all.put.whole) << type;
    EXPECT_EQ(all.fills, 0) << type;
    EXPECT_EQ(all.others, 0) << type;  // no sums of another dtype
  }
  // Fewer indices than elements, or some that are outside.
  const std::string three = "%v, %k = sort %x axis(1) count(3) descending(1)";
  for (const auto& [statement, size, updates] :
       {std::tuple{three, 6, "[5, 3]"}, {three, 3, "[5, 3]"}, {kSort, 8, "[5, 6]"}}) {
    const Found some = lowered(putting(statement, 1, size, updates));
    EXPECT_TRUE(some.put.distinct) << size;
    EXPECT_FALSE(some.put.whole) << size;
    EXPECT_EQ(some.fills, 1) << size;
  }
}

TEST(Distinct, SumsOfSixteenBitsAreWide) {
  const Found user = lowered(
      "graph g(%i: i64[5, 6], %u: bf16[5, 6]) { %y = put %i, %u axis(1) "
      "size(6) return y: %y }");
  EXPECT_EQ(user.put.out.dtype, DType::f32);
  EXPECT_EQ(lowered(putting(kSort, 1, 6, "[5, 6]", "bf16")).put.out.dtype, DType::bf16);
}

// The executor against the interpreter, whose arena is filled with NaN.
TEST(Distinct, PutsAreTheSame) {
  for (const std::string type : {"f32", "bf16", "f16", "f64", "i32", "i64"}) {
    for (const auto& [statement, axis, size, updates] :
         {std::tuple{kSort, 1, 6, "[5, 6]"},
          {kSort, 1, 9, "[5, 6]"},
          {"%v, %k = sort %x axis(1) count(3) descending(1)", 1, 6, "[5, 3]"},
          {"%v, %k = sort %x axis(1) count(3) descending(1)", 1, 3, "[5, 3]"},
          {"%v, %k = sort %x axis(0) count(5) descending(0)", 0, 5, "[5, 6]"}}) {
      const std::string text = putting(statement, axis, size, updates, type);
      SCOPED_TRACE(text);
      const Graph graph = Graph::parse(text);
      const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 3);
      EXPECT_EQ(difference(execute(compile(graph), inputs),
                           ir::interpret(GraphAccess::of(graph), inputs)),
                0.0);
    }
  }
}

// The gradient of sorted values, chunked and not, added to another gradient.
TEST(Distinct, GradientsOfSortsAreTheSame) {
  for (const std::string type : {"f32", "bf16", "f64"}) {
    const Graph graph = Graph::parse(
        "graph g(%x: " + type + "[12, 40], %w: " + type + "[12, 40]) { " +
        "%v, %i = sort %x axis(1) count(40) descending(1) %p = mul %v, %w %e = exp %x " +
        "%q = mul %e, %p %s = reduce_sum %q dims(0, 1) return s: %s " +
        "differentiate s wrt %x, %w }");
    const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 4);
    const ir::Tensors expected = ir::interpret(GraphAccess::of(graph), inputs);
    ASSERT_TRUE(expected.contains("d_x"));
    for (const int chunks : {0, 3}) {
      CompileOptions options;
      options.chunks = chunks;
      options.memory_budget = chunks > 0 ? 1 : 0;
      EXPECT_LT(difference(execute(compile(graph, options), inputs), expected),
                type == "bf16" ? 2e-2 : 1e-5);
    }
  }
}

}  // namespace
}  // namespace logitless::test
