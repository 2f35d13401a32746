// Heads of compiled programs under a FarFieldHead: dense steps to the bit, far-field ones within
// the error, misses done again before gradients are used, and the programs that have no such head.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "compiler/graph_access.h"
#include "compiler/run.h"
#include "core/half.h"
#include "logitless/error.h"
#include "logitless/far_field.h"
#include "support/common_kernel.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 128, kWords = 65536, kDim = 8;
constexpr const char* kPlain = "%z = dot %x, %w contract(1; 1) : f32[128, 65536]";
constexpr const char* kLoss =
    " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %s = reduce_sum %d "
    "dims(0) return s: %s";
constexpr const char* kGrad = " differentiate s wrt %x, %w";

std::string f32(const std::string& body, const std::string& more = "") {
  return "graph g(%x: f32[128, 8], %w: f32[65536, 8], %t: i64[128]" + more + ") { " + body + " }";
}

struct Case {
  std::string name;
  std::string text;
  Accuracy accuracy = Accuracy::far_backward;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  const std::string plain = kPlain, loss = kLoss, grad = kGrad;
  const std::string masked =
      plain +
      " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %c = constant "
      "value(-100) : i64[128] %m = eq %t, %c %o = constant value(0) : f32[128] %e = select %m, %o, "
      "%d %s = reduce_sum %e dims(0) return s: %s" +
      grad;
  const std::string biased =
      "%y = dot %x, %w contract(1; 1) %a = broadcast %b dims(1) : f32[128, 65536] %z = add %y, %a" +
      loss + " differentiate s wrt %x, %w, %b";
  const std::string sixteen =
      "graph g(%h: f32[128, 8], %m: f32[65536, 8], %t: i64[128]) { %x = cast %h : bf16[128, 8] %w "
      "= cast %m : bf16[65536, 8] " +
      plain + loss + " differentiate s wrt %h, %m }";
  const std::string tied =
      "graph g(%h: f32[128, 8], %i: i64[128], %w: f32[65536, 8], %t: i64[128]) { %u = take %w, %i "
      "%x = add %h, %u " +
      plain + loss + " differentiate s wrt %w }";
  std::vector<Case> list;
  for (const Accuracy a : {Accuracy::far_backward, Accuracy::far_both}) {
    const std::string end = a == Accuracy::far_both ? "Both" : "";
    list.push_back({"Plain" + end, f32(plain + loss + grad), a});
    list.push_back({"Masked" + end, f32(masked), a});
    list.push_back({"Bias" + end, f32(biased, ", %b: f32[65536]"), a});
    list.push_back({"Bf16" + end, sixteen, a});
  }
  list.push_back({"TiedTable", tied});
  return list;
}

// Words in clusters, tokens of a few topics; some targets ignored or outside the vocabulary.
ir::Tensors inputs_of(const CompiledProgram& program) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  ir::Tensors inputs;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    ir::Tensor& to = inputs[t.name];
    to.shape = t.shape;
    const std::int64_t rows = t.shape[0];
    std::vector<double> center(kDim);
    for (std::int64_t i = 0; i < rows; ++i) {
      if (t.name == "t") {
        to.data.push_back(i % 17 == 3   ? -100.0
                          : i % 31 == 5 ? static_cast<double>(kWords)
                                        : static_cast<double>(random() % kWords));
      } else if (t.name == "i") {
        to.data.push_back(static_cast<double>(random() % kWords));
      } else if (t.name == "b") {
        to.data.push_back(0.1 * normal(random));
      } else {
        const bool words = rows == kWords;
        if (i % (words ? 128 : 32) == 0)
          for (double& c : center) c = (words ? 1.0 : 1.2) * normal(random);
        for (const double c : center) {
          const double x = c + (words ? 0.1 : 0.2) * normal(random);
          to.data.push_back(bf16_to_float(float_to_bf16(static_cast<float>(x))));
        }
      }
    }
  }
  return inputs;
}

CompiledProgram compiled(const std::string& text, int threads = 1) {
  CompileOptions options;
  options.threads = threads;
  return compile(Graph::parse(text), options);
}

