#include "head/far/shared_order.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "comm/collective_calls.h"
#include "comm/digest.h"
#include "core/check.h"
#include "head/cuda/views.h"
#include "head/shard_plan.h"
#include "head/validate.h"
#include "head/vocab_order_access.h"
#include "kernels/device/stream.h"
#include "math/shard_state.h"

namespace logitless {
namespace {

// Does sample_of_ranks on a GPU: rows are spaced as in look_at, and concatenated by rank.
OrderSample device_sample(const Context& context, const OrderSource& source, std::int64_t rows) {
  const Sharding& sharding = source.sharding;
  RowMatrix m;
  const Agreement agreed = agree(*sharding.vocab_group, [&](PlanDigest& digest) {
    m = cuda::rows_of("hidden", source.hidden);
    digest.own("tokens", m.rows);
  });
  const int ranks = sharding.vocab_group->size();
  std::int64_t tokens = 0;
  for (int r = 0; r < ranks; ++r) tokens += agreed.value_of(r, "tokens");
  const std::int64_t step = std::max<std::int64_t>(ceil_div(tokens, rows), 1);
  const auto count_of = [&](int r) { return ceil_div(agreed.value_of(r, "tokens"), step); };
  std::int64_t most = 0, count = 0;
  for (int r = 0; r < ranks; ++r) {
    most = std::max(most, count_of(r));
    count += count_of(r);
  }
  const std::size_t row = static_cast<std::size_t>(m.columns) * size_of(source.hidden.dtype());
  const std::size_t block = static_cast<std::size_t>(most) * row;
  cuda::DeviceMemory mine, gathered;
  std::shared_ptr<cuda::DeviceMemory> all;
  together(sharding, [&] {
    mine = cuda::DeviceMemory(block);
    gathered = cuda::DeviceMemory(block * static_cast<std::size_t>(ranks));
    all = std::make_shared<cuda::DeviceMemory>(static_cast<std::size_t>(count) * row);
  });
  const cuda::Stream stream = context.stream();
  const std::int64_t own = count_of(sharding.vocab_group->rank());
  const auto stride =
      static_cast<std::size_t>(step * m.row_stride) * size_of(source.hidden.dtype());
  if (own > 0)
    cuda::copy_rows_async({mine.data(), row}, {source.hidden.data(), std::max(stride, row)}, row,
                          static_cast<std::size_t>(own), stream);
  CollectiveCalls calls(sharding.vocab_group, agreed.plan);
  calls.run([&] { calls.all_gather(mine.data(), gathered.data(), block, stream); });
  auto* to = static_cast<std::byte*>(all->data());
  for (int r = 0; r < ranks; ++r) {
    const std::size_t bytes = static_cast<std::size_t>(count_of(r)) * row;
    const auto* const from =
        static_cast<const std::byte*>(gathered.data()) + static_cast<std::size_t>(r) * block;
    if (bytes > 0) cuda::copy_async(to, from, bytes, stream);
    to += bytes;
  }
  cuda::synchronize(stream);
  OrderSample out = head_of(source);
  out.hidden = ConstTensorView(all->data(), source.hidden.dtype(), {count, m.columns});
  out.device_hidden = std::move(all);
  out.sharding = sharding;
  out.sharding.tokens = false;
  return out;
}

}  // namespace

void together(const Sharding& sharding, const std::function<void()>& body) {
  agree(*sharding.vocab_group, [&](PlanDigest&) { body(); });
}

HeadShape require_order_source(const Context& context, const ConstTensorView& hidden,
                               const ConstTensorView& weight, const ConstTensorView& bias,
                               const Sharding& sharding) {
  if (!is_sharded(sharding)) {
    const HeadShape shape = require_head(hidden, weight, bias);
    if (context.device().kind != DeviceKind::cpu)
      require_one_dtype(hidden, weight, "for an order on a GPU");
    return shape;
  }
  HeadShape shape;
  together(sharding, [&] {
    require_device(sharding, context.device().kind);
    shape = require_head(hidden, weight, bias, 0, columns_of(sharding));
    require_one_dtype(hidden, weight, "with a sharding");
    require_sharding(sharding, shape.vocab);
    require_rows(sharding);
  });
  return shape;
}

std::int64_t sampled_tokens(const Sharding& sharding, std::int64_t mine) {
  if (!is_sharded(sharding) || !sharding.tokens) return mine;
  const Agreement agreed =
      agree(*sharding.vocab_group, [&](PlanDigest& digest) { digest.own("tokens", mine); });
  std::int64_t tokens = 0;
  for (int r = 0; r < sharding.vocab_group->size(); ++r) tokens += agreed.value_of(r, "tokens");
  return tokens;
}

OrderSample sample_of_ranks(const Context& context, const OrderSource& source, std::int64_t rows) {
  const Sharding& sharding = source.sharding;
  const bool on_gpu = context.device().kind == DeviceKind::cuda;
  MemoryMeter* const meter = &context.memory();
  OrderSample out;
  if (!sharding.tokens) {
    together(sharding, [&] {
      out = on_gpu ? look_at(source, rows) : sample_of(source, rows, /*copy=*/false, meter);
    });
    out.sharding = sharding;
    return out;
  }
  if (on_gpu) return device_sample(context, source, rows);
  RowMatrix m;
  const Agreement agreed = agree(*sharding.vocab_group, [&](PlanDigest& digest) {
    m = as_rows("hidden", source.hidden);
    digest.own("tokens", m.rows);
  });
  const int ranks = sharding.vocab_group->size();
  std::int64_t all = 0, before = 0;
  for (int r = 0; r < ranks; ++r) {
    if (r == sharding.vocab_group->rank()) before = all;
    all += agreed.value_of(r, "tokens");
  }
  const std::int64_t count = std::min(rows, all);
  // Row i of the sample is token i * all / count of all ranks' tokens, concatenated by rank.
  const auto first_of = [&](std::int64_t token) { return ceil_div(token * count, all); };
  std::int64_t most = 0, of_ranks = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t end = of_ranks + agreed.value_of(r, "tokens");
    most = std::max(most, first_of(end) - first_of(of_ranks));
    of_ranks = end;
  }
  const std::size_t row_bytes =
      static_cast<std::size_t>(m.columns) * size_of(source.hidden.dtype());
  const std::size_t block = static_cast<std::size_t>(most) * row_bytes;
  out = head_of(source);
  Buffer gathered, mine;
  together(sharding, [&] {
    gathered = Buffer(block * static_cast<std::size_t>(ranks), meter);
    mine = Buffer(block, meter);
    out.hidden_copy = Buffer(static_cast<std::size_t>(count) * row_bytes, meter);
    std::memset(mine.data(), 0, block);
  });
  const auto element = static_cast<std::int64_t>(size_of(source.hidden.dtype()));
  const auto* const from = static_cast<const std::byte*>(source.hidden.data());
  std::byte* to = mine.as<std::byte>();
  for (std::int64_t i = first_of(before); i < first_of(before + m.rows); ++i) {
    const std::int64_t row = (i * all / count - before) * m.row_stride;
    for (std::int64_t k = 0; k < m.columns; ++k, to += element)
      std::memcpy(to, from + (row + k * m.column_stride) * element,
                  static_cast<std::size_t>(element));
  }
  CollectiveCalls calls(sharding.vocab_group, agreed.plan);
  calls.run([&] { calls.all_gather(mine.data(), gathered.data(), block); });
  to = out.hidden_copy.as<std::byte>();
  of_ranks = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t end = of_ranks + agreed.value_of(r, "tokens");
    const std::size_t bytes =
        static_cast<std::size_t>(first_of(end) - first_of(of_ranks)) * row_bytes;
    std::memcpy(to, gathered.as<std::byte>() + static_cast<std::size_t>(r) * block, bytes);
    to += bytes;
    of_ranks = end;
  }
  out.hidden = ConstTensorView(out.hidden_copy.data(), source.hidden.dtype(), {count, m.columns});
  out.sharding = sharding;
  out.sharding.tokens = false;
  return out;
}

