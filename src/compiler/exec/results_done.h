// Reports when the results of a running program are complete.
#pragma once

#include <cstddef>
#include <functional>
#include <unordered_map>
#include <vector>

#include "compiler/exec/backend.h"

namespace logitless::ir {

// Calls done(result) once for each result, after the last instruction that reads or writes it.
// Results that no instruction touches are reported at the end.
class ResultsDone final : public Observer {
 public:
  ResultsDone(const Program& program, const std::function<void(std::size_t)>& done);
  void after(const Instruction& instruction) override;
  void after_loop(const Instruction& loop) override { after(loop); }
  // Must be called when all of the program has run.
  void end() const;

 private:
  const std::function<void(std::size_t)>& done_;
  std::unordered_map<const Instruction*, std::vector<std::size_t>> last_;
  std::vector<std::size_t> untouched_;
};

}  // namespace logitless::ir
