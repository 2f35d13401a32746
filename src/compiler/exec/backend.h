// What runs lowered programs on a machine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "compiler/plan/program.h"
#include "logitless/far_field.h"

namespace logitless::ir {

// A program made ready for the current device.
class Prepared {
 public:
  virtual ~Prepared() = default;

  // Backend::run's pointers, of the device. Enqueues on the stream; neither waits nor allocates.
  virtual void run(std::span<const void* const> parameters, std::span<void* const> results,
                   std::byte* arena, void* stream) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // parameters and results in the order of the program; arena of arena_bytes, aligned as the
  // program says. Several threads may run one program, each in an arena of its own. `far`, or null,
  // decides what far_head() does. Throws Unsupported where there is none.
  virtual void run(const Program& program, std::span<const void* const> parameters,
                   std::span<void* const> results, std::byte* arena, FarFieldHead* far) const = 0;

  // The plan of the program's audited steps under `far`. Throws as run() does.
  virtual LossPlan far_plan(const Program& program, const FarFieldHead& far) const = 0;

  // The program must outlive what is made. Throws InvalidArgument where run() is for the host.
  virtual std::unique_ptr<const Prepared> prepare(const Program& program,
                                                  const Context& context) const = 0;
};

// The one head of the program that may take the far field. Throws Unsupported, saying why there is
// none.
const HeadRun& far_head(const Program& program);

}  // namespace logitless::ir
