// Runs programs without loops, with a number of threads.
#pragma once

#include "compiler/run.h"

namespace logitless::test {

inline ir::Tensors run_whole(const Graph& graph, const ir::Tensors& inputs, int threads) {
  CompileOptions options;
  options.threads = threads;
  options.chunk = false;
  return execute(compile(graph, options), inputs);
}

}  // namespace logitless::test
