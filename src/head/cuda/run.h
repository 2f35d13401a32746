// One call of the head on a GPU, bound to its plan's memory: checked operands and outputs, and the
// calls of its chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "head/cuda/layout.h"
#include "head/head_call.h"

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

// Says whether a chunk is the first or the last one of its call.
struct ChunkPlace {
  bool first = true, last = true;
};

// Advances a pointer by a number of elements of the dtype.
template <typename Pointer>
Pointer advance(Pointer data, std::int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

// Refers to the call, which must outlive it.
class Run {
 public:
  // Binds the operands alone: no outputs and no gradients. Throws InvalidArgument if plan or
  // workspace do not fit the call.
  explicit Run(const HeadCall& call);
  void bind_gradients();
  void bind_outputs();

  const HeadCall& call;
  const DeviceKernel& kernel;
  const HeadFeatures features;  // of the kernel's calls
  const Layout& layout;
  const Sizes& sizes;
  // Operands of all tokens. Output pointers are those of the caller, null if not requested.
  ForwardCall all;
  GradientOutput d_hidden, d_weight, d_bias;  // those of the caller
  float* d_hidden_bound = nullptr;
  // The i64 argmax that the caller fills from the chunks' i32 ones; null if there is none.
  std::int64_t* int64_argmax = nullptr;

  template <typename T>
  T* at(std::size_t offset) const {
    std::byte* const base = offset < layout.exchange ? base_ : exchange_;
    return reinterpret_cast<T*>(base + offset);
  }
  // Returns the workspace of the audit's plan, behind this one's.
  std::byte* audit_workspace() const {
    return base_ + (exchange_ == base_ ? layout.total : layout.exchange);
  }
  DeviceStatistics* statistics() const { return at<DeviceStatistics>(layout.statistics); }
  void* loss_workspace() const { return at<std::byte>(layout.loss); }
  // Returns where a ChunkFunction puts the coefficients of the chunk from token `first` on; null
  // without gradients.
  RowCoefficients* coefficients(std::int64_t first = 0) const;
  float* delta(std::int64_t first = 0) const;

  bool wants_gradients() const { return cuda::wants_gradients(features); }
  bool sharded() const { return call.shard.sharded(); }
  bool gathered() const { return call.shard.gathered != nullptr; }
  // Returns whether chunks take the tokens in the order of a list. Audited tokens are in the order
  // of all.rows, which has those with a target first already.
  bool lists() const { return layout.list.wanted && all.rows == nullptr; }
  // Returns whether this rank's shard has no vocabulary entries. It then runs no kernels over the
  // vocabulary, but all collectives.
  bool empty_shard() const { return call.shard.vocab.rows() == 0; }
  // A rank without tokens has no d_hidden, but partial sums for the other ranks.
  bool wants_hidden() const { return d_hidden.data != nullptr || (sharded() && features.d_hidden); }
  std::int64_t plan_tokens() const { return call.plan->shape.tokens; }

  // Returns the call for tokens [first, first + count) of `of`; outputs that it lacks are in the
  // workspace.
  ForwardCall chunk_call(const ForwardCall& of, std::int64_t first, std::int64_t count) const;
  ForwardCall chunk_call(std::int64_t first, std::int64_t count) const {
    return chunk_call(all, first, count);
  }
  // Returns the call for positions [first, first + count) of an order of tokens, `rows` [all
  // tokens]. Outputs are in the workspace; scatter_outputs brings them to the caller's.
  ForwardCall call_by_rows(const std::int32_t* rows, std::int64_t first, std::int64_t count) const;
  // Writes the hidden states of a chunk_call in f32, where they are of 16 bits beside an f32
  // weight.
  void widen_hidden(const ForwardCall& chunk) const;
  // Clears the gradients of a call without tokens.
  void clear_weights() const;

 private:
  void require_fit() const;
  void bind_vocab();
  VocabRanges aliased_ranges() const;
  // Returns the number, in the workspace, of the chunk from token `first` on.
  std::int64_t chunk_index(std::int64_t first) const {
    return sizes.weight_apart ? first / sizes.chunk : 0;
  }

  std::byte* base_;
  std::byte* exchange_;  // base of the offsets from layout.exchange on
};

}  // namespace logitless::cuda