Context context_of(int threads = 1) {
  ContextOptions options;
  options.threads = threads;
  options.kernel = common_kernel();
  return Context(options);
}

// An order begun at step 2, and tried at 3.
FarFieldOptions quick(Accuracy accuracy) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.05;
  o.audit_every = 3;
  o.refresh_every = 2;
  o.refresh_delay = 1;
  return o;
}

bool same(const ir::Tensors& a, const ir::Tensors& b) {
  for (const auto& [name, x] : b)
    if (a.at(name).data != x.data) return false;
  return true;
}

// In the 2-norm.
double error(const ir::Tensor& x, const ir::Tensor& y) {
  double squares = 0.0, of = 1e-300;
  for (std::size_t i = 0; i < y.data.size(); ++i) {
    squares += std::pow(x.data[i] - y.data[i], 2);
    of += std::pow(y.data[i], 2);
  }
  return std::sqrt(squares / of);
}

class FarHeads : public testing::TestWithParam<Case> {};

TEST_P(FarHeads, AreDenseThenWithinTheError) {
  const Case& c = GetParam();
  const CompiledProgram program = compiled(c.text);
  const ir::Tensors inputs = inputs_of(program);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick(c.accuracy));
  const LossPlan plan = program.far_plan(far);
  EXPECT_GT(plan.tau, 0.0f) << plan.explain();
  std::vector<ir::Tensors> steps;
  for (int step = 1; step <= 4; ++step) {
    SCOPED_TRACE(step);
    steps.push_back(execute(program, inputs, &far));
    const ir::Tensors& got = steps.back();
    EXPECT_EQ(far.report().steps, step);
    if (step < 3) {
      EXPECT_TRUE(same(got, dense));
      continue;
    }
    ASSERT_TRUE(far.report().far) << far.explain();
    EXPECT_FALSE(same(got, dense));
    for (const auto& [name, wanted] : dense) {
      const bool exact = name == "s" && c.accuracy == Accuracy::far_backward;
      EXPECT_LT(error(got.at(name), wanted), exact ? 1e-6 : 0.05) << name;
    }
  }
  const FarFieldReport& r = far.report();
  EXPECT_EQ(r.dense_steps, 2);
  EXPECT_EQ(r.repeated_steps, 0);
  EXPECT_EQ(r.refreshes, 1);
  EXPECT_EQ(r.audits, 1) << "the trial's";
  EXPECT_GT(r.mean_kept, 0.0);
  EXPECT_LT(r.mean_kept, 0.67);
  EXPECT_GE(context.memory().peak_bytes(), plan.workspace_bytes());

  // Another run, of other threads.
  const CompiledProgram more = compiled(c.text, 3);
  const Context context_of_more = context_of(2);
  FarFieldHead again(context_of_more, quick(c.accuracy));
  EXPECT_EQ(more.far_plan(again).chunk_tokens, plan.chunk_tokens);
  for (const ir::Tensors& step : steps) EXPECT_TRUE(same(execute(more, inputs, &again), step));
}

INSTANTIATE_TEST_SUITE_P(All, FarHeads, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

TEST(FarHeadsSteps, MissesAreDoneAgainDensely) {
  const CompiledProgram program = compiled(f32(std::string(kPlain) + kLoss + kGrad));
  const ir::Tensors inputs = inputs_of(program);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldOptions o = quick(Accuracy::far_backward);
  o.error = 1e-9;
  FarFieldHead far(context, o);
  for (int step = 1; step <= 6; ++step) EXPECT_TRUE(same(execute(program, inputs, &far), dense));
  EXPECT_GE(far.report().repeated_steps, 1);
  EXPECT_EQ(far.report().dense_steps, 6);
}

// Equal logits: every tile of 32768 words has more than tau, all are kept, and computed exactly.
TEST(FarHeadsSteps, AllTilesKeptAreTheDenseGradients) {
  std::string text = f32(std::string(kPlain) + kLoss + kGrad);
  for (std::size_t at = 0; (at = text.find("65536", at)) != std::string::npos;)
    text.replace(at, 5, "32768");
  const CompiledProgram program = compiled(text);
  ir::Tensors inputs = random_inputs(GraphAccess::of(Graph::parse(text)), 3);
  for (double& x : inputs.at("x").data) x *= 1e-4;
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick(Accuracy::far_backward));
  for (int step = 1; step <= 3; ++step) {
    const ir::Tensors got = execute(program, inputs, &far);
    for (const auto& [name, wanted] : dense) EXPECT_LT(error(got.at(name), wanted), 1e-5) << name;
  }
  EXPECT_EQ(far.report().mean_kept, 1.0);
  EXPECT_EQ(far.report().dense_steps, 2);
  EXPECT_FALSE(far.report().far) << "nothing was gained";
}

