#include "compiler/random_losses.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace logitless::test {
namespace {

using Matrix = std::pair<std::int64_t, std::int64_t>;  // rows, columns

class Author {
 public:
  Author(std::uint64_t seed, DType dtype, LossSize size)
      : rng_(seed),
        dtype_(dtype),
        wide_(dtype == DType::f64 ? DType::f64 : DType::f32),
        size_(size),
        g_("random") {}

  Graph run() && {
    const bool head = size_ == LossSize::head;
    const std::int64_t dims[] = {4, 6, 8, 12};
    dim_ = dims[below(4)];
    rows_ = head ? 130 + 130 * 3 * below(2) : 6 * (1 + below(4));
    vocab_ = head ? (1 << 18) / rows_ + 8 * (1 + below(3)) : 8 * (3 + below(8));
    if (head && below(3) == 0) rows_ = vocab_ = 520;  // then each may stand for the other
    if (!head && below(3) == 0) vocab_ = rows_;
    Value loss = loss_of(logits());
    if (below(4) == 0) loss = loss + loss_of(logits()) * 0.3;
    if (below(3) == 0) loss = loss + mean(square(cast(hidden(rows_, dim_), wide_)), {0, 1}) * 0.1;
    g_.result("loss", loss);
    std::vector<Value> wrt;
    for (const Value p : parameters_) {
      if (below(6) > 0 || wrt.empty()) wrt.push_back(p);
    }
    const std::vector<Value> gradients = g_.gradients({loss}, wrt);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      g_.result("d" + std::to_string(i), gradients[i]);
    return std::move(g_);
  }

 private:
  std::mt19937_64 rng_;
  const DType dtype_, wide_;
  const LossSize size_;
  Graph g_;
  std::int64_t rows_ = 0, vocab_ = 0, dim_ = 0;
  std::vector<Value> parameters_;              // floats
  std::map<Matrix, std::vector<Value>> made_;  // by shape
  std::map<Matrix, Value> indices_;            // by their number and the size they index

