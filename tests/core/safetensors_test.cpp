// Tests of the safetensors container with hand-made bytes: accepted files, and each refusal.
#include "core/safetensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "logitless/tensor_file.h"
#include "test_files.h"
#include "test_tensors.h"

namespace logitless {
namespace {

using Shape = std::vector<std::int64_t>;

// Returns {"a": {...}} with each field as given.
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

// Returns the message from opening the bytes, without the quoted name before it.
std::string refusal(const std::string& file) {
  const ExactBytes bytes(file);
  const std::string message =
      message_of<InvalidArgument>([&] { TensorFile opened(bytes.get(), "file"); });
  const std::string prefix = "'file': ";
  EXPECT_TRUE(message.empty() || message.starts_with(prefix)) << message;
  return message.empty() ? "" : message.substr(prefix.size());
}

struct Case {
  std::string header;
  std::string message;
};

TEST(SafetensorsReader, ReadsWhatTheFormatDescribes) {
  const std::string header = R"({"__metadata__":{"format":"pt","":"empty key"},)"
                             R"("second":{"dtype":"I16","shape":[3],"data_offsets":[8,14]},)"
                             R"("first":{"data_offsets":[0,8],"shape":[2,1],"dtype":"F32"}} )";
  const std::string file = safetensors_bytes(header, "ABCDEFGHabcdef");
  const TensorIndex index = parse_safetensors(as_bytes(file), "file");
  ASSERT_EQ(index.tensors.size(), 2u);
  const std::size_t data = 8 + header.size();
  EXPECT_EQ(index.tensors[0].name, "first");  // in the order of the bytes
  EXPECT_EQ(index.tensors[0].dtype_text, "F32");
  EXPECT_EQ(index.tensors[0].dtype, DType::f32);
  EXPECT_EQ(index.tensors[0].shape, (Shape{2, 1}));
  EXPECT_EQ(index.tensors[0].begin, data);
  EXPECT_EQ(index.tensors[0].end, data + 8);
  EXPECT_EQ(index.tensors[1].name, "second");
  EXPECT_EQ(index.tensors[1].dtype, std::nullopt);
  EXPECT_EQ(index.tensors[1].begin, data + 8);
  EXPECT_EQ(index.tensors[1].end, data + 14);
  EXPECT_EQ(index.metadata,
            (std::map<std::string, std::string>{{"format", "pt"}, {"", "empty key"}}));
}

TEST(SafetensorsReader, ReadsFilesWithoutTensors) {
  for (const char* header : {"{}", "{ \t\r\n }", R"({"__metadata__":{}})"}) {
    const std::string file = safetensors_bytes(header, "");
    const TensorFile opened(as_bytes(file), "file");
    EXPECT_TRUE(opened.names().empty()) << header;
    EXPECT_TRUE(opened.metadata().empty()) << header;
    EXPECT_EQ(message_of<InvalidArgument>([&] { opened.tensor("a"); }),
              "'file': no tensor 'a'; there are: none");
  }
}

TEST(SafetensorsReader, DecodesNames) {
  const std::string file = safetensors_bytes(
      R"({"\u00e9\n\"\ud83d\ude00":{"dtype":"I8","shape":[],"data_offsets":[0,1]}})", "x");
  const TensorFile opened(as_bytes(file), "file");
  EXPECT_EQ(opened.names(), std::vector<std::string>{"\xc3\xa9\n\"\xf0\x9f\x98\x80"});
}

TEST(SafetensorsReader, TensorsWithoutElementsLieAnywhere) {
  const std::string file =
      safetensors_bytes(R"({"end":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},)"
                        R"("all":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                        R"("begin":{"dtype":"BF16","shape":[3,0,5],"data_offsets":[0,0]},)"
                        R"("too":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}})",
                        "wxyz");
  const TensorFile opened(as_bytes(file), "file");
  EXPECT_EQ(opened.names(), (std::vector<std::string>{"begin", "too", "all", "end"}));
  EXPECT_EQ(shape_of(opened.tensor("begin")), (Shape{3, 0, 5}));
  EXPECT_EQ(opened.tensor("begin").numel(), 0);
  EXPECT_EQ(shape_of(opened.tensor("end")), (Shape{0, 7}));
}

// Bits of each type of the format; the library opens those that have a dtype.
TEST(SafetensorsReader, KnowsTheSizeOfEveryType) {
  const std::pair<const char*, int> types[] = {
      {"F64", 64},    {"F32", 32},    {"F16", 16},    {"BF16", 16},   {"I64", 64},
      {"I32", 32},    {"I16", 16},    {"I8", 8},      {"U64", 64},    {"U32", 32},
      {"U16", 16},    {"U8", 8},      {"BOOL", 8},    {"C64", 64},    {"F8_E4M3", 8},
      {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
  };
  for (const auto& [type, bits] : types) {
    const std::string quoted = std::string("\"") + type + "\"";
    const std::size_t bytes = static_cast<std::size_t>(bits);  // of 8 elements
    EXPECT_EQ(refusal(safetensors_bytes(one(quoted, "[2,4]", "[0," + std::to_string(bytes) + "]"),
                                        std::string(bytes, 'x'))),
              "")
        << type;
    EXPECT_EQ(
        refusal(safetensors_bytes(one(quoted, "[2,4]", "[0," + std::to_string(bytes + 1) + "]"),
                                  std::string(bytes + 1, 'x'))),
        std::string("tensor 'a': ") + type + "[2, 4] needs " + std::to_string(bytes) +
            " bytes, but data_offsets give " + std::to_string(bytes + 1));
  }
  EXPECT_EQ(refusal(safetensors_bytes(one("\"F4\"", "[3]", "[0,2]"), "xx")),
            "tensor 'a': F4[3] ends within a byte");
  EXPECT_EQ(refusal(safetensors_bytes(one("\"F6_E2M3\"", "[2]", "[0,2]"), "xx")),
            "tensor 'a': F6_E2M3[2] ends within a byte");
}

TEST(SafetensorsReader, OpensOnlyItsOwnTypes) {
  for (const char* type : {"I16", "U8", "F8_E4M3", "BOOL", "f32", "F128", ""}) {
    const std::size_t bytes = std::string(type) == "I16" ? 2 : 1;
    const std::string file = safetensors_bytes(
        one(std::string("\"") + type + "\"", "[1]", "[0," + std::to_string(bytes) + "]"),
        std::string(bytes, 'x'));
    const TensorFile opened(as_bytes(file), "file");
    EXPECT_TRUE(opened.contains("a"));
    EXPECT_EQ(message_of<InvalidArgument>([&] { opened.tensor("a"); }),
              std::string("'file': tensor 'a' has dtype '") + type +
                  "'; expected F32, BF16, F16, I32, I64, I8 or F64");
  }
}

TEST(SafetensorsReader, OpensUpToRankFour) {
  const std::string four = safetensors_bytes(one("\"I8\"", "[1,2,1,1]", "[0,2]"), "xy");
  EXPECT_EQ(shape_of(TensorFile(as_bytes(four), "file").tensor("a")), (Shape{1, 2, 1, 1}));
  const std::string five = safetensors_bytes(one("\"I8\"", "[1,2,1,1,1]", "[0,2]"), "xy");
  const TensorFile opened(as_bytes(five), "file");
  EXPECT_EQ(message_of<InvalidArgument>([&] { opened.tensor("a"); }),
            "'file': tensor 'a' has rank 5; expected at most 4");
}

TEST(SafetensorsReader, RefusesLengthsThatTheFileDoesNotHold) {
  const std::string cut =
      "not a safetensors file, or cut short: the first 8 bytes tell of a header of ";
  EXPECT_EQ(refusal(""), "0 bytes are too few for a safetensors or npy file");
  EXPECT_EQ(refusal("1234567"), "7 bytes are too few for a safetensors or npy file");
  EXPECT_EQ(refusal(safetensors_bytes("", "")), "header of 0 bytes, expected 2 to 100000000");
  EXPECT_EQ(refusal(safetensors_bytes("{}", "", 1)), "header of 1 bytes, expected 2 to 100000000");
  EXPECT_EQ(refusal(safetensors_bytes("{}", "", 3)), cut + "3 bytes, but 2 follow");
  const std::pair<std::uint64_t, std::string> lengths[] = {
      {(std::uint64_t{1} << 32) + 2, "4294967298"},
      {(std::uint64_t{1} << 63) - 1, "9223372036854775807"},
      {std::uint64_t{1} << 63, "9223372036854775808"},
      {UINT64_MAX - 7, "18446744073709551608"},  // 8 more would be 0
      {UINT64_MAX, "18446744073709551615"},
  };
  for (const auto& [length, text] : lengths)
    EXPECT_EQ(refusal(safetensors_bytes("{}", "", length)), cut + text + " bytes, but 2 follow");
}

TEST(SafetensorsReader, RefusesHeadersLongerThanTheFormatAllows) {
  const TempDir directory;
  const std::string path = directory.file("long");
  write_atomically(path, safetensors_bytes("{}", "", kMaxSafetensorsHeader + 1));
  std::filesystem::resize_file(path, 8 + kMaxSafetensorsHeader + 1);  // a hole: takes no space
  EXPECT_EQ(message_of<InvalidArgument>([&] { TensorFile file(path); }),
            "'" + path + "': header of 100000001 bytes, expected 2 to 100000000");
}

TEST(SafetensorsReader, RefusesWhatIsNotJson) {
  using std::string_literals::operator""s;
  const Case cases[] = {
      {"[]", "the header does not start with '{'"},
      {" {}", "the header does not start with '{'"},
      {"\xef\xbb\xbf{}", "the header does not start with '{'"},
      {"null", "the header does not start with '{'"},
      {"{}\0\0"s, "zero byte in the header"},
      {"{\"a\0b\":1}"s, "zero byte in the header"},
      {"{ ", "the header is not JSON: error at byte 3 of it"},
      {"{]", "the header is not JSON: error at byte 2 of it"},
      {"{}x", "the header is not JSON: error at byte 3 of it"},
      {"{}{}", "the header is not JSON: error at byte 3 of it"},
      {"{,}", "the header is not JSON: error at byte 2 of it"},
      {"{a:1}", "the header is not JSON: error at byte 2 of it"},
      {"{'a':1}", "the header is not JSON: error at byte 2 of it"},
      {"{\"a\"}", "the header is not JSON: error at byte 5 of it"},
      {"{\"a\":}", "the header is not JSON: error at byte 6 of it"},
      {"{/**/}", "the header is not JSON: error at byte 2 of it"},
      {"{\"a", "the header is not JSON: error at byte 4 of it"},
      {"{\"a\n\":1}", "the header is not JSON: error at byte 4 of it"},
      {R"({"\x":1})", "the header is not JSON: error at byte 4 of it"},
      {R"({"\ud800":1})", "the header is not JSON: error at byte 9 of it"},
      {"{\"\xff\":1}", "the header is not JSON: error at byte 3 of it"},          // not UTF-8
      {"{\"\xc0\xaf\":1}", "the header is not JSON: error at byte 3 of it"},      // overlong
      {"{\"\xed\xa0\x80\":1}", "the header is not JSON: error at byte 4 of it"},  // surrogate
      {"{\"\xf4\x90\x80\x80\":1}",
       "the header is not JSON: error at byte 4 of it"},  // past the end
      {R"({"__metadata__":{},})", "the header is not JSON: error at byte 20 of it"},
      {R"({"a":NaN})", "the header is not JSON: error at byte 6 of it"},
      {one("\"F32\"", "[01]", "[0,4]"), "the header is not JSON: error at byte 31 of it"},
      {one("\"F32\"", "[1,]", "[0,4]"), "the header is not JSON: error at byte 32 of it"},
      {one("\"F32\"", "[1e999]", "[0,4]"), "the header is not JSON: error at byte 34 of it"},
  };
  for (const auto& [header, message] : cases)
    EXPECT_EQ(refusal(safetensors_bytes(header, "")), message) << header;
  // A length of one too few leaves the last bracket to the data; one too many takes a byte of them.
  const std::string good = one("\"I8\"", "[1]", "[0,1]");
  EXPECT_EQ(refusal(safetensors_bytes(good, "x")), "");
  const std::string bytes = std::to_string(good.size());
  EXPECT_EQ(refusal(safetensors_bytes(good, "x", good.size() - 1)),
            "the header is not JSON: error at byte " + bytes + " of it");
  EXPECT_EQ(refusal(safetensors_bytes(good, "x", good.size() + 1)),
            "the header is not JSON: error at byte " + std::to_string(good.size() + 1) + " of it");
}

TEST(SafetensorsReader, RefusesDeepNestingWhereItBegins) {
  constexpr std::size_t kDepth = 1'000'000;  // would crash a recursive parser
  std::string objects;
  for (std::size_t i = 0; i < kDepth; ++i) objects += R"({"a":)";
  const Case cases[] = {
      {R"({"a":)" + std::string(kDepth, '['), "'a' is an array, expected an object"},
      {objects, "tensor 'a': unknown field 'a'; expected dtype, shape and data_offsets"},
      {R"({"a":{"shape":[)" + std::string(kDepth, '['),
       "tensor 'a': shape has an array, expected integers from 0"},
      {R"({"__metadata__":{"k":)" + objects, "metadata 'k' is an object, expected text"},
  };
  for (const auto& [header, message] : cases)
    EXPECT_EQ(refusal(safetensors_bytes(header, "")), message);
}

TEST(SafetensorsReader, RefusesValuesOfTheWrongKind) {
  const std::pair<std::string, std::string> values[] = {
      {"null", "null"},
      {"true", "a boolean"},
      {"false", "a boolean"},
      {"-1", "the negative number -1"},
      {"-9223372036854775808", "the negative number -9223372036854775808"},
      {"1.5", "the number '1.5'"},
      {"1.0", "the number '1.0'"},
      {"1e2", "the number '1e2'"},
      {"18446744073709551616", "the number '18446744073709551616'"},
      {"-9223372036854775809", "the number '-9223372036854775809'"},
  };
  for (const auto& [value, words] : values) {
    const Case cases[] = {
        {"{\"a\":" + value + "}", "'a' is " + words + ", expected an object"},
        {R"({"__metadata__":)" + value + "}",
         "'__metadata__' is " + words + ", expected an object"},
        {R"({"__metadata__":{"k":)" + value + "}}", "metadata 'k' is " + words + ", expected text"},
        {one(value, "[1]", "[0,4]"), "tensor 'a': dtype is " + words + ", expected text"},
        {one("\"F32\"", value, "[0,4]"), "tensor 'a': shape is " + words + ", expected an array"},
        {one("\"F32\"", "[1," + value + "]", "[0,4]"),
         "tensor 'a': shape has " + words + ", expected integers from 0"},
        {one("\"F32\"", "[1]", value),
         "tensor 'a': data_offsets is " + words + ", expected an array"},
        {one("\"F32\"", "[1]", "[0," + value + "]"),
         "tensor 'a': data_offsets has " + words + ", expected two integers from 0"},
    };
    for (const auto& [header, message] : cases)
      EXPECT_EQ(refusal(safetensors_bytes(header, "1234")), message) << header;
  }
}

TEST(SafetensorsReader, RefusesOtherStructure) {
  const std::string good = R"({"dtype":"I8","shape":[1],"data_offsets":[0,1]})";
  const std::string at_most = ", over 2^63 - 1,";
  const Case cases[] = {
      {R"({"a":"x"})", "'a' is the text 'x', expected an object"},
      {R"({"a":3})", "'a' is the number 3, expected an object"},
      {R"({"__metadata__":{"k":["x"]}})", "metadata 'k' is an array, expected text"},
      {one("3", "[1]", "[0,1]"), "tensor 'a': dtype is the number 3, expected text"},
      {one("[\"I8\"]", "[1]", "[0,1]"), "tensor 'a': dtype is an array, expected text"},
      {one("{}", "[1]", "[0,1]"), "tensor 'a': dtype is an object, expected text"},
      {one("\"I8\"", "\"1\"", "[0,1]"), "tensor 'a': shape is the text '1', expected an array"},
      {one("\"I8\"", "{}", "[0,1]"), "tensor 'a': shape is an object, expected an array"},
      {one("\"I8\"", "[\"1\"]", "[0,1]"),
       "tensor 'a': shape has the text '1', expected integers from 0"},
      {one("\"I8\"", "[{}]", "[0,1]"), "tensor 'a': shape has an object, expected integers from 0"},
      {one("\"I8\"", "[9223372036854775808]", "[0,1]"),
       "tensor 'a': shape has the number 9223372036854775808" + at_most +
           " expected integers from 0"},
      {one("\"I8\"", "[1]", "[0,18446744073709551615]"),
       "tensor 'a': data_offsets has the number 18446744073709551615" + at_most +
           " expected two integers from 0"},
      {one("\"I8\"", "[1]", "[]"), "tensor 'a': data_offsets has length 0, expected [begin, end]"},
      {one("\"I8\"", "[1]", "[1]"), "tensor 'a': data_offsets has length 1, expected [begin, end]"},
      {one("\"I8\"", "[1]", "[0,1,1]"),
       "tensor 'a': data_offsets has a third number, expected two integers from 0"},
      {R"({"a":{}})", "tensor 'a': no dtype"},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "tensor 'a': no dtype"},
      {R"({"a":{"dtype":"I8","data_offsets":[0,1]}})", "tensor 'a': no shape"},
      {R"({"a":{"dtype":"I8","shape":[1]}})", "tensor 'a': no data_offsets"},
      {R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1],"crc":1}})",
       "tensor 'a': unknown field 'crc'; expected dtype, shape and data_offsets"},
      {R"({"a":)" + good + R"(,"a":)" + good + "}", "the name 'a' stands twice"},
      {R"({"a":)" + good + R"(,"\u0061":)" + good + "}", "the name 'a' stands twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", "the name '__metadata__' stands twice"},
      {R"({"__metadata__":{"k":"1","k":"1"}})", "the metadata key 'k' stands twice"},
      {R"({"a":{"dtype":"I8","shape":[1],"shape":[1],"data_offsets":[0,1]}})",
       "tensor 'a': the field 'shape' stands twice"},
  };
  for (const auto& [header, message] : cases)
    EXPECT_EQ(refusal(safetensors_bytes(header, "x")), message) << header;
}