TEST(FarHeadsSteps, ASmallVocabularyIsDense) {
  const std::string text =
      "graph g(%x: f32[128, 8], %w: f32[4000, 8], %t: i64[128]) { %z = dot %x, %w contract(1; 1)" +
      std::string(kLoss) + kGrad + " }";
  const CompiledProgram program = compiled(text);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(Graph::parse(text)), 3);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick(Accuracy::far_backward));
  EXPECT_EQ(program.far_plan(far).tau, 0.0f);
  for (int step = 1; step <= 5; ++step) EXPECT_TRUE(same(execute(program, inputs, &far), dense));
  EXPECT_EQ(far.report().dense_steps, 5);
  EXPECT_NE(far.explain().find("tiles of 4000 words: nothing to gain"), std::string::npos)
      << far.explain();
}

TEST(FarHeadsRefusals, SayWhatIsMissing) {
  const std::string plain = kPlain, loss = kLoss, grad = kGrad;
  const Context context = context_of();
  const auto refused = [&](const std::string& text, const std::string& why,
                           const CompileOptions& options = {}) {
    SCOPED_TRACE(why);
    const CompiledProgram program = compile(Graph::parse(text), options);
    FarFieldHead far(context, quick(Accuracy::far_backward));
    const std::vector<const void*> parameters(program.parameters().size(), &far);
    const std::vector<void*> results(program.results().size(), &far);
    for (const bool run : {false, true}) {
      try {
        if (run) {
          alignas(64) static std::byte arena[64];
          program.run(parameters, results, arena, far);
        } else {
          program.far_plan(far);
        }
        ADD_FAILURE() << "accepted";
      } catch (const Unsupported& e) {
        EXPECT_NE(std::string(e.what()).find("the program" + why), std::string::npos) << e.what();
      }
    }
    EXPECT_EQ(far.report().steps, 0);
  };
  const std::string none = " has no head operation";
  CompileOptions loops;
  loops.head_engine = false;
  refused(f32(plain + loss + grad), none, loops);
  CompileOptions written;
  written.chunk = false;
  refused(f32(plain + loss + grad), none, written);
  refused("graph g(%x: f32[4, 8]) { return x: %x }", none);
  refused(f32(plain + loss), "'s head has no gradients");
  refused(f32(plain + loss + " differentiate s wrt %w"),
          "'s head has no gradient of its hidden states");
  // The gradient of lse depends on lse.
  refused(f32(plain +
              " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %q = mul %l, "
              "%l %e = add %d, %q %s = reduce_sum %e dims(0) return s: %s" +
              grad),
          " has 2 head operations: one for losses and one for gradients");
  refused(f32(plain + " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %y = "
                      "dot %x, %v contract(1; 1) %k = reduce_lse %y dims(1) %n = pick %y, %t "
                      "axis(1) %e = sub %k, %n %f = add %d, %e %s = reduce_sum %f dims(0) return "
                      "s: %s differentiate s wrt %x, %w, %v",
              ", %v: f32[65536, 8]"),
          " has 2 heads with gradients, expected one");
}

TEST(FarHeadsRefusals, ABudgetBelowEveryPlan) {
  const CompiledProgram program = compiled(f32(std::string(kPlain) + kLoss + kGrad));
  const Context context = context_of();
  FarFieldOptions o = quick(Accuracy::far_backward);
  o.memory_budget = 1;
  FarFieldHead far(context, o);
  EXPECT_THROW(program.far_plan(far), InvalidArgument);
}

}  // namespace
}  // namespace logitless::test
