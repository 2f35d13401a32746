// Programs with one head for the far field, for CPU and GPU.
#pragma once

#include <string>
#include <vector>

#include "compiler/ir/interpreter.h"
#include "logitless/compiler.h"
#include "logitless/far_field.h"

namespace logitless::test {

struct FarSizes {
  std::int64_t tokens = 128, vocab_count = 65536, dim = 8;
  const char* dtype = "f32";  // of %x and %w
};

// Returns a program with %x [tokens, dim], %w [vocab, dim] and %t i64 [tokens]; `more` adds
// parameters.
std::string far_graph(const std::string& body, const std::string& more = "", FarSizes sizes = {});
// The logits %z of %x and %w; the sum %s of cross entropies of %z and %t; its gradients.
extern const char* const kFarLogits;
extern const char* const kFarLoss;
extern const char* const kFarGrad;

struct FarCase {
  std::string name;
  std::string text;
  Accuracy accuracy = Accuracy::far_backward;
};
void PrintTo(const FarCase& c, std::ostream* out);
std::vector<FarCase> far_cases(FarSizes sizes = {});

// Returns vocabulary entries in clusters and tokens of a few topics; some targets are ignored or
// outside the vocabulary. spread: of a cluster's entries relative to their centers; tokens of a
// topic have twice that.
ir::Tensors far_inputs(const CompiledProgram& program, double spread = 0.1);

// An order that is computed from step 2 on and tried at step 3.
FarFieldOptions quick_far_field(Accuracy accuracy);

bool same_bits(const ir::Tensors& a, const ir::Tensors& b);
// Returns the relative error in the 2-norm.
double relative_2norm(const ir::Tensor& x, const ir::Tensor& y);

}  // namespace logitless::test
