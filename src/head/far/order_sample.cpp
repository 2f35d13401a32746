#include "head/far/order_sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "head/validate.h"

namespace logitless {
namespace {

// Weight of the old average probabilities when an order is made.
constexpr float kMemory = 0.5f;

// Copies `count` evenly spaced rows of m; `view` becomes a view of the copy.
Buffer copy_rows(const ConstTensorView& m, std::int64_t count, MemoryMeter* meter,
                 ConstTensorView& view) {
  const std::int64_t rows = m.size(0);
  const std::int64_t columns = m.rank() > 1 ? m.size(1) : 1;
  const auto element = static_cast<std::int64_t>(size_of(m.dtype()));
  Buffer out(static_cast<std::size_t>(count * columns * element), meter);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t from = i * rows / count * m.stride(0);
    std::byte* to = out.as<std::byte>() + i * columns * element;
    if (m.rank() == 1 || m.stride(1) == 1) {
      std::memcpy(to, static_cast<const std::byte*>(m.data()) + from * element,
                  static_cast<std::size_t>(columns * element));
      continue;
    }
    for (std::int64_t k = 0; k < columns; ++k) {
      std::memcpy(to + k * element,
                  static_cast<const std::byte*>(m.data()) + (from + k * m.stride(1)) * element,
                  static_cast<std::size_t>(element));
    }
  }
  const std::int64_t sizes[] = {count, columns};
  view = ConstTensorView(out.data(), m.dtype(), std::span(sizes, m.rank() == 1 ? 1 : 2));
  return out;
}

}  // namespace

OrderSample head_of(const OrderSource& source) {
  OrderSample s;
  s.logit_scale = source.logit_scale;
  s.softcap = source.softcap;
  s.weight = source.weight;
  s.bias = source.bias;
  return s;
}

OrderSample look_at(const OrderSource& source, std::int64_t rows) {
  OrderSample s = head_of(source);
  const RowMatrix m = as_rows("hidden", source.hidden);
  const std::int64_t step = std::max<std::int64_t>(ceil_div(m.rows, rows), 1);
  const std::int64_t sizes[] = {ceil_div(m.rows, step), m.columns};
  const std::int64_t strides[] = {step * m.row_stride, m.column_stride};
  s.hidden = ConstTensorView(source.hidden.data(), source.hidden.dtype(), sizes, strides);
  return s;
}

OrderSample sample_of(const OrderSource& source, std::int64_t rows, bool copy, MemoryMeter* meter) {
  OrderSample s = head_of(source);
  const RowMatrix m = as_rows("hidden", source.hidden);
  const std::int64_t sizes[] = {m.rows, m.columns};
  const std::int64_t strides[] = {m.row_stride, m.column_stride};
  const ConstTensorView tokens(source.hidden.data(), source.hidden.dtype(), sizes, strides);
  s.hidden_copy = copy_rows(tokens, std::min(m.rows, rows), meter, s.hidden);
  if (!copy) return s;
  s.weight_copy = copy_rows(source.weight, source.weight.size(0), meter, s.weight);
  if (source.bias.defined())
    s.bias_copy = copy_rows(source.bias, source.bias.size(0), meter, s.bias);
  return s;
}

std::vector<float> average_of(const Context& context, const OrderSample& s) {
  std::vector<float> average =
      average_probability(context, s.hidden, s.weight, s.bias, s.logit_scale, s.softcap,
                          /*memory_budget=*/0, s.sharding);
  for (std::size_t i = 0; i < s.average.size(); ++i)
    average[i] += kMemory * (s.average[i] - average[i]);
  for (float& p : average) p = std::isfinite(p) ? p : 0.0f;
  return average;
}

VocabOrder make_order(const Context& context, const OrderSample& s) {
  VocabOrder order = make_vocab_order(context, s.weight, average_of(context, s));
  return s.moments ? measure_tiles(context, order, s.hidden, s.weight, s.bias, s.logit_scale, s.tau)
                   : order;
}

}  // namespace logitless
