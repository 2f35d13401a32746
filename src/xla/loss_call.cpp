#include "xla/loss_call.h"

#include <cstdint>
#include <utility>

namespace logitless::xla_handlers {

Context context_of(const Place& place, const Call& call) {
  ContextOptions options;
  options.device = place.device;
  options.device_index = place.device_index;
  options.stream = place.stream;
  if (place.device == DeviceKind::cpu)
    options.threads = static_cast<int>(call.attribute<std::int64_t>("threads"));
  return Context(std::move(options));
}

Precision precision_of(const Call& call) {
  return static_cast<Precision>(call.attribute<std::int64_t>("precision"));
}

CrossEntropyOptions loss_options(const Call& call) {
  CrossEntropyOptions options;
  options.reduction = static_cast<Reduction>(call.attribute<std::int64_t>("reduction"));
  options.ignore_index = call.attribute<std::int64_t>("ignore_index");
  for (const LossNumber<float>& number : loss_numbers(options))
    *number.value = call.attribute<float>(number.name);
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  options.precision = precision_of(call);
  if (const auto normalizer = call.attribute<double>("normalizer"); normalizer != 0.0)
    options.normalizer = normalizer;
  return options;
}

std::size_t budget_of(const Call& call) {
  return static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
}

// Plans on a GPU have loaded kernels, so the key names the device.
std::string plan_key(std::string_view handler, const Place& place, const Context& context,
                     const Call& call, const std::string& options) {
  return concat(handler, " ", call.signature(), " ", options, " budget ", budget_of(call),
                " device ", static_cast<int>(place.device), " ", place.device_index, " threads ",
                context.threads(), " kernel ", context.device().kernel);
}

}  // namespace logitless::xla_handlers
