// Tests of both containers through the public interface: written data are read back, and failures
// change nothing.
#include "logitless/tensor_file.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "file_system.h"
#include "test_files.h"
#include "test_tensors.h"

namespace logitless {
namespace {

using Names = std::vector<std::string>;
using Metadata = std::map<std::string, std::string>;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16, DType::i32,
                             DType::i64, DType::i8,   DType::f64};
static_assert(std::size(kDTypes) == kDTypeCount);

const std::vector<std::int64_t> kShapes[] = {{},     {1},       {5},       {0},          {3, 4},
                                             {4, 0}, {2, 3, 5}, {0, 0, 0}, {2, 1, 3, 2}, {300, 70}};

bool aligned(const ConstTensorView& view) {
  return std::bit_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) == 0;
}

bool lies_in(const ConstTensorView& view, std::span<const std::byte> bytes) {
  const auto* data = static_cast<const std::byte*>(view.data());
  return data >= bytes.data() && data + view.bytes() <= bytes.data() + bytes.size();
}

TEST(TensorFile, SafetensorsCarriesEveryDtypeAndShape) {
  const TempDir directory;
  const std::string path = directory.file("x.safetensors");
  unsigned seed = 0;
  for (const DType dtype : kDTypes) {
    for (const auto& shape : kShapes) {
      const RandomTensor tensor(dtype, shape, ++seed);
      const NamedTensor named[] = {{"t", tensor.view()}};
      write_safetensors(path, named);
      const TensorFile file(path);
      EXPECT_EQ(file.names(), Names{"t"});
      EXPECT_EQ(content_of(file.tensor("t")), content_of(tensor.view()));
      EXPECT_TRUE(aligned(file.tensor("t")));
    }
  }
  EXPECT_EQ(directory.listing(), Names{"x.safetensors"});
}

TEST(TensorFile, NpyCarriesEveryDtypeButBf16) {
  const TempDir directory;
  const std::string path = directory.file("x.npy");
  unsigned seed = 100;
  for (const DType dtype : kDTypes) {
    for (const auto& shape : kShapes) {
      const RandomTensor tensor(dtype, shape, ++seed);
      if (dtype == DType::bf16) {
        EXPECT_EQ(message_of<InvalidArgument>([&] { write_npy(path, tensor.view()); }),
                  "'" + path + "': npy has no code for bf16; write safetensors, or convert to f32");
        continue;
      }
      write_npy(path, tensor.view());
      const TensorFile file(path);
      EXPECT_EQ(file.names(), Names{""});
      EXPECT_EQ(content_of(file.tensor("any name")), content_of(tensor.view()));
    }
  }
}

TEST(TensorFile, StridedViewsAreWrittenContiguous) {
  const TempDir directory;
  const RandomTensor memory(DType::bf16, {1000}, 7);
  const std::vector<std::int64_t> shape = {5, 7, 3};
  const std::vector<std::int64_t> strides = {-2, 90, 11};
  const ConstTensorView strided(static_cast<const std::uint16_t*>(memory.view().data()) + 8,
                                DType::bf16, shape, strides);
  const ConstTensorView repeated(memory.view().data(), DType::f32, shape,
                                 std::vector<std::int64_t>{0, 1, 0});
  const NamedTensor named[] = {{"strided", strided}, {"repeated", repeated}};
  write_safetensors(directory.file("x"), named);
  const TensorFile file(directory.file("x"));
  for (const auto& [name, view] : named) {
    EXPECT_TRUE(file.tensor(name).contiguous());
    EXPECT_EQ(content_of(file.tensor(name)), content_of(view));
  }
  write_npy(directory.file("y"), repeated);
  EXPECT_EQ(content_of(TensorFile(directory.file("y")).tensor("")), content_of(repeated));
}

