#include "head/cuda/engine.h"

#include <algorithm>

#include "head/cuda/exchange.h"
#include "head/cuda/vocab_parallel.h"

namespace logitless::cuda {

Engine::Engine(const HeadCall& call) : run_(call) {
  run_.bind_gradients();
  run_.bind_outputs();
  if (run_.sizes.far) far_.emplace(run_);
  if (run_.lists()) list_.emplace(run_);
  if (run_.sharded()) require_aligned_operands(run_);
}

// Gathers the audited tokens.
Engine::Engine(const HeadCall& call, const Run& far, const FarAudit& audit) : run_(call) {
  ForwardCall& all = run_.all;
  const ForwardCall own = all;
  auto* const tokens = far.at<std::byte>(far.layout.audit.tokens);
  all = far.all;
  all.shape = own.shape;
  all.bad_target = own.bad_target;
  all.workspace = own.workspace;
  all.rows = audit.rows;
  list_audited(audit, all.stream);
  gather_tokens(all, far.all.hidden, far.all.hidden_stride, tokens);
  all.hidden = tokens;
  all.hidden_stride = all.shape.dim;
  all.log_prob = all.target_logit = all.entropy = nullptr;
  all.argmax = nullptr;
  all.lse = far.at<float>(far.layout.audit.exact_lse);
  run_.d_hidden = {far.at<std::byte>(far.layout.audit.exact), all.shape.dim, DType::f32, false};
}

void Engine::prepare() const {
  if (run_.kernel.prepare != nullptr) run_.kernel.prepare();
}

void Engine::run(const ChunkFunction& set_coefficients) {
  prepare();
  if (run_.gathered()) return run_weight_gathered(run_, set_coefficients);
  if (run_.sharded()) return VocabParallel(run_, far_ ? &*far_ : nullptr).run(set_coefficients);
  run_chunks(set_coefficients);
}

ForwardCall Engine::chunk_call(std::int64_t first, std::int64_t count) const {
  if (far_) return far_->chunk_call(first, count);
  return list_ ? list_->chunk_call(first, count) : run_.chunk_call(first, count);
}

void Engine::forward(const ForwardCall& chunk) {
  if (far_) return far_->forward(chunk);
  if (list_) list_->gather(chunk);
  run_.widen_hidden(chunk);
  run_.kernel.forward(chunk);
}

void Engine::spread_hidden() const {
  if (list_ && !sums_hidden(run_.all.shape.vocab, run_.features, run_.sizes))
    list_->spread_hidden();
}

void Engine::run_chunks(const ChunkFunction& set_coefficients) {
  const Backward backward(run_);
  const bool gradients = run_.wants_gradients();
  const std::int64_t total = run_.all.shape.tokens;
  std::int64_t first = 0;
  if (far_) far_->begin();
  if (list_) list_->begin();
  do {  // runs once even without tokens, so that outputs are cleared
    const std::int64_t most = first == 0 ? run_.sizes.first_chunk() : run_.sizes.chunk;
    const std::int64_t count = std::min(std::max<std::int64_t>(most, 1), total - first);
    const ForwardCall chunk = chunk_call(first, count);
    const ChunkPlace place{.first = first == 0, .last = first + count == total};
    forward(chunk);
    set_coefficients(chunk, run_.coefficients(first), run_.delta(first));
    if (far_ || list_) scatter_outputs(chunk, run_.all);
    if (gradients && total > 0) far_ ? far_->backward(chunk, place) : backward.chunk(chunk, place);
    first += count;
  } while (first < total);
  if (run_.sizes.weight_apart) run_weight_pass();
  if (gradients && total > 0) backward.round_weights();
  spread_hidden();
  if (total == 0) run_.clear_weights();
}

void Engine::run_weight_pass() const {
  const Backward backward(run_, Backward::Part::weight);
  const std::int64_t total = run_.all.shape.tokens;
  for (std::int64_t vocab_id = 0; vocab_id < run_.all.shape.vocab;
       vocab_id += run_.sizes.vocab_block) {
    for (std::int64_t first = 0; first < total; first += run_.sizes.chunk) {
      const std::int64_t count = std::min(run_.sizes.chunk, total - first);
      const ForwardCall chunk = run_.chunk_call(first, count);
      run_.widen_hidden(chunk);
      backward.vocab_block(chunk, vocab_id, {.first = first == 0, .last = first + count == total});
    }
  }
}

ForwardCall Engine::forward_saved() {
  prepare();
  if (list_) list_->begin();
  const ForwardCall chunk = chunk_call(0, run_.all.shape.tokens);
  forward(chunk);
  return chunk;
}

void Engine::backward_saved(const ChunkFunction& set_coefficients) {
  prepare();
  if (run_.all.shape.tokens == 0) return run_.clear_weights();
  const ForwardCall chunk = chunk_call(0, run_.all.shape.tokens);
  if (list_) list_->gather(chunk);  // an earlier backward may have scaled them
  set_coefficients(chunk, run_.coefficients(), run_.delta());
  const Backward backward(run_);
  backward.chunk(chunk, {});
  backward.round_weights();
  spread_hidden();
}

void Engine::audit(const ChunkFunction& set_coefficients) const {
  if (run_.sizes.audited == 0) return;
  const FarAudit a = far_->audit();
  if (a.tokens == 0 && !run_.call.shard.tokens_sharded) return;
  const LossPlan& plan = *run_.call.plan->audit;
  const Workspace rest(run_.audit_workspace(), plan.workspace_bytes());
  HeadCall call = run_.call;
  call.plan = &plan;
  call.workspace = &rest;
  call.shape = run_.call.plan->shape;
  call.shape.tokens = a.tokens;
  call.features = plan.features;
  Engine exact(call, run_, a);
  exact.run(set_coefficients);
  compare_audited(exact.run_.all, a, run_.at<float>(run_.layout.audit.exact), far_->call().sums);
}

}  // namespace logitless::cuda
