// Programs of one head that may take the far field, for both machines.
#pragma once

#include <string>
#include <vector>

#include "compiler/ir/interpreter.h"
#include "logitless/compiler.h"
#include "logitless/far_field.h"

namespace logitless::test {

struct FarSizes {
  std::int64_t tokens = 128, words = 65536, dim = 8;
  const char* dtype = "f32";  // of %x and %w
};

// %x [tokens, dim], %w [words, dim], %t i64 [tokens]: parameters, and what `more` adds.
std::string far_graph(const std::string& body, const std::string& more = "", FarSizes sizes = {});
// %z of %x and %w; the sum %s of cross entropies of %z and %t; its gradients.
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

// Words in clusters, tokens of a few topics; some targets ignored or outside the vocabulary.
// spread: of the words of a cluster, beside their centers'; of the tokens of a topic twice that.
ir::Tensors far_inputs(const CompiledProgram& program, double spread = 0.1);

// An order begun at step 2, and tried at 3.
FarFieldOptions quick_far_field(Accuracy accuracy);

bool same_bits(const ir::Tensors& a, const ir::Tensors& b);
// In the 2-norm.
double relative_2norm(const ir::Tensor& x, const ir::Tensor& y);

}  // namespace logitless::test
