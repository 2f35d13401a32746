// Plans use the threads of their context, and are refused by one with another number.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::test {
namespace {

// A small call of the loss, and one of the primitive.
struct Calls {
  std::vector<float> hidden = std::vector<float>(6 * 4, 0.5f), weight = std::vector<float>(9 * 4);
  std::vector<float> d_hidden = std::vector<float>(6 * 4), lse = std::vector<float>(6, 1.0f);
  std::vector<std::int32_t> vocab_ids = {0, 8, 3, 3, 1, 5};
  float loss = 0.0f;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  HeadInputs head_in;
  HeadOutputs head_out;
  HeadCotangents cotangents;
  HeadGradients gradients;

  Calls() {
    in.hidden = head_in.hidden = {hidden.data(), DType::f32, {6, 4}};
    in.weight = head_in.weight = {weight.data(), DType::f32, {9, 4}};
    in.targets = head_in.targets = {vocab_ids.data(), DType::i32, {6}};
    out.loss = {&loss, DType::f32, {}};
    out.d_hidden = gradients.d_hidden = {d_hidden.data(), DType::f32, {6, 4}};
    head_out.lse = {lse.data(), DType::f32, {6}};
    cotangents.lse = head_out.lse;
  }
};

// OMP_NUM_THREADS is the default number of a Context's threads.
class PlanThreads : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* before = std::getenv("OMP_NUM_THREADS")) before_ = before;
    setenv("OMP_NUM_THREADS", "3", 1);
  }
  void TearDown() override {
    before_.empty() ? unsetenv("OMP_NUM_THREADS") : setenv("OMP_NUM_THREADS", before_.c_str(), 1);
  }

 private:
  std::string before_;
};

TEST_F(PlanThreads, AnEmptyRequestHasThoseOfAContext) {
  Calls c;
  const Context context;
  ASSERT_EQ(context.threads(), 3);
  for (const LossPlan& plan :
       {plan_cross_entropy({}, c.in, c.out), plan_cross_entropy({}, c.in, c.out, PlanRequest{}),
        plan_cross_entropy({}, c.in, c.out, {.memory_budget = 64_MiB}),
        plan_cross_entropy({}, c.in, c.out, {.device = {.kernel = "scalar"}}),
        plan_cross_entropy(context, {}, c.in, c.out)}) {
    EXPECT_EQ(plan.threads, 3);
    cross_entropy(context, plan, {}, c.in, c.out, Workspace(context, plan));
  }
  EXPECT_EQ(plan_head({6, 4, 9}, {}).threads, 3);
  EXPECT_EQ(plan_head_forward({}, c.head_in, c.head_out).threads, 3);
  EXPECT_EQ(plan_head_backward({}, c.head_in, c.cotangents, c.gradients).threads, 3);
}

TEST_F(PlanThreads, WithAContextItIsForThatOne) {
  Calls c;
  const Context context({.threads = 2, .kernel = "scalar"});
  for (const LossPlan& plan :
       {plan_cross_entropy(context, {}, c.in, c.out, {.memory_budget = 64_MiB}),
        plan_head(context, {6, 4, 9}, {}), plan_head_forward(context, {}, c.head_in, c.head_out),
        plan_head_backward(context, {}, c.head_in, c.cotangents, c.gradients),
        plan_head(context, {6, 4, 9}, {}, {.device = context.device()})}) {
    EXPECT_EQ(plan.threads, 2);
    EXPECT_EQ(plan.kernel, "scalar");
  }
  try {
    plan_head(context, {6, 4, 9}, {}, {.device = {.threads = 3}});
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_EQ(std::string(e.what()).rfind("device: set to another one than the context's", 0), 0u);
  }
}

TEST_F(PlanThreads, LogitlessCpuHolds) {
  if (std::getenv("LOGITLESS_CPU") != nullptr) GTEST_SKIP() << "LOGITLESS_CPU is set";
  setenv("LOGITLESS_CPU", "scalar", 1);
  const std::string kernel = plan_head({6, 4, 9}, {}).kernel;
  unsetenv("LOGITLESS_CPU");
  EXPECT_EQ(kernel, "scalar");
}

TEST_F(PlanThreads, APlanForOthersIsRefused) {
  Calls c;
  const auto message = [&](auto run) {
    try {
      run();
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const PlanRequest one{.device = {.threads = 1}}, three{.device = {.threads = 3}};
  const Context two({.threads = 2});
  const auto run = [&](const LossPlan& plan, const Context& context) {
    return message(
        [&] { cross_entropy(context, plan, {}, c.in, c.out, Workspace(context, plan)); });
  };
  c.loss = -1.0f;
  EXPECT_EQ(run(plan_cross_entropy({}, c.in, c.out, one), two),
            "plan: made for 1 thread, the context has 2; plan with this context, or give it as "
            "many");
  EXPECT_EQ(run(plan_cross_entropy({}, c.in, c.out, three), two),
            "plan: made for 3 threads, the context has 2; plan with this context, or give it as "
            "many");
  EXPECT_EQ(c.loss, -1.0f);
  const LossPlan forward = plan_head_forward({}, c.head_in, c.head_out, one);
  EXPECT_EQ(message([&] {
              head_forward(two, forward, {}, c.head_in, c.head_out, Workspace(two, forward));
            }).rfind("plan: made for 1 thread", 0),
            0u);
  const LossPlan backward = plan_head_backward({}, c.head_in, c.cotangents, c.gradients, one);
  EXPECT_EQ(message([&] {
              head_backward(two, backward, {}, c.head_in, c.cotangents, c.gradients,
                            Workspace(two, backward));
            }).rfind("plan: made for 1 thread", 0),
            0u);
  EXPECT_EQ(run(plan_cross_entropy({}, c.in, c.out, one), Context({.threads = 1})), "accepted");
}

}  // namespace
}  // namespace logitless::test
