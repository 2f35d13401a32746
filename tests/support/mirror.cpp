#include "support/mirror.h"

#include <algorithm>

#include "kernels/device/kernel.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// Returns the bytes from a view's first element to the end of its last.
template <typename View>
std::size_t span_of(const View& view) {
  if (view.numel() == 0) return 0;
  std::int64_t last = 0;
  for (int d = 0; d < view.rank(); ++d) last += (view.size(d) - 1) * view.stride(d);
  return static_cast<std::size_t>(last + 1) * size_of(view.dtype());
}
template <typename View, typename Pointer>
View moved(const View& view, Pointer data) {
  std::int64_t shape[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};
  for (int d = 0; d < view.rank(); ++d) {
    shape[d] = view.size(d);
    strides[d] = view.stride(d);
  }
  const auto rank = static_cast<std::size_t>(view.rank());
  return View(data, view.dtype(), {shape, rank}, {strides, rank});
}

}  // namespace

bool is_device_kernel(const std::string& kernel) {
  for (const cuda::DeviceKernel& k : cuda::device_kernels())
    if (kernel == k.name) return true;
  return false;
}

std::vector<DType> tested_dtypes(const std::string& kernel) {
  std::vector<DType> dtypes = {DType::f32, DType::bf16};
  if (is_device_kernel(kernel)) dtypes.push_back(DType::f16);
  std::erase_if(dtypes, [&](DType dtype) {
    HeadSpec spec;
    spec.dim = 8;  // a width that every kernel takes
    spec.dtype = dtype;
    return !accepts(kernel, spec);
  });
  return dtypes;
}

DType narrow_dtype(const std::string& kernel) {
  const std::vector<DType> dtypes = tested_dtypes(kernel);
  return std::ranges::count(dtypes, DType::bf16) > 0 ? DType::bf16 : DType::f16;
}

Context make_context(const std::string& kernel, int threads) {
  ContextOptions options;
  options.kernel = kernel;
  if (is_device_kernel(kernel)) {
    options.device = DeviceKind::cuda;
  } else {
    options.threads = threads;
  }
  return Context(options);
}

void* Mirror::upload(const void* data, std::size_t bytes) {
  auto memory = std::make_unique<cuda::DeviceMemory>(bytes);
  if (bytes > 0) cuda::copy_to_device(memory->data(), data, bytes, nullptr);
  copies_.push_back({std::move(memory), nullptr, bytes});
  return copies_.back().memory->data();
}

ConstTensorView Mirror::in(const ConstTensorView& view) {
  if (!device_ || !view.defined() || view.data() == nullptr) return view;
  return moved(view, static_cast<const void*>(upload(view.data(), span_of(view))));
}

TensorView Mirror::out(const TensorView& view) {
  if (!device_ || !view.defined() || view.data() == nullptr) return view;
  void* const there = upload(view.data(), span_of(view));
  copies_.back().host = view.data();
  return moved(view, there);
}

CrossEntropyInputs Mirror::in(const CrossEntropyInputs& inputs) {
  CrossEntropyInputs to = inputs;
  for (ConstTensorView* view : {&to.hidden, &to.weight, &to.targets, &to.bias, &to.class_weight,
                                &to.token_weight, &to.target_weight, &to.grad_losses})
    *view = in(*view);
  return to;
}

CrossEntropyOutputs Mirror::out(const CrossEntropyOutputs& outputs) {
  CrossEntropyOutputs to = outputs;
  for (TensorView* view :
       {&to.loss, &to.d_hidden, &to.d_weight, &to.d_bias, &to.lse, &to.target_logit, &to.log_prob,
        &to.entropy, &to.argmax, &to.d_hidden_bound})
    *view = out(*view);
  return to;
}

void Mirror::finish() {
  if (!device_) return;
  cuda::synchronize(nullptr);
  for (const Copy& copy : copies_) {
    if (copy.host != nullptr && copy.bytes > 0)
      cuda::copy_to_host(copy.host, copy.memory->data(), copy.bytes, nullptr);
  }
}

}  // namespace logitless::test
