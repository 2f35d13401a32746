// When the results of a program are done while it runs.
#pragma once

#include <cstddef>
#include <functional>
#include <unordered_map>
#include <vector>

#include "compiler/exec/backend.h"

namespace logitless::ir {

// Calls done(result) after the last instruction that reads or writes it: each result once, those
// that no instruction touches at the end.
class ResultsDone final : public Observer {
 public:
  ResultsDone(const Program& program, const std::function<void(std::size_t)>& done);
  void after(const Instruction& instruction) override;
  void after_loop(const Instruction& loop) override { after(loop); }
  // All of the program has run.
  void end() const;

 private:
  const std::function<void(std::size_t)>& done_;
  std::unordered_map<const Instruction*, std::vector<std::size_t>> last_;
  std::vector<std::size_t> untouched_;
};

}  // namespace logitless::ir
