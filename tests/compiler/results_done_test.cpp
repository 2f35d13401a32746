// A result that is reported as done is not written again, and is reported before the program ends.
#include "compiler/exec/results_done.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "compiler/compiled.h"
#include "compiler/programs.h"

namespace logitless::test {
namespace {

using Bytes = std::vector<std::byte>;

// A program's memory; parameters are small numbers of any dtype.
struct Memory {
  explicit Memory(const CompiledProgram& compiled)
      : program(CompilerAccess::state(compiled).program) {
    std::mt19937 random(7);
    for (const CompiledProgram::Tensor& t : compiled.parameters()) {
      inputs.emplace_back(static_cast<std::size_t>(t.bytes()));
      if (t.dtype != DType::f32) continue;  // the others are zeros
      for (std::size_t at = 0; at + 4 <= inputs.back().size(); at += 4) {
        const float number = static_cast<float>(random() % 64) / 64.0f - 0.5f;
        std::memcpy(inputs.back().data() + at, &number, 4);
      }
    }
    for (const CompiledProgram::Tensor& t : compiled.results())
      outputs.emplace_back(static_cast<std::size_t>(t.bytes()), std::byte{0xff});
    for (const Bytes& b : inputs) parameters.push_back(b.data());
    for (Bytes& b : outputs) results.push_back(b.data());
    arena.resize(compiled.arena_bytes() + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(arena.data());
    base = arena.data() + (64 - address % 64) % 64;
    CompilerAccess::state(compiled).backend->run(program, parameters, results, base, {}, nullptr);
    finals = outputs;
    for (Bytes& b : outputs) std::fill(b.begin(), b.end(), std::byte{0xff});
  }
  const ir::Program& program;
  std::vector<Bytes> inputs, outputs, finals;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  Bytes arena;
  std::byte* base = nullptr;
};

class ResultsDoneOf : public testing::TestWithParam<NamedProgram> {};

TEST_P(ResultsDoneOf, AreFinalOnceEach) {
  for (const bool chunk : {false, true}) {
    SCOPED_TRACE(chunk);
    CompileOptions options;
    options.chunk = chunk;
    options.sizes = GetParam().sizes;
    const CompiledProgram compiled = compile(GetParam().make(DType::f32), options);
    Memory run(compiled);
    std::vector<int> times(run.results.size(), 0);
    int early = 0;
    const std::function<void(std::size_t)> done = [&](std::size_t r) {
      ASSERT_LT(r, times.size());
      ++times[r];
      EXPECT_EQ(run.outputs[r], run.finals[r]) << "result " << r;
      for (std::size_t other = 0; other < times.size(); ++other)
        early += run.outputs[other] != run.finals[other] ? 1 : 0;
    };
    ir::ResultsDone observer(run.program, done);
    CompilerAccess::state(compiled).backend->run(run.program, run.parameters, run.results, run.base,
                                                 {}, &observer);
    observer.end();
    EXPECT_EQ(run.outputs, run.finals);
    for (const int t : times) EXPECT_EQ(t, 1);
    // Without loops some results are done before others.
    if (!chunk && times.size() > 1) {
      EXPECT_GT(early, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, ResultsDoneOf, testing::ValuesIn(programs()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace logitless::test
