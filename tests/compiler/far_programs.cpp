#include "compiler/far_programs.h"

#include <cmath>
#include <ostream>
#include <random>

#include "core/half.h"

namespace logitless::test {
namespace {

// Replaces the sizes in the text.
std::string with_sizes(std::string text, FarSizes sizes) {
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos;) {
      text.replace(at, from.size(), to);
    }
  };
  replace("VOCAB", std::to_string(sizes.vocab_count));
  replace("TOKENS", std::to_string(sizes.tokens));
  replace("DIM", std::to_string(sizes.dim));
  replace("DTYPE", sizes.dtype);
  return text;
}

}  // namespace

const char* const kFarLogits = "%z = dot %x, %w contract(1; 1) : f32[TOKENS, VOCAB]";
const char* const kFarLoss =
    " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %s = reduce_sum %d "
    "dims(0) return s: %s";
const char* const kFarGrad = " differentiate s wrt %x, %w";

std::string far_graph(const std::string& body, const std::string& more, FarSizes sizes) {
  return with_sizes("graph g(%x: DTYPE[TOKENS, DIM], %w: DTYPE[VOCAB, DIM], %t: i64[TOKENS]" +
                        more + ") { " + body + " }",
                    sizes);
}

void PrintTo(const FarCase& c, std::ostream* out) { *out << c.name; }

std::vector<FarCase> far_cases(FarSizes sizes) {
  const std::string plain = kFarLogits, loss = kFarLoss, grad = kFarGrad;
  const std::string masked =
      plain +
      " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %c = constant "
      "value(-100) : i64[TOKENS] %m = eq %t, %c %o = constant value(0) : f32[TOKENS] %e = select "
      "%m, %o, %d %s = reduce_sum %e dims(0) return s: %s" +
      grad;
  const std::string biased =
      "%y = dot %x, %w contract(1; 1) : f32[TOKENS, VOCAB] %a = broadcast %b dims(1) : f32[TOKENS, "
      "VOCAB] %z = add %y, %a" +
      loss + " differentiate s wrt %x, %w, %b";
  const std::string sixteen =
      "graph g(%h: f32[TOKENS, DIM], %m: f32[VOCAB, DIM], %t: i64[TOKENS]) { %x = cast %h : "
      "bf16[TOKENS, DIM] %w = cast %m : bf16[VOCAB, DIM] " +
      plain + loss + " differentiate s wrt %h, %m }";
  const std::string tied =
      "graph g(%h: DTYPE[TOKENS, DIM], %i: i64[TOKENS], %w: DTYPE[VOCAB, DIM], %t: i64[TOKENS]) { "
      "%u "
      "= take %w, %i %x = add %h, %u " +
      plain + loss + " differentiate s wrt %w }";
  std::vector<FarCase> list;
  for (const Accuracy a : {Accuracy::far_backward, Accuracy::far_both}) {
    const std::string end = a == Accuracy::far_both ? "Both" : "";
    list.push_back({"Plain" + end, far_graph(plain + loss + grad, "", sizes), a});
    list.push_back({"Masked" + end, far_graph(masked, "", sizes), a});
    list.push_back({"Bias" + end, far_graph(biased, ", %b: f32[VOCAB]", sizes), a});
    list.push_back({"Bf16" + end, with_sizes(sixteen, sizes), a});
  }
  list.push_back({"TiedTable", with_sizes(tied, sizes)});
  return list;
}

ir::Tensors far_inputs(const CompiledProgram& program, double spread) {
  const CompiledProgram::Tensor* vocab_of = nullptr;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    if (t.name == "w" || t.name == "m") vocab_of = &t;
  }
  const std::int64_t vocab_count = vocab_of->shape[0], dim = vocab_of->shape[1];
  // Logits have the same spread in any dimension.
  const double unit = std::sqrt(8.0 / static_cast<double>(dim));
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  ir::Tensors inputs;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    ir::Tensor& to = inputs[t.name];
    to.shape = t.shape;
    const std::int64_t rows = t.shape[0];
    std::vector<double> center(static_cast<std::size_t>(dim));
    for (std::int64_t i = 0; i < rows; ++i) {
      if (t.name == "t") {
        to.data.push_back(i % 17 == 3   ? -100.0
                          : i % 31 == 5 ? static_cast<double>(vocab_count)
                                        : static_cast<double>(random() % vocab_count));
      } else if (t.name == "i") {
        to.data.push_back(static_cast<double>(random() % vocab_count));
      } else if (t.name == "b") {
        to.data.push_back(0.1 * normal(random));
      } else {
        const bool table = rows == vocab_count;
        const double scale = table ? unit : 1.0;
        if (i % (table ? 128 : rows / 4) == 0)
          for (double& c : center) c = (table ? 1.0 : 1.2) * scale * normal(random);
        for (const double c : center) {
          const double x = c + (table ? spread : 2.0 * spread) * scale * normal(random);
          to.data.push_back(bf16_to_float(float_to_bf16(static_cast<float>(x))));
        }
      }
    }
  }
  return inputs;
}

FarFieldOptions quick_far_field(Accuracy accuracy) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.05;
  o.audit_every = 3;
  o.refresh_every = 2;
  o.refresh_delay = 1;
  return o;
}

bool same_bits(const ir::Tensors& a, const ir::Tensors& b) {
  for (const auto& [name, x] : b)
    if (a.at(name).data != x.data) return false;
  return true;
}

double relative_2norm(const ir::Tensor& x, const ir::Tensor& y) {
  double squares = 0.0, of = 1e-300;
  for (std::size_t i = 0; i < y.data.size(); ++i) {
    squares += std::pow(x.data[i] - y.data[i], 2);
    of += std::pow(y.data[i], 2);
  }
  return std::sqrt(squares / of);
}

}  // namespace logitless::test
