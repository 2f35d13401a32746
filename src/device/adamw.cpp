#include "kernels/device/adamw.h"

#include <cmath>
#include <vector>

#include "core/check.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"

namespace logitless {
namespace {

static_assert(sizeof(DeviceAdamWRates) == sizeof(cuda::AdamWRates));
static_assert(sizeof(DeviceAdamWReport) == sizeof(cuda::AdamWReport));
static_assert(sizeof(DeviceAdamWTotals) == sizeof(cuda::AdamWTotals));

cuda::AdamWTensor checked(const DeviceAdamWTensor& t, std::size_t index) {
  require(t.count >= 0, "tensor ", index, ": count: expected at least 0, got ", t.count);
  const auto check_memory = [&](const char* name, const void* data) {
    require(data != nullptr || t.count == 0, "tensor ", index, ": ", name, ": null");
    require(reinterpret_cast<std::uintptr_t>(data) % 16 == 0, "tensor ", index, ": ", name,
            ": expected memory aligned to 16 bytes");
  };
  check_memory("value", t.value);
  check_memory("gradient", t.gradient);
  check_memory("m", t.m);
  check_memory("v", t.v);
  if (t.rounded != nullptr) check_memory("rounded", t.rounded);
  return {t.value, t.gradient, t.m, t.v, t.rounded, t.count, t.decay};
}

}  // namespace

struct DeviceAdamW::State {
  DeviceAdamWOptions options;
  DeviceBuffer memory;
  cuda::AdamWCall call;

  cuda::AdamWCall on(void* stream) const {
    cuda::AdamWCall now = call;
    now.stream = stream;
    return now;
  }
};

std::size_t DeviceAdamW::bytes(std::span<const std::int64_t> counts) {
  return cuda::adamw_offsets(counts).end;
}

DeviceAdamW::DeviceAdamW(const Context& context, const DeviceAdamWOptions& options,
                         std::span<const DeviceAdamWTensor> tensors) {
  std::vector<cuda::AdamWTensor> table;
  std::vector<std::int64_t> counts;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    table.push_back(checked(tensors[t], t));
    counts.push_back(tensors[t].count);
  }
  auto state = std::make_shared<State>();
  state->options = options;
  cuda::AdamWCall& call = state->call;
  call.places = cuda::adamw_offsets(counts);
  state->memory = DeviceBuffer(context, call.places.end);
  call.memory = state->memory.data();
  call.beta1 = static_cast<float>(options.beta1);
  call.beta2 = static_cast<float>(options.beta2);
  call.keep1 = static_cast<float>(1.0 - options.beta1);
  call.keep2 = static_cast<float>(1.0 - options.beta2);
  call.epsilon = static_cast<float>(options.epsilon);
  call.clip = options.clip;
  const std::vector<std::byte> tables = cuda::adamw_tables(table);
  cuda::copy_to_device(call.memory, tables.data(), tables.size(), nullptr);
  cuda::adamw_reset(call);
  cuda::synchronize(nullptr);
  state_ = std::move(state);
}

DeviceAdamWRates DeviceAdamW::rates(std::int64_t step, double rate) const {
  const DeviceAdamWOptions& o = state_->options;
  const auto correction = [&](double beta) {
    return 1.0 - std::pow(beta, static_cast<double>(step));
  };
  return {static_cast<float>(rate / correction(o.beta1)),
          static_cast<float>(1.0 / correction(o.beta2)),
          static_cast<float>(1.0 - rate * o.weight_decay)};
}

void DeviceAdamW::first_loss(const float* loss, void* stream) const {
  cuda::adamw_loss(state_->on(stream), loss, false);
}
void DeviceAdamW::add_loss(const float* loss, void* stream) const {
  cuda::adamw_loss(state_->on(stream), loss, true);
}
void DeviceAdamW::step(const DeviceAdamWRates* rates, DeviceAdamWReport* report,
                       void* stream) const {
  cuda::adamw_step(state_->on(stream), reinterpret_cast<const cuda::AdamWRates*>(rates),
                   reinterpret_cast<cuda::AdamWReport*>(report));
}
void DeviceAdamW::totals(const DeviceAdamWRates* rates, DeviceAdamWTotals* totals,
                         void* stream) const {
  cuda::adamw_totals(state_->on(stream), reinterpret_cast<const cuda::AdamWRates*>(rates),
                     reinterpret_cast<cuda::AdamWTotals*>(totals));
}
void DeviceAdamW::step_of_ranks(const DeviceAdamWRates* rates, const DeviceAdamWTotals* of_all,
                                int ranks, DeviceAdamWReport* report, void* stream) const {
  cuda::adamw_step_of_ranks(state_->on(stream), reinterpret_cast<const cuda::AdamWRates*>(rates),
                            reinterpret_cast<const cuda::AdamWTotals*>(of_all), ranks,
                            reinterpret_cast<cuda::AdamWReport*>(report));
}
void DeviceAdamW::reset(void* stream) const { cuda::adamw_reset(state_->on(stream)); }
void DeviceAdamW::round(void* stream) const { cuda::adamw_round(state_->on(stream)); }

}  // namespace logitless
