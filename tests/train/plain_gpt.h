// A reference GPT-2 in plain loops in double, with which the graphs are compared.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "train/model/gpt.h"

namespace logitless::train {

using Numbers = std::vector<double>;
using NamedNumbers = std::map<std::string, Numbers>;

class PlainGpt {
 public:
  PlainGpt(const GptConfig& config, const NamedNumbers& parameters)
      : config_(config), parameters_(parameters) {}

  // Returns the logits [T, V] of one row of tokens.
  Numbers logits(const std::vector<std::int64_t>& tokens) const {
    const std::size_t length = tokens.size(), dim = size(config_.dim), vocab = size(config_.vocab);
    Numbers x(length * dim);
    for (std::size_t t = 0; t < length; ++t) {
      for (std::size_t d = 0; d < dim; ++d) {
        x[t * dim + d] =
            at("wte.weight")[size(tokens[t]) * dim + d] + at("wpe.weight")[t * dim + d];
      }
    }
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::string h = "h." + std::to_string(layer) + ".";
      add(x,
          linear(mixed(linear(norm(x, h + "ln_1"), h + "attn.c_attn"), length), h + "attn.c_proj"));
      Numbers inner = linear(norm(x, h + "ln_2"), h + "mlp.c_fc");
      for (double& u : inner) {
        u = 0.5 * u *
            (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (u + 0.044715 * u * u * u)));
      }
      add(x, linear(inner, h + "mlp.c_proj"));
    }
    x = norm(x, "ln_f");
    const Numbers& head = at(config_.tied_head ? "wte.weight" : "lm_head.weight");
    Numbers z(length * vocab);
    for (std::size_t t = 0; t < length; ++t) {
      for (std::size_t v = 0; v < vocab; ++v) {
        for (std::size_t d = 0; d < dim; ++d)
          z[t * vocab + v] += x[t * dim + d] * head[v * dim + d];
      }
    }
    return z;
  }

  // Returns the sum over the targets of one row that are not ignored.
  double loss(const std::vector<std::int64_t>& tokens,
              const std::vector<std::int64_t>& targets) const {
    const Numbers z = logits(tokens);
    const std::size_t vocab = size(config_.vocab);
    double total = 0.0;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      if (targets[t] == kIgnoredTarget) continue;
      double sum = 0.0;
      for (std::size_t v = 0; v < vocab; ++v) sum += std::exp(z[t * vocab + v]);
      total += std::log(sum) - z[t * vocab + size(targets[t])];
    }
    return total;
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  const Numbers& at(const std::string& name) const { return parameters_.at(name); }
  static void add(Numbers& x, const Numbers& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Numbers linear(const Numbers& x, const std::string& name) const {
    const Numbers &w = at(name + ".weight"), &b = at(name + ".bias");
    const std::size_t out = b.size(), in = w.size() / out, rows = x.size() / in;
    Numbers y(rows * out);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t o = 0; o < out; ++o) {
        y[r * out + o] = b[o];
        for (std::size_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[i * out + o];
      }
    }
    return y;
  }

  Numbers norm(const Numbers& x, const std::string& name) const {
    const Numbers &gain = at(name + ".weight"), &bias = at(name + ".bias");
    const std::size_t dim = gain.size();
    Numbers y(x.size());
    for (std::size_t r = 0; r < x.size() / dim; ++r) {
      double mean = 0.0, variance = 0.0;
      for (std::size_t d = 0; d < dim; ++d) mean += x[r * dim + d] / static_cast<double>(dim);
      for (std::size_t d = 0; d < dim; ++d) {
        variance += (x[r * dim + d] - mean) * (x[r * dim + d] - mean) / static_cast<double>(dim);
      }
      for (std::size_t d = 0; d < dim; ++d) {
        y[r * dim + d] = (x[r * dim + d] - mean) / std::sqrt(variance + 1e-5) * gain[d] + bias[d];
      }
    }
    return y;
  }

  // Returns causal attention of qkv [T, 3 D].
  Numbers mixed(const Numbers& qkv, std::size_t length) const {
    const std::size_t dim = size(config_.dim), heads = size(config_.heads), width = dim / heads;
    const auto part = [&](std::size_t t, std::size_t which, std::size_t head, std::size_t d) {
      return qkv[t * 3 * dim + which * dim + head * width + d];
    };
    Numbers y(length * dim);
    for (std::size_t head = 0; head < heads; ++head) {
      for (std::size_t t = 0; t < length; ++t) {
        Numbers weights(t + 1);
        double sum = 0.0;
        for (std::size_t s = 0; s <= t; ++s) {
          double score = 0.0;
          for (std::size_t d = 0; d < width; ++d)
            score += part(t, 0, head, d) * part(s, 1, head, d);
          weights[s] = std::exp(score / std::sqrt(static_cast<double>(width)));
          sum += weights[s];
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t d = 0; d < width; ++d) {
            y[t * dim + head * width + d] += weights[s] / sum * part(s, 2, head, d);
          }
        }
      }
    }
    return y;
  }

  const GptConfig& config_;
  const NamedNumbers& parameters_;
};

}  // namespace logitless::train
