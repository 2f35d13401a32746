// The chunk loop on a GPU: forward of a chunk, a function of its tokens, backward. Enqueues and
// returns.
#pragma once

#include "head/device_plan.h"
#include "head/validate.h"
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
  cuda::GradientOutput d_hidden_, d_weight_, d_bias_;
  // Where sums go: the outputs themselves, or fp32 in the workspace that is rounded in the end.
  bool round_hidden_ = false;
  bool round_weight_ = false;
};

// An optional fp32 vector or output of the device; throws unless contiguous.
const float* device_floats(std::string_view name, const ConstTensorView& view);
float* device_floats(std::string_view name, const TensorView& view);

}  // namespace logitless
