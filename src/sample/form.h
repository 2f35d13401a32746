// The properties of a sampling call that its programs depend on.
#pragma once

#include <array>
#include <cstdint>

#include "logitless/dtype.h"
#include "logitless/head_shape.h"

namespace logitless {

struct LogitsForm {
  HeadShape shape;
  DType hidden_dtype = DType::f32, weight_dtype = DType::f32;
  bool bias = false;
  DType bias_dtype = DType::f32;
  float softcap = 0.0f;
  float logit_scale = 1.0f;
};

// A number of the sampler: not used, one for all tokens, or one for each.
enum class Given : std::uint8_t { none, number, per_token };

struct SampleForm {
  LogitsForm logits;
  bool logit_bias = false;
  bool greedy = false;  // the temperature is 0 for every token
  // The head finds the largest entries: greedy without logit_bias.
  bool of_head() const { return greedy && !logit_bias; }
  Given temperature = Given::number;
  std::int64_t top_k = 0;  // 0: all
  Given top_p = Given::none;
  Given min_p = Given::none;
  bool counter = false;
  DType counter_dtype = DType::i64;
  DType token_dtype = DType::i64;
};

struct TopForm {
  LogitsForm logits;
  std::int64_t k = 1;
  bool target = false;
  DType target_dtype = DType::i64;
  DType id_dtype = DType::i64;
  std::int64_t wanted() const { return k + (target ? 1 : 0); }  // ids of a token
};

// Returns a key of two 32-bit words, so that near seeds have keys far apart (splitmix64; Steele et
// al. 2014).
inline std::array<std::int64_t, 2> noise_key(std::uint64_t seed) {
  std::uint64_t x = seed + 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return {static_cast<std::int64_t>(x & 0xFFFFFFFFu), static_cast<std::int64_t>(x >> 32)};
}

}  // namespace logitless
