#include "xla/loss_call.h"

#include <cstdint>
#include <utility>

#include "head/tensor_roles.h"

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

void read_loss(Call& call, CrossEntropyInputs& in, CrossEntropyOutputs& out,
               Slots<ConstTensorView> inputs, Slots<TensorView> outputs) {
  each_loss_input(listed_in(inputs), in);
  each_loss_output(listed_in(outputs), out);
  call.read_inputs(inputs);
  call.read_outputs(outputs);
}

}  // namespace logitless::xla_handlers
