// A run of a compiled program allocates nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "compiler/programs.h"
#include "logitless/compiler.h"

// Counts calls of operator new while `counting`. Not inlined: the compiler would see a new that is
// freed by free().
static std::atomic<bool> counting{false};
static std::atomic<int> allocations{0};

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (counting) ++allocations;
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (counting) ++allocations;
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace logitless::test {
namespace {

TEST(Run, AllocatesNothing) {
  for (const NamedProgram& p : programs()) {
    SCOPED_TRACE(p.name);
    CompileOptions options;
    options.sizes = p.sizes;
    options.memory_budget = 1;
    options.threads = 1;  // a machine-sized thread pool may allocate
    const CompiledProgram program = compile(p.make(DType::bf16), options);
    std::vector<std::vector<std::byte>> memory;
    std::vector<const void*> parameters;
    std::vector<void*> results;
    for (const CompiledProgram::Tensor& t : program.parameters()) {
      memory.emplace_back(static_cast<std::size_t>(t.bytes()));
      parameters.push_back(memory.back().data());
    }
    for (const CompiledProgram::Tensor& t : program.results()) {
      memory.emplace_back(static_cast<std::size_t>(t.bytes()));
      results.push_back(memory.back().data());
    }
    void* arena = std::aligned_alloc(64, (program.arena_bytes() + 63) / 64 * 64);
    program.run(parameters, results, arena);  // grows the scratch of this thread
    allocations = 0;
    counting = true;
    program.run(parameters, results, arena);
    counting = false;
    std::free(arena);
    EXPECT_EQ(allocations, 0);
  }
}

}  // namespace
}  // namespace logitless::test
