#include "sample/stored.h"

#include <algorithm>
#include <climits>

#include "core/check.h"
#include "kernels/device/sample.h"
#include "sample/state.h"

namespace logitless {
namespace {

constexpr std::int64_t kLogitBytes = std::int64_t{512} << 20;  // of a chunk, by default

// ids: of a token.
cuda::ForwardShape shape_of(const LogitsForm& form, std::int64_t ids, std::int64_t tokens) {
  const HeadShape& s = form.shape;
  cuda::ForwardShape shape;
  shape.tokens = tokens;
  shape.dim = s.dim;
  shape.vocab = s.vocab;
  shape.dtype = s.dtype;
  shape.targets_per_token = static_cast<int>(ids);
  return shape;
}

StoredLogits plan_chunks(const LogitsForm& form, std::int64_t ids, const LossPlan& head,
                         std::size_t memory_budget) {
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel(head.kernel);
  if (kernel.stored == nullptr) return {};
  const std::int64_t tokens = form.shape.tokens;
  const std::int64_t unit = kernel.stored->unit_tokens(shape_of(form, ids, tokens));
  const bool same_bits = head.chunk_tokens >= tokens || head.chunk_tokens % unit == 0;
  if (unit != cuda::kBlockPadding && (memory_budget > 0 || !same_bits)) return {};
  const std::int64_t row_bytes = cuda::padded_vocab(form.shape.vocab) * std::int64_t{sizeof(float)};
  const auto units = [&](std::int64_t count) { return (count + unit - 1) / unit; };
  const auto stored_of = [&](std::int64_t most_units) -> StoredLogits {
    const std::int64_t chunks = (units(tokens) + most_units - 1) / most_units;
    const std::int64_t even = (units(tokens) + chunks - 1) / chunks * unit;
    const std::int64_t chunk = std::min(tokens, even);
    return {&kernel, chunk, cuda::sample_bytes(kernel, shape_of(form, ids, chunk))};
  };
  std::int64_t most = std::max<std::int64_t>(1, kLogitBytes / (row_bytes * unit));
  if (memory_budget > 0) most = units(tokens);
  for (; most > 0; --most) {
    const StoredLogits stored = stored_of(most);
    if (memory_budget == 0 || stored.bytes <= memory_budget) return stored;
  }
  return {};
}

template <typename T>
const T* data_of(const ConstTensorView& view) {
  return view.defined() ? static_cast<const T*>(view.data()) : nullptr;
}

// Returns the number of the options, or of each token. A null one is not used.
cuda::TokenNumbers numbers_of(Given given, const ConstTensorView& each, const float* one) {
  if (each.defined()) return {data_of<float>(each), true};
  return {given == Given::none ? nullptr : one, false};
}

// Operands of all chunks but for their first token.
cuda::ForwardCall operands_of(const Context& context, const LogitsForm& form,
                              const ConstTensorView& weight, const ConstTensorView& bias,
                              void* workspace) {
  cuda::ForwardCall c;
  c.hidden_stride = c.weight_stride = form.shape.dim;
  c.weight = weight.data();
  c.bias = data_of<float>(bias);
  c.logit_scale = form.logit_scale;
  c.softcap = form.softcap;
  c.workspace = workspace;
  c.stream = context.stream();
  return c;
}

// run(c) for each chunk. log_prob [N, ids], or null.
template <typename Run>
void each_chunk(cuda::ForwardCall& c, const StoredLogits& stored, const LogitsForm& form,
                std::int64_t ids, const ConstTensorView& hidden, float* log_prob, const Run& run) {
  const HeadShape& s = form.shape;
  if (stored.kernel->prepare != nullptr) stored.kernel->prepare();
  const auto row_bytes = s.dim * static_cast<std::int64_t>(size_of(s.dtype));
  for (std::int64_t first = 0; first < s.tokens; first += stored.chunk_tokens) {
    c.shape = shape_of(form, ids, std::min(stored.chunk_tokens, s.tokens - first));
    c.first_token = first;
    c.hidden = static_cast<const std::byte*>(hidden.data()) + first * row_bytes;
    c.log_prob = log_prob == nullptr ? nullptr : log_prob + first * ids;
    run();
  }
}

}  // namespace

StoredLogits plan_stored(const SampleForm& form, const LossPlan& head, bool log_prob,
                         std::size_t memory_budget) {
  if (form.of_head() && !log_prob) return {};
  return plan_chunks(form.logits, 1, head, memory_budget);
}

StoredLogits plan_stored(const TopForm& form, const LossPlan& head, std::size_t memory_budget) {
  if (form.k > cuda::kMostBestEntries) return {};
  return plan_chunks(form.logits, form.wanted(), head, memory_budget);
}

std::string explain_stored(const StoredLogits& stored, const LogitsForm& form) {
  return concat("sample: one GEMM for ids and log-probabilities, kernel ", stored.kernel->name,
                "\n  fp32 logits of ", stored.chunk_tokens, " of ", form.shape.tokens,
                " tokens at a time\n  workspace ", format_bytes(stored.bytes), "\n");
}

void sample_stored(const Context& context, const StoredLogits& stored, const SampleForm& form,
                   const SampleInputs& in, const SampleOutputs& out, const SampleNumbers* numbers,
                   void* workspace) {
  cuda::SampleCall call;
  call.kernel = stored.kernel;
  call.logit_bias = data_of<float>(in.logit_bias);
  call.tokens = out.tokens.data();
  call.int64_tokens = form.token_dtype == DType::i64;
  if (!form.greedy) {
    call.key = in.key.defined() ? data_of<std::int64_t>(in.key) : numbers->key.data();
    call.counter = data_of<void>(in.counter);
    call.int64_counter = form.counter_dtype == DType::i64;
    call.temperature = numbers_of(form.temperature, in.temperature, &numbers->temperature);
    call.top_k = form.top_k;
    call.top_p = numbers_of(form.top_p, in.top_p, &numbers->top_p);
    call.min_p = numbers_of(form.min_p, in.min_p, &numbers->min_p);
  }
  call.chunk = operands_of(context, form.logits, in.weight, in.bias, workspace);
  call.chunk.ignore_index = -1;  // tokens are ids
  auto* const log_prob =
      out.log_prob.defined() ? static_cast<float*>(out.log_prob.data()) : nullptr;
  each_chunk(call.chunk, stored, form.logits, 1, in.hidden, log_prob,
             [&] { cuda::sample_tokens(call); });
}

void best_stored(const Context& context, const StoredLogits& stored, const TopForm& form,
                 const TopLogProbsInputs& in, std::int64_t* wanted, float* found, void* workspace) {
  cuda::BestCall call;
  call.kernel = stored.kernel;
  call.k = form.k;
  call.targets = data_of<void>(in.targets);
  call.int64_targets = form.target_dtype == DType::i64;
  call.wanted = wanted;
  call.chunk = operands_of(context, form.logits, in.weight, in.bias, workspace);
  each_chunk(call.chunk, stored, form.logits, form.wanted(), in.hidden, found,
             [&] { cuda::best_entries(call); });
}

}  // namespace logitless
