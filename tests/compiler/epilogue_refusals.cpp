// Readers of a matrix product that its generated epilogue does not take.
#include "compiler/epilogue_cases.h"
#include "core/check.h"

namespace logitless::test {
namespace {

constexpr const char* kSum = "  %s = reduce_sum %z dims(1)\n  return s: %s\n}\n";

// A program of z = h . w^T and statements.
std::string of(const std::string& statements, const std::string& parameters = "") {
  return "graph g(%h: bf16[N, D], %w: bf16[V, D]" + parameters +
         ") {\n  %z = dot %h, %w contract(1; 1) : f32[N, V]\n" + statements + "\n}\n";
}
// A product of other operands, and the sums of its rows.
std::string product(const std::string& parameters, const std::string& statements,
                    const std::string& reader = kSum) {
  return "graph g(" + parameters + ") {\n" + statements + reader;
}
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}
// The text with A, and with B, in place of X.
EpilogueRefusal with(const std::string& name, const std::string& text, const std::string& refused,
                     const std::string& taken) {
  return {name, replaced(text, "X", refused), replaced(text, "X", taken)};
}

// `count` results, each a function of the product. row: of its sum with a vector of columns.
std::string results(int count, const std::string& function, bool row = true) {
  std::string steps = row ? "  %y = broadcast %x dims(1) : f32[N, V]\n  %v0 = add %z, %y\n"
                          : "  %v0 = tanh %z\n",
              list;
  for (int i = 1; i <= count; ++i) {
    steps += concat("  %c", i, " = constant value(", i, ") : f32[N, V]\n  %v", i, " = add %v0, %c",
                    i, "\n");
    if (!function.empty()) steps += concat("  %r", i, " = ", function, " %v", i, " dims(1)\n");
    list += concat(i > 1 ? ", r" : "r", i, ": %", function.empty() ? "v" : "r", i);
  }
  return of(steps + "  return " + list, row ? ", %x: f32[V]" : "");
}

void add_operands(std::vector<EpilogueRefusal>& list) {
  const std::string add = "  %e = add %z, %y\n  return e: %e";
  list.push_back({"transposed elements",
                  of("  %y = transpose %x dims(1, 0)\n" + add, ", %x: f32[V, N]"),
                  of("  %y = tanh %x\n" + add, ", %x: f32[N, V]")});
  for (const char* flip : {"flip %x axis(0)", "flip %x axis(1)"})
    list.push_back(with(flip, of("  %y = X\n" + add, ", %x: f32[N, V]"), flip, "neg %x"));
  const std::string second =
      "  %q = slice %x begin(0, 1) end(X, 2)\n  %k = reshape %q : f32[X]\n"
      "  %y = broadcast %k dims(";
  list.push_back({"columns apart",
                  of(replaced(second, "X", "V") + "1) : f32[N, V]\n" + add, ", %x: f32[V, 2]"),
                  of(replaced(second, "X", "N") + "0) : f32[N, V]\n" + add, ", %x: f32[N, 2]")});
  list.push_back(with("elements of f64",
                      of("  %x = cast %z : X[N, V]\n  %e = mul %x, %y\n  %f = cast %e : f32[N, V]\n"
                         "  return f: %f",
                         ", %y: X[N, V]"),
                      "f64", "bf16"));
}

void add_results(std::vector<EpilogueRefusal>& list) {
  for (const char* dtype : {"i8", "i32", "i64", "f64"})
    list.push_back(with(concat("results of ", dtype),
                        of("  %y = cast %z : X[N, V]\n  return y: %y"), dtype, "f16"));
  list.push_back({"transposed results",
                  of("  %e = exp %z\n  %y = transpose %e dims(1, 0)\n  return y: %y"),
                  of("  %e = exp %z\n  return e: %e")});
  list.push_back(
      with("results between multiples of 16 bytes",
           of("  %e = exp %z\n  %y = concat %x, %e axis(1)\n  return y: %y", ", %x: f32[N, X]"),
           "3", "4"));
  list.push_back({"five matrices", results(5, ""), results(4, "")});
  // Their loops are over all elements, in rows and columns of their own.
  list.push_back({"matrices without rows", results(2, "", false), results(2, "")});
  list.push_back({"thirteen sums", results(13, "reduce_sum"), results(12, "reduce_sum")});
}

void add_reductions(std::vector<EpilogueRefusal>& list) {
  for (const char* refused :
       {"reduce_sum %z dims(0)", "reduce_max %z dims(0)", "reduce_product %z dims(1)",
        "argmax %z dims(1)", "cumsum %z axis(1) reverse(0)"})
    list.push_back(with(refused, of("  %s = X\n  return s: %s"), refused, "reduce_sum %z dims(1)"));
  list.push_back(with("sums of integers",
                      of("  %e = cast %z : X[N, V]\n  %s = reduce_max %e dims(1)\n"
                         "  return s: %s"),
                      "i32", "f16"));
  list.push_back(with("softmax",
                      of("  %l = reduce_lse %z dims(1)\n  %b = broadcast %X dims(0) : f32[N, V]\n"
                         "  %e = sub %z, %b\n  return e: %e, l: %l",
                         ", %t: f32[N]"),
                      "l", "t"));
  list.push_back({"sums beside a result that is the product",
                  of("  %s = reduce_sum %z dims(1)\n  return s: %s, z: %z"),
                  of("  %e = exp %z\n  return e: %e, z: %z")});
  list.push_back(with("picks of several",
                      of("  %p = pick %z, %i axis(1)\n  return p: %p", ", %i: i64X"), "[N, 2]",
                      "[N]"));
}

void add_products(std::vector<EpilogueRefusal>& list) {
  const std::string z = "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n";
  list.push_back(with("products of f32", product("%h: X[N, D], %w: X[V, D]", z), "f32", "f16"));
  list.push_back({"columns that are no multiple of 8",
                  product("%h: f16[N, D], %w: f16[V + 2, D]",
                          "  %z = dot %h, %w contract(1; 1) : f32[N, V + 2]\n"),
                  product("%h: f16[N, D], %w: f16[V + 8, D]",
                          "  %z = dot %h, %w contract(1; 1) : f32[N, V + 8]\n")});
  list.push_back(with("rows of operands between multiples of 16 bytes",
                      product("%h: bf16[N, D + X], %w: bf16[V, D + X]",
                              "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"),
                      "3", "8"));
  list.push_back(
      {"a left operand by columns",
       product("%h: bf16[D, N], %w: bf16[V, D]", "  %z = dot %h, %w contract(0; 1) : f32[N, V]\n"),
       product("%h: bf16[N, D], %w: bf16[D, V]",
               "  %z = dot %h, %w contract(1; 0) : f32[N, V]\n")});
  list.push_back({"batches",
                  product("%h: bf16[2, N, D], %w: bf16[2, V, D]",
                          "  %z = dot %h, %w batch(0; 0) contract(2; 2) : f32[2, N, V]\n",
                          "  %s = reduce_sum %z dims(2)\n  return s: %s\n}\n"),
                  product("%h: bf16[2, N, D], %w: bf16[V, D]",
                          "  %z = dot %h, %w contract(2; 1) : f32[2, N, V]\n",
                          "  %s = reduce_sum %z dims(2)\n  return s: %s\n}\n")});
  list.push_back(with(
      "results of f64",
      product("%h: bf16[N, D], %w: bf16[V, D]", "  %z = dot %h, %w contract(1; 1) : X[N, V]\n"),
      "f64", "f32"));
}

}  // namespace

std::vector<EpilogueRefusal> epilogue_refusals() {
  std::vector<EpilogueRefusal> list;
  add_operands(list);
  add_results(list);
  add_reductions(list);
  add_products(list);
  return list;
}

}  // namespace logitless::test
