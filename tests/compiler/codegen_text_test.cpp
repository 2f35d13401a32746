// The text of generated kernels, and the decisions in it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/compiled.h"
#include "compiler/exec/cuda/codegen.h"
#include "compiler/ir/text.h"
#include "compiler/loops.h"
#include "compiler/plan/group_rows.h"
#include "compiler/plan/lower.h"
#include "compiler/row_groups.h"
#include "compiler/target/cpu.h"
#include "core/check.h"

namespace logitless::test {
namespace {

std::vector<LoopCase> loops_of(const std::string& text) {
  return cases_of("g", ir::lower(ir::parse(text).graph, ir::CpuTarget(1)));
}
std::vector<ir::GeneratedKernel> kernels_of(const std::string& text) {
  std::vector<ir::GeneratedKernel> kernels;
  for (const LoopCase& c : loops_of(text)) {
    for (ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
      kernels.push_back(std::move(kernel));
  }
  return kernels;
}
std::string text_of(const std::string& graph) {
  std::string out;
  for (const ir::GeneratedKernel& kernel : kernels_of(graph)) out += kernel.source;
  return out;
}

TEST(CodegenText, OfAMap) {
  EXPECT_EQ(text_of(R"(graph g(%x: bf16[6, 16], %b: f32[16]) {
  %a = cast %x : f32[6, 16]
  %c = broadcast %b dims(1) : f32[6, 16]
  %d = mul %a, %c
  %h = constant value(0.5) : f32[6, 16]
  %e = max %d, %h
  %o = cast %e : bf16[6, 16]
  return o: %o
})"),
            R"cuda(// each of [6, 16]
extern "C" __global__ void __launch_bounds__(256)
map_c8b9aa74c128d00f(const bf16* a0, const float* a1, bf16* to) {
  bf16 x0[8];
  float x1[8];
  const unsigned item = (unsigned)blockIdx.x * 256u + threadIdx.x;
  if (item >= 12u) return;
  const unsigned at = item * 8u;
  const unsigned i1 = at % 16u;
  const unsigned i0 = at / 16u;
  load(x0, a0 + (i0 * 16u + i1));
  load(x1, a1 + (i1));
  bf16 y[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float r0 = (float)number(x0[j]);
    const float r1 = (float)number(x1[j]);
    const float r3 = r0 * r1;
    const float r4 = maximum<float>(r3, 0.5f);
    y[j] = to_bf16((float)(r4));
  }
  store(to + (i0 * 16u + i1), y);
}
)cuda");
}

// The kernels' kinds.
std::string kinds_of(const std::string& graph) {
  std::string out;
  for (const ir::GeneratedKernel& kernel : kernels_of(graph))
    out += concat(out.empty() ? "" : " ", kernel.entry.substr(0, kernel.entry.find('_')));
  return out;
}

// A tile where the result and an operand too large for the caches are contiguous along different
// dimensions.
TEST(CodegenText, OfATurnedOperand) {
  const auto turned = [](const std::string& rows, const std::string& columns) {
    return "graph g(%x: f32[" + columns + ", " + rows + "], %y: f32[" + rows + ", " + columns +
           "]) { %t = transpose %x dims(1, 0) %o = mul %t, %y return o: %o }";
  };
  EXPECT_EQ(kinds_of(turned("300", "400")), "tile");
  EXPECT_EQ(kinds_of(turned("30", "40")), "map");
  EXPECT_EQ(kinds_of(turned("8", "40000")), "map");
  const std::string text = text_of(turned("300", "400"));
  for (const char* part :
       {"__shared__ float tile0[64][65];", "for (int j = 0; j < 4; ++j) tile0[q][p + j] = x[j];",
        "__syncthreads();", "for (int j = 0; j < 4; ++j) x0[j] = tile0[q + j][p];",
        "load(x1, a1 + (i0 * 400u + i1));", "store(to + (i0 * 400u + i1), y);"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

// Neighbouring threads read neighbouring elements, whatever the order of the dimensions.
TEST(CodegenText, OfReductionsInTheOrderOfMemory) {
  const auto reduced = [](const std::string& size, int dim) {
    return concat("graph g(%x: f32[", size, "]) { %t = transpose %x dims(1, 0) %o = reduce_sum %t ",
                  "dims(", dim, ") return o: %o }");
  };
  EXPECT_EQ(kinds_of(reduced("300, 400", 0)), "rows");
  EXPECT_EQ(kinds_of(reduced("600, 400", 1)), "columns merge");
  EXPECT_EQ(kinds_of(reduced("30, 40", 1)), "rows");
}

// A thread for each column of a few rows.
TEST(CodegenText, OfColumnsOfFewRows) {
  const std::string text =
      text_of("graph g(%x: f32[2, 5000]) { %o = reduce_sum %x dims(0) return o: %o }");
  EXPECT_NE(text.find("const int x = threadIdx.x % 256, y = threadIdx.x / 256;"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("__shared__"), std::string::npos) << text;
}

TEST(CodegenText, OfRows) {
  EXPECT_EQ(text_of(R"(graph g(%x: f32[5, 100]) { %o = reduce_lse %x dims(1) return o: %o })"),
            R"cuda(// 5 rows of 100
extern "C" __global__ void __launch_bounds__(256)
rows_d2fb9e349bb05d89(const float* a0, float* to) {
  const int lane = threadIdx.x % 32;
  const unsigned own = (unsigned)blockIdx.x * 8u + threadIdx.x / 32;
  const unsigned row = own < 5u ? own : 4u;
  const unsigned i0 = row;
  LogSum<float> state;
  state.clear();
#pragma unroll 4
  for (unsigned c = lane * 4u; c < 100u; c += 128u) {
    const unsigned i1 = c;
    float x0[4];
    load(x0, a0 + (i0 * 100u + i1));
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float r0 = (float)number(x0[j]);
      v[j] = r0;
    }
    state.add(v);
  }
  across_lanes(state, 32);
  if (lane == 0 && own == row) {
    to[i0] = (float)(state.value());
  }
}
)cuda");
}

TEST(CodegenText, OfColumnsInParts) {
  EXPECT_EQ(text_of(R"(graph g(%x: f32[1000, 24]) { %o = reduce_max %x dims(0) return o: %o })"),
            R"cuda(// 24 columns of 1000
extern "C" __global__ void __launch_bounds__(256)
columns_fc22ade3f8ec47bc(const float* a0, float* to) {
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;
  const unsigned part = blockIdx.x / 1u;
  const unsigned own = (blockIdx.x % 1u * 8u + x) * 4u;
  const unsigned column = own < 24u ? own : 0;
  const unsigned i1 = column;
  Max<float> state[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) state[j].clear();
#pragma unroll 4
  for (unsigned row = y; row < 1000u; row += 32u) {
    const unsigned i0 = row;
    float x0[4];
    load(x0, a0 + (i0 * 24u + i1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float r0 = (float)number(x0[j]);
      const float v[1] = {r0};
      state[j].add(v);
    }
  }
  __shared__ Max<float> shared[32][32];
#pragma unroll
  for (int j = 0; j < 4; ++j) shared[y][x * 4 + j] = state[j];
  for (int half = 16; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state[j].merge(shared[y + half][x * 4 + j]);
        shared[y][x * 4 + j] = state[j];
      }
    }
  }
  if (y == 0 && own == column) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[i1 + j * 1u] = (float)(state[j].value());
    }
  }
}
)cuda");
}

// Layers of equal shapes share a kernel, whatever their buffers.
TEST(CodegenText, IsSharedByEqualLoops) {
  const auto kernels = kernels_of(
      "graph g(%x: f32[4, 100], %y: f32[4, 100], %z: f32[4, 104]) {\n"
      "  %a = exp %x\n  %b = exp %y\n  %c = exp %z\n  return a: %a, b: %b, c: %c\n}");
  ASSERT_EQ(kernels.size(), 3u);
  EXPECT_EQ(kernels[0].entry, kernels[1].entry);
  EXPECT_EQ(kernels[0].source, kernels[1].source);
  EXPECT_NE(kernels[0].entry, kernels[2].entry);
  const std::string module = ir::module_source(kernels);
  const std::size_t first = module.find(kernels[0].source);
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(module.find(kernels[0].source, first + 1), std::string::npos);
  EXPECT_EQ(module.find("#include"), std::string::npos);
}

// Accesses are 16 bytes wide if the addresses are known to be aligned.
TEST(CodegenText, FollowsAlignment) {
  LoopCase c = loops_of("graph g(%x: f32[4, 100]) { %a = exp %x return a: %a }").at(0);
  EXPECT_NE(ir::generate(c.loop, c.alignments)[0].source.find("float x0[4];"), std::string::npos);
  c.alignments = {8, 16};
  EXPECT_NE(ir::generate(c.loop, c.alignments)[0].source.find("float x0[2];"), std::string::npos);
  c.alignments = {16, 4};
  EXPECT_NE(ir::generate(c.loop, c.alignments)[0].source.find("float x0;"), std::string::npos);
}

// Rows of odd length use vectors if the gaps behind them are long enough to be read.
TEST(CodegenText, ReadsGapsBehindRowsAndLeavesThem) {
  LoopCase c = loops_of(
                   "graph g(%x: f32[4, 37], %s: f32[37]) { %b = broadcast %s dims(1) : f32[4, 37] "
                   "%t = mul %x, %b %a = exp %t return a: %a }")
                   .at(0);
  const auto text = [&] { return ir::generate(c.loop, c.alignments)[0].source; };
  const auto has_tail = [&] { return text().find("<= 37u)") != std::string::npos; };
  const auto set_rows = [&](std::int64_t step) {
    for (ir::Pointwise::Leaf& leaf : c.loop.leaves) {
      if (leaf.kind == ir::Pointwise::Leaf::Kind::memory && leaf.view.strides[0] != 0)
        leaf.view.strides[0] = step;
    }
    c.loop.store.view.strides[0] = step;
  };
  set_rows(40);
  EXPECT_FALSE(has_tail()) << "what every row reads ends where its memory ends\n" << text();
  for (ir::Pointwise::Leaf& leaf : c.loop.leaves) {
    if (leaf.kind == ir::Pointwise::Leaf::Kind::memory && leaf.view.strides[0] == 0)
      leaf.view.strides = {1, 0};
  }
  EXPECT_TRUE(has_tail()) << text();
  set_rows(38);
  EXPECT_FALSE(has_tail()) << text();
}

TEST(CodegenText, CountsIn64BitsOnlyWhereItMust) {
  const std::string narrow =
      text_of("graph g(%x: i8[32767, 65536]) { %a = logical_not %x return a: %a }");
  EXPECT_EQ(narrow.find("long long"), std::string::npos) << narrow;
  const std::string wide =
      text_of("graph g(%x: i8[32768, 65536]) { %a = logical_not %x return a: %a }");
  EXPECT_NE(wide.find("const long long at = "), std::string::npos) << wide;
  EXPECT_NE(wide.find("(long long)blockIdx.x * "), std::string::npos) << wide;
}

// Labels that f32 does not tell apart are integers in registers; floats beside them are floats.
TEST(CodegenText, OfIntegersBesideFloats) {
  EXPECT_EQ(text_of(R"(graph g(%x: i32[6], %y: i32[6], %f: f32[6]) {
  %c = constant value(3) : i32[6]
  %s = sub %x, %c
  %e = eq %s, %y
  %n = neg %f
  %o = select %e, %f, %n
  return o: %o
})"),
            R"cuda(// each of [6]
extern "C" __global__ void __launch_bounds__(256)
map_26b889129ab3ff3d(const int* a0, const int* a1, const float* a2, float* to) {
  int x0[2];
  int x2[2];
  float x3[2];
  const unsigned item = (unsigned)blockIdx.x * 256u + threadIdx.x;
  if (item >= 3u) return;
  const unsigned at = item * 2u;
  const unsigned i0 = at;
  load(x0, a0 + (i0));
  load(x2, a1 + (i0));
  load(x3, a2 + (i0));
  float y[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const long long r0 = (long long)number(x0[j]);
    const long long r2 = (long long)number(x2[j]);
    const float r3 = (float)number(x3[j]);
    const long long r4 = (int)wrapped_difference(r0, 3ll);
    const float r5 = (float)(r4 == r2);
    const float r6 = -(r3);
    const float r7 = r5 != 0.0f ? r3 : r6;
    y[j] = (float)(r7);
  }
  store(to + (i0), y);
}
)cuda");
}

// A sum of one element starts from 0, as all sums: that of -0 is 0.
TEST(CodegenText, OfASumOfOneElement) {
  const std::string text =
      text_of("graph g(%x: f32[9, 1]) { %n = neg %x %o = reduce_sum %n dims(1) return o: %o }");
  EXPECT_NE(text.find("= r2 + 0.0f;"), std::string::npos) << text;
}

// Sums of integers wrap, and so do what they are added to.
TEST(CodegenText, OfSumsOfIntegers) {
  for (const char* dtype : {"i32", "i64"}) {
    const std::string sizes = concat(dtype, "[5, 100]");
    const std::string text = text_of(concat("graph g(%x: ", sizes, ", %y: ", sizes,
                                            ") { %s = mul %x, %y %o = reduce_sum %s dims(1) "
                                            "%t = reduce_max %s dims(1) return o: %o, t: %t }"));
    EXPECT_NE(text.find("Sum<unsigned long long> state;"), std::string::npos) << text;
    EXPECT_NE(text.find("Max<long long> state;"), std::string::npos) << text;
    EXPECT_NE(text.find("wrapped_product(r0, r1)"), std::string::npos) << text;
    EXPECT_EQ(text.find("(int)wrapped_product") != std::string::npos, dtype == std::string("i32"));
    for (const char* real : {"float", "double"})
      EXPECT_EQ(text.find(real), std::string::npos) << text;
  }
}

// Rows that are split need two states; the shape decides where to split.
TEST(CodegenText, ScratchIsOfTheShape) {
  const auto bytes = [](const std::string& graph) {
    return ir::pointwise_scratch_bytes(loops_of(graph).at(0).loop);
  };
  EXPECT_EQ(bytes("graph g(%x: f32[8, 1024]) { %o = reduce_sum %x dims(1) return o: %o }"), 0);
  EXPECT_EQ(bytes("graph g(%x: f32[2048, 50000]) { %o = reduce_sum %x dims(1) return o: %o }"), 0);
  EXPECT_EQ(bytes("graph g(%x: f32[512, 16384]) { %o = reduce_sum %x dims(1) return o: %o }"),
            512 * 2 * 4);
  EXPECT_EQ(bytes("graph g(%x: f32[512, 16384]) { %o = reduce_lse %x dims(1) return o: %o }"),
            512 * 2 * 8);
  EXPECT_EQ(bytes("graph g(%x: f64[1, 131072]) { %o = reduce_max %x dims(1) return o: %o }"),
            32 * 8);
}

// A body's slices are aligned to their step per round, which may be less than the outer alignment.
TEST(CodegenText, AlignmentOfALoopsBuffers) {
  ir::Program body;
  for (int slot = 0; slot < 3; ++slot) {
    ir::Buffer buffer;
    buffer.place = ir::Place::external;
    buffer.slot = slot;
    body.buffers.push_back(buffer);
  }
  body.buffers.emplace_back();  // in the body's arena
  body.alignment = 256;
  ir::LoopRun loop;
  loop.chunk = 6;
  loop.slices = {{0, 0, 0}, {0, 512, 4}, {1, 32, 16}};
  loop.arena = 2;
  const std::int64_t outer[] = {256, 64, 128};
  EXPECT_EQ(ir::buffer_alignments(loop, body, outer), (std::vector<std::int64_t>{256, 8, 32, 128}));
}

// An offset of all logits cancels only beside the digits that f32 lacks.
TEST(CodegenText, LogSumExpsOfRowGroupsKeepTheDigitsOfF64) {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  const CompiledProgram compiled = compile(
      Graph::parse("graph g(%x: f32[70, 300], %b: f32[300], %y: f32[70]) {\n"
                   "  %c = broadcast %b dims(1) : f32[70, 300]\n  %z = add %x, %c\n"
                   "  %l = reduce_lse %z dims(1)\n  %d = sub %l, %y\n  return d: %d, z: %z\n}\n"),
      options);
  int groups = 0;
  for (const ir::Instruction& i : CompilerAccess::state(compiled).program.instructions) {
    const auto* group = std::get_if<ir::RowGroup>(&i.what);
    if (group == nullptr) continue;
    ++groups;
    const std::string source =
        ir::generate(*group, std::vector<std::int64_t>(8, 16)).front().source;
    EXPECT_NE(source.find("double q1;"), std::string::npos) << source;
    EXPECT_NE(source.find("q1 = state.wide_value();"), std::string::npos) << source;
  }
  EXPECT_EQ(groups, 1);
}

// Sums of a sum's neighbours that read nothing of it join its pass, wherever they stand.
TEST(CodegenText, JoinsSumsOfRowGroups) {
  CompileOptions options;
  options.device.kind = DeviceKind::cuda;
  options.device.compute_capability = 90;
  const auto compiled = compile(Graph::parse(R"(graph g(%x: f32[128, 512], %y: f32[128, 512]) {
  %a = reduce_sum %x dims(1)
  %b = broadcast %a dims(0) : f32[128, 512]
  %c = sub %x, %b
  %d = mul %c, %c
  %e = reduce_sum %d dims(1)
  %f = mul %y, %x
  %h = reduce_sum %f dims(1)
  %i = add %e, %h
  %j = broadcast %i dims(0) : f32[128, 512]
  %o = mul %c, %j
  return o: %o
})"),
                                options);
  const ir::Program& program = CompilerAccess::state(compiled).program;
  ASSERT_EQ(program.instructions.size(), 1u);
  const auto* group = std::get_if<ir::RowGroup>(&program.instructions[0].what);
  ASSERT_NE(group, nullptr);
  const ir::Pointwise &first = group->stages[0].loop, &second = group->stages[1].loop;
  EXPECT_EQ(ir::kind_of(first), ir::StageKind::row_sum);
  EXPECT_EQ(ir::kind_of(second), ir::StageKind::row_sum);
  for (const ir::Pointwise::Leaf& leaf : second.leaves)
    EXPECT_NE(leaf.view.buffer, first.store.view.buffer);
}

// Stages side by side are one pass, and what a stage has kept is read again.
TEST(CodegenText, ComputesAValueOfARowGroupOnce) {
  for (const char* dtype : {"bf16", "f16"}) {
    const GroupCase c = repeated_group(dtype);
    EXPECT_EQ(c.group.stages.size(), 4u);
    const std::string source = ir::generate(c.group, c.memory.alignments).front().source;
    const std::size_t first = source.find("erff(");
    EXPECT_NE(first, std::string::npos) << source;
    EXPECT_EQ(source.find("erff(", first + 1), std::string::npos) << source;
  }
}

}  // namespace
}  // namespace logitless::test
