// Programs whose loops become the epilogues of their matrix products.
#pragma once

#include <logitless/compiler.h>
#include <logitless/dtype.h>
#include <logitless/gpu_card.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::test {

// The products of a kernel with a generated epilogue.
enum class Pair { none, beside, difference };

struct ProductProgram {
  std::string name;
  std::string text;        // of the sizes N, V, D
  Pair pair = Pair::none;  // of its kernel with a generated epilogue
};

struct ProductSizes {
  std::int64_t rows, columns, depth;  // N, V, D
};
// Sizes with and without rests of tiles and steps.
inline std::vector<ProductSizes> product_sizes() {
  return {{300, 520, 72}, {256, 1024, 200}, {700, 264, 8}};
}

// The programs in a 16-bit dtype. None of their results cancels.
inline std::vector<ProductProgram> product_programs(DType dtype) {
  const std::string t(name_of(dtype));
  const std::string operands = "(%h: " + t + "[N, D], %w: " + t + "[V, D]";
  const std::string product = "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n";
  const std::string narrow = " : " + t + "[N, V]\n";
  return {
      {"sigmoid_loss", "graph g" + operands + ", %t: f32[N]) {\n" + product +
                           "  %p = sigmoid %z\n  %r = broadcast %t dims(0) : f32[N, V]\n"
                           "  %e = mul %p, %r\n  %g = cast %e" +
                           narrow +
                           "  %s = reduce_sum %p dims(1)\n"
                           "  %dh = dot %g, %w contract(1; 0) : " +
                           t +
                           "[N, D]\n"
                           "  return s: %s, g: %g, dh: %dh\n}\n"},
      {"scores", "graph g" + operands + ", %y: i64[N]) {\n" + product +
                     "  %l = reduce_lse %z dims(1)\n  %k = pick %z, %y axis(1)\n"
                     "  %m = reduce_max %z dims(1)\n  %n = sub %l, %k\n"
                     "  return n: %n, l: %l, k: %k, m: %m\n}\n"},
      {"gated",
       "graph g" + operands + ", %u: " + t +
           "[V, D], %c: f32[V]) {\n"
           "  %a = dot %h, %w contract(1; 1)" +
           narrow + "  %b = dot %h, %u contract(1; 1)" + narrow +
           "  %s = sigmoid %a\n  %d = mul %a, %s\n  %y = mul %d, %b\n"
           "  %x = cast %b : f32[N, V]\n  %v = broadcast %c dims(1) : f32[N, V]\n"
           "  %f = add %x, %v\n  return a: %a, b: %b, y: %y, f: %f\n}\n",
       Pair::beside},
      {"columns",
       "graph g(%h: " + t + "[N, D], %w: " + t +
           "[D, V], %r: i32[N]) {\n"
           "  %z = dot %h, %w contract(1; 0) : f32[N, V]\n  %i = iota axis(1) : i32[N, V]\n"
           "  %j = constant value(300) : i32[N]\n  %q = mul %r, %j\n"
           "  %b = broadcast %q dims(0) : i32[N, V]\n"
           "  %m = lt %i, %b\n  %x = tanh %z\n  %e = select %m, %x, %z\n"
           "  %g = cast %e" +
           narrow + "  %o = mul %g, %g\n  return g: %g, o: %o\n}\n"},
      // Both products' columns, a value of each element and sums of rows.
      {"gated_columns",
       "graph g(%h: " + t + "[N, D], %w: " + t + "[D, V], %u: " + t + "[D, V], %x: f32[N, V]) {\n" +
           "  %a = dot %h, %w contract(1; 0) : f32[N, V]\n"
           "  %b = dot %h, %u contract(1; 0) : f32[N, V]\n"
           "  %p = tanh %a\n  %q = mul %p, %b\n  %e = add %q, %x\n  %g = cast %e" +
           narrow +
           "  %s = mul %e, %e\n  %n = reduce_sum %s dims(1)\n  %m = reduce_max %e dims(1)\n" +
           "  return g: %g, n: %n, m: %m\n}\n",
       Pair::beside},
      // One product whose halves are read.
      {"packed",
       "graph g(%h: " + t + "[N, D], %w: " + t + "[2 * V, D]) {\n" +
           "  %z = dot %h, %w contract(1; 1) : " + t + "[N, 2 * V]\n" +
           "  %a = slice %z begin(0, 0) end(N, V)\n  %b = slice %z begin(0, V) end(N, 2 * V)\n"
           "  %s = sigmoid %a\n  %d = mul %a, %s\n  %y = mul %d, %b\n  return y: %y\n}\n",
       Pair::beside},
      // A student and a teacher of another width: only the difference of their logits is read.
      {"squared_error",
       "graph g" + operands + ", %t: " + t + "[N, 2 * D + 8], %u: " + t + "[V, 2 * D + 8]) {\n" +
           product + "  %o = dot %t, %u contract(1; 1) : f32[N, V]\n" +
           "  %d = sub %o, %z\n  %q = mul %d, %d\n  %s = reduce_sum %q dims(1)\n  %g = cast %d" +
           narrow + "  return g: %g, s: %s\n}\n",
       Pair::difference},
  };
}

// Returns options of a card whose memory is so slow that every epilogue pays.
inline CompileOptions slow_memory(const ProductSizes& sizes, DeviceLimits device = {}) {
  CompileOptions options;
  device.kind = DeviceKind::cuda;
  if (device.compute_capability == 0) device.compute_capability = 90;
  device.card = gpu_card("H200");
  device.card.copy_bytes_per_second /= 100.0;
  options.device = device;
  options.sizes = {{"N", sizes.rows}, {"V", sizes.columns}, {"D", sizes.depth}};
  options.chunk = false;
  return options;
}

// Returns the groups with a generated epilogue, those of loops included once.
inline std::vector<const ir::RowGroup*> groups_of_products(const ir::Program& program) {
  std::vector<const ir::RowGroup*> list;
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* group = std::get_if<ir::RowGroup>(&i.what); group != nullptr && group->product)
      list.push_back(group);
    if (const auto* loop = std::get_if<ir::LoopRun>(&i.what)) {
      for (const ir::RowGroup* group : groups_of_products(*loop->body)) list.push_back(group);
    }
  }
  return list;
}
inline int generated_epilogues(const ir::Program& program) {
  return static_cast<int>(groups_of_products(program).size());
}
inline Pair pair_of(const ir::RowGroup& group) {
  return group.difference ? Pair::difference : group.other ? Pair::beside : Pair::none;
}

}  // namespace logitless::test
