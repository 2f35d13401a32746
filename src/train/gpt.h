// GPT-2 (Radford et al. 2019) as programs for the compiler, and the list of its parameters.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/dtype.h"
#include "logitless/graph.h"

namespace logitless::train {

struct GptConfig {
  std::int64_t vocab = 50257;
  std::int64_t context = 1024;  // positions there are
  std::int64_t dim = 768;
  std::int64_t heads = 12;
  std::int64_t layers = 12;
  bool tied_head = true;  // logits are products with wte.weight, else with lm_head.weight
  // f32, or bf16: products and the residual stream in bf16; weights, the statistics of layer norms,
  // softmax and loss in f32 all the same.
  DType activations = DType::f32;

  bool operator==(const GptConfig&) const = default;
};

// "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl".
std::vector<std::string> gpt_preset_names();
// Throws InvalidArgument naming the presets.
GptConfig gpt_preset(std::string_view name);
// Throws InvalidArgument naming the field, what was expected and what came.
void check_config(const GptConfig& config);

struct GptParameter {
  std::string name;  // as Hugging Face's safetensors call it: "h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;
  double constant = 0.0;   // what it starts from ...
  double deviation = 0.0;  // ... plus normal numbers of this deviation
  std::int64_t numel() const;
  bool is_matrix() const { return shape.size() == 2; }
};

// In the order of all programs below and of checkpoints. Weights of layers are [in, out], the
// tables and lm_head.weight [rows, dim]. Throws what check_config does.
std::vector<GptParameter> gpt_parameters(const GptConfig& config);

// Starting values of the parameter at `index` of the list. Depends on seed, index and size alone.
void initialise(const GptParameter& parameter, std::size_t index, std::uint64_t seed,
                std::span<float> values);

inline constexpr std::int64_t kIgnoredTarget = -100;

// All programs take the parameters, f32, under their names, and
//   tokens   i64 [batch, length]   in [0, vocab)
// Sizes may be symbols. They throw InvalidArgument on a bad config, and on a length over context.

// One step of training.
//   targets  i64 [batch, length]   in [0, vocab), or kIgnoredTarget
//   inverse_count  f32 []          1 / targets of the whole batch that are not ignored
// Results: loss f32 [], the sum over targets of their losses times inverse_count, and for each
// parameter its gradient d_NAME, f32.
Graph build_gpt(const GptConfig& config, const Dim& batch, const Dim& length);

// Validation: tokens and targets as above. Results: loss f32 [], the sum, and count f32 [], of
// targets that are not ignored.
Graph build_gpt_loss(const GptConfig& config, const Dim& batch, const Dim& length);

// Sampling.
//   last  i64 [batch]   position of the last token of each row; those after it do not matter
// Result: logits f32 [batch, vocab] of the word after it.
Graph build_gpt_logits(const GptConfig& config, const Dim& batch, const Dim& length);

}  // namespace logitless::train
