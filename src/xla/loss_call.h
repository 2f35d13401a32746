// The parts of a call that several handlers read: its context, the options of a loss, its plan.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/lru_cache.h"
#include "xla/buffers.h"
#include "xla/handler.h"

namespace logitless::xla_handlers {

// Attribute threads: of the CPU.
Context context_of(const Place& place, const Call& call);

Precision precision_of(const Call& call);

// Attributes: the options under their names in the library.
CrossEntropyOptions loss_options(const Call& call);

std::size_t budget_of(const Call& call);

// Returns equal texts for calls of a handler that equal plans can serve. `options`: those that the
// plan depends on, as text.
std::string plan_key(std::string_view handler, const Place& place, const Context& context,
                     const Call& call, const std::string& options);

// Returns the plan of a key from make(), cached in the process: a program's calls repeat.
template <typename Plan, typename Make>
std::shared_ptr<const Plan> remembered_plan(const std::string& key, const Make& make) {
  constexpr std::size_t kMostPlans = 1024;
  static auto* const plans = new LruCache<std::string, Plan>(kMostPlans);  // outlives XLA's threads
  return plans->get(key, make);
}

}  // namespace logitless::xla_handlers
