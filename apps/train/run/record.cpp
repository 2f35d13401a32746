#include "train/run/record.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "logitless/error.h"
#include "train/run/log.h"

namespace logitless::train {
namespace {

constexpr std::size_t kShown = 40;  // letters of a refused text in messages

class Reader {
 public:
  explicit Reader(std::string path) { record_.path = std::move(path); }

  RunRecord read() {
    std::ifstream in(record_.path, std::ios::binary);
    if (!in) throw InvalidArgument(fmt::format("{}: cannot be read", record_.path));
    for (std::string text; std::getline(in, text);) {
      ++line_;
      if (in.eof()) {
        record_.torn = true;  // no end of line: still being written, or the run was killed
        break;
      }
      take(text);
    }
    if (record_.headers.empty())
      throw InvalidArgument(fmt::format(
          "{}: there is no run in it, expected its first line to be one", record_.path));
    return std::move(record_);
  }

 private:
  RunRecord record_;
  std::int64_t line_ = 0;

  [[noreturn]] void fail(const std::string& what) const {
    throw InvalidArgument(fmt::format("{}:{}: {}", record_.path, line_, what));
  }

  const Json& field(const Json& json, const char* name) const {
    const Json* found = json.find(name);
    if (found == nullptr) fail(fmt::format("'{}' is missing", name));
    return *found;
  }
  std::string shown(const Json& json) const {
    return json.dump(-1, NotUtf8::replace_ascii).substr(0, kShown);
  }
  std::int64_t whole(const Json& json, const char* name) const {
    const Json& value = field(json, name);
    if (!value.is_number_integer() || value.get<double>() < 0.0 || value.get<double>() > 0x1p53)
      fail(fmt::format("'{}': expected a whole number from 0 on, got {}", name, shown(value)));
    return value.get<std::int64_t>();
  }
  double real(const Json& json, const char* name) const {
    const Json& value = field(json, name);
    if (!value.is_number())
      fail(fmt::format("'{}': expected a number, got {}", name, shown(value)));
    return value.get<double>();
  }
  const Json& object(const Json& json, const char* name) const {
    const Json& value = field(json, name);
    if (!value.is_object())
      fail(fmt::format("'{}': expected an object, got {}", name, shown(value)));
    return value;
  }
  std::string text(const Json& json, const char* name) const {
    const Json& value = field(json, name);
    if (!value.is_string()) fail(fmt::format("'{}': expected a text, got {}", name, shown(value)));
    return value.get<std::string>();
  }

  void take(const std::string& line) {
    const Json json = Json::try_parse(line).value_or(nullptr);
    if (!json.is_object())
      fail(fmt::format("expected a JSON object, got {}", shown(Json(line.substr(0, kShown)))));
    const std::string kind = text(json, "kind");
    if (record_.headers.empty() && kind != "run")
      fail(
          fmt::format("expected the run itself first, got a line of kind {}", shown(json["kind"])));
    if (kind == "run") {
      header(json);
    } else if (kind == "step") {
      step(json);
    } else if (kind == "validation") {
      record_.validations.push_back(
          {whole(json, "step"), real(json, "loss"), real(json, "seconds")});
    } else if (kind == "end") {
      record_.ends.push_back({whole(json, "step"), text(json, "reason")});
    } else {
      fail(fmt::format("'kind': expected run, step, validation or end, got {}",
                       shown(json["kind"])));
    }
  }

  void header(const Json& json) {
    if (const std::int64_t format = whole(json, "format"); format != kLogFormat)
      fail(fmt::format("'format': this program reads {}, got {}", kLogFormat, format));
    for (const char* name : {"first_step", "steps", "tokens_per_step"}) whole(json, name);
    for (const char* name : {"logitless", "time", "device", "far_refusal"}) text(json, name);
    for (const char* name : {"options", "model", "memory", "program"}) object(json, name);
    check_model(object(json, "model"));
    for (const char* name :
         {"arena_bytes", "unchunked_arena_bytes", "parameter_bytes", "gradient_bytes",
          "moment_bytes", "table_bytes", "far_workspace_bytes"})
      whole(object(json, "memory"), name);
    const Json& device = object(object(json, "memory"), "device");
    for (const auto& [name, bytes] : device.items()) whole(device, name.c_str());
    check_program(object(json, "program"));
    record_.headers.push_back(json);
  }

  void check_model(const Json& model) const {
    text(model, "type");
    for (const char* name : {"parameters", "vocab", "context", "dim", "heads", "layers"})
      whole(model, name);
  }

  void check_program(const Json& program) const {
    for (const char* name : {"timeline", "at_peak", "regions", "heads"}) {
      if (!field(program, name).is_array()) fail(fmt::format("'{}': expected a list", name));
    }
    for (const Json& bytes : program["timeline"]) {
      if (!bytes.is_number_integer())
        fail(fmt::format("'timeline': expected whole numbers, got {}", shown(bytes)));
    }
    for (const Json& live : program["at_peak"]) {
      for (const char* name : {"value", "operation"}) text(live, name);
      whole(live, "bytes");
    }
    for (const Json& region : program["regions"]) {
      for (const char* name : {"seed", "cut"}) text(region, name);
      for (const char* name : {"extent", "chunk", "arena_before", "arena_after"})
        whole(region, name);
      if (whole(region, "chunk") < 1) fail("'chunk': expected 1 or more, got 0");
      real(region, "extra_work");
    }
    for (const Json& head : program["heads"]) {
      for (const char* name : {"head", "plan", "kernel"}) text(head, name);
      for (const char* name : {"tokens", "vocab", "chunk_tokens", "workspace_bytes"})
        whole(head, name);
    }
  }

  void step(const Json& json) {
    RunRecord::Step s{whole(json, "step"),
                      whole(json, "tokens"),
                      real(json, "loss"),
                      real(json, "lr"),
                      real(json, "grad_norm"),
                      real(json, "seconds"),
                      real(json, "tokens_per_second")};
    if (!record_.steps.empty() && s.step <= record_.steps.back().step)
      fail(fmt::format("step {} stands after step {}", s.step, record_.steps.back().step));
    if (json.contains("far_field")) {
      const Json& far = object(json, "far_field");
      RunRecord::Far& f = s.far.emplace();
      f.steps = whole(far, "steps");
      f.dense_steps = whole(far, "dense_steps");
      f.repeated_steps = whole(far, "repeated_steps");
      f.orders = whole(far, "orders");
      f.mean_selected = real(far, "mean_selected");
      if (!field(far, "last_error").is_null()) f.last_error = real(far, "last_error");
    }
    record_.steps.push_back(std::move(s));
  }
};

}  // namespace

std::string log_file(const std::string& run) {
  std::error_code error;
  if (std::filesystem::is_directory(run, error))
    throw InvalidArgument(fmt::format("'{}' is a folder, expected a run's log or checkpoint", run));
  if (!run.ends_with(".safetensors")) return run;
  const std::string log = log_of(run);
  if (!std::filesystem::exists(log, error))
    throw InvalidArgument(fmt::format("'{}' has no log beside it: there is no '{}'", run, log));
  return log;
}

RunRecord read_run(const std::string& run) { return Reader(log_file(run)).read(); }

}  // namespace logitless::train
