// Heads of compiled programs under a FarFieldHead: dense steps are bit-equal, and far-field steps
// are within the error. Misses are repeated before gradients are used. Programs without such a head
// are refused.
#include <gtest/gtest.h>

#include "compiler/far_programs.h"
#include "compiler/graph_access.h"
#include "compiler/run.h"
#include "logitless/error.h"
#include "support/common_kernel.h"

namespace logitless::test {
namespace {

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

class FarHeads : public testing::TestWithParam<FarCase> {};

TEST_P(FarHeads, AreDenseThenWithinTheError) {
  const FarCase& c = GetParam();
  const CompiledProgram program = compiled(c.text);
  const ir::Tensors inputs = far_inputs(program);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick_far_field(c.accuracy));
  const LossPlan plan = program.far_plan(far);
  EXPECT_GT(plan.tau, 0.0f) << plan.explain();
  std::vector<ir::Tensors> steps;
  for (int step = 1; step <= 4; ++step) {
    SCOPED_TRACE(step);
    steps.push_back(execute(program, inputs, &far));
    const ir::Tensors& got = steps.back();
    EXPECT_EQ(far.report().steps, step);
    if (step < 3) {
      EXPECT_TRUE(same_bits(got, dense));
      continue;
    }
    ASSERT_TRUE(far.report().far) << far.explain();
    EXPECT_FALSE(same_bits(got, dense));
    for (const auto& [name, wanted] : dense) {
      const bool exact = name == "s" && c.accuracy == Accuracy::far_backward;
      EXPECT_LT(relative_2norm(got.at(name), wanted), exact ? 1e-6 : 0.05) << name;
    }
  }
  const FarFieldReport& r = far.report();
  EXPECT_EQ(r.dense_steps, 2);
  EXPECT_EQ(r.repeated_steps, 0);
  EXPECT_EQ(r.refreshes, 1);
  EXPECT_EQ(r.audits, 1) << "the trial's";
  EXPECT_GT(r.mean_selected, 0.0);
  EXPECT_LT(r.mean_selected, 0.67);
  EXPECT_GE(context.memory().peak_bytes(), plan.workspace_bytes());

  // Runs another program with other threads.
  const CompiledProgram more = compiled(c.text, 3);
  const Context context_of_more = context_of(2);
  FarFieldHead again(context_of_more, quick_far_field(c.accuracy));
  EXPECT_EQ(more.far_plan(again).chunk_tokens, plan.chunk_tokens);
  for (const ir::Tensors& step : steps) EXPECT_TRUE(same_bits(execute(more, inputs, &again), step));
}

INSTANTIATE_TEST_SUITE_P(All, FarHeads, testing::ValuesIn(far_cases()),
                         [](const auto& c) { return c.param.name; });

TEST(FarHeadsSteps, MissesAreDoneAgainDensely) {
  const CompiledProgram program =
      compiled(far_graph(std::string(kFarLogits) + kFarLoss + kFarGrad));
  const ir::Tensors inputs = far_inputs(program);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldOptions o = quick_far_field(Accuracy::far_backward);
  o.error = 1e-9;
  FarFieldHead far(context, o);
  for (int step = 1; step <= 6; ++step)
    EXPECT_TRUE(same_bits(execute(program, inputs, &far), dense));
  EXPECT_GE(far.report().repeated_steps, 1);
  EXPECT_EQ(far.report().dense_steps, 6);
}

// With equal logits all tiles of 32768 vocabulary entries are above tau, so all are selected and
// computed exactly.
TEST(FarHeadsSteps, AllTilesKeptAreTheDenseGradients) {
  const std::string text =
      far_graph(std::string(kFarLogits) + kFarLoss + kFarGrad, "", {.vocab_count = 32768});
  const CompiledProgram program = compiled(text);
  ir::Tensors inputs = random_inputs(GraphAccess::of(Graph::parse(text)), 3);
  for (double& x : inputs.at("x").data) x *= 1e-4;
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick_far_field(Accuracy::far_backward));
  for (int step = 1; step <= 3; ++step) {
    const ir::Tensors got = execute(program, inputs, &far);
    for (const auto& [name, wanted] : dense)
      EXPECT_LT(relative_2norm(got.at(name), wanted), 1e-5) << name;
  }
  EXPECT_EQ(far.report().mean_selected, 1.0);
  EXPECT_EQ(far.report().dense_steps, 2);
  EXPECT_FALSE(far.report().far) << "nothing was gained";
}

