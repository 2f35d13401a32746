// What the reports tell of a compiled program, before it is text, JSON or a page.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "compiler/compiled.h"

namespace logitless::report {

std::string bytes_text(std::int64_t bytes);
std::string fixed(double value, int digits);
std::string seconds_text(double seconds);  // "12.34 ms"

// A program and the graph that its buffers and instructions name nodes of.
struct Stage {
  const ir::Program& program;
  const ir::Graph& graph;
};
Stage before_loops(const CompiledProgram::State& state);
Stage as_run(const CompiledProgram::State& state);

struct Live {
  std::string name;       // "layer3.mlp.gelu", or what it is scratch of
  std::string operation;  // "tanh bf16[4096, 3072]"; empty: scratch
  std::string location;   // "loss.py:12", or empty
  std::string text;       // all of them
  std::int64_t bytes = 0;
};
// The most that lives at once, and what it is, biggest first.
struct Peak {
  int instruction = -1;  // -1: the program has none
  std::int64_t bytes = 0;
  std::vector<Live> live;
};
Peak peak_of(const Stage& stage);

// Name, operation and location of an instruction: "layer3.mlp.c_fc (dot) bf16[4096, 3072],
// gpt.py:9".
std::string text_of_instruction(const Stage& stage, std::size_t instruction);

// "with loops", "with the head engine", "with loops and the head engine", or empty: what the
// program has that the one without loops has not.
std::string what_was_done(const CompiledProgram::State& state);

// What it was compiled for.
std::string machine(const CompiledProgram::State& state);

// (name, what it does before it stores) of products that do something; loops' bodies once.
std::vector<std::pair<std::string, std::string>> epilogues(const ir::Program& program);

// What the instructions of one layer do: of values that are called alike up to the first dot, their
// gradients, "d_...", apart. In the order they first run in.
struct Work {
  std::string layer;                     // "layer3"; empty: values without a name
  double forward = 0.0, backward = 0.0;  // multiply-adds
  double bytes = 0.0;                    // read and written
};
std::vector<Work> work_by_layer(const ir::Program& program);

}  // namespace logitless::report
