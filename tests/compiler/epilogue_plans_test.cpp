// The table of readers of a product: those that its epilogue takes, and those that it leaves.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include "compiler/compiled.h"
#include "compiler/epilogue_cases.h"
#include "core/check.h"

namespace logitless::test {
namespace {

CompiledProgram planned(const std::string& text, int capability) {
  DeviceLimits device;
  device.compute_capability = capability;
  return compile(Graph::parse(text), every_epilogue(device));
}

TEST(EpiloguePlans, TakeAllCases) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const EpilogueCase& c : epilogue_cases(dtype)) {
      for (const int capability : {80, 90}) {
        SCOPED_TRACE(concat(c.name, " ", name_of(dtype), " ", capability));
        const CompiledProgram compiled = planned(c.text, capability);
        const ir::Program& program = CompilerAccess::state(compiled).program;
        const auto groups = groups_of_products(program);
        ASSERT_EQ(groups.size(), 1u) << c.text << compiled.explain();
        EXPECT_EQ(pair_of(*groups[0]), c.pair);
      }
    }
  }
}

TEST(EpiloguePlans, LeaveWhatTheyDoNotTake) {
  for (const EpilogueRefusal& r : epilogue_refusals()) {
    for (const int capability : {80, 90}) {
      SCOPED_TRACE(concat(r.name, " ", capability));
      for (const std::string* text : {&r.refused, &r.taken}) {
        const CompiledProgram compiled = planned(*text, capability);
        const ir::Program& program = CompilerAccess::state(compiled).program;
        EXPECT_EQ(generated_epilogues(program), text == &r.taken ? 1 : 0)
            << *text << compiled.explain();
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
