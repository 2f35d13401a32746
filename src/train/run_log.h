// The log of a run: JSON lines, one for each step and validation, that `logitless report` makes a
// page of. docs/train.md has the fields.
#pragma once

#include <cstdint>
#include <string>

#include "json/json.h"
#include "logitless/far_field.h"
#include "train/run_options.h"
#include "train/tokenizer.h"
#include "train/trainer.h"

namespace logitless::train {

inline constexpr int kLogFormat = 1;

// Beside a checkpoint: run.safetensors has run.log.jsonl.
std::string log_of(const std::string& checkpoint);

// A run is worth more than its log: what the disk refuses is said once and left out, and nothing
// here throws for it. Each line is whole when its call returns.
class RunLog {
 public:
  // An empty path: nothing is written. `before`: the log that a resumed run goes on from, which may
  // be `path` or be missing; empty for a new run.
  RunLog(std::string path, std::string before, const Say& say);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  bool wanted() const { return !path_.empty(); }
  // Kept until the first line, so that a run that fails before it leaves the file as it was. Then
  // the file is replaced by the lines of `before` up to this step, and the header.
  void begin(std::int64_t first_step, Json header);
  void write(const Json& line);

 private:
  void open();
  void append(const std::string& text);
  void fail(const std::string& why);

  std::string path_, before_;
  const Say& say_;
  std::int64_t first_step_ = 0;
  Json header_;  // not yet written
  bool begun_ = false;
  int descriptor_ = -1;
  bool failed_ = false;
};

Json to_json(const FarFieldReport& far);
Json to_json(const TrainMemory& memory);

}  // namespace logitless::train
