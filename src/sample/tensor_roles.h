// The tensors of each call of sample.h by name, for visitors as in head/tensor_roles.h.
#pragma once

namespace logitless {

template <typename Visit, typename... Structs>
void each_sample_input(const Visit& visit, Structs&... s) {
  visit("hidden", s.hidden...);
  visit("weight", s.weight...);
  visit("bias", s.bias...);
  visit("logit_bias", s.logit_bias...);
  visit("temperature", s.temperature...);
  visit("top_p", s.top_p...);
  visit("min_p", s.min_p...);
  visit("counter", s.counter...);
  visit("key", s.key...);
}

template <typename Visit, typename... Structs>
void each_sample_output(const Visit& visit, Structs&... s) {
  visit("tokens", s.tokens...);
  visit("log_prob", s.log_prob...);
}

template <typename Visit, typename... Structs>
void each_top_input(const Visit& visit, Structs&... s) {
  visit("hidden", s.hidden...);
  visit("weight", s.weight...);
  visit("bias", s.bias...);
  visit("targets", s.targets...);
}

template <typename Visit, typename... Structs>
void each_top_output(const Visit& visit, Structs&... s) {
  visit("top_log_probs", s.top_log_probs...);
  visit("top_ids", s.top_ids...);
  visit("log_prob", s.log_prob...);
}

}  // namespace logitless