TEST(TensorFile, WideElementsComeFirstSoThatAllAreAligned) {
  const RandomTensor i8(DType::i8, {3}, 1);
  const RandomTensor f32(DType::f32, {5}, 2);
  const RandomTensor bf16(DType::bf16, {7, 3}, 3);
  const RandomTensor i64(DType::i64, {1}, 4);
  const RandomTensor none(DType::i64, {0, 2}, 5);
  const RandomTensor i32(DType::i32, {}, 6);
  const NamedTensor named[] = {{"i8", i8.view()},   {"f32", f32.view()},   {"bf16", bf16.view()},
                               {"i64", i64.view()}, {"none", none.view()}, {"i32", i32.view()}};
  const TempDir directory;
  write_safetensors(directory.file("x"), named);

  const std::string bytes = read_file(directory.file("x"));
  const Buffer block(bytes.size());  // aligned to 64
  std::memcpy(block.data(), bytes.data(), bytes.size());
  const std::span<const std::byte> span(block.as<std::byte>(), bytes.size());
  const TensorFile file(span, "x");
  EXPECT_EQ(file.names(), (Names{"i64", "none", "f32", "i32", "bf16", "i8"}));
  for (const auto& [name, view] : named) {
    EXPECT_TRUE(file.contains(name));
    const ConstTensorView read = file.tensor(name);
    EXPECT_EQ(content_of(read), content_of(view)) << name;
    EXPECT_TRUE(view.numel() == 0 || lies_in(read, span)) << name;  // no copy was needed
  }
  EXPECT_FALSE(file.contains("i9"));
  EXPECT_FALSE(file.contains(""));
  EXPECT_EQ(message_of<InvalidArgument>([&] { file.tensor("i9"); }),
            "'x': no tensor 'i9'; there are: 'i64', 'none', 'f32', 'i32', 'bf16', 'i8'");
}

// Views are aligned for any offset of the bytes and any length of the header. A copy is made only
// when needed, once.
TEST(TensorFile, UnalignedDataAreCopiedOnce) {
  const RandomTensor tensor(DType::f64, {3}, 1);
  const std::string data = elements_of(tensor.view());
  int copied = 0;
  for (std::size_t spaces = 0; spaces < 8; ++spaces) {
    for (std::size_t shift = 0; shift < 8; ++shift) {
      const std::string header =
          R"({"a":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}})" + std::string(spaces, ' ');
      const ExactBytes bytes(safetensors_bytes(header, data), shift);
      const TensorFile file(bytes.get(), "x");
      const ConstTensorView view = file.tensor("a");
      EXPECT_TRUE(aligned(view));
      EXPECT_EQ(content_of(view), content_of(tensor.view()));
      EXPECT_EQ(file.tensor("a").data(), view.data());
      const bool in_place = (shift + 8 + header.size()) % 8 == 0;
      EXPECT_EQ(lies_in(view, bytes.get()), in_place);
      copied += in_place ? 0 : 1;
    }
  }
  EXPECT_EQ(copied, 56);
}

TEST(TensorFile, UnalignedFilesAreReadToo) {
  const TempDir directory;
  const RandomTensor wide(DType::i64, {9}, 1);
  const std::string header = R"({"odd":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},)"
                             R"("wide":{"dtype":"I64","shape":[9],"data_offsets":[1,73]}})";
  write_atomically(directory.file("x"), safetensors_bytes(header, "o" + elements_of(wide.view())));
  const TensorFile file(directory.file("x"));
  EXPECT_TRUE(aligned(file.tensor("wide")));
  EXPECT_EQ(content_of(file.tensor("wide")), content_of(wide.view()));

  const std::string dict = "{'descr': '<i8', 'fortran_order': False, 'shape': (9,)}";
  write_atomically(directory.file("y"), npy_bytes(1, dict, elements_of(wide.view())));
  const TensorFile npy(directory.file("y"));
  EXPECT_TRUE(aligned(npy.tensor("")));
  EXPECT_EQ(content_of(npy.tensor("")), content_of(wide.view()));
}