  int below(std::int64_t n) { return static_cast<int>(rng_() % static_cast<std::uint64_t>(n)); }
  template <typename T>
  const T& one_of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(static_cast<std::int64_t>(list.size())))];
  }

  Value parameter(Shape shape) {
    const Value p =
        g_.parameter("p" + std::to_string(parameters_.size()), dtype_, std::move(shape));
    parameters_.push_back(p);
    return p;
  }
  Value indices(std::int64_t count, std::int64_t limit) {
    const auto found = indices_.find({count, limit});
    if (found != indices_.end()) return found->second;
    const std::string name = "t" + std::to_string(indices_.size()) + "_" + std::to_string(limit);
    return indices_[{count, limit}] = g_.parameter(name, DType::i64, {count});
  }

  // --- matrices of the dtype, with entries of size about one

  Value hidden(std::int64_t rows, std::int64_t columns, int depth = 3) {
    std::vector<Value>& known = made_[{rows, columns}];
    if (!known.empty() && below(3) == 0) return one_of(known);
    const Value made = depth == 0 ? parameter({rows, columns}) : written(rows, columns, depth);
    made_[{rows, columns}].push_back(made);
    return made;
  }

  Value written(std::int64_t rows, std::int64_t columns, int depth) {
    const auto again = [&](std::int64_t r, std::int64_t c) { return hidden(r, c, depth - 1); };
    if (rows < 2 || columns < 2) return parameter({rows, columns});
    switch (below(20)) {
      case 0: {
        const std::int64_t first = 1 + below(columns - 1);
        return concat({again(rows, first), again(rows, columns - first)}, 1);
      }
      case 1: {
        const std::int64_t first = 1 + below(rows - 1);
        return concat({again(first, columns), again(rows - first, columns)}, 0);
      }
      case 2: {  // two halves, like those of a state and its successor
        const Value both = concat({again(rows, columns), again(rows, columns)}, 1);
        return matmul(both, again(2 * columns, columns)) * 0.3;
      }
      case 3:
        return matmul(again(rows, dim_), again(dim_, columns)) * 0.4;
      case 4:
        return transpose(again(columns, rows), {1, 0});
      case 5: {
        const std::int64_t first = below(3);
        return slice(again(rows + 2, columns), 0, first, first + rows);
      }
      case 6: {
        const std::int64_t low = below(2);
        return pad(again(rows, columns - 1), 1, low, 1 - low);
      }
      case 7:
        return flip(again(rows, columns), below(2));
      case 8:
        return take(again(vocab_, columns), indices(rows, vocab_));
      case 9: {
        const Value x = again(rows, columns);
        return rms_norm(x, parameter({columns}), 0.1);
      }
      case 10: {
        const Value x = again(rows, columns);
        return layer_norm(x, parameter({columns}), parameter({columns}), 0.1);
      }
      case 11: {
        const Value x = cast(again(rows, columns), wide_);
        const Value norm = rsqrt(sum(square(x), {1}) + 0.1);
        return cast(x * reshape(norm, {rows, 1}), dtype_);
      }
      case 12:
        return stop_gradient(again(rows, columns));
      case 13:
        return tanh(again(rows, columns));
      case 14:
        return gelu(again(rows, columns));
      case 15:
        return again(rows, columns) * tanh(again(rows, columns));
      case 16:
        return again(rows, columns) * 0.6 + again(rows, columns) * 0.6;
      case 17:
        return reshape(again(columns, rows), {rows, columns});
      case 18:
        return dtype_ == DType::f64 || rows % 2 != 0 ? parameter({rows, columns})
                                                     : attended(rows, columns, depth);
      default:
        return parameter({rows, columns});
    }
  }

  Value attended(std::int64_t rows, std::int64_t columns, int depth) {
    const auto heads = [&](const Value& x) { return reshape(x, {2, 1, rows / 2, columns}); };
    const Value q = heads(hidden(rows, columns, depth - 1)),
                k = heads(hidden(rows, columns, depth - 1)),
                v = heads(hidden(rows, columns, depth - 1));
    return reshape(attention(q, k, v, 1.0 / static_cast<double>(columns), below(2) == 0),
                   {rows, columns});
  }

  // --- products of them

  Value logits() {
    const Value x = hidden(rows_, dim_);
    const bool same = rows_ == vocab_ && below(2) == 0;
    const Value w = same ? x : below(2) == 0 ? parameter({vocab_, dim_}) : hidden(vocab_, dim_);
    DotOptions options{.contract_a = {1}, .contract_b = {1}};
    options.f32_result = dtype_ != DType::f64;
    Value z = below(4) == 0 ? of_sequences(x, w, options) : dot(x, w, options);
    if (below(3) == 0) z = z * 0.7;
    if (below(3) == 0) {
      z = z + (below(3) == 0 ? sum(cast(w, wide_), {1}) : cast(parameter({vocab_}), wide_));
    }
    switch (below(8)) {
      case 0:
        return tanh(z / 3.0) * 3.0;
      case 1:
        return slice(z, 1, 0, vocab_ - 4);
      case 2:
        return select(equal(g_.iota(z.shape(), 0), g_.iota(z.shape(), 1)), 0.0 * z - 9.0, z);
      case 3:
        return rows_ == vocab_ && z.shape()[0] == Dim(rows_) ? transpose(z, {1, 0}) : z;
      default:
        return z;
    }
  }

  // Two sequences of half the rows each; the last position of each has no target.
  Value of_sequences(const Value& x, const Value& w, DotOptions options) {
    options.contract_a = {2};
    const Value z = dot(reshape(x, {2, rows_ / 2, dim_}), w, options);
    return reshape(slice(z, 1, 0, rows_ / 2 - 1), {rows_ - 2, vocab_});
  }

  Value loss_of(const Value& z) {
    const std::int64_t rows = z.shape()[0].value(), vocab_count = z.shape()[1].value();
    const Value t = indices(rows, vocab_count);
    const Value lse = logsumexp(z, {1});
    switch (below(size_ == LossSize::head ? 6 : 13)) {
      case 0: {
        const Value loss = lse - pick(z, t, 1);
        const Value seen =
            less(t, g_.constant(static_cast<double>(vocab_count) / 2.0, DType::i64, {rows}));
        return mean(select(seen, loss, 0.0 * loss), {0});
      }
      case 1:
        return mean(lse - pick(z, t, 1) + square(lse) * 0.1, {0});
      case 2:
        return mean(0.0 - pick(z - reshape(lse, {rows, 1}), t, 1), {0});
      case 3: {
        const Value log_p = pick(log_softmax(z, 1), t, 1);
        return mean(square(1.0 - exp(log_p)) * log_p, {0}) * -1.0;
      }
      case 4:  // both directions
        return mean(lse - pick(z, t, 1), {0}) + mean(logsumexp(z, {0}), {0});
      case 5:
        return mean(lse * lse, {0}) + sum(pick(z, t, 1) * lse, {0}) * 0.01;
      case 6: {
        const Value log_p = log_softmax(z, 1);
        return sum(exp(log_p) * log_p, {0, 1}) * 0.1;
      }
      case 7: {
        const Value p = softmax(z, 1);
        return mean(square(p - stop_gradient(flip(p, 1))), {0, 1});
      }
      case 8:
        return mean(lse - pick(z, t, 1), {0}) + mean(square(z), {0, 1}) * 0.1;
      case 9: {
        const Value y = z * z;
        return mean(sigmoid(y) * z, {0, 1});
      }
      case 10: {
        const Value c = cumsum(z, 1) * 0.1;
        return mean(logcumsumexp(c, 1), {0, 1});
      }
      case 11: {  // the largest few, which are all different
        const Value apart = z + cast(g_.iota({vocab_count}, 0), wide_) * 0.01;
        return mean(log_softmax(sort(apart, 1, 4, true).values, 1), {0, 1}) +
               mean(max(apart, {1}), {0});
      }
      default: {
        const Value p = softmax(z, 1);
        const Value q = dot(p, p, {.contract_a = {1}, .contract_b = {1}});
        return mean(square(q), {0, 1});
      }
    }
  }
};

}  // namespace

Graph random_loss(std::uint64_t seed, DType dtype, LossSize size) {
  return Author(seed, dtype, size).run();
}

}  // namespace logitless::test
