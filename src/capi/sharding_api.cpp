// Vocabulary-parallel heads over the C ABI: all functions besides the calls that take a sharding.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"
#include "logitless/c_sharding.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

namespace {

// Returns an empty order for a rank with an empty vocabulary shard.
VocabOrder optional_order(const logitless_vocab_order* handle) {
  return handle == nullptr ? VocabOrder() : handle->order;
}

Sharding required(const logitless_sharding* sharding) {
  require(sharding != nullptr, "sharding: expected one, got NULL");
  return sharding_from(sharding);
}

}  // namespace

int32_t logitless_supports_vocab_parallel(logitless_device device, int32_t compute_capability,
                                          logitless_dtype dtype, int64_t dim) {
  int32_t supported = 0;
  guarded([&] {
    DeviceLimits limits;
    limits.kind = device == LOGITLESS_DEVICE_CUDA ? DeviceKind::cuda : DeviceKind::cpu;
    limits.compute_capability = compute_capability;
    supported = supports_vocab_parallel(limits, dtype_from(dtype, "dtype"), dim) ? 1 : 0;
  });
  return supported;
}

logitless_status logitless_interleave_vocab(int64_t vocab, int32_t ranks, const float* average,
                                            uint64_t seed, int32_t* interleaved) {
  return guarded([&] {
    require(interleaved != nullptr,
            "interleaved: expected memory for the vocabulary entries, got NULL");
    std::span<const float> given;
    if (average != nullptr && vocab > 0) given = {average, static_cast<std::size_t>(vocab)};
    const std::vector<std::int32_t> made = interleave_vocab(vocab, ranks, given, seed);
    std::copy(made.begin(), made.end(), interleaved);
  });
}

logitless_status logitless_interleaved_begin(int64_t vocab, int32_t ranks, int32_t rank,
                                             int64_t* first) {
  return guarded([&] {
    require(first != nullptr, "first: expected a pointer, got NULL");
    *first = interleaved_begin(vocab, ranks, rank);
  });
}

logitless_status logitless_sharded_average_probability(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_tensor* hidden, const logitless_tensor* weight, const logitless_tensor* bias,
    float logit_scale, float softcap, uint64_t memory_budget, float* average, int64_t rows) {
  return guarded([&] {
    const std::vector<float> made = average_probability(
        context_of(context), view_from(hidden, "hidden"), view_from(weight, "weight"),
        view_from(bias, "bias"), logit_scale, softcap, memory_budget, required(sharding));
    require(rows == static_cast<std::int64_t>(made.size()), "rows: expected ", made.size(),
            ", the rows of weight, got ", rows);
    require(average != nullptr || rows == 0, "average: expected memory for ", rows,
            " numbers, got NULL");
    std::copy(made.begin(), made.end(), average);
  });
}

logitless_status logitless_sharded_vocab_order_measure(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_vocab_order* order, const logitless_tensor* hidden,
    const logitless_tensor* weight, const logitless_tensor* bias, float logit_scale, float tau,
    logitless_vocab_order** measured) {
  return guarded([&] {
    require(measured != nullptr, "measured: expected a pointer, got NULL");
    *measured = new logitless_vocab_order{
        measure_tiles(context_of(context), optional_order(order), view_from(hidden, "hidden"),
                      view_from(weight, "weight"), view_from(bias, "bias"), logit_scale, tau,
                      required(sharding))};
  });
}

logitless_status logitless_vocab_order_share(const logitless_vocab_order* order,
                                             const logitless_sharding* sharding,
                                             logitless_vocab_order** shared) {
  return guarded([&] {
    require(shared != nullptr, "shared: expected a pointer, got NULL");
    *shared = new logitless_vocab_order{share_order(optional_order(order), required(sharding))};
  });
}