TEST(SafetensorsReader, MessagesQuoteHostileNamesSafely) {
  const std::string longest(200, 'n');
  EXPECT_EQ(refusal(safetensors_bytes("{\"" + longest + "\":1}", "")),
            "'" + std::string(80, 'n') + "...' is the number 1, expected an object");
  EXPECT_EQ(refusal(safetensors_bytes(R"({"\u001b[31m\u007f\u0000":1})", "")),
            "'?[31m?\?' is the number 1, expected an object");
  // 79 bytes and a character of two: cut before it, not within.
  EXPECT_EQ(refusal(safetensors_bytes("{\"" + std::string(79, 'n') + "\xc3\xa9 more\":1}", "")),
            "'" + std::string(79, 'n') + "...' is the number 1, expected an object");
}

TEST(SafetensorsReader, RefusesShapesThatOverflow) {
  const std::pair<std::string, std::string> shapes[] = {
      {"[1152921504606846976]", "[1152921504606846976]"},
      {"[9223372036854775807]", "[9223372036854775807]"},
      {"[4294967296,4294967296]", "[4294967296, 4294967296]"},
      {"[4294967296,4294967296,0]",
       "[4294967296, 4294967296, 0]"},  // strides overflow all the same
      {"[0,9223372036854775807,2]", "[0, 9223372036854775807, 2]"},
      {"[2,2,2,2,2,2,2,2,9223372036854775807]", "[2, 2, 2, 2, 2, 2, 2, 2, ...]"},
  };
  for (const auto& [shape, text] : shapes) {
    EXPECT_EQ(refusal(safetensors_bytes(one("\"I8\"", shape, "[0,0]"), "")),
              "tensor 'a': shape " + text + " overflows");
    EXPECT_EQ(refusal(safetensors_bytes(one("\"unknown\"", shape, "[0,0]"), "")),
              "tensor 'a': shape " + text + " overflows");
  }
  // The largest one without overflow: 8 * (2^60 - 1) bytes are counted right.
  EXPECT_EQ(
      refusal(safetensors_bytes(one("\"F64\"", "[1152921504606846975]", "[0,0]"), "")),
      "tensor 'a': F64[1152921504606846975] needs 9223372036854775800 bytes, but data_offsets "
      "give 0");
}

TEST(SafetensorsReader, RefusesOffsetsThatDoNotFitTheShape) {
  const auto opened = [](const std::string& shape, std::size_t bytes) {
    return refusal(safetensors_bytes(one("\"F32\"", shape, "[0," + std::to_string(bytes) + "]"),
                                     std::string(bytes, 'x')));
  };
  EXPECT_EQ(opened("[2]", 8), "");
  EXPECT_EQ(opened("[2]", 4), "tensor 'a': F32[2] needs 8 bytes, but data_offsets give 4");
  EXPECT_EQ(opened("[2]", 9), "tensor 'a': F32[2] needs 8 bytes, but data_offsets give 9");
  EXPECT_EQ(opened("[2]", 0), "tensor 'a': F32[2] needs 8 bytes, but data_offsets give 0");
  EXPECT_EQ(opened("[]", 0), "tensor 'a': F32[] needs 4 bytes, but data_offsets give 0");
  EXPECT_EQ(opened("[0,5]", 4), "tensor 'a': F32[0, 5] needs 0 bytes, but data_offsets give 4");
}

TEST(SafetensorsReader, RefusesOffsetsThatDoNotCoverTheData) {
  struct Layout {
    std::string a;
    std::string b;
    std::string message;
  };
  const Layout layouts[] = {
      {"[0,4]", "[4,8]", ""},
      {"[4,8]", "[0,4]", ""},
      {"[4,0]", "[4,8]", "tensor 'a': data_offsets [4, 0] end before they begin"},
      {"[0,4]", "[8,4]", "tensor 'b': data_offsets [8, 4] end before they begin"},
      {"[9223372036854775807,0]", "[0,4]",
       "tensor 'a': data_offsets [9223372036854775807, 0] end before they begin"},
      {"[0,4]", "[2,6]", "tensor 'b': data_offsets [2, 6] overlap another tensor, which ends at 4"},
      {"[0,4]", "[0,4]", "tensor 'b': data_offsets [0, 4] overlap another tensor, which ends at 4"},
      {"[0,8]", "[4,8]", "tensor 'b': data_offsets [4, 8] overlap another tensor, which ends at 8"},
      {"[0,8]", "[4,4]", "tensor 'b': data_offsets [4, 4] overlap another tensor, which ends at 8"},
      {"[1,5]", "[5,8]", "tensor 'a': data_offsets [1, 5] leave a hole from 0"},
      {"[0,3]", "[4,8]", "tensor 'b': data_offsets [4, 8] leave a hole from 3"},
      {"[0,4]", "[8,8]", "tensor 'b': data_offsets [8, 8] leave a hole from 4"},
      {"[0,4]", "[4,7]", "1 bytes at the end belong to no tensor"},
      {"[0,4]", "[4,12]",
       "tensor 'b': data_offsets [4, 12] run past the data of 8 bytes; is the file cut short?"},
      {"[0,4]", "[9,9]",
       "tensor 'b': data_offsets [9, 9] run past the data of 8 bytes; is the file cut short?"},
      {"[0,4]", "[4,9223372036854775807]",
       "tensor 'b': data_offsets [4, 9223372036854775807] run past the data of 8 bytes; is the "
       "file cut short?"},
  };
  for (const Layout& layout : layouts) {
    const std::string header = R"({"a":{"dtype":"I32","shape":[1],"data_offsets":)" + layout.a +
                               R"(},"b":{"dtype":"I32","shape":[1],"data_offsets":)" + layout.b +
                               "}}";
    EXPECT_EQ(refusal(safetensors_bytes(header, "12345678")), layout.message) << header;
  }
  EXPECT_EQ(refusal(safetensors_bytes("{}", "1")), "1 bytes at the end belong to no tensor");
}

TEST(SafetensorsReader, ThousandsOfTensorsAreNoTrouble) {
  std::string header = "{";
  constexpr int kTensors = 20000;
  for (int i = kTensors - 1; i >= 0; --i) {
    header += "\"t" + std::to_string(i) + R"(":{"dtype":"I8","shape":[1],"data_offsets":[)" +
              std::to_string(i) + "," + std::to_string(i + 1) + "]}" + (i > 0 ? "," : "}");
  }
  const std::string file = safetensors_bytes(header, std::string(kTensors, 'x'));
  const TensorFile opened(as_bytes(file), "file");
  ASSERT_EQ(opened.names().size(), std::size_t{kTensors});
  EXPECT_EQ(opened.names().front(), "t0");
  EXPECT_EQ(opened.names().back(), "t19999");
  const std::string message = message_of<InvalidArgument>([&] { opened.tensor("u"); });
  EXPECT_TRUE(message.ends_with("'t18', 't19' and 19980 more")) << message;
}

// Compares bytes, so that reader and writer cannot share an error.
TEST(SafetensorsWriter, WritesThisVeryHeader) {
  const float memory[2] = {};
  const NamedTensor a{"a", {memory, DType::f32, {2}}};
  const NamedTensor b{"b\"", {nullptr, DType::bf16, {3, 0}}};
  const NamedTensor* const tensors[] = {&a, &b};
  const std::string json =
      R"({"__metadata__":{"k":"v","l":"\n"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("b\"":{"dtype":"BF16","shape":[3,0],"data_offsets":[8,8]}})";
  const std::string header = safetensors_header(tensors, {{"k", "v"}, {"l", "\n"}}, "file");
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_EQ(header.substr(8), json + std::string(header.size() - 8 - json.size(), ' '));
  EXPECT_LT(header.size() - 8 - json.size(), 64u);
  EXPECT_EQ(header.substr(0, 8), safetensors_bytes("", "", header.size() - 8));
  EXPECT_EQ(safetensors_header({}, {}, "file"), safetensors_bytes("{}" + std::string(54, ' '), ""));
}

TEST(SafetensorsWriter, RefusesFilesPastTheLargestOffset) {
  // All elements are the same one: 2^63 bytes need no memory.
  const double value = 0.0;
  const std::vector<std::int64_t> shape = {std::int64_t{1} << 59};
  const std::vector<std::int64_t> strides = {0};
  const NamedTensor a{"a", {&value, DType::f64, shape, strides}};
  const NamedTensor b{"b", a.view};
  const NamedTensor* const tensors[] = {&a, &b};
  EXPECT_EQ(message_of<InvalidArgument>([&] { safetensors_header(tensors, {}, "file"); }),
            "'file': tensor 'b' makes the file larger than 2^63 bytes");
}

}  // namespace
}  // namespace logitless
