// The chunk loop on a GPU: forward of a chunk, a function of its tokens, backward. Enqueues and
// returns.
#pragma once

#include "head/device_plan.h"
#include "head/validate.h"
#include "kernels/device_far.h"
#include "logitless/cross_entropy.h"

namespace logitless {

// A function of a chunk's tokens between forward and backward: fills rows and delta (null without
// gradients).
class ChunkFunction {
 public:
  template <typename F>
  ChunkFunction(F&& function)  // NOLINT: implicit on purpose
      : object_(&function),
        call_([](void* object, const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows,
                 float* delta) {
          (*static_cast<std::remove_reference_t<F>*>(object))(chunk, rows, delta);
        }) {}
  void operator()(const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows, float* delta) const {
    call_(object_, chunk, rows, delta);
  }

 private:
  void* object_;
  void (*call_)(void*, const cuda::ForwardCall&, cuda::RowCoefficients*, float*);
};

// One call. Set `all` and the gradients, then run.
class DeviceEngine {
 public:
  // Throws InvalidArgument when plan or workspace do not fit the call.
  DeviceEngine(const Context& context, const LossPlan& plan, const HeadShape& shape,
               const HeadFeatures& features, const Workspace& workspace);

  // Of all tokens; output pointers are of all tokens too, and null where the caller has none.
  cuda::ForwardCall all;

  // On a GPU rows are contiguous, vectors and outputs too.
  void set_matrices(const ConstTensorView& hidden, const ConstTensorView& weight);
  void set_targets(const ConstTensorView& targets, std::int64_t ignore_index);
  void set_gradients(const TensorView& d_hidden, const TensorView& d_weight,
                     const TensorView& d_bias);
  // Of far-field plans, where it is needed: the order, where bounds go (null: nowhere), and which
  // sample of d_weight. The first call with an order on a device copies it there, and waits for
  // that.
  void set_far(const VocabOrder& order, float* bound, std::uint64_t sample_seed);
  // After run, of far-field plans with an audit: the engine of the exact plan of its tokens, and
  // their comparison with what run has left. `tokens` as in run.
  void audit(const Context& context, const LossPlan& plan, const Workspace& workspace,
             const ChunkFunction& tokens) const;
  // i32 outputs are written in place; of i64 ones the pointer is returned, for the caller to fill
  // from the chunks' argmax.
  std::int64_t* set_argmax(const TensorView& view);

  cuda::DeviceStatistics* statistics() const;
  void* loss_workspace() const;
  void run(const ChunkFunction& tokens);

 private:
  cuda::ForwardCall chunk_call(std::int64_t first, std::int64_t count) const;
  void backward(const cuda::ForwardCall& chunk, bool first_chunk);
  void products(const cuda::BlockCall& block, bool first_chunk, bool first_slab);
  cuda::BlockCall block_call(const cuda::ForwardCall& chunk) const;
  cuda::ProductsCall products_call(const cuda::ForwardCall& chunk) const;
  void sum_weights(const cuda::ForwardCall& chunk, const void* rows, std::int64_t count,
                   const float* omega);
  void sum_hidden(const cuda::ForwardCall& chunk);
  void add_many_entries(cuda::ProductsCall& p) const;
  void add_bias_parts(const cuda::BlockCall& block, float* sums) const;
  cuda::GradientOutput hidden_sums(const cuda::ForwardCall& chunk, bool first) const;
  cuda::GradientOutput weight_sums(bool first_chunk) const;
  cuda::RunningSums running_sums(const cuda::BlockCall& block, bool first_chunk) const;
  // device_far.cpp
  void far_backward(const cuda::ForwardCall& chunk, bool first_chunk);
  void set_estimate(const VocabOrder& order);
  void begin_far();
  void sort_chunk(const cuda::ForwardCall& chunk) const;
  void order_chunk(cuda::ForwardCall& chunk) const;
  cuda::TargetOrder token_order() const;
  void* hidden_rows() const { return base_ + layout_.hidden_rows; }
  cuda::FarAudit far_audit() const;
  void far_products(const cuda::BlockCall& block, const cuda::LogitBlock& masses);
  void near_products(const cuda::BlockCall& block, bool first_chunk);
  cuda::TargetOrder target_order() const;
  cuda::TargetEntries target_entries() const;
  void sum_bias(const cuda::BlockCall& block, bool first_chunk);
  void round_chunk(const cuda::ForwardCall& chunk);
  void round_weights();
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  const cuda::DeviceKernel& kernel_;
  HeadFeatures features_;
  DeviceSizes sizes_;
  DeviceLayout layout_;
  std::int64_t layout_tokens_;  // of the plan
  std::byte* base_;
  std::size_t forward_bytes_ = 0;  // of the kernel's workspace
  cuda::FarCall far_;              // of far-field plans
  cuda::FarEstimate estimate_;
  float* bound_output_ = nullptr;
  std::int64_t sample_every_;
  std::uint64_t sample_seed_ = 0;
  cuda::GradientOutput d_hidden_, d_weight_, d_bias_;
  // Where sums go: the outputs themselves, or fp32 in the workspace that is rounded in the end.
  bool round_hidden_ = false;
  bool round_weight_ = false;
};

// A matrix of the device, or a tensor as one; throws unless its rows are contiguous.
RowMatrix device_rows(std::string_view name, const ConstTensorView& view);
// An optional fp32 vector or output of the device; throws unless contiguous.
const float* device_floats(std::string_view name, const ConstTensorView& view);
float* device_floats(std::string_view name, const TensorView& view);

}  // namespace logitless
