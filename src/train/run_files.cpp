#include "train/run_files.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/hugging_face.h"
#include "train/trainer.h"

namespace logitless::train {
namespace {

std::filesystem::path whole_path(const std::string& path) {
  std::error_code error;
  return std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
}

// What is written into a folder of --text would replace a text, or be one when the run is resumed.
void refuse_among_texts(const RunOptions& o) {
  const auto refuse = [&](const char* option, const std::string& path) {
    if (path.empty()) return;
    const std::filesystem::path whole = whole_path(path);
    for (const std::string& folder : o.text) {
      std::error_code error;
      if (!std::filesystem::is_directory(folder, error)) continue;
      const std::filesystem::path below = whole.lexically_relative(whole_path(folder));
      if (below.empty() || *below.begin() == "..") continue;
      throw InvalidArgument(fmt::format("--{}: '{}' lies in '{}' of --text, whose files are read",
                                        option, path, folder));
    }
  };
  refuse("save", o.save);
  refuse("log", o.log);
  refuse("export", o.hugging_face);
}

// A checkpoint or model that would replace what the run reads, or the other.
void refuse_same_files(const RunOptions& o) {
  const auto refuse = [](const char* option, const std::string& path, const char* other,
                         const std::string& there) {
    if (path.empty() || there.empty()) return;
    if (whole_path(path) != whole_path(there)) return;
    throw InvalidArgument(
        fmt::format("--{}: '{}' is the file of --{}, which it would replace", option, path, other));
  };
  refuse("export", o.hugging_face, "save", o.save);
  refuse("export", o.hugging_face, "resume", o.resume);
  refuse("save", o.save, "init", o.init);
  refuse("log", o.log, "save", o.save);
  refuse("log", o.log, "resume", o.resume);
  refuse("log", o.log, "init", o.init);
  for (const auto& [name, paths] :
       {std::pair{"data", &o.data}, {"val", &o.val}, {"text", &o.text}}) {
    for (const std::string& path : *paths) {
      refuse("save", o.save, name, path);
      refuse("log", o.log, name, path);
      refuse("export", o.hugging_face, name, path);
    }
  }
  refuse_among_texts(o);
}

}  // namespace

void check_files(const RunOptions& o) {
  refuse_same_files(o);
  const auto check = [](const char* option, const std::string& path) {
    try {
      check_writable(path);
    } catch (const Error& error) {
      throw InvalidArgument(fmt::format("--{}: {}", option, error.what()));
    }
  };
  if (!o.save.empty()) {
    options_text(o);
    check("save", o.save);
    if (o.far_field > 0.0) check("save", far_state_of(o.save));
  }
  if (!o.hugging_face.empty()) {
    check("export", o.hugging_face);
    try {
      check_hugging_face_folder(o.hugging_face, o.model_type());
    } catch (const Error& error) {
      throw InvalidArgument(fmt::format("--export: {}", error.what()));
    }
  }
  if (const std::string log = o.log_path(); !log.empty()) {
    options_text(o);  // its header has them
    check("log", log);
  }
  if (!o.cache.empty()) {
    std::error_code error;
    std::filesystem::create_directories(o.cache, error);
    if (error)
      throw InvalidArgument(
          fmt::format("--cache: cannot make the folder '{}': {}", o.cache, error.message()));
    check("cache", (std::filesystem::path(o.cache) / "words").string());
  }
}

}  // namespace logitless::train
