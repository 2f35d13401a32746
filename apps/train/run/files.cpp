#include "train/run/files.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "core/own_files.h"
#include "json/json.h"
#include "logitless/error.h"
#include "logitless/tensor_file.h"
#include "train/model/hugging_face.h"
#include "train/run/log.h"
#include "train/run/output_files.h"
#include "train/run/trainer.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

struct NamedPath {
  std::string option;  // name without dashes
  std::string path;
  bool folder = false;  // a folder that is created if missing
};
using Paths = std::vector<NamedPath>;

fs::path whole_path(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path);
  const fs::path canonical = fs::weakly_canonical(absolute, error);
  const fs::path whole = (error ? absolute : canonical).lexically_normal();
  // A path with a slash at the end names the same folder.
  return whole.has_filename() ? whole : whole.parent_path();
}

bool is_same(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) || whole_path(a) == whole_path(b);
}

bool is_below(const fs::path& path, const fs::path& folder) {
  const fs::path below = path.lexically_relative(folder);
  return !below.empty() && *below.begin() != "..";
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string beside(const std::string& path, const std::string& name) {
  return (fs::path(path).parent_path() / name).string();
}

void add(Paths& paths, const char* option, const std::string& path) {
  if (!path.empty()) paths.push_back({option, path});
}

Paths files_of_save(const RunOptions& o) {
  Paths paths;
  if (o.save.empty()) return paths;
  add(paths, "save", o.save);
  if (o.far_field > 0.0) add(paths, "save", far_state_of(o.save));
  add(paths, "save", far_state_of(o.save) + kNewState);
  return paths;
}

// Returns the files of an export, except shards, whose number is not fixed.
Paths files_of_export(const RunOptions& o) {
  Paths paths;
  if (o.hugging_face.empty()) return paths;
  add(paths, "export", o.hugging_face);
  add(paths, "export", index_of(o.hugging_face));
  for (const char* name : kExportedBeside) add(paths, "export", beside(o.hugging_face, name));
  return paths;
}

// Returns the files of --init, or of the tokenizer of a resumed run.
Paths files_of_model(const std::string& path) {
  Paths paths;
  if (path.empty()) return paths;
  add(paths, "init", path);
  for (const char* name : kExportedBeside) add(paths, "init", beside(path, name));
  for (const std::string& shard : shards_listed(path)) add(paths, "init", beside(path, shard));
  return paths;
}

Paths files_read(const RunOptions& o) {
  Paths paths;
  for (const auto& [name, list] :
       {std::pair{"data", &o.data}, {"val", &o.val}, {"text", &o.text}}) {
    for (const std::string& path : *list) add(paths, name, path);
  }
  std::error_code none;
  if (fs::is_regular_file(o.model, none)) add(paths, "model", o.model);
  return paths;
}

void refuse_pairs(const Paths& outputs, const Paths& others) {
  const auto is_folder = [](const NamedPath& named) {
    std::error_code none;
    return named.folder || fs::is_directory(named.path, none);
  };
  for (const NamedPath& output : outputs) {
    for (const NamedPath& other : others) {
      if (is_same(output.path, other.path)) {
        throw InvalidArgument(fmt::format("--{}: '{}' is the {} of --{}, which it would replace",
                                          output.option, output.path,
                                          is_folder(other) ? "folder" : "file", other.option));
      }
      // A file cannot also be a folder of the other path.
      for (const auto& [file, inner] : {std::pair{&other, &output}, {&output, &other}}) {
        if (is_folder(*file) || !is_below(whole_path(inner->path), whole_path(file->path)))
          continue;
        throw InvalidArgument(fmt::format("--{}: '{}' is a file, and the folder of '{}' of --{}",
                                          file->option, file->path, inner->path, inner->option));
      }
    }
  }
}

void refuse_shards(const RunOptions& o, const Paths& others) {
  if (o.hugging_face.empty()) return;
  for (const NamedPath& other : others) {
    if (!is_shard_of(whole_path(o.hugging_face).string(), whole_path(other.path).string()))
      continue;
    throw InvalidArgument(fmt::format("--{}: '{}' has the name of a shard of --export '{}'",
                                      other.option, other.path, o.hugging_face));
  }
}

// Refuses outputs in a folder of --text: they would replace a text, or be read as one when the run
// is resumed.
void refuse_among_texts(const RunOptions& o, const Paths& outputs) {
  for (const NamedPath& output : outputs) {
    for (const std::string& folder : o.text) {
      std::error_code error;
      if (!fs::is_directory(folder, error)) continue;
      if (!is_below(whole_path(output.path), whole_path(folder))) continue;
      throw InvalidArgument(fmt::format("--{}: '{}' lies in '{}' of --text, whose files are read",
                                        output.option, output.path, folder));
    }
  }
}

// Refuses files that would replace the run's inputs or each other.
void refuse_same_files(const RunOptions& o) {
  const Paths save = files_of_save(o), exported = files_of_export(o);
  Paths log, resume;
  add(log, "log", o.log_path());
  refuse_pairs(log, save);
  Paths own = save;  // files other than the exported model
  own.insert(own.end(), log.begin(), log.end());
  if (!o.hugging_face.empty()) refuse_pairs(own, {{"export", folder_of(o.hugging_face), true}});
  refuse_pairs(exported, own);
  Paths written = own;
  written.insert(written.end(), exported.begin(), exported.end());
  if (!o.has_shards())
    refuse_pairs(written, {{"cache", o.cache.empty() ? default_cache_directory() : o.cache, true}});
  refuse_among_texts(o, written);
  const Paths read = files_read(o);
  refuse_pairs(written, read);
  if (!o.resume.empty()) {
    add(resume, "resume", o.resume);
    add(resume, "resume", far_state_of(o.resume));
    refuse_pairs(log, resume);
    refuse_pairs(exported, resume);
    // A resumed run may overwrite its checkpoint.
    if (o.save.empty() || !is_same(o.save, o.resume)) refuse_pairs(save, resume);
  }
  for (const Paths& others : {own, read, resume}) refuse_shards(o, others);
  // An export may replace the model of --init.
  for (const std::string& start : {o.init, o.tokenizer}) refuse_pairs(own, files_of_model(start));
}

template <typename Act>
void with_option(const char* option, Act&& act) {
  try {
    act();
  } catch (const Error& error) {
    throw InvalidArgument(fmt::format("--{}: {}", option, error.what()));
  }
}

// Checks that a folder exists and can be written, or can be created.
void check_folder(const std::string& folder) {
  std::error_code error;
  fs::path there = whole_path(folder), missing;
  while (!fs::exists(fs::symlink_status(there, error)) && there.has_relative_path()) {
    missing = there;
    there = there.parent_path();
  }
  if (!fs::is_directory(there, error)) {
    throw InvalidArgument(
        fmt::format("cannot make the folder '{}': '{}' is no folder", folder, there.string()));
  }
  check_writable(missing.empty() ? (fs::path(folder) / "tokens").string() : missing.string());
}

void check_cache(const std::string& folder) {
  check_folder(folder);
  if (const std::string refusal = cache_refusal(folder); !refusal.empty())
    throw InvalidArgument(fmt::format("'{}' is no place for a cache: {}", folder, refusal));
}

void check_export(const RunOptions& o) {
  std::error_code error;
  const std::string folder = folder_of(o.hugging_face);
  if (!fs::exists(folder, error)) return check_folder(folder);
  check_replaceable(o.hugging_face, FileKind::weights);
  check_writable(o.hugging_face);
  check_hugging_face_folder(o.hugging_face, o.model_type());
}

}  // namespace

void check_files(const RunOptions& o) {
  refuse_same_files(o);
  if (!o.save.empty()) {
    options_text(o);
    with_option("save", [&] {
      check_replaceable(o.save, FileKind::checkpoint);
      check_writable(o.save);
      if (o.far_field > 0.0) check_writable(far_state_of(o.save));
    });
  }
  if (!o.hugging_face.empty()) with_option("export", [&] { check_export(o); });
  if (const std::string log = o.log_path(); !log.empty()) {
    options_text(o);  // its header contains them
    with_option("log", [&] {
      check_replaceable(log, FileKind::log);
      check_writable(log);
    });
  }
  if (!o.cache.empty()) with_option("cache", [&] { check_cache(o.cache); });
}

}  // namespace logitless::train
