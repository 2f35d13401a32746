#include "compiler/exec/cpu/backend.h"

#include "compiler/exec/cpu/run.h"
#include "compiler/exec/head_over_ranks.h"
#include "core/check.h"

namespace logitless::ir {

void CpuBackend::run(const Program& program, std::span<const void* const> parameters,
                     std::span<void* const> results, std::byte* arena, const HeadUnder& under,
                     Observer* observer) const {
  if (under.far != nullptr) far_head(program);
  if (under.ranks != nullptr) require_head(*under.ranks, program);
  run_program({program, arena, parameters, results}, threads_, under, observer);
}

std::unique_ptr<const Prepared> CpuBackend::prepare(const Program&, const Context&) const {
  throw InvalidArgument(
      "prepare: the program was compiled for the CPU, where run() takes it as it is");
}

std::vector<const Instruction*> heads_of(const Program& program) {
  std::vector<const Instruction*> heads;
  for (const Instruction& i : program.instructions) {
    if (std::holds_alternative<HeadRun>(i.what)) heads.push_back(&i);
  }
  if (heads.empty()) {
    throw Unsupported(
        "the program has no head operation: its losses are loops or plain products, as they are "
        "without chunk or head_engine, with chunks, or where the logits are small");
  }
  return heads;
}

const HeadRun& far_head(const Program& program) {
  std::vector<const HeadRun*> heads, with_gradients;
  for (const Instruction* i : heads_of(program)) {
    heads.push_back(&std::get<HeadRun>(i->what));
    if (heads.back()->d_lse.buffer >= 0) with_gradients.push_back(heads.back());
  }
  const auto refuse = [](const auto&... why) { throw Unsupported(concat("the program", why...)); };
  if (with_gradients.empty()) refuse("'s head has no gradients");
  if (with_gradients.size() > 1)
    refuse(" has ", with_gradients.size(), " heads with gradients, expected one");
  if (heads.size() > 1) {
    refuse(" has ", heads.size(),
           " head operations: one for losses and one for gradients, where those depend on the "
           "losses, or heads without gradients; expected one with both");
  }
  if (heads[0]->d_x.buffer < 0)
    refuse("'s head has no gradient of its hidden states, whose error audits measure");
  return *heads[0];
}

}  // namespace logitless::ir
