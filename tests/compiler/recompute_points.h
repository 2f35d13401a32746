// The choices of a RecomputeCurve, and their programs.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "compiler/compiled.h"
#include "compiler/passes/recompute_segments.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lower.h"
#include "compiler/run.h"
#include "compiler/target/cpu.h"
#include "logitless/graph.h"

namespace logitless::test {

// Returns the choices, from the one that stores most to the one that stores least.
inline std::vector<ir::RecomputeCurve::Point> points_of(const ir::RecomputeCurve& curve) {
  std::vector<ir::RecomputeCurve::Point> points = {curve.cheapest()};
  const auto between = [&](auto&& self, const ir::RecomputeCurve::Point& more,
                           const ir::RecomputeCurve::Point& less) -> void {
    const auto middle = curve.between(more, less);
    if (!middle) return;
    self(self, more, *middle);
    points.push_back(*middle);
    self(self, *middle, less);
  };
  const ir::RecomputeCurve::Point least = curve.smallest();
  between(between, points[0], least);
  if (least.again != points.back().again && least.cost > points.back().cost)
    points.push_back(least);
  return points;
}

// Returns a program of this graph without further passes.
inline CompiledProgram program_of(const CompiledProgram& like, const ir::Graph& graph) {
  auto state = std::make_shared<CompiledProgram::State>(CompilerAccess::state(like));
  state->graph = graph;
  state->program = ir::lower(graph, ir::CpuTarget(1));
  return CompilerAccess::make(std::move(state));
}

// Checks that every third choice, and the last one, gives bit-equal results. Returns their number.
inline int expect_same_bits(const CompiledProgram& program, const ir::Tensors& inputs) {
  const ir::Graph& graph = CompilerAccess::state(program).graph;
  const ir::Tensors expected = execute(program_of(program, graph), inputs);
  std::vector<bool> stored = ir::inlined_nodes(graph);
  stored.flip();
  const ir::RecomputeCurve curve(graph, 1.0, stored);
  const std::vector<ir::RecomputeCurve::Point> points = points_of(curve);
  int count = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (i % 3 != 0 && i + 1 != points.size()) continue;
    SCOPED_TRACE(i);
    ++count;
    const ir::Graph again = curve.graph_of(points[i]);
    EXPECT_NO_THROW(ir::verify(again));
    for (const auto& [name, tensor] : execute(program_of(program, again), inputs))
      EXPECT_EQ(tensor.data, expected.at(name).data) << name;
  }
  return count;
}

}  // namespace logitless::test
