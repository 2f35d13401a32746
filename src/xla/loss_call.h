// The parts of a call that several handlers read: its context, the options of a loss, its buffers.
#pragma once

#include "xla/buffers.h"
#include "xla/handler.h"

namespace logitless::xla_handlers {

// Attribute threads: of the CPU.
Context context_of(const Place& place, const Call& call);

Precision precision_of(const Call& call);

// Attributes: the options under their names in the library.
CrossEntropyOptions loss_options(const Call& call);

// Reads the buffers of a loss, and further ones by their slots.
void read_loss(Call& call, CrossEntropyInputs& in, CrossEntropyOutputs& out,
               Slots<ConstTensorView> inputs = {}, Slots<TensorView> outputs = {});

}  // namespace logitless::xla_handlers
