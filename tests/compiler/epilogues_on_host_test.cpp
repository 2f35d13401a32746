// Generated epilogues on the CPU: the host's compiler compiles their text for mma.sync and for
// Hopper, with stand-ins for the engines' instructions. Their programs run, and must agree with the
// interpreter.
#include <gtest/gtest.h>
#include <logitless/compiler.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "compiler/compiled.h"
#include "compiler/epilogue_cases.h"
#include "compiler/exec/cpu/run.h"
#include "compiler/graph_access.h"
#include "compiler/host_kernels.h"
#include "compiler/host_wgmma.h"
#include "core/check.h"
#include "core/element.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

// A case planned for a compute capability.
struct Planned {
  EpilogueCase c;
  DType dtype;
  CompiledProgram compiled;

  Planned(const EpilogueCase& of, DType of_dtype, int capability)
      : c(of), dtype(of_dtype), compiled(plan(c.text, capability)) {}
  const ir::Program& program() const { return CompilerAccess::state(compiled).program; }
  std::vector<ir::GeneratedKernel> kernels(const ir::RowGroup& group) const {
    return ir::generate(group, ir::buffer_alignments(program()));
  }

 private:
  static CompiledProgram plan(const std::string& text, int capability) {
    DeviceLimits device;
    device.compute_capability = capability;
    return compile(Graph::parse(text), every_epilogue(device));
  }
};

constexpr std::size_t kFence = 256;  // bytes behind memory

// Memory of a run, filled with NaN.
class Blocks {
 public:
  // begin: bytes behind a multiple of 256 at which it begins.
  std::byte* add(std::size_t bytes, std::size_t begin) {
    const std::size_t all = (begin + bytes + 255) / 256 * 256 + kFence;
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(256, all)), &std::free);
    std::memset(memory_.back().get(), 0xff, all);
    return memory_.back().get() + begin;
  }

 private:
  std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> memory_;
};

// Arguments of a kernel: the values, and the address of each.
class Arguments {
 public:
  Arguments(const ir::GeneratedKernel& kernel, const ir::RowGroup& group, const ir::Frame& frame) {
    const std::size_t count = kernel.arguments.size();
    values_.reserve(count);
    matrices_.reserve(count);
    for (const ir::KernelArgument& a : kernel.arguments) {
      const bool scratch = a.kind == ir::KernelArgument::Kind::scratch;
      values_.push_back(frame.address(scratch ? group.scratch : a.buffer) + a.offset);
      if (a.kind == ir::KernelArgument::Kind::matrix) {
        const cuda::MatrixShape& m = kernel.matrices[static_cast<std::size_t>(a.matrix)];
        matrices_.push_back({values_.back(), m.rows, m.columns, m.row_stride});
        list_.push_back(&matrices_.back());
      } else {
        check(scratch || a.kind == ir::KernelArgument::Kind::address, "an argument of a loop");
        list_.push_back(&values_.back());
      }
    }
  }
  std::span<void* const> list() const { return list_; }

 private:
  std::vector<void*> values_, list_;
  std::vector<HostMatrix> matrices_;
};

ir::Tensors run(const Planned& p, const ir::Tensors& inputs, const HostKernels& host) {
  constexpr std::size_t kExternal = 16;  // the alignment that parameters and results promise
  Blocks blocks;
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const CompiledProgram::Tensor& t : p.compiled.parameters()) {
    const ir::Tensor& from = inputs.at(t.name);
    std::byte* const to = blocks.add(static_cast<std::size_t>(t.bytes()), kExternal);
    for (std::size_t i = 0; i < from.data.size(); ++i)
      store_element(to, t.dtype, static_cast<std::int64_t>(i), from.data[i]);
    parameters.push_back(to);
  }
  for (const CompiledProgram::Tensor& t : p.compiled.results())
    results.push_back(blocks.add(static_cast<std::size_t>(t.bytes()), kExternal));
  std::byte* const arena = blocks.add(p.compiled.arena_bytes(), 0);
  ir::Program one = p.program();  // an instruction at a time
  for (const ir::Instruction& i : p.program().instructions) {
    const auto* const group = std::get_if<ir::RowGroup>(&i.what);
    one.instructions = {i};
    const ir::Frame frame{one, arena, parameters, results};
    if (group == nullptr) {
      ir::run_program(frame, 1, {}, nullptr);
      continue;
    }
    for (const ir::GeneratedKernel& kernel : p.kernels(*group))
      host.run(kernel, Arguments(kernel, *group, frame).list());
  }
  ir::Tensors out;
  const auto fence = [](const std::byte* at, std::size_t bytes) {
    return std::all_of(at + bytes, at + bytes + kFence,
                       [](std::byte b) { return b == std::byte{0xff}; });
  };
  EXPECT_TRUE(fence(arena, p.compiled.arena_bytes())) << "written behind the arena";
  for (std::size_t r = 0; r < results.size(); ++r) {
    const CompiledProgram::Tensor& t = p.compiled.results()[r];
    const auto* const from = static_cast<const std::byte*>(results[r]);
    const auto bytes = static_cast<std::size_t>(t.bytes());
    EXPECT_TRUE(fence(from, bytes)) << "written behind " << t.name;
    ir::Tensor x;
    x.shape = t.shape;
    for (std::size_t i = 0; i < bytes / size_of(t.dtype); ++i)
      x.data.push_back(load_element(from, t.dtype, static_cast<std::int64_t>(i)));
    out[t.name] = std::move(x);
  }
  return out;
}

// Runs every case, those of bf16 and those of f16 by turns.
void check_on_host(int capability, int parity) {
  if (!has_host_compiler()) GTEST_SKIP() << "no C++ compiler here";
  const std::vector<EpilogueCase> cases[] = {epilogue_cases(DType::bf16),
                                             epilogue_cases(DType::f16)};
  std::vector<Planned> list;
  for (std::size_t i = 0; i < cases[0].size(); ++i) {
    const bool f16 = (static_cast<int>(i) + parity) % 2 == 1;
    list.emplace_back(cases[f16 ? 1 : 0][i], f16 ? DType::f16 : DType::bf16, capability);
  }
  std::vector<ir::GeneratedKernel> kernels;
  for (const Planned& p : list) {
    for (const ir::Instruction& i : p.program().instructions) {
      const auto* const group = std::get_if<ir::RowGroup>(&i.what);
      if (group == nullptr) continue;
      for (ir::GeneratedKernel& k : p.kernels(*group)) kernels.push_back(std::move(k));
    }
  }
  const HostKernels host(kernels);
  for (const Planned& p : list) {
    SCOPED_TRACE(concat(p.c.name, " ", name_of(p.dtype)));
    const ir::Graph bound =
        ir::bind(GraphAccess::of(Graph::parse(p.c.text)), every_epilogue({}).sizes);
    const ir::Tensors inputs = exact_inputs(bound, 1);
    expect_near(p.c, bound, run(p, inputs, host), ir::interpret(bound, inputs));
  }
}

TEST(Codegen, EpiloguesOfAllOperandsOnTheHost) { check_on_host(80, 0); }
TEST(Codegen, HoppersEpiloguesOfAllOperandsOnTheHost) {
  // Generated code has no instrumentation, and the library has run in the other test.
  if (kAddressSanitizer) GTEST_SKIP() << "the same calls of the library";
  check_on_host(90, 1);
}

}  // namespace
}  // namespace logitless::test
