// Inputs of a model's programs in tests: weights, their rounded copies, tokens.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "logitless/compiler.h"
#include "train/hash.h"
#include "train/model/model.h"

namespace logitless::train {

using Bytes = std::vector<std::byte>;

// Returns the bits of the nearest bf16, ties to even.
inline std::uint16_t nearest_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Returns the inputs in the order of the program's parameters.
inline std::vector<Bytes> step_inputs(const Model& model, const CompiledProgram& program) {
  std::map<std::string, std::vector<float>> floats;
  const std::vector<Parameter> list = model.parameters();
  for (std::size_t i = 0; i < list.size(); ++i) {
    Parameter noisy = list[i];
    if (noisy.deviation == 0.0) noisy.deviation = 0.05;  // biases
    std::vector<float>& values = floats[noisy.name];
    values.resize(static_cast<std::size_t>(noisy.numel()));
    initialise(noisy, i, 3, values);
  }
  std::vector<Bytes> inputs;
  for (const CompiledProgram::Tensor& t : program.parameters()) {
    Bytes bytes(static_cast<std::size_t>(t.bytes()));
    const auto put = [&](std::size_t at, auto value) {
      std::memcpy(bytes.data() + at * sizeof(value), &value, sizeof(value));
    };
    if (t.dtype == DType::i64) {  // tokens, targets, last
      const auto vocab = static_cast<std::uint64_t>(model.sizes().vocab);
      for (std::size_t i = 0; i * sizeof(std::int64_t) < bytes.size(); ++i) {
        const bool ignored = t.name == "targets" && i % 5 == 4;
        const auto vocab_id = static_cast<std::int64_t>(mix(t.name.size(), i) % vocab);
        put(i, ignored ? kIgnoredTarget : t.name == "last" ? std::int64_t{1} : vocab_id);
      }
    } else if (t.name == "inverse_count") {
      put(0, 0.125f);
    } else if (t.dtype == DType::f32) {
      const auto table = model.tables(t.shape[0]);
      for (const PositionTable& p : table) {
        if (p.name == t.name) std::memcpy(bytes.data(), p.values.data(), bytes.size());
      }
      if (const auto found = floats.find(t.name); found != floats.end())
        std::memcpy(bytes.data(), found->second.data(), bytes.size());
    } else {
      for (const auto& [name, values] : floats) {
        if (rounded_name(name) != t.name) continue;
        for (std::size_t i = 0; i < values.size(); ++i) put(i, nearest_bf16(values[i]));
      }
    }
    inputs.push_back(std::move(bytes));
  }
  return inputs;
}

// The programs of a model over four rows of 32 tokens, in both forms.
struct ProgramPair {
  std::string name;
  Graph masters, rounded;
};
inline std::vector<ProgramPair> program_pairs(const Model& model) {
  std::vector<ProgramPair> pairs;
  pairs.push_back({"step", build_step(model, 4, 32), build_step(model, 4, 32, Weights::rounded)});
  pairs.push_back({"loss", build_loss(model, 4, 32), build_loss(model, 4, 32, Weights::rounded)});
  pairs.push_back(
      {"logits", build_logits(model, 4, 32), build_logits(model, 4, 32, Weights::rounded)});
  return pairs;
}

}  // namespace logitless::train
