#include "sample/stored.h"

#include <algorithm>
#include <climits>

#include "core/check.h"
#include "kernels/device/sample.h"
#include "sample/state.h"

namespace logitless {
namespace {

constexpr std::int64_t kLogitBytes = std::int64_t{512} << 20;  // of a chunk, by default

cuda::ForwardShape shape_of(const SampleForm& form, std::int64_t tokens) {
  const HeadShape& s = form.logits.shape;
  cuda::ForwardShape shape;
  shape.tokens = tokens;
  shape.dim = s.dim;
  shape.vocab = s.vocab;
  shape.dtype = s.dtype;
  return shape;
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

}  // namespace

StoredLogits plan_stored(const SampleForm& form, std::string_view kernel, bool log_prob,
                         std::size_t memory_budget) {
  const HeadShape& s = form.logits.shape;
  if (form.top_k > 0 || form.top_p != Given::none || (form.of_head() && !log_prob)) return {};
  if (!cuda::sample_unsupported(cuda::find_device_kernel(kernel)).empty()) return {};
  const std::int64_t row_bytes = cuda::padded_vocab(s.vocab) * std::int64_t{sizeof(float)};
  constexpr std::int64_t kTokens = cuda::kBlockPadding;
  const auto units = [](std::int64_t tokens) { return (tokens + kTokens - 1) / kTokens; };
  const auto stored_of = [&](std::int64_t most_units) -> StoredLogits {
    const std::int64_t chunks = (units(s.tokens) + most_units - 1) / most_units;
    const std::int64_t even = (units(s.tokens) + chunks - 1) / chunks * kTokens;
    const std::int64_t tokens = std::min(s.tokens, even);
    return {tokens, cuda::sample_bytes(shape_of(form, tokens))};
  };
  std::int64_t most = std::max<std::int64_t>(1, kLogitBytes / (row_bytes * kTokens));
  if (memory_budget > 0) most = units(s.tokens);
  for (; most > 0; --most) {
    const StoredLogits stored = stored_of(most);
    if (memory_budget == 0 || stored.bytes <= memory_budget) return stored;
  }
  return {};
}

std::string explain_stored(const StoredLogits& stored, const SampleForm& form,
                           std::string_view kernel) {
  return concat("sample: one GEMM for tokens and log-probabilities, kernel ", kernel,
                "\n  fp32 logits of ", stored.chunk_tokens, " of ", form.logits.shape.tokens,
                " tokens at a time\n  workspace ", format_bytes(stored.bytes), "\n");
}

void sample_stored(const Context& context, const StoredLogits& stored, const SampleForm& form,
                   const SampleInputs& in, const SampleOutputs& out, const SampleNumbers* numbers,
                   void* workspace) {
  const HeadShape& s = form.logits.shape;
  cuda::SampleCall call;
  call.logit_bias = data_of<float>(in.logit_bias);
  call.tokens = out.tokens.data();
  call.int64_tokens = form.token_dtype == DType::i64;
  if (!form.greedy) {
    call.key = in.key.defined() ? data_of<std::int64_t>(in.key) : numbers->key.data();
    call.counter = data_of<void>(in.counter);
    call.int64_counter = form.counter_dtype == DType::i64;
    call.temperature = numbers_of(form.temperature, in.temperature, &numbers->temperature);
    call.min_p = numbers_of(form.min_p, in.min_p, &numbers->min_p);
  }
  cuda::ForwardCall& c = call.chunk;
  c.hidden_stride = c.weight_stride = s.dim;
  c.weight = in.weight.data();
  c.bias = data_of<float>(in.bias);
  c.ignore_index = -1;  // tokens are ids
  c.logit_scale = form.logits.logit_scale;
  c.softcap = form.logits.softcap;
  c.workspace = workspace;
  c.stream = context.stream();
  const auto row_bytes = s.dim * static_cast<std::int64_t>(size_of(s.dtype));
  for (std::int64_t first = 0; first < s.tokens; first += stored.chunk_tokens) {
    c.shape = shape_of(form, std::min(stored.chunk_tokens, s.tokens - first));
    c.first_token = first;
    c.hidden = static_cast<const std::byte*>(in.hidden.data()) + first * row_bytes;
    if (out.log_prob.defined()) c.log_prob = static_cast<float*>(out.log_prob.data()) + first;
    cuda::sample_tokens(call);
  }
}

}  // namespace logitless