TEST(TensorFile, ThreadsShareOneCopy) {
  const std::string data(8000, 'd');
  const ExactBytes bytes(
      safetensors_bytes(R"({"a":{"dtype":"F64","shape":[1000],"data_offsets":[0,8000]}})", data),
      8 - 55 % 8 + 1);
  const TensorFile file(bytes.get(), "x");
  std::vector<const void*> seen(4);
  {
    std::vector<std::jthread> threads;
    for (const void*& mine : seen) threads.emplace_back([&] { mine = file.tensor("a").data(); });
  }
  EXPECT_FALSE(lies_in(file.tensor("a"), bytes.get()));
  EXPECT_EQ(seen, std::vector<const void*>(4, file.tensor("a").data()));
  EXPECT_EQ(elements_of(file.tensor("a")), data);
}

TEST(TensorFile, ViewsSurviveAMove) {
  const TempDir directory;
  const RandomTensor tensor(DType::f32, {6}, 1);
  write_npy(directory.file("x"), tensor.view());
  TensorFile first(directory.file("x"));
  const ConstTensorView view = first.tensor("");
  TensorFile second(std::move(first));
  EXPECT_EQ(second.tensor("").data(), view.data());
  write_npy(directory.file("y"), RandomTensor(DType::i8, {1}, 2).view());
  TensorFile third(directory.file("y"));
  third = std::move(second);
  EXPECT_EQ(third.tensor("").data(), view.data());
  EXPECT_EQ(content_of(view), content_of(tensor.view()));
}

TEST(TensorFile, MayBeReplacedByItsOwnTensors) {
  const TempDir directory;
  const std::string path = directory.file("x");
  const RandomTensor a(DType::f32, {1000}, 1);
  const RandomTensor b(DType::f32, {2000}, 2);
  const NamedTensor both[] = {{"a", a.view()}, {"b", b.view()}};
  write_safetensors(path, both);
  const TensorFile file(path);
  const NamedTensor last[] = {{"b", file.tensor("b")}};
  write_safetensors(path, last);
  EXPECT_EQ(content_of(file.tensor("a")), content_of(a.view()));  // still the old bytes
  EXPECT_EQ(TensorFile(path).names(), Names{"b"});
  EXPECT_EQ(content_of(TensorFile(path).tensor("b")), content_of(b.view()));
}

