// A transformer block without its attention, with the gradients of training.
#pragma once

#include <logitless/graph.h>

#include <vector>

namespace logitless::test {

// Returns a linear layer, gelu and a residual with all gradients, as compiled for training.
inline Graph residual_block(std::int64_t rows, DType dtype) {
  Graph graph("block");
  const auto parameter = [&](const char* name, const Shape& shape) {
    return graph.parameter(name, dtype, shape);
  };
  const Value x = parameter("x", {rows, 64}), up = parameter("up", {64, 96}),
              shift = parameter("shift", {96}), down = parameter("down", {96, 64}),
              back = parameter("back", {64}), mix = parameter("mix", {64, 64}),
              weights = parameter("weights", {rows, 64});
  const Value mixed = x + (matmul(x, mix) + back);
  const Value inner = gelu(matmul(mixed, up) + shift);
  const Value out = mixed + (matmul(inner, down) + back);
  const Value loss = sum(sum(cast(out * weights, DType::f32), {1}), {0});
  graph.result("out", out);
  graph.result("loss", loss);
  const std::vector<Value> gradients = graph.gradients({loss}, {x, up, shift, down, back, mix});
  const char* names[] = {"d_x", "d_up", "d_shift", "d_down", "d_back", "d_mix"};
  for (std::size_t i = 0; i < 6; ++i) graph.result(names[i], gradients[i]);
  return graph;
}

}  // namespace logitless::test
