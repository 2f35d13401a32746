// The prepared instructions of a program on a GPU, and how they are enqueued.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "compiler/exec/backend.h"
#include "compiler/exec/cuda/codegen.h"
#include "compiler/exec/frame.h"
#include "kernels/device/gemm.h"
#include "kernels/device/module.h"
#include "logitless/far_field.h"

namespace logitless::ir {

// The kernels of a program and of its loops: one module in which equal kernels are stored once. The
// same holds for matrix products.
class KernelSet {
 public:
  // Adds kernels that the program needs, before load().
  void add(const std::vector<GeneratedKernel>& kernels);
  void load(int compute_capability);
  void* find(const std::string& entry) const;
  std::shared_ptr<const cuda::Product> product(const cuda::GemmShape& shape);

 private:
  std::map<std::string, GeneratedKernel> kernels_;  // by entry
  std::map<std::string, void*> loaded_;
  cuda::Module module_;
  std::vector<std::pair<cuda::GemmShape, std::shared_ptr<const cuda::Product>>> products_;
};

// A prepared program or body of a loop.
class Steps {
 public:
  // Generates kernels into `set`, which is loaded before bind(). alignments[b]: bytes that divide
  // the address of buffer b.
  Steps(const Program& program, const std::vector<std::int64_t>& alignments, KernelSet& set);
  void bind(KernelSet& set);
  // Enqueues on the stream of the context. `observer` is notified of each instruction and may be
  // null; `under` applies to the heads.
  void enqueue(const Frame& frame, const Context& context, Observer* observer = nullptr,
               const HeadUnder& under = {}) const;

 private:
  struct Launches {
    std::vector<GeneratedKernel> kernels;
    std::vector<void*> loaded;
  };
  struct GemmStep {
    cuda::GemmShape shape;
    std::shared_ptr<const cuda::Product> product;
  };
  struct LoopStep {
    std::unique_ptr<Steps> body, tail;  // tail: null when there is none
  };
  using Step = std::variant<std::monostate, Launches, GemmStep, LoopStep>;
  struct Enqueue;

  const Program& program_;
  std::vector<Step> steps_;  // by instruction
};

}  // namespace logitless::ir
