// The same steps by the C++ interface, with which the C tests compare bits.
#include <cstdint>
#include <span>

#include "expected.h"
#include "logitless/far_field.h"

using namespace logitless;  // NOLINT: a test

struct CppFarHead {
  FarFieldHead head;
};

CppFarHead* cpp_far_head(const logitless_far_field_options* from) {
  ContextOptions one_thread;
  one_thread.threads = 1;
  FarFieldOptions options;
  options.accuracy = static_cast<Accuracy>(from->accuracy);
  options.error = from->error;
  options.audit_rows = from->audit_rows;
  options.audit_every = from->audit_every;
  options.refresh_every = from->refresh_every;
  options.refresh_delay = from->refresh_delay;
  options.sample_rows = from->sample_rows;
  return new CppFarHead{FarFieldHead(Context(one_thread), options)};
}

void cpp_far_head_destroy(CppFarHead* head) { delete head; }

double cpp_far_step(CppFarHead* head, FarProblem* p) {
  constexpr std::int64_t tokens = kFarTokens, dim = kFarDim, vocab = kFarVocab;
  CrossEntropyInputs in;
  in.hidden = ConstTensorView(p->hidden, DType::f32, {tokens, dim});
  in.weight = ConstTensorView(p->weight, DType::f32, {vocab, dim});
  in.targets = ConstTensorView(p->targets, DType::i64, {tokens});
  CrossEntropyOutputs out;
  out.loss = TensorView(&p->loss, DType::f32, std::span<const std::int64_t>());
  out.d_hidden = TensorView(p->d_hidden, DType::f32, {tokens, dim});
  out.d_weight = TensorView(p->d_weight, DType::f32, {vocab, dim});
  return head->head.step({}, in, out).far.passes;
}
