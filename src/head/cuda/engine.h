// The chunk loop on a GPU: forward of a chunk, a function of its tokens, backward. Enqueues and
// returns.
#pragma once

#include <functional>

#include "head/cuda/layout.h"
#include "head/head_call.h"
#include "kernels/device/far.h"

namespace logitless::cuda {

// Non-owning function of a chunk's tokens between forward and backward: a loss, or the cotangents
// of the outputs. It sets their gradient coefficients, `rows` and `delta` (null without gradients).
class ChunkFunction {
 public:
  template <typename F>
  ChunkFunction(F&& function)  // NOLINT: implicit on purpose
      : object_(&function),
        call_([](void* object, const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
          (*static_cast<std::remove_reference_t<F>*>(object))(chunk, rows, delta);
        }) {}
  void operator()(const ForwardCall& chunk, RowCoefficients* rows, float* delta) const {
    call_(object_, chunk, rows, delta);
  }

 private:
  void* object_;
  void (*call_)(void*, const ForwardCall&, RowCoefficients*, float*);
};

// Runs one call, which must outlive the engine.
class Engine {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or the kernels do not support
  // a tensor's strides. The first call of a far-field plan with an order on a device copies the
  // order there, and waits for the copy.
  explicit Engine(const HeadCall& call);

  // Operands of all tokens. Output pointers are those of the caller, null if not requested.
  ForwardCall all;

  // Audits after run of a far-field plan: an engine runs the exact plan of the audited tokens, and
  // the results are compared.
  void audit(const ChunkFunction& set_coefficients) const;
  // Returns the i64 argmax that the caller fills from the chunks' i32 ones; null if there is none.
  std::int64_t* int64_argmax() const { return int64_argmax_; }

  // Returns the denominator of a mean over the ranks of sharded tokens and the replicas; null if
  // the local tokens are all. Collective, like finish_sharded, which replaces finish_loss for
  // sharded tokens.
  const double* global_denominator(const LossCall& loss) const;
  void finish_sharded(const LossCall& loss) const;
  // All-gathers the far field's sums of all ranks, after the audit, for far_statistics.
  void publish_far_sums() const;

  DeviceStatistics* statistics() const;
  void* loss_workspace() const;
  void run(const ChunkFunction& set_coefficients);
  // Split `run` into two calls, each with its own engine, for a dense plan of all tokens at once.
  // The block of exponentials and the outputs stay in the workspace in between. The outputs are
  // those of `all`; null ones are not requested.
  ForwardCall forward_saved();
  void backward_saved(const ChunkFunction& set_coefficients);

 private:
  // A chunk of a vocabulary-parallel call: tokens [first, first + count), of each rank if tokens
  // are sharded.
  struct ShardChunk {
    std::int64_t first = 0, count = 0;
    int buffer = 0;  // index of its input buffers
  };

