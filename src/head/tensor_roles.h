// The tensors of each call by name, listed once. Conversions from C and from XLA's buffers and the
// search for overlaps go through these lists, so that a new tensor is one line here.
//
// A visitor gets a tensor's name and its field in each of the given structs. These are the structs
// of C++, or of the C ABI, whose fields have the same names.
#pragma once

#include "logitless/cross_entropy.h"

namespace logitless {

template <typename Visit, typename... Structs>
void each_loss_input(const Visit& visit, Structs&... s) {
  visit("hidden", s.hidden...);
  visit("weight", s.weight...);
  visit("targets", s.targets...);
  visit("bias", s.bias...);
  each_loss_weight([&](const char* name, WeightAxis, auto&... field) { visit(name, field...); },
                   s...);
  visit("grad_losses", s.grad_losses...);
}

template <typename Visit, typename... Structs>
void each_loss_output(const Visit& visit, Structs&... s) {
  visit("loss", s.loss...);
  visit("d_hidden", s.d_hidden...);
  visit("d_weight", s.d_weight...);
  visit("d_bias", s.d_bias...);
  visit("lse", s.lse...);
  visit("target_logit", s.target_logit...);
  visit("log_prob", s.log_prob...);
  visit("entropy", s.entropy...);
  visit("argmax", s.argmax...);
  visit("d_hidden_bound", s.d_hidden_bound...);
}

template <typename Visit, typename... Structs>
void each_head_input(const Visit& visit, Structs&... s) {
  visit("hidden", s.hidden...);
  visit("weight", s.weight...);
  visit("targets", s.targets...);
  visit("bias", s.bias...);
  visit("vocab_weight", s.vocab_weight...);
}

template <typename Visit, typename... Structs>
void each_head_cotangent(const Visit& visit, Structs&... s) {
  visit("lse", s.lse...);
  visit("target_logit", s.target_logit...);
  visit("log_prob", s.log_prob...);
  visit("entropy", s.entropy...);
  visit("weighted_logit_sum", s.weighted_logit_sum...);
}

template <typename Visit, typename... Structs>
void each_head_output(const Visit& visit, Structs&... s) {
  each_head_cotangent(visit, s...);
  visit("argmax", s.argmax...);
}

template <typename Visit, typename... Structs>
void each_head_gradient(const Visit& visit, Structs&... s) {
  visit("d_hidden", s.d_hidden...);
  visit("d_weight", s.d_weight...);
  visit("d_bias", s.d_bias...);
}

}  // namespace logitless