TEST(FarHeadsSteps, ASmallVocabularyIsDense) {
  const std::string text =
      far_graph(std::string(kFarLogits) + kFarLoss + kFarGrad, "", {.vocab_count = 4000});
  const CompiledProgram program = compiled(text);
  const ir::Tensors inputs = random_inputs(GraphAccess::of(Graph::parse(text)), 3);
  const ir::Tensors dense = execute(program, inputs);
  const Context context = context_of();
  FarFieldHead far(context, quick_far_field(Accuracy::far_backward));
  EXPECT_EQ(program.far_plan(far).tau, 0.0f);
  for (int step = 1; step <= 5; ++step)
    EXPECT_TRUE(same_bits(execute(program, inputs, &far), dense));
  EXPECT_EQ(far.report().dense_steps, 5);
  EXPECT_NE(far.explain().find("tiles of 4000 vocabulary entries: nothing to gain"),
            std::string::npos)
      << far.explain();
}

TEST(FarHeadsRefusals, SayWhatIsMissing) {
  const std::string plain = kFarLogits, loss = kFarLoss, grad = kFarGrad;
  const Context context = context_of();
  const auto refused = [&](const std::string& text, const std::string& why,
                           const CompileOptions& options = {}) {
    SCOPED_TRACE(why);
    const CompiledProgram program = compile(Graph::parse(text), options);
    FarFieldHead far(context, quick_far_field(Accuracy::far_backward));
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
  refused(far_graph(plain + loss + grad), none, loops);
  CompileOptions written;
  written.chunk = false;
  refused(far_graph(plain + loss + grad), none, written);
  refused("graph g(%x: f32[4, 8]) { return x: %x }", none);
  refused(far_graph(plain + loss), "'s head has no gradients");
  refused(far_graph(plain + loss + " differentiate s wrt %w"),
          "'s head has no gradient of its hidden states");
  // The gradient of lse depends on lse.
  refused(
      far_graph(plain +
                " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %q = mul %l, "
                "%l %e = add %d, %q %s = reduce_sum %e dims(0) return s: %s" +
                grad),
      " has 2 head operations: one for losses and one for gradients");
  refused(
      far_graph(plain + " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %y = "
                        "dot %x, %v contract(1; 1) %k = reduce_lse %y dims(1) %n = pick %y, %t "
                        "axis(1) %e = sub %k, %n %f = add %d, %e %s = reduce_sum %f dims(0) return "
                        "s: %s differentiate s wrt %x, %w, %v",
                ", %v: f32[VOCAB, DIM]"),
      " has 2 heads with gradients, expected one");
}

TEST(FarHeadsRefusals, AnOrderOfAnotherVocabulary) {
  const std::string body = std::string(kFarLogits) + kFarLoss + kFarGrad;
  const CompiledProgram program = compiled(far_graph(body));
  const CompiledProgram other = compiled(far_graph(body, "", {.vocab_count = 32768}));
  const Context context = context_of();
  FarFieldHead far(context, quick_far_field(Accuracy::far_backward));
  const ir::Tensors inputs = far_inputs(program);
  // An order is being computed.
  for (int step = 1; step <= 2; ++step) execute(program, inputs, &far);
  EXPECT_THROW(execute(other, far_inputs(other), &far), InvalidArgument);
  EXPECT_EQ(far.report().steps, 2);
}

TEST(FarHeadsRefusals, ABudgetBelowEveryPlan) {
  const CompiledProgram program =
      compiled(far_graph(std::string(kFarLogits) + kFarLoss + kFarGrad));
  const Context context = context_of();
  FarFieldOptions o = quick_far_field(Accuracy::far_backward);
  o.memory_budget = 1;
  FarFieldHead far(context, o);
  EXPECT_THROW(program.far_plan(far), InvalidArgument);
}

}  // namespace
}  // namespace logitless::test