  // Initializes the members common to both kinds of engine; sets no outputs and no gradients.
  struct OperandsAlone {};
  Engine(const HeadCall& call, OperandsAlone);
  // The engine of an audit: the tokens of `all` in the order of audit.rows.
  Engine(const HeadCall& call, const Engine& far, const FarAudit& audit);
  void require_fit() const;
  void set_operands();
  void set_outputs();
  void set_gradients();
  void clear_weights() const;
  // Returns the call for tokens [first, first + count) of `of`; outputs that it lacks are in the
  // workspace.
  ForwardCall chunk_call(const ForwardCall& of, std::int64_t first, std::int64_t count) const;
  ForwardCall chunk_call(std::int64_t first, std::int64_t count) const {
    return chunk_call(all, first, count);
  }
  VocabRanges aliased_ranges() const;
  void backward(const ForwardCall& chunk, bool first_chunk);
  void set_vocab_block(BlockCall& block) const;
  void products(const BlockCall& block, bool first_chunk, bool first_vocab_block);
  BlockCall block_call(const ForwardCall& chunk) const;
  GradientGemmsCall gemms_call(const ForwardCall& chunk) const;
  void sum_weights(const ForwardCall& chunk, const void* rows, std::int64_t count,
                   const float* logit_weights);
  void sum_hidden(const ForwardCall& chunk);
  void add_many_entries(GradientGemmsCall& p) const;
  void add_bias_parts(const BlockCall& block, float* sums) const;
  GradientOutput hidden_sums(const ForwardCall& chunk, bool first) const;
  GradientOutput weight_sums(bool first_chunk) const;
  RunningSums running_sums(const BlockCall& block, bool first_chunk) const;
  // Implemented in far_engine.cpp.
  void set_far();
  void far_forward(const ForwardCall& chunk);
  void far_backward(const ForwardCall& chunk, bool first_chunk);
  void set_estimate(const VocabOrder& order);
  void begin_far();
  void sum_all_weights();
  void use_own_order();
  void use_arranged_order(const ForwardCall& chunk);
  void forward_selected_tiles(const ForwardCall& chunk, float* target_logits);
  void sort_chunk(const ForwardCall& chunk) const;
  void order_chunk(ForwardCall& chunk) const;
  TargetOrder token_order() const;
  void* hidden_rows() const { return base_ + layout_.far.hidden_rows; }
  FarAudit far_audit() const;
  // Implemented in shard_engine.cpp.
  bool sharded() const { return call_.shard.sharded(); }
  // A rank without tokens has no d_hidden, but partial sums for the other ranks.
  bool wants_hidden() const {
    return d_hidden_.data != nullptr || (sharded() && features_.d_hidden);
  }
  const CommStream& comm() const { return *call_.shard.comm_stream; }
  Stream comm_stream() const { return comm().stream.get(); }
  // Returns whether this rank's shard has no vocabulary entries. It then runs no kernels over the
  // vocabulary, but all collectives.
  bool empty_shard() const { return call_.shard.vocab.rows() == 0; }
  void require_aligned_operands() const;
  void require_same_tokens() const;
  // Marks that no rank has a bad target yet. Kernels do so themselves, except where they do not
  // read the caller's targets.
  void reset_bad_targets() const;
  void run_sharded(const ChunkFunction& set_coefficients);
  void run_chunks(const ChunkFunction& set_coefficients);
  // Returns whether a chunk's inputs are not the caller's tensors but copies, of the tokens of all
  // ranks or in the far field's order.
  bool assembles_chunks() const { return call_.shard.tokens_sharded || sizes_.far; }
  ForwardCall prefetch_chunk(const ShardChunk& of);
  ForwardCall assemble_chunk(const ShardChunk& of) const;
  void merge_target_logits(ForwardCall& chunk, int buffer) const;
  void forward_sharded(ForwardCall& chunk);
  void set_local_coefficients(const ForwardCall& chunk, const ShardChunk& of,
                              const ChunkFunction& set_coefficients) const;
  void copy_local_outputs(const ForwardCall& own) const;
  void backward_sharded(const ForwardCall& chunk, const ShardChunk& of);
  bool gathers_rounded_sums() const;
  void reduce_hidden(const ShardChunk& of, std::int64_t tokens) const;
  void finish_hidden();
  // Implemented in shard_far_engine.cpp.
  std::uint64_t common_order() const;
  void begin_shared_far();
  ForwardCall call_in_local_order(const ForwardCall& chunk) const;
  void forward_local(const ForwardCall& chunk, bool first_chunk);
  void exchange_totals(const ForwardCall* local, std::int64_t tokens) const;
  void forward_shared_far(ForwardCall& chunk, bool first_chunk);
  ForwardCall call_of_local_tokens(const ShardChunk& of) const;
  void backward_local(const ForwardCall& chunk, const ShardChunk& of);
  void exchange_bounds(const ForwardCall& chunk, const ShardChunk& of) const;
  void finish_far_hidden(const float* sums, const ShardChunk& of) const;
  // Implemented in gathered_engine.cpp.
  struct SliceBlock;
  bool gathered() const { return call_.shard.gathered != nullptr; }
  void run_gathered(const ChunkFunction& set_coefficients);
  void gather_bias() const;
  void gather_slice(std::int64_t slice) const;
  template <typename F>
  void each_block(std::int64_t slice, const F& function);
  SliceBlock block_of(int rank, std::int64_t slice) const;
  bool joins_ranks(std::int64_t slice) const;
  SliceBlock joined_block(std::int64_t slice) const;
  void set_block(ForwardCall& chunk, const SliceBlock& block) const;
  void forward_block(const SliceBlock& block, bool first) const;
  void backward_block(const ForwardCall& tokens, const SliceBlock& block, std::byte* sums_of);
  void exchange_sums(std::int64_t rows, std::byte* sums) const;
  void comm_stream_waits() const;
  void join_comm_stream() const;
  void with_exchange_memory(const std::function<void()>& run) const;
  std::byte* slice_at(std::int64_t slice) const;
  std::byte* whole_at(std::int64_t slice) const;
  std::byte* sums_at(std::int64_t slice) const;
  void run_slices(const ChunkFunction& set_coefficients);
  void send_sums(std::int64_t slice) const;
  void add_sums(std::int64_t slice, const GradientOutput& d_weight,
                const GradientOutput& d_bias) const;
  void far_gemms(const BlockCall& block, const LogitBlock& masses);
  GradientGemmsCall near_call(const ForwardCall& chunk, bool first_chunk, std::int64_t position);
  void near_gemms(const BlockCall& block, bool first_chunk);
  TargetOrder target_order() const;
  TargetEntries target_entries() const;
  void sum_bias(const BlockCall& block, bool first_chunk);
  void round_chunk(const ForwardCall& chunk);
  void round_weights();
  template <typename T>
  T* at(std::size_t offset) const {
    std::byte* const base = offset < layout_.exchange ? base_ : exchange_;
    return reinterpret_cast<T*>(base + offset);
  }

  const HeadCall& call_;
  const DeviceKernel& kernel_;
  const HeadFeatures features_;  // features of the kernel's calls
  const Layout& layout_;
  const Sizes& sizes_;
  const std::int64_t layout_tokens_;  // tokens of the plan
  std::byte* base_;
  std::byte* exchange_;  // base of the offsets from layout_.exchange on
  FarCall far_;          // with far-field plans
  DeviceOrder order_;    // the call's order; far_ has it or an arrangement of it
  FarEstimate estimate_;
  ForwardCall local_;           // vocabulary-parallel far field: the chunk in the local order
  std::int64_t far_chunk_ = 0;  // chunk of far_'s sample
  float* bound_output_ = nullptr;
  bool last_chunk_ = true;  // last chunk of the call
  // Chunk whose d_hidden is being reduced over the ranks; count 0: none.
  ShardChunk pending_;
  std::int64_t* int64_argmax_ = nullptr;
  GradientOutput d_hidden_, d_weight_, d_bias_;
  // If set, sums go to fp32 buffers of the workspace, which are rounded into the output at the end.
  bool round_hidden_ = false;
  bool round_weight_ = false;
  // With gathered weights: whether d_hidden already has sums of other slices, and the sums of
  // d_bias.
  bool adds_hidden_ = false;
  float* bias_sums_ = nullptr;
};

}  // namespace logitless::cuda
