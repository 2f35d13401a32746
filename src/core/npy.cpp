#include "core/npy.h"

#include <charconv>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"

namespace logitless {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionBytes = 2;  // major, minor

constexpr std::pair<std::string_view, DType> kDescriptors[] = {
    {"<f4", DType::f32}, {"<f2", DType::f16}, {"<f8", DType::f64}, {"<i4", DType::i32},
    {"<i8", DType::i64}, {"|i1", DType::i8},  {"<i1", DType::i8},
};

// Parses the dict literal that NumPy writes, and only that:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
// with the members in any order, either kind of quotes, and blanks between tokens.
class DictReader {
 public:
  DictReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  struct Header {
    std::string descr;
    bool fortran_order = false;
    std::vector<std::int64_t> shape;
  };

  Header read() {
    Header header;
    bool seen[3] = {};
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      const int field = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : -1;
      if (field < 0)
        fail("unknown key ", quoted_text(key), ", expected descr, fortran_order and shape");
      if (std::exchange(seen[field], true)) fail("the key ", quoted_text(key), " stands twice");
      expect(':');
      if (field == 0) header.descr = descriptor();
      if (field == 1) header.fortran_order = boolean();
      if (field == 2) header.shape = tuple();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_blanks();
    if (at_ != text_.size()) fail("unexpected ", quoted_text(text_.substr(at_)), " after the dict");
    if (!seen[0] || !seen[1] || !seen[2]) {
      fail("no key ", !seen[0] ? "descr" : !seen[1] ? "fortran_order" : "shape");
    }
    return header;
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw InvalidArgument(concat("'", path_, "': npy header: ", parts...));
  }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n'))
      ++at_;
  }

  bool accept(char token) {
    skip_blanks();
    if (at_ == text_.size() || text_[at_] != token) return false;
    ++at_;
    return true;
  }

  void expect(char token) {
    if (!accept(token))
      fail("expected ", token, " at byte ", at_, ", found ", quoted_text(text_.substr(at_)));
  }

  std::string string() {
    skip_blanks();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"')
      fail("expected a string at byte ", at_, ", found ", quoted_text(text_.substr(at_)));
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) fail("the string at byte ", at_, " does not end");
    const std::string_view content = text_.substr(at_ + 1, end - at_ - 1);
    if (content.find('\\') != std::string_view::npos)
      fail("escape in the string ", quoted_text(content));
    at_ = end + 1;
    return std::string(content);
  }

  std::string descriptor() {
    skip_blanks();
    if (at_ < text_.size() && text_[at_] == '[')
      fail("structured dtypes are not read; expected one number per element");
    return string();
  }

  bool boolean() {
    skip_blanks();
    for (const auto& [name, value] :
         {std::pair{std::string_view("True"), true}, {"False", false}}) {
      if (text_.substr(at_).starts_with(name)) {
        at_ += name.size();
        return value;
      }
    }
    fail("fortran_order is ", quoted_text(text_.substr(at_)), ", expected True or False");
  }

  // (), (3,), (3, 4), (3, 4,); one size needs its comma, as in Python.
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> sizes;
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma)
        fail("shape: expected , or ) at byte ", at_, ", found ", quoted_text(text_.substr(at_)));
      if (sizes.size() == kMaxRank) fail("shape: rank is over ", kMaxRank);
      sizes.push_back(size());
      comma = accept(',');
    }
    if (sizes.size() == 1 && !comma) fail("shape: expected a tuple, found a number in brackets");
    return sizes;
  }

  std::int64_t size() {
    skip_blanks();
    const std::string_view rest = text_.substr(at_);
    const bool digit = !rest.empty() && rest[0] >= '0' && rest[0] <= '9';
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    const bool leading_zero = digit && rest[0] == '0' && end != rest.data() + 1;
    if (!digit || leading_zero || error != std::errc()) {
      fail("shape has ", quoted_text(rest), ", expected integers from 0 to 2^63 - 1");
    }
    at_ = static_cast<std::size_t>(end - text_.data());
    return value;
  }

  std::string_view text_;
  const std::string& path_;
  std::size_t at_ = 0;
};