void sum_log2(const Sharding& sharding, float* mine, std::int64_t count) {
  const int ranks = sharding.vocab_group->size();
  std::vector<float> all;
  agree(*sharding.vocab_group, [&](PlanDigest& digest) {
    all.resize(static_cast<std::size_t>(ranks * count));
    digest.same("tokens to measure with", count);
  });
  sharding.vocab_group->all_gather_host(mine, all.data(),
                                        static_cast<std::size_t>(count) * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i)
    mine[i] =
        log2_of_sum(ranks, [&](int r) { return all[static_cast<std::size_t>(r * count + i)]; });
}

VocabOrder share_order(const VocabOrder& order, const Sharding& sharding) {
  require(is_sharded(sharding), "sharding: expected one, of the ranks that the order is for");
  const int ranks = sharding.vocab_group->size();
  const std::int64_t rows = order.vocab();
  const Agreement agreed = agree(*sharding.vocab_group, [&](PlanDigest& digest) {
    require_sharding(sharding, rows);
    require_rows(sharding);
    digest.same("vocab", sharding.vocab);
    digest.add_vocab(sharding.vocab, vocab_of(sharding, rows));
  });
  std::vector<std::int64_t> counts;
  for (const auto& runs : agreed.vocab_runs) {
    counts.push_back(std::accumulate(
        runs.begin(), runs.end(), std::int64_t{0},
        [](std::int64_t sum, const VocabRun& run) { return sum + run.end - run.first; }));
  }
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<std::int32_t> mine, all, places;
  together(sharding, [&] {
    mine.assign(static_cast<std::size_t>(most), 0);
    std::copy(order.positions().begin(), order.positions().end(), mine.begin());
    all.resize(static_cast<std::size_t>(most * ranks));
    places.resize(static_cast<std::size_t>(sharding.vocab));
  });
  sharding.vocab_group->all_gather_host(mine.data(), all.data(),
                                        static_cast<std::size_t>(most) * sizeof(std::int32_t));
  std::int32_t before = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int32_t* position = all.data() + static_cast<std::int64_t>(r) * most;
    for (const VocabRun& run : agreed.vocab_runs[static_cast<std::size_t>(r)]) {
      for (std::int64_t vocab_id = run.first; vocab_id < run.end; ++vocab_id)
        places[static_cast<std::size_t>(vocab_id)] = before + *position++;
    }
    before += static_cast<std::int32_t>(counts[static_cast<std::size_t>(r)]);
  }
  return VocabOrderAccess::with_positions(order, std::move(places));
}

VocabOrder make_shared_order(const Context& context, const OrderSample& s) {
  std::vector<float> average = average_of(context, s);
  VocabOrder order;
  together(s.sharding, [&] {
    if (!average.empty()) order = make_vocab_order(context, s.weight, average);
  });
  if (s.moments)
    order =
        measure_tiles(context, order, s.hidden, s.weight, s.bias, s.logit_scale, s.tau, s.sharding);
  return share_order(order, s.sharding);
}

}  // namespace logitless
