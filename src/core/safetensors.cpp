#include "core/safetensors.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "json/json.h"

namespace logitless {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::size_t kLengthBytes = 8;

// Every type of the format. Tensors of types without a DType are listed and their size is checked,
// but they cannot be opened.
struct StoredType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};
constexpr StoredType kStoredTypes[] = {
    {"F64", 64, DType::f64},      {"F32", 32, DType::f32},      {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},    {"I64", 64, DType::i64},      {"I32", 32, DType::i32},
    {"I8", 8, DType::i8},         {"I16", 16, std::nullopt},    {"U64", 64, std::nullopt},
    {"U32", 32, std::nullopt},    {"U16", 16, std::nullopt},    {"U8", 8, std::nullopt},
    {"BOOL", 8, std::nullopt},    {"C64", 64, std::nullopt},    {"F8_E4M3", 8, std::nullopt},
    {"F8_E5M2", 8, std::nullopt}, {"F8_E8M0", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt}, {"F4", 4, std::nullopt},
};

const StoredType* find_type(std::string_view name) {
  for (const StoredType& type : kStoredTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

std::string_view stored_name(DType dtype) {
  for (const StoredType& type : kStoredTypes) {
    if (type.dtype == dtype) return type.name;
  }
  throw InternalError("a dtype without a safetensors name");
}

// Reads the header as a stream of events and accepts exactly
//   {"__metadata__": {key: text, ...}, name: {"dtype": text, "shape": [n, ...], "data_offsets":
//   [begin, end]}, ...}
// with its members in any order. No document is built, nothing recurses: depth past that shape is
// an error at once.
class HeaderReader : public JsonEvents {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  TensorIndex take() { return std::move(index_); }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(std::int64_t value) override {
    return unexpected(concat("the negative number ", value));
  }
  bool number_float(double, const std::string& text) override {
    return unexpected(concat("the number ", quoted_text(text)));
  }

  bool number_unsigned(std::uint64_t value) override {
    if (at_ != At::kShape && at_ != At::kOffsets) return unexpected(concat("the number ", value));
    if (value > INT64_MAX) return unexpected(concat("the number ", value, ", over 2^63 - 1"));
    if (at_ == At::kShape) {
      tensor().shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (offsets_seen_ == 2) return unexpected("a third number");
      (offsets_seen_++ == 0 ? tensor().begin : tensor().end) = static_cast<std::size_t>(value);
    }
    return true;
  }

  bool string(std::string& text) override {
    if (at_ == At::kMetadata) {
      index_.metadata[key_] = std::move(text);
    } else if (at_ == At::kTensor && key_ == "dtype") {
      tensor().dtype_text = std::move(text);
    } else {
      return unexpected(concat("the text ", quoted_text(text)));
    }
    return true;
  }

  bool start_object() override {
    if (at_ == At::kFile) {
      at_ = At::kTop;
    } else if (at_ == At::kTop && key_ == kMetadataKey) {
      at_ = At::kMetadata;
    } else if (at_ == At::kTop) {
      at_ = At::kTensor;
      fields_seen_.clear();
      index_.tensors.emplace_back().name = key_;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(std::string& name) override {
    if (at_ == At::kTop) {
      if (!names_seen_.insert(name).second) fail("the name ", quoted_text(name), " stands twice");
    } else if (at_ == At::kMetadata) {
      if (index_.metadata.contains(name))
        fail("the metadata key ", quoted_text(name), " stands twice");
    } else {
      if (name != "dtype" && name != "shape" && name != "data_offsets") {
        fail(where(), ": unknown field ", quoted_text(name),
             "; expected dtype, shape and data_offsets");
      }
      if (!fields_seen_.insert(name).second)
        fail(where(), ": the field ", quoted_text(name), " stands twice");
    }
    key_ = std::move(name);
    return true;
  }

  bool end_object() override {
    if (at_ == At::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_seen_.contains(field)) fail(where(), ": no ", field);
      }
    }
    at_ = at_ == At::kTop ? At::kFile : At::kTop;
    return true;
  }

  bool start_array() override {
    if (at_ == At::kTensor && key_ == "shape") {
      at_ = At::kShape;
    } else if (at_ == At::kTensor && key_ == "data_offsets") {
      at_ = At::kOffsets;
      offsets_seen_ = 0;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (at_ == At::kOffsets && offsets_seen_ != 2) {
      fail(where(), ": data_offsets has length ", offsets_seen_, ", expected [begin, end]");
    }
    at_ = At::kTensor;
    return true;
  }

  void parse_error(std::size_t position, const std::string&) override {
    fail("the header is not JSON: error at byte ", position, " of it");
  }

 private:
  enum class At { kFile, kTop, kMetadata, kTensor, kShape, kOffsets };

  StoredTensor& tensor() { return index_.tensors.back(); }

  std::string where() { return concat("tensor ", quoted_text(tensor().name)); }

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw InvalidArgument(concat("'", path_, "': ", parts...));
  }

  // Reports a value of the wrong kind for the reader's state.
  [[noreturn]] bool unexpected(const std::string& what) {
    switch (at_) {
      case At::kFile:
        fail("the header is ", what, ", expected an object");
      case At::kTop:
        fail(quoted_text(key_), " is ", what, ", expected an object");
      case At::kMetadata:
        fail("metadata ", quoted_text(key_), " is ", what, ", expected text");
      case At::kTensor:
        fail(where(), ": ", key_, " is ", what, ", expected ",
             key_ == "dtype" ? "text" : "an array");
      case At::kShape:
        fail(where(), ": shape has ", what, ", expected integers from 0");
      case At::kOffsets:
        fail(where(), ": data_offsets has ", what, ", expected two integers from 0");
    }
    throw InternalError("safetensors header: unknown state");
  }

  const std::string& path_;
  TensorIndex index_;
  At at_ = At::kFile;
  std::string key_;
  std::set<std::string> names_seen_;
  std::set<std::string> fields_seen_;  // of the tensor being read
  int offsets_seen_ = 0;
};

// Returns the length of the JSON text. It checks that the file can hold it and that it may be JSON.
std::size_t header_length(std::span<const std::byte> file, const std::string& path) {
  require(file.size() >= kLengthBytes, "'", path, "': ", file.size(),
          " bytes are too few for a safetensors or npy file");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  const std::size_t rest = file.size() - kLengthBytes;
  require(length <= rest, "'", path,
          "': not a safetensors file, or cut short: the first 8 bytes tell of a header of ", length,
          " bytes, but ", rest, " follow");
  require(length >= 2 && length <= kMaxSafetensorsHeader, "'", path, "': header of ", length,
          " bytes, expected 2 to ", kMaxSafetensorsHeader);
  const std::byte* text = file.data() + kLengthBytes;
  require(text[0] == std::byte{'{'}, "'", path, "': the header does not start with '{'");
  // The JSON parser would stop at a zero byte and ignore the rest.
  require(std::memchr(text, 0, length) == nullptr, "'", path, "': zero byte in the header");
  return static_cast<std::size_t>(length);
}

// Sets the dtype, and checks that the shape has as many bytes as the offsets.
void check_size(StoredTensor& tensor, const std::string& path) {
  const auto name = [&] { return concat("'", path, "': tensor ", quoted_text(tensor.name)); };
  const auto numel = checked_numel(tensor.shape);
  if (!numel)
    throw InvalidArgument(concat(name(), ": shape ", shape_text(tensor.shape), " overflows"));
  const StoredType* type = find_type(tensor.dtype_text);
  if (type == nullptr) return;  // its size cannot be checked; opening the tensor reports it
  tensor.dtype = type->dtype;
  // numel < 2^60 and bits <= 64: whole bytes first, so that nothing overflows.
  const std::int64_t bits = type->bits;
  const std::int64_t bytes = *numel / 8 * bits + (*numel % 8 * bits + 7) / 8;
  if (*numel % 8 * bits % 8 != 0) {
    throw InvalidArgument(
        concat(name(), ": ", tensor.dtype_text, shape_text(tensor.shape), " ends within a byte"));
  }
  if (static_cast<std::uint64_t>(bytes) != tensor.end - tensor.begin) {
    throw InvalidArgument(concat(name(), ": ", tensor.dtype_text, shape_text(tensor.shape),
                                 " needs ", bytes, " bytes, but data_offsets give ",
                                 tensor.end - tensor.begin));
  }
}

// Sorts the tensors by offset, and checks that they cover [0, data_bytes) without holes or overlap.
void check_coverage(std::vector<StoredTensor>& tensors, std::size_t data_bytes,
                    const std::string& path) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  std::size_t covered = 0;
  for (const StoredTensor& tensor : tensors) {
    const auto fail = [&](const auto&... parts) {
      throw InvalidArgument(concat("'", path, "': tensor ", quoted_text(tensor.name),
                                   ": data_offsets [", tensor.begin, ", ", tensor.end, "]",
                                   parts...));
    };
    if (tensor.begin > tensor.end) fail(" end before they begin");
    if (tensor.end > data_bytes)
      fail(" run past the data of ", data_bytes, " bytes; is the file cut short?");
    if (tensor.begin < covered) fail(" overlap another tensor, which ends at ", covered);
    if (tensor.begin > covered) fail(" leave a hole from ", covered);
    covered = tensor.end;
  }
  require(covered == data_bytes, "'", path, "': ", data_bytes - covered,
          " bytes at the end belong to no tensor");
}

// Returns the JSON text of a string. Throws InvalidArgument unless it is UTF-8.
std::string json_text(const std::string& text, const std::string& path) {
  try {
    return Json(text).dump();
  } catch (const JsonError&) {
    throw InvalidArgument(concat("'", path, "': ", quoted_text(text), " is not UTF-8"));
  }
}

}  // namespace

