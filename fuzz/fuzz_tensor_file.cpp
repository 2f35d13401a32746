// Reads any bytes as a tensor file. The reader must throw InvalidArgument, or read all of it so
// that a written copy reads back the same. Anything else aborts.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/npy.h"
#include "core/safetensors.h"
#include "logitless/error.h"
#include "logitless/tensor_file.h"

namespace logitless {
namespace {

void expect(bool ok, std::string_view what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_tensor_file: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

// A temporary folder, in memory if the system has such a file system.
class Folder {
 public:
  Folder() {
    const bool shared = access("/dev/shm", W_OK) == 0;
    const std::filesystem::path parent =
        shared ? "/dev/shm" : std::filesystem::temp_directory_path();
    std::string pattern = parent / "logitless-fuzz-XXXXXX";
    expect(mkdtemp(pattern.data()) != nullptr, "no temporary folder");
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const char* name) const { return path_ / name; }
  // Checks that no writer has left a file behind.
  void expect_files(std::ptrdiff_t count) const {
    using Iterator = std::filesystem::directory_iterator;
    expect(std::distance(Iterator(path_), Iterator()) <= count, "a temporary file was left behind");
  }

 private:
  std::filesystem::path path_;
};

const Folder& folder() {
  static const Folder instance;
  return instance;
}

// A copy in a block of its exact size, `shift` bytes off an aligned address.
class Copy {
 public:
  Copy(std::span<const std::byte> bytes, std::size_t shift)
      : block_(new std::byte[bytes.size() + shift]), bytes_(block_.get() + shift, bytes.size()) {
    std::copy(bytes.begin(), bytes.end(), block_.get() + shift);
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> block_;
  std::span<const std::byte> bytes_;
};

std::string bytes_of(const ConstTensorView& view) {
  expect(view.contiguous(), "a view from a file is not contiguous");
  expect(reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) == 0,
         "a view from a file is not aligned");
  return {static_cast<const char*>(view.data()), static_cast<std::size_t>(view.bytes())};
}

// Returns dtype, shape and bytes.
std::string content_of(const ConstTensorView& view) { return describe(view) + bytes_of(view); }

// Opens a tensor. Returns nothing if the library has no such dtype or rank; no other refusal is
// allowed once the file is open.
std::optional<ConstTensorView> opened(const TensorFile& file, const std::string& name) {
  expect(file.contains(name), "a name of names() is not contained");
  try {
    return file.tensor(name);
  } catch (const InvalidArgument& error) {
    const std::string_view message = error.what();
    expect(message.ends_with("; expected F32, BF16, F16, I32, I64, I8 or F64") ||
               message.ends_with("; expected at most 4"),
           "a tensor of a well-formed file is refused");
    return std::nullopt;
  }
}

// The full content of a file, or the refusal if it does not open.
struct Reading {
  std::string refusal;
  std::vector<std::string> names;
  std::map<std::string, std::string> contents;  // of the tensors that opened
  std::map<std::string, std::string> metadata;

  bool operator==(const Reading&) const = default;
};

Reading read_all(const TensorFile& file) {
  Reading reading;
  reading.names = file.names();
  reading.metadata = file.metadata();
  for (const std::string& name : reading.names) {
    if (const auto view = opened(file, name)) reading.contents[name] = content_of(*view);
  }
  return reading;
}

Reading read_all(std::span<const std::byte> bytes) {
  try {
    return read_all(TensorFile(bytes, "input"));
  } catch (const InvalidArgument& error) {
    expect(std::string_view(error.what()).starts_with("'input': "), "a refusal without the path");
    Reading reading;
    reading.refusal = error.what();
    return reading;
  }
}

// Start and length of the header, computed independently from the format descriptions.
struct HeaderSpan {
  std::size_t length_at;
  std::size_t length_bytes;

  std::size_t begin() const { return length_at + length_bytes; }
};

HeaderSpan header_of(std::span<const std::byte> file) {
  if (!has_npy_magic(file)) return {0, 8};
  return {8, file.size() > 6 && file[6] == std::byte{1} ? std::size_t{2} : std::size_t{4}};
}

// Checks that the tensors cover the data: each byte is read exactly once. `file` was opened from
// `bytes`.
void check_sizes(std::span<const std::byte> bytes, const TensorFile& file) {
  const HeaderSpan header = header_of(bytes);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data() + header.length_at, header.length_bytes);
  const std::uint64_t data = bytes.size() - header.begin() - length;
  std::uint64_t total = 0;
  bool all = true;
  for (const std::string& name : file.names()) {
    const auto view = opened(file, name);
    all = all && view;
    if (view) total += static_cast<std::uint64_t>(view->bytes());
  }
  expect(all ? total == data : total <= data, "the tensors do not share out the data");
}

std::string whole_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_back_safetensors(const TensorFile& file, const Reading& reading) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, content] : reading.contents) tensors.push_back({name, file.tensor(name)});
  const bool has_unnamed = reading.contents.contains("");
  const std::string path = folder().file("first");
  bool refused = false;
  try {
    write_safetensors(path, tensors, reading.metadata);
  } catch (const InvalidArgument&) {
    refused = true;
  }
  expect(refused == has_unnamed, "write_safetensors refuses the wrong files");
  if (refused) return;

  const TensorFile again(path);
  const Reading read = read_all(again);
  expect(read.contents == reading.contents, "written tensors read back otherwise");
  expect(read.metadata == reading.metadata, "written metadata read back otherwise");
  // A file that the library wrote must be written again byte for byte.
  std::vector<NamedTensor> in_order;
  for (const std::string& name : again.names()) in_order.push_back({name, again.tensor(name)});
  const std::string second = folder().file("second");
  write_safetensors(second, in_order, again.metadata());
  expect(whole_file(path) == whole_file(second), "two writings of one file differ");
}