DType dtype_of(const std::string& descr, const std::string& path) {
  for (const auto& [name, dtype] : kDescriptors) {
    if (name == descr) return dtype;
  }
  require(!descr.starts_with('>'), "'", path, "': dtype ", quoted_text(descr),
          " is big-endian, expected little-endian");
  throw InvalidArgument(concat("'", path, "': dtype ", quoted_text(descr),
                               " is not read; expected <f2, <f4, <f8, |i1, <i4 or <i8"));
}

}  // namespace

bool has_npy_magic(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() &&
         std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

TensorIndex parse_npy(std::span<const std::byte> file, const std::string& path) {
  require(has_npy_magic(file), "'", path, "': no npy magic at the start");
  constexpr std::size_t kLengthAt = kMagic.size() + kVersionBytes;
  require(file.size() >= kLengthAt, "'", path, "': npy file cut short in its version");
  const int major = static_cast<int>(file[kMagic.size()]);
  const int minor = static_cast<int>(file[kMagic.size() + 1]);
  require(major >= 1 && major <= 3 && minor == 0, "'", path, "': npy format ", major, ".", minor,
          ", expected 1.0, 2.0 or 3.0");

  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t text_at = kLengthAt + length_bytes;
  require(file.size() >= text_at, "'", path, "': npy file cut short in its header length");
  std::uint32_t length = 0;
  std::memcpy(&length, file.data() + kLengthAt, length_bytes);
  require(length <= file.size() - text_at, "'", path, "': npy header of ", length, " bytes, but ",
          file.size() - text_at, " follow");
  const auto* text = reinterpret_cast<const char*>(file.data()) + text_at;
  const DictReader::Header header = DictReader({text, length}, path).read();

  StoredTensor tensor;
  tensor.dtype_text = header.descr;
  tensor.dtype = dtype_of(header.descr, path);
  tensor.shape = header.shape;
  tensor.begin = text_at + length;
  tensor.end = file.size();
  require(!header.fortran_order, "'", path, "': Fortran order is not read; save a C-ordered copy");
  const std::optional<std::int64_t> numel = checked_numel(tensor.shape);
  require(numel.has_value(), "'", path, "': shape ", shape_text(tensor.shape), " overflows");
  const std::size_t bytes = static_cast<std::size_t>(*numel) * size_of(*tensor.dtype);
  require(bytes == tensor.end - tensor.begin, "'", path, "': ", header.descr,
          shape_text(tensor.shape), " needs ", bytes, " bytes of data, but ",
          tensor.end - tensor.begin, " follow the header");
  TensorIndex index;
  index.tensors.push_back(std::move(tensor));
  return index;
}

std::string npy_header(const ConstTensorView& tensor, const std::string& path) {
  require(tensor.defined(), "'", path, "': tensor is none, expected a view");
  require(tensor.data() != nullptr || tensor.numel() == 0, "'", path,
          "': tensor has a null pointer");
  std::string_view descr;
  for (const auto& [name, dtype] : kDescriptors) {
    if (dtype == tensor.dtype() && descr.empty()) descr = name;
  }
  require(!descr.empty(), "'", path, "': npy has no code for ", name_of(tensor.dtype()),
          "; write safetensors, or convert to f32");

  std::string text = concat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (");
  for (int d = 0; d < tensor.rank(); ++d)
    text += concat(d ? " " : "", tensor.size(d),
                   tensor.rank() == 1 || d + 1 < tensor.rank() ? "," : "");
  text += "), }";
  constexpr std::size_t kAlignment = 64;
  constexpr std::size_t kPrefix = kMagic.size() + kVersionBytes + 2;
  text.append(kAlignment - 1 - (kPrefix + text.size()) % kAlignment, ' ');
  text += '\n';
  const std::uint16_t length =
      static_cast<std::uint16_t>(text.size());  // rank <= 4: a few hundred bytes at most
  std::string result(kMagic);
  result += {'\x01', '\x00', static_cast<char>(length & 0xff), static_cast<char>(length >> 8)};
  return result + text;
}

}  // namespace logitless
