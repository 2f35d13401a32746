#include "head.h"

#include <bit>

#include "logitless/parallel.h"

namespace log_bilinear {
namespace {

using logitless::DType;

// Rounds to bf16, nearest, ties to even. Weights that are not finite stay so.
std::uint16_t round_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

void round_all(int threads, const float* from, std::int64_t count, std::uint16_t* to) {
  constexpr std::int64_t kGrain = 1 << 14;
  logitless::parallel_ranges(threads, count, kGrain, [=](std::int64_t i, std::int64_t last) {
    for (; i < last; ++i) to[i] = round_to_bf16(from[i]);
  });
}

}  // namespace

Head::Head(const logitless::Context& context, const HeadShape& shape, std::size_t memory_budget,
           const FarField& far, logitless::MemoryMeter* meter)
    : context_(context),
      shape_(shape),
      best_(static_cast<std::size_t>(shape.batch) * sizeof(std::int32_t), meter),
      train_plan_(plan(true, memory_budget)),
      evaluate_plan_(plan(false, memory_budget)),
      evaluate_space_(context, evaluate_plan_) {
  if (far.error > 0.0) {
    logitless::FarFieldOptions options;
    options.error = far.error;
    options.accuracy = far.both ? logitless::Accuracy::far_both : logitless::Accuracy::far_backward;
    options.memory_budget = memory_budget;
    far_ = std::make_unique<logitless::FarFieldHead>(context, options);
  } else {
    train_space_ = logitless::Workspace(context, train_plan_);
  }
  if (shape.dtype != DType::f32) {
    const auto dim = static_cast<std::size_t>(shape.dim);
    rounded_weight_ = logitless::Buffer(static_cast<std::size_t>(shape.vocab) * dim * 2, meter);
    rounded_hidden_ = logitless::Buffer(static_cast<std::size_t>(shape.batch) * dim * 2, meter);
  }
}

logitless::LossPlan Head::plan(bool gradients, std::size_t memory_budget) {
  const logitless::HeadShape shape{shape_.batch, shape_.dim, shape_.vocab, shape_.dtype};
  logitless::HeadFeatures features;
  features.bias = true;
  features.argmax = !gradients;
  features.d_hidden = gradients;
  features.d_weight = gradients;
  features.d_bias = gradients;
  logitless::PlanRequest request;
  request.device = context_.device();
  request.memory_budget = memory_budget;
  return logitless::plan_head(shape, features, request);
}

void Head::set_weight(const float* weight) {
  weight_ = weight;
  if (shape_.dtype == DType::f32) return;
  round_all(context_.threads(), weight, shape_.vocab * shape_.dim,
            rounded_weight_.as<std::uint16_t>());
  weight_ = rounded_weight_.data();
}

logitless::CrossEntropyInputs Head::inputs(const float* hidden, const std::int32_t* targets,
                                           std::int64_t tokens, const float* bias) {
  const void* rows = hidden;
  if (shape_.dtype != DType::f32) {
    round_all(context_.threads(), hidden, tokens * shape_.dim, rounded_hidden_.as<std::uint16_t>());
    rows = rounded_hidden_.data();
  }
  logitless::CrossEntropyInputs in;
  in.hidden = {rows, shape_.dtype, {tokens, shape_.dim}};
  in.weight = {weight_, shape_.dtype, {shape_.vocab, shape_.dim}};
  in.targets = {targets, DType::i32, {tokens}};
  in.bias = {bias, DType::f32, {shape_.vocab}};
  return in;
}

double Head::train(const float* hidden, const std::int32_t* targets, std::int64_t tokens,
                   const float* bias, const HeadGradients& gradients) {
  float loss = 0.0f;
  logitless::CrossEntropyOutputs out;
  out.loss = {&loss, DType::f32, {}};
  out.d_hidden = {gradients.hidden, DType::f32, {tokens, shape_.dim}};
  out.d_weight = {gradients.weight, DType::f32, {shape_.vocab, shape_.dim}};
  out.d_bias = {gradients.bias, DType::f32, {shape_.vocab}};
  const logitless::CrossEntropyInputs in = inputs(hidden, targets, tokens, bias);
  if (far_ != nullptr) {
    far_->step(options_, in, out);
  } else {
    logitless::cross_entropy(context_, train_plan_, options_, in, out, train_space_);
  }
  return loss;
}

logitless::LossStatistics Head::evaluate(const float* hidden, const std::int32_t* targets,
                                         std::int64_t tokens, const float* bias) {
  float loss = 0.0f;
  logitless::CrossEntropyOutputs out;
  out.loss = {&loss, DType::f32, {}};
  out.argmax = {best_.data(), DType::i32, {tokens}};
  return logitless::cross_entropy(context_, evaluate_plan_, options_,
                                  inputs(hidden, targets, tokens, bias), out, evaluate_space_);
}

}  // namespace log_bilinear
