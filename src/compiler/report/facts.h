// Facts about a compiled program, as reports in text, JSON and HTML present them.
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

// A program and the graph whose nodes its buffers and instructions refer to.
struct Stage {
  const ir::Program& program;
  const ir::Graph& graph;
};
Stage before_loops(const CompiledProgram::State& state);
Stage as_run(const CompiledProgram::State& state);

struct Live {
  std::string name;       // "layer3.mlp.gelu", or the owner of scratch
  std::string operation;  // "tanh bf16[4096, 3072]"; empty: scratch
  std::string location;   // "loss.py:12", or empty
  std::string text;       // all of the above as one text
  std::int64_t bytes = 0;
};
// The peak of memory and the buffers live there, the biggest first.
struct Peak {
  int instruction = -1;  // -1: the program has no instructions
  std::int64_t bytes = 0;
  std::vector<Live> live;
};
Peak peak_of(const Stage& stage);

// A value that takes no memory of the arena: it is in a result's memory until that is made.
struct InResult {
  std::string name, result;
  std::int64_t bytes = 0;
};
// Returns those of a program, the biggest first.
std::vector<InResult> values_in_results(const ir::Program& program);

// Returns name, operation and location of an instruction: "layer3.mlp.c_fc (dot) bf16[4096, 3072],
// gpt.py:9".
std::string text_of_instruction(const Stage& stage, std::size_t instruction);

// Returns what distinguishes the program from the one without loops: "with loops", "with the head
// engine", "with loops and the head engine", or an empty text.
std::string what_was_done(const CompiledProgram::State& state);

// Returns the machine that the program was compiled for.
std::string machine(const CompiledProgram::State& state);

// A matrix product, or two that one kernel computes, with an epilogue.
struct ProductEpilogue {
  std::string product;   // names of the values: "logits", "gate and up", "student minus teacher"
  std::string size;      // m x n x k: "4096 x 32768 x 1024"
  std::string epilogue;  // "bias, residual", or "tanh, mul, exp; row sum to s; stores g"
};
// Returns those of a program, loops' bodies once.
std::vector<ProductEpilogue> epilogues(const ir::Program& program);

// The work of one layer's instructions, grouped by the name up to the first dot; gradients,
// "d_...", are counted apart. Layers are in the order of their first instruction.
struct Work {
  std::string layer;                     // "layer3"; empty: values without a name
  double forward = 0.0, backward = 0.0;  // multiply-adds
  double bytes = 0.0;                    // read and written
};
std::vector<Work> work_by_layer(const ir::Program& program);

}  // namespace logitless::report