void write_back_npy(const ConstTensorView& view) {
  const std::string path = folder().file("npy");
  bool refused = false;
  try {
    write_npy(path, view);
  } catch (const InvalidArgument&) {
    refused = true;
  }
  expect(refused == (view.dtype() == DType::bf16), "write_npy refuses the wrong tensors");
  if (refused) return;
  const TensorFile again(path);
  expect(content_of(again.tensor("")) == content_of(view), "a npy file reads back otherwise");
}

void check(std::span<const std::byte> input) {
  const Copy copy(input, 0);
  const Reading reading = read_all(copy.bytes());
  expect(read_all(Copy(input, 1).bytes()) == reading, "what is read depends on where it lies");

  // Each parser also gets the bytes that are meant for the other one.
  for (const auto& parse : {parse_safetensors, parse_npy}) {
    try {
      parse(copy.bytes(), "input");
    } catch (const InvalidArgument&) {
    }
  }
  if (!reading.refusal.empty()) return;

  const TensorFile file(copy.bytes(), "input");
  check_sizes(copy.bytes(), file);
  write_back_safetensors(file, reading);
  if (!reading.contents.empty()) write_back_npy(file.tensor(reading.contents.begin()->first));
  folder().expect_files(3);
}

// Returns the input with a correct header length, so that mutations of the header pass the first
// check. Empty if no end of a header is found.
std::vector<std::byte> with_right_length(std::span<const std::byte> input) {
  std::vector<std::byte> bytes(input.begin(), input.end());
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  const HeaderSpan header = header_of(input);
  const std::size_t end = has_npy_magic(input) ? text.find('\n', header.begin()) : text.rfind('}');
  if (end == std::string_view::npos || end < header.begin()) return {};
  const std::uint64_t length = end + 1 - header.begin();
  std::memcpy(bytes.data() + header.length_at, &length, header.length_bytes);
  return bytes;
}

}  // namespace
}  // namespace logitless

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  logitless::check(input);
  const std::vector<std::byte> repaired = logitless::with_right_length(input);
  if (!repaired.empty() && !std::ranges::equal(repaired, input)) logitless::check(repaired);
  return 0;
}
