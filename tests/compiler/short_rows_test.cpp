// Elementwise loops and reductions with a short last dimension, for all dtypes and orders of
// dimensions.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <string>

#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/run_whole.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

void check_program(const std::string& text, double tolerance) {
  SCOPED_TRACE(text);
  const Graph graph = Graph::parse(text, "test");
  const ir::Graph& plain = GraphAccess::of(graph);
  const ir::Tensors inputs = random_inputs(plain, 5);
  const ir::Tensors one = run_whole(graph, inputs, 1);
  EXPECT_LT(difference(one, ir::interpret(plain, inputs)), tolerance);
  EXPECT_EQ(difference(run_whole(graph, inputs, 3), one), 0.0);
}

TEST(ShortRows, AreMappedAndReduced) {
  // %y has another order, so that no dimensions of the loop can be merged.
  constexpr const char* kShapes[][3] = {{"3, 5, 7, 9", "9, 7, 5, 3", "3, 5"},
                                        {"40, 2, 60, 8", "8, 60, 2, 40", "40, 2"},
                                        {"2, 1, 300, 1", "1, 300, 1, 2", "2, 1"},
                                        {"1, 70, 3, 256", "256, 3, 70, 1", "1, 70"},
                                        {"2, 3, 2, 600", "600, 2, 3, 2", "2, 3"}};
  const std::pair<std::string, double> dtypes[] = {{"f64", 1e-12}, {"f32", 3e-6}, {"f16", 0x1p-9}};
  constexpr const char* kDims[] = {"0",    "1",    "2",       "3",      "0, 1",
                                   "2, 3", "1, 2", "0, 1, 2", "1, 2, 3"};
  for (const auto& [shape, turned, lead] : kShapes) {
    for (const auto& [dtype, tolerance] : dtypes) {
      const std::string type = dtype + "[" + shape + "]";
      std::string text =
          "graph g(%x: " + type + ", %y: " + dtype + "[" + turned + "], %z: " + dtype + "[" + lead +
          "]) {\n" +
          "  %t = transpose %y dims(3, 2, 1, 0)\n  %b = broadcast %z dims(0, 1) : " + type +
          "\n  %m = mul %x, %t\n  %v = sub %m, %b\n";
      std::string results = "v: %v";
      int count = 0;
      for (const char* dims : kDims) {
        for (const char* kind : {"sum", "max", "lse"}) {
          const std::string name = "r" + std::to_string(count++);
          text += "  %" + name + " = reduce_" + kind + " %v dims(" + dims + ")\n";
          results += ", " + name + ": %" + name;
        }
      }
      check_program(text + "  return " + results + "\n}\n", tolerance);
    }
  }
}

TEST(ShortRows, OfConditionsAndNumbersOfElements) {
  for (const char* dtype : {"i32", "i64", "f16", "bf16", "f32", "f64"}) {
    const std::string d = dtype;
    check_program("graph g(%x: " + d + "[30, 6, 40], %y: " + d +
                      "[40, 6]) {\n"
                      "  %t = transpose %y dims(1, 0)\n"
                      "  %b = broadcast %t dims(1, 2) : " +
                      d + "[30, 6, 40]\n  %hit = gt %x, %b\n" +
                      "  %at = iota axis(1) : i64[30, 6, 40]\n"
                      "  %row = iota axis(0) : i64[30, 6, 40]\n"
                      "  %near = lt %at, %row\n"
                      "  %both = logical_and %hit, %near\n"
                      "  %wide = cast %both : i64[30, 6, 40]\n"
                      "  %n = reduce_sum %wide dims(1, 2)\n"
                      "  %all = reduce_sum %wide dims(0, 1, 2)\n"
                      "  %kept = select %both, %x, %b\n"
                      "  return both: %both, n: %n, all: %all, kept: %kept\n}\n",
                  1e-12);
  }
}

const ir::Pointwise& last_loop(const ir::Program& program) {
  return std::get<ir::Pointwise>(program.instructions.back().what);
}

// Counts of true values are exact in f32 up to 2^24; other integers are not.
TEST(ShortRows, CountsAreMadeOfF32) {
  const auto wide = [](const std::string& type, const std::string& truth) {
    const std::string text = "graph g(%x: " + type + ", %y: " + type + ") {\n  %h = " + truth +
                             "\n  %n = reduce_sum %h dims(0, 1)\n  return n: %n\n}\n";
    return last_loop(ir::lower(ir::parse(text).graph, ir::CpuTarget(1))).wide;
  };
  EXPECT_FALSE(wide("i8[4096, 4096]", "cast %x : i64[4096, 4096]"));
  EXPECT_TRUE(wide("i8[4096, 4097]", "cast %x : i64[4096, 4097]"));
  EXPECT_TRUE(wide("i64[40, 40]", "add %x, %y"));
}

// A polynomial of %u, each of whose terms reads it, takes 28 registers: %u is computed once.
TEST(ShortRows, ALoopThatReadsAValueOftenIsOne) {
  std::string text =
      "graph g(%x: f32[8, 64], %y: f32[8, 64]) {\n  %u = sub %x, %y\n  %p0 = mul %u, %x\n";
  for (int k = 0; k < 8; ++k) {
    const std::string p = "%p" + std::to_string(k), next = "%p" + std::to_string(k + 1);
    text += "  %m" + std::to_string(k) + " = mul " + p + ", %u\n  " + next + " = add %m" +
            std::to_string(k) + (k % 2 == 0 ? ", %x\n" : ", %u\n");
  }
  text += "  %s = reduce_sum %p8 dims(1)\n  return s: %s\n}\n";
  EXPECT_EQ(ir::lower(ir::parse(text).graph, ir::CpuTarget(1)).instructions.size(), 1u);
  check_program(text, 1e-5);
}

}  // namespace
}  // namespace logitless::test
