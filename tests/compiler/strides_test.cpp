// Matrix products that read memory in place: values whose reshapes return to strides, and
// contracted dimensions that are not adjacent.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/run_whole.h"
#include "compiler/target/cpu.h"

namespace logitless::test {
namespace {

struct Counts {
  int products = 0, others = 0;
  std::int64_t copied = 0;  // bytes in the arena
  double work = 0.0;
  auto operator<=>(const Counts&) const = default;
};
Counts counts(const std::string& text) {
  const ir::Program program = ir::lower(ir::parse(text).graph, ir::CpuTarget(1));
  Counts c;
  for (const ir::Instruction& i : program.instructions)
    (std::holds_alternative<ir::Gemm>(i.what) ? c.products : c.others) += 1;
  c.copied = program.value_bytes;
  c.work = program.multiply_adds;
  return c;
}
void expect_right(const std::string& text) {
  const Graph graph = Graph::parse(text);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(graph), 5);
  const ir::Tensors once = run_whole(graph, inputs, 1);
  EXPECT_LT(difference(once, ir::interpret(GraphAccess::of(graph), inputs)), 2e-5) << text;
  EXPECT_EQ(difference(once, run_whole(graph, inputs, 3)), 0.0) << text;
}

// Pixels of images become rows of one matrix, which has no strides, and then pixels again.
const std::string kPixels =
    "graph g(%x: f32[2, 6, 5, 7], %w: f32[9, 6]) {\n"
    "%t = transpose %x dims(0, 2, 3, 1) %rows = reshape %t : f32[70, 6]\n";

constexpr std::int64_t kCopy = (2 * 6 * 5 * 7 * 4 + 63) / 64 * 64;

TEST(Strides, OfRowsThatArePartedAgainNeedNoCopy) {
  const std::string parted = kPixels +
                             "%p = reshape %rows : f32[2, 5, 7, 6]\n"
                             "%y = dot %p, %w contract(3; 1) return y: %y }";
  EXPECT_EQ(counts(parted), (Counts{1, 0, 0, 2 * 35 * 6 * 9.0}));
  expect_right(parted);
  // With a transpose, and split otherwise.
  const std::string turned = kPixels +
                             "%u = transpose %rows dims(1, 0) %p = reshape %u : f32[3, 2, 2, 35]\n"
                             "%v = reshape %w : f32[9, 3, 2]\n"
                             "%y = dot %p, %v contract(0, 1; 1, 2) return y: %y }";
  EXPECT_EQ(counts(turned), (Counts{1, 0, 0, 2 * 35 * 6 * 9.0}));
  expect_right(turned);
}

TEST(Strides, OfRowsAsTheyAreAreACopyOfAll) {
  const std::string rows = kPixels + "%y = dot %rows, %w contract(1; 1) return y: %y }";
  EXPECT_EQ(counts(rows), (Counts{1, 1, kCopy, 2 * 35 * 6 * 9.0}));
  expect_right(rows);
  // Reuses a copy that exists for another reader.
  const std::string both =
      kPixels +
      "%y = dot %rows, %w contract(1; 1) %p = reshape %rows : f32[2, 5, 7, 6]\n"
      "%z = dot %p, %w contract(3; 1) return y: %y, z: %z }";
  EXPECT_EQ(counts(both), (Counts{2, 1, kCopy, 4 * 35 * 6 * 9.0}));
  expect_right(both);
  // A part of the rows is half of an image line.
  const std::string across = kPixels +
                             "%p = reshape %rows : f32[10, 7, 6] %y = dot %p, %w contract(2; 1)\n"
                             "%q = reshape %rows : f32[35, 2, 6] %z = dot %q, %w contract(2; 1)\n"
                             "return y: %y, z: %z }";
  EXPECT_EQ(counts(across).others, 1);
  expect_right(across);
}

// The weight gradient of a 1 x 1 convolution: a sum over images and pixels.
const std::string kImages =
    "graph g(%x: f32[2, 6, 5, 7], %d: f32[2, 9, 5, 7], %s: f32[9, 6]) {\n"
    "%y = dot %d, %x contract(0, 2, 3; 0, 2, 3)\n";

// Elementwise loops read transposed operands in tiles, whole or not, and scans several rows at a
// time.
TEST(Strides, OfTransposedOperandsAreReadInTiles) {
  for (const std::string dtype : {"f32", "f64", "bf16", "i64"}) {
    for (const auto& [rows, columns] : {std::pair{37, 70}, {16, 32}, {17, 33}, {1, 600}, {48, 5}}) {
      const std::string n = std::to_string(rows), m = std::to_string(columns);
      const std::string shape = "[3, " + n + ", " + m + "]";
      const std::string wide = (dtype == "bf16" ? "f32" : dtype) + shape;
      expect_right("graph g(%x: " + dtype + "[3, " + m + ", " + n + "], %y: " + dtype + shape +
                   ") {\n%t = transpose %x dims(0, 2, 1) %a = cast %t : " + wide +
                   " %b = cast %y : " + wide +
                   "\n%d = sub %a, %b %e = eq %t, %y %f = cast %e : f32" + shape +
                   "\n%s = cumsum %a axis(2) reverse(1)\nreturn d: %d, f: %f, s: %s }");
    }
  }
}

// A few rows of a table that lies by columns are picked; of many it is copied.
TEST(Strides, OfATransposedTableAreNotCopiedForAFewRows) {
  const auto taken = [](int rows) {
    const std::string n = std::to_string(rows);
    return "graph g(%x: f32[6, 80], %i: i64[" + n +
           "]) {\n%t = transpose %x dims(1, 0)\n%r = take %t, %i : f32[" + n +
           ", 6] return r: %r }";
  };
  EXPECT_EQ(counts(taken(10)), (Counts{0, 1, 0, 0.0}));
  EXPECT_EQ(counts(taken(11)), (Counts{0, 2, 1920, 0.0}));
  expect_right(taken(10));
  expect_right(taken(11));
}

// Columns of a matrix are read and written by lines of a cache, so loops over a few of them are not
// free.
TEST(Strides, OfAFewColumnsCountAsLines) {
  const auto bytes = [](std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
    ir::Fill fill;
    fill.out = {0, DType::f32, 0, std::move(shape), std::move(strides)};
    return ir::bytes_moved(ir::Instruction{{}, fill});
  };
  EXPECT_EQ(bytes({100, 64}, {64, 1}), 4.0 * 100 * 64);
  EXPECT_EQ(bytes({64, 100}, {1, 64}), 4.0 * 100 * 64);
  EXPECT_EQ(bytes({100, 16}, {64, 1}), 4.0 * 100 * 16);
  EXPECT_EQ(bytes({100, 2}, {64, 1}), 64.0 * 100);
  EXPECT_EQ(bytes({100}, {64}), 64.0 * 100);
  EXPECT_EQ(bytes({100, 2}, {2, 1}), 4.0 * 200);
  EXPECT_EQ(bytes({2}, {1}), 8.0);
}

TEST(Strides, OfContractedDimensionsApartAreProductsThatAdd) {
  const std::string alone = kImages + "return y: %y }";
  EXPECT_EQ(counts(alone), (Counts{2, 0, 0, 2 * 35 * 6 * 9.0}));
  expect_right(alone);
  expect_right(kImages + "%z = add %s, %y return z: %z }");  // added to another value
}

TEST(Strides, OfManyContractedDimensionsAreACopy) {
  const std::string many =
      "graph g(%x: f32[40, 6, 2], %d: f32[40, 9, 2]) {\n"
      "%y = dot %d, %x contract(0, 2; 0, 2) return y: %y }";
  EXPECT_EQ(counts(many).products, 2);  // along 40, for each of 2
  expect_right(many);
  const std::string more =
      "graph g(%x: f32[40, 6, 30], %d: f32[40, 9, 30]) {\n"
      "%y = dot %d, %x contract(0, 2; 0, 2) return y: %y }";
  EXPECT_EQ(counts(more).products, 30);  // 29 times 54 numbers is less than a copy's 7200
  expect_right(more);
  const std::string wide =
      "graph g(%x: f32[4, 60, 3], %d: f32[4, 90, 3]) {\n"
      "%y = dot %d, %x contract(0, 2; 0, 2) return y: %y }";
  EXPECT_EQ(counts(wide).products, 1);
  EXPECT_GT(counts(wide).copied, 0);
  expect_right(wide);
  const std::string narrow =
      "graph g(%x: bf16[2, 6, 5, 7], %d: bf16[2, 9, 5, 7]) {\n"
      "%y = dot %d, %x contract(0, 2, 3; 0, 2, 3) return y: %y }";  // rounds once
  EXPECT_EQ(counts(narrow).products, 1);
}

// --- dimensions that an einsum merged

void expect_parted(const std::string& before, const std::string& after) {
  const ir::Graph result = ir::part_products(ir::parse(before).graph);
  ir::verify(result);
  EXPECT_EQ(ir::print(result), ir::print(ir::parse(after).graph));
  const ir::Tensors inputs = random_inputs(result, 3);
  EXPECT_LT(
      difference(ir::interpret(result, inputs), ir::interpret(ir::parse(before).graph, inputs)),
      1e-12);
}
void expect_left(const std::string& text) { expect_parted(text, text); }

const std::string kExperts = "graph g(%x: f32[6, 3], %w: f32[4, 3, 8]) {\n";
const std::string kUnits = "%t = transpose %w dims(1, 0, 2) %u = reshape %t : f32[3, 32] ";

TEST(PartProducts, ThatAreFreeInOneOperand) {
  expect_parted(kExperts + kUnits +
                    "%y = dot %x, %u contract(1; 0) %z = reshape %y : f32[6, 4, 8] return z: %z }",
                kExperts +
                    "%t = transpose %w dims(1, 0, 2) %y = dot %x, %t contract(1; 0) : f32[6, 4, 8] "
                    "%z = reshape %y : f32[6, 4, 8] return z: %z }");
}

TEST(PartProducts, ThatAreContracted) {
  // The other operand has the dimensions in order.
  const std::string head = "graph g(%h: f32[6, 32], %w: f32[4, 3, 8]) {\n";
  expect_parted(head + kUnits + "%y = dot %h, %u contract(1; 1) return y: %y }",
                head +
                    "%t = transpose %w dims(1, 0, 2) %1 = reshape %h : f32[6, 4, 8] "
                    "%y = dot %1, %t contract(1, 2; 1, 2) return y: %y }");
}

TEST(PartProducts, NotOfWhatHasStrides) {
  const std::string head = "graph g(%x: f32[6, 3], %w: f32[3, 4, 8], %v: f32[8, 4, 3]) {\n";
  expect_left(head + "%u = reshape %w : f32[3, 32] %y = dot %x, %u contract(1; 0) return y: %y }");
  expect_left(head +
              "%t = transpose %v dims(2, 0, 1) %u = reshape %t : f32[3, 32] "
              "%y = dot %x, %u contract(1; 0) return y: %y }");
  // No row has eight elements, so a copy is read faster.
  const std::string thin = "graph g(%x: f32[6, 3], %w: f32[4, 3, 7]) {\n";
  expect_left(thin +
              "%t = transpose %w dims(1, 0, 2) %u = reshape %t : f32[3, 28] "
              "%y = dot %x, %u contract(1; 0) return y: %y }");
}

TEST(PartProducts, NotForCallersThatRunTheText) {
  const std::string text =
      kExperts + kUnits + "%y = dot %x, %u contract(1; 0) %s = exp %y return s: %s }";
  CompileOptions options;
  options.chunk = false;
  const auto parted = [&] {
    return compile(Graph::parse(text), options).text().find("f32[6, 4, 8]") != std::string::npos;
  };
  EXPECT_TRUE(parted());
  options.externs = true;
  EXPECT_FALSE(parted());
}

}  // namespace
}  // namespace logitless::test