TensorIndex parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  const std::size_t length = header_length(file, path);
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  HeaderReader reader(path);
  parse_json(std::string_view(text, length), reader);
  TensorIndex index = reader.take();
  const std::size_t data = kLengthBytes + length;
  check_coverage(index.tensors, file.size() - data, path);
  for (StoredTensor& tensor : index.tensors) {
    check_size(tensor, path);
    tensor.begin += data;
    tensor.end += data;
  }
  return index;
}

std::string safetensors_header(std::span<const NamedTensor* const> tensors,
                               const std::map<std::string, std::string>& metadata,
                               const std::string& path) {
  std::string header = "{";
  if (!metadata.empty()) {
    header += concat("\"", kMetadataKey, "\":{");
    const char* separator = "";
    for (const auto& [key, value] : metadata) {
      header +=
          concat(std::exchange(separator, ","), json_text(key, path), ":", json_text(value, path));
    }
    header += "}";
  }
  std::set<std::string_view> names;
  std::int64_t position = 0;
  for (const NamedTensor* tensor : tensors) {
    const ConstTensorView& view = tensor->view;
    const auto expect = [&](bool ok, const char* what) {
      require(ok, "'", path, "': tensor ", quoted_text(tensor->name), " ", what);
    };
    expect(!tensor->name.empty(), "has no name");
    expect(tensor->name != kMetadataKey, "has the name that the format keeps for metadata");
    expect(names.insert(tensor->name).second, "is given twice");
    expect(view.defined(), "is none, expected a view");
    expect(view.data() != nullptr || view.numel() == 0, "has a null pointer");
    const std::int64_t begin = position;
    expect(!__builtin_add_overflow(begin, view.bytes(), &position),
           "makes the file larger than 2^63 bytes");
    header += concat(header.size() > 1 ? "," : "", json_text(tensor->name, path), ":{\"dtype\":\"",
                     stored_name(view.dtype()), "\",\"shape\":[");
    for (int d = 0; d < view.rank(); ++d) header += concat(d ? "," : "", view.size(d));
    header += concat("],\"data_offsets\":[", begin, ",", position, "]}");
  }
  header += "}";
  constexpr std::size_t kAlignment = 64;
  header.append((kAlignment - (kLengthBytes + header.size()) % kAlignment) % kAlignment, ' ');
  require(header.size() <= kMaxSafetensorsHeader, "'", path,
          "': names and metadata make a header of ", header.size(), " bytes, expected at most ",
          kMaxSafetensorsHeader);
  const std::uint64_t length = header.size();
  std::string result(kLengthBytes, '\0');
  std::memcpy(result.data(), &length, kLengthBytes);
  return result + header;
}

}  // namespace logitless