TEST(TensorFile, MetadataComesBack) {
  using std::string_literals::operator""s;
  const Metadata metadata = {{"format", "pt"},
                             {"", ""},
                             {"quotes \" \\ /", "\n\r\t\b\f\x1f\x7f"},
                             {"nul", "a\0b"s},
                             {"gr\xc3\xbc\xc3\x9f", "\xf0\x9f\x98\x80 \xe2\x80\xa8"},
                             {"long", std::string(100'000, 'x')}};
  const TempDir directory;
  write_safetensors(directory.file("x"), {}, metadata);
  const TensorFile file(directory.file("x"));
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_TRUE(file.names().empty());
}

TEST(TensorFile, NamesComeBack) {
  using std::string_literals::operator""s;
  const RandomTensor tensor(DType::i8, {1}, 1);
  const Names names = {"a.b/c",     " ",        "\"\\",       "\n",
                       "nul\0nul"s, "\xc3\xa9", "__metadata", std::string(5000, 'n')};
  std::vector<NamedTensor> named;
  for (const std::string& name : names) named.push_back({name, tensor.view()});
  const TempDir directory;
  write_safetensors(directory.file("x"), named);
  const TensorFile file(directory.file("x"));
  EXPECT_EQ(file.names(), names);  // one size: in the order given
  for (const std::string& name : names) EXPECT_EQ(file.tensor(name).numel(), 1);
}

// Returns a small file of either format with the same content.
std::string small_file(const std::string& format) {
  const TempDir directory;
  const RandomTensor a(DType::f32, {2, 3}, 1);
  const RandomTensor b(DType::i8, {5}, 2);
  const NamedTensor named[] = {{"a", a.view()}, {"b", b.view()}};
  if (format == "npy") {
    write_npy(directory.file("x"), a.view());
  } else {
    write_safetensors(directory.file("x"), named, {{"k", "v"}});
  }
  return read_file(directory.file("x"));
}

class DamagedTensorFile : public testing::TestWithParam<std::string> {};

TEST_P(DamagedTensorFile, EveryPrefixIsRefused) {
  const std::string whole = small_file(GetParam());
  ASSERT_NO_THROW(TensorFile(as_bytes(whole), "x"));
  const TempDir directory;
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const std::string prefix = whole.substr(0, length);
    const ExactBytes bytes(prefix);
    const std::string message = message_of<InvalidArgument>([&] { TensorFile(bytes.get(), "x"); });
    EXPECT_TRUE(message.starts_with("'x': ")) << length << ": " << message;
    if (length % 16 == 0) {  // mapped files report the same
      write_atomically(directory.file("x"), prefix);
      EXPECT_EQ(message_of<InvalidArgument>([&] { TensorFile(directory.file("x")); }),
                "'" + directory.file("x") + "'" + message.substr(3));
    }
  }
}

TEST_P(DamagedTensorFile, SurplusIsRefused) {
  const std::string whole = small_file(GetParam()) + '\0';
  EXPECT_EQ(message_of<InvalidArgument>([&] { TensorFile(as_bytes(whole), "x"); }),
            GetParam() == "npy" ? "'x': <f4[2, 3] needs 24 bytes of data, but 25 follow the header"
                                : "'x': 1 bytes at the end belong to no tensor");
}

// A changed byte of the header may make another valid file, but never one with tensors outside of
// it.
TEST_P(DamagedTensorFile, EveryByteOfTheHeaderMayChange) {
  const std::string whole = small_file(GetParam());
  const std::size_t data = GetParam() == "npy" ? 24 : 29;
  int refused = 0;
  int opened = 0;
  for (std::size_t at = 0; at + data < whole.size(); ++at) {
    for (int flip = 1; flip < 256; flip += at < 16 ? 1 : 7) {
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ flip);
      const ExactBytes bytes(changed);
      try {
        const TensorFile file(bytes.get(), "x");
        ++opened;
        std::size_t total = 0;
        for (const std::string& name : file.names()) {
          try {
            total += elements_of(file.tensor(name)).size();
          } catch (const InvalidArgument&) {  // an unsupported dtype
          }
        }
        EXPECT_LE(total, data) << at << " " << flip;
      } catch (const InvalidArgument&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(opened, 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, DamagedTensorFile, testing::Values("npy", "safetensors"),
                         [](const auto& format) { return format.param; });

TEST(TensorFile, PathsThatCannotBeRead) {
  const TempDir directory;
  const std::string absent = directory.file("absent");
  EXPECT_EQ(message_of<DeviceError>([&] { TensorFile file(absent); }),
            "'" + absent + "': cannot open: No such file or directory");
  const std::string folder = directory.file("folder");
  std::filesystem::create_directory(folder);
  EXPECT_EQ(message_of<InvalidArgument>([&] { TensorFile file(folder); }),
            "'" + folder + "' is not a regular file");
  const std::string empty = directory.file("empty");
  write_atomically(empty, "");
  EXPECT_EQ(message_of<InvalidArgument>([&] { TensorFile file(empty); }),
            "'" + empty + "': 0 bytes are too few for a safetensors or npy file");
}

// Each refusal leaves an existing file, and a folder without one, unchanged.
TEST(WriteSafetensors, RefusesBeforeAnythingIsWritten) {
  const float value = 1.0f;
  const ConstTensorView good(&value, DType::f32, {1});
  const ConstTensorView null(nullptr, DType::f32, {1});
  struct Case {
    std::vector<NamedTensor> tensors;
    Metadata metadata;
    std::string message;
  };
  const Case cases[] = {
      {{{"", good}}, {}, "tensor '' has no name"},
      {{{"__metadata__", good}},
       {},
       "tensor '__metadata__' has the name that the format keeps for metadata"},
      {{{"a", good}, {"b", good}, {"a", good}}, {}, "tensor 'a' is given twice"},
      {{{"a", {}}}, {}, "tensor 'a' is none, expected a view"},
      {{{"a", null}}, {}, "tensor 'a' has a null pointer"},
      {{{"a\xff", good}}, {}, "'a\xff' is not UTF-8"},
      {{{"a", good}}, {{"k\xc0\xaf", ""}}, "'k\xc0\xaf' is not UTF-8"},
      {{{"a", good}}, {{"k", "\xed\xa0\x80"}}, "'\xed\xa0\x80' is not UTF-8"},
      {{{"a", good}}, {{"k", "cut short \xe2\x82"}}, "'cut short \xe2\x82' is not UTF-8"},
  };
  const TempDir directory;
  const std::string path = directory.file("x");
  for (const bool exists : {false, true}) {
    if (exists) write_atomically(path, "old");
    for (const Case& c : cases) {
      EXPECT_EQ(
          message_of<InvalidArgument>([&] { write_safetensors(path, c.tensors, c.metadata); }),
          "'" + path + "': " + c.message);
      EXPECT_EQ(directory.listing(), exists ? Names{"x"} : Names{});
    }
  }
  EXPECT_EQ(read_file(path), "old");
}

TEST(WriteSafetensors, RefusesAHeaderThatNoReaderTakes) {
  const Metadata metadata = {{"k", std::string(16'666'667, '\1')}};  // \u0001 each
  const TempDir directory;
  EXPECT_EQ(
      message_of<InvalidArgument>([&] { write_safetensors(directory.file("x"), {}, metadata); }),
      "'" + directory.file("x") +
          "': names and metadata make a header of 100000056 bytes, expected at most 100000000");
  EXPECT_EQ(directory.listing(), Names{});
}

TEST(WriteTensorFile, FullDiskLeavesTheOldFile) {
  const TempDir directory;
  const std::string path = directory.file("x");
  const RandomTensor tensor(DType::f32, {100'000}, 1);
  const NamedTensor named[] = {{"t", tensor.view()}};
  for (const bool exists : {false, true}) {
    if (exists) write_atomically(path, "old");
    const FileSizeLimit limit(100'000);
    ASSERT_TRUE(limit.ok());
    const std::string expected = "'" + path + "': cannot write: File too large";
    EXPECT_EQ(message_of<DeviceError>([&] { write_safetensors(path, named); }), expected);
    EXPECT_EQ(message_of<DeviceError>([&] { write_npy(path, tensor.view()); }), expected);
    EXPECT_EQ(directory.listing(), exists ? Names{"x"} : Names{});
  }
  EXPECT_EQ(read_file(path), "old");
}

TEST(WriteTensorFile, FoldersThatRefuse) {
  const TempDir directory;
  const RandomTensor tensor(DType::f32, {2}, 1);
  const NamedTensor named[] = {{"t", tensor.view()}};
  const std::string path = directory.file("absent/x");
  const std::string expected =
      "'" + path + "': cannot create a temporary file beside it: No such file or directory";
  EXPECT_EQ(message_of<DeviceError>([&] { write_safetensors(path, named); }), expected);
  EXPECT_EQ(message_of<DeviceError>([&] { write_npy(path, tensor.view()); }), expected);
  const std::string folder = directory.file("");
  EXPECT_EQ(message_of<InvalidArgument>([&] { write_npy(folder, tensor.view()); }),
            "'" + folder + "' exists and is not a regular file");
  EXPECT_EQ(directory.listing(), Names{});
}

}  // namespace
}  // namespace logitless
