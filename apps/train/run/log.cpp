#include "train/run/log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "logitless/error.h"
#include "logitless/tensor_file.h"

namespace logitless::train {
namespace {

std::string text_of(const Json& line) {
  // JSON is UTF-8, but paths may have other bytes.
  return line.dump(-1, NotUtf8::replace) + "\n";
}

// Returns whether a line belongs to a step up to the one that the run continues from.
bool is_kept(const std::string& line, std::int64_t first_step) {
  const std::optional<Json> json = Json::try_parse(line);
  if (!json || !json->contains("kind")) return false;
  const bool header = json->at("kind") == "run";
  const Json* step = json->find(header ? "first_step" : "step");
  if (step == nullptr || !step->is_number_integer()) return false;
  const auto at = step->get<std::int64_t>();
  return header ? at < first_step : at <= first_step;
}

// Returns the lines of a log up to this step; none without a log.
std::string kept_lines(const std::string& path, std::int64_t first_step) {
  std::string kept;
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line);) {
    if (!in.eof() && is_kept(line, first_step))
      kept += line + "\n";  // an incomplete last line is dropped
  }
  return kept;
}

}  // namespace

std::string log_of(const std::string& checkpoint) {
  return std::filesystem::path(checkpoint).replace_extension(".log.jsonl").string();
}

RunLog::RunLog(std::string path, std::string before, const Print& print)
    : path_(std::move(path)), before_(std::move(before)), print_(print) {}

RunLog::~RunLog() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RunLog::begin(std::int64_t first_step, Json header) {
  first_step_ = first_step;
  header_ = std::move(header);
}

void RunLog::fail(const std::string& why) {
  if (!std::exchange(failed_, true))
    print_(fmt::format("the log '{}' cannot be written: {}; the run goes on", path_, why));
}

// Writes a new file and renames it over the old one, so that a crash never loses the log.
void RunLog::open() {
  begun_ = true;
  try {
    write_file(path_, (before_.empty() ? std::string() : kept_lines(before_, first_step_)) +
                          text_of(header_));
  } catch (const Error& error) {
    return fail(error.what());
  }
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor_ < 0) fail(std::strerror(errno));
}

void RunLog::append(const std::string& text) {
  const off_t end = ::lseek(descriptor_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::write(descriptor_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      fail(std::strerror(count < 0 ? errno : ENOSPC));
      // Removes a partial line, which would corrupt later lines that fit on the disk.
      if (done > 0 && end >= 0 && ::ftruncate(descriptor_, end) != 0)
        ::close(std::exchange(descriptor_, -1));
      return;
    }
    done += static_cast<std::size_t>(count);
  }
}

void RunLog::write(const Json& line) {
  if (path_.empty()) return;
  if (!begun_) open();
  if (descriptor_ >= 0) append(text_of(line));
}

Json to_json(const FarFieldReport& far) {
  return {{"steps", far.steps},
          {"dense_steps", far.dense_steps},
          {"repeated_steps", far.repeated_steps},
          {"audits", far.audits},
          {"orders", far.refreshes},
          {"last_error", far.audits > 0 ? Json(far.last_error) : Json(nullptr)},
          {"worst_accepted_error", far.worst_accepted_error},
          {"tau", far.tau},
          {"mean_selected", far.mean_selected}};
}

Json to_json(const TrainMemory& memory) {
  Json items = Json::object();
  for (const MemoryItem& item : memory.device) items[item.name] = item.bytes;
  return {{"arena_bytes", memory.arena},
          {"unchunked_arena_bytes", memory.unchunked_arena},
          {"parameter_bytes", memory.parameters},
          {"gradient_bytes", memory.gradients},
          {"moment_bytes", memory.moments},
          {"table_bytes", memory.tables},
          {"far_workspace_bytes", memory.far_workspace},
          {"far_peak_bytes", memory.far_peak},
          {"head_workspace_bytes", memory.head_workspace},
          {"device", items},
          {"device_bytes", total_bytes(memory.device)},
          {"device_taken_before_bytes", memory.device_taken_before},
          {"device_taken_bytes", memory.device_taken}};
}

}  // namespace logitless::train
