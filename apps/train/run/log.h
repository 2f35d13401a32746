// The log of a run: a JSON line for each step and validation, from which `logitless report` makes a
// page. docs/reference/log.md has the fields.
#pragma once

#include <cstdint>
#include <string>

#include "json/json.h"
#include "logitless/far_field.h"
#include "train/run/options.h"
#include "train/run/trainer.h"
#include "train/tokenizer/tokenizer.h"

namespace logitless::train {

inline constexpr int kLogFormat = 1;

// Returns the log's path next to a checkpoint: run.log.jsonl for run.safetensors.
std::string log_of(const std::string& checkpoint);

// Writes a log. Errors of the disk do not end the run: they are reported once, the lines are
// dropped, and no call throws. Each line is complete when its call returns.
class RunLog {
 public:
  // With an empty path nothing is written. `before`: the log that a resumed run continues, which
  // may be `path` or missing; empty for a new run.
  RunLog(std::string path, std::string before, const Print& print);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  bool wanted() const { return !path_.empty(); }
  // Holds the header back until the first line, so that a run that fails earlier leaves the file as
  // it was. The first line replaces the file by the lines of `before` up to this step, and the
  // header.
  void begin(std::int64_t first_step, Json header);
  void write(const Json& line);

 private:
  void open();
  void append(const std::string& text);
  void fail(const std::string& why);

  std::string path_, before_;
  const Print& print_;
  std::int64_t first_step_ = 0;
  Json header_;  // pending
  bool begun_ = false;
  int descriptor_ = -1;
  bool failed_ = false;
};

Json to_json(const FarFieldReport& far);
Json to_json(const TrainMemory& memory);

}  // namespace logitless::train
