// Tests of the npy container with hand-made bytes: accepted files, and each refusal.
#include "core/npy.h"

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

std::string dict(const std::string& descr, const std::string& order, const std::string& shape) {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
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

std::string header_refusal(const std::string& header) {
  const std::string message = refusal(npy_bytes(1, header, "xxxx"));
  const std::string prefix = "npy header: ";
  EXPECT_TRUE(message.empty() || message.starts_with(prefix)) << message;
  return message.empty() ? "" : message.substr(prefix.size());
}

TEST(NpyReader, ReadsEveryFormat) {
  for (const int major : {1, 2, 3}) {
    const std::string file = npy_bytes(major, dict("'<i4'", "False", "(2, 1)"), "ABCDEFGH");
    const TensorFile opened(as_bytes(file), "file");
    EXPECT_EQ(opened.names(), std::vector<std::string>{""});
    EXPECT_TRUE(opened.metadata().empty());
    for (const char* name : {"", "weight"}) {
      EXPECT_TRUE(opened.contains(name));
      const ConstTensorView view = opened.tensor(name);
      EXPECT_EQ(view.dtype(), DType::i32);
      EXPECT_EQ(shape_of(view), (Shape{2, 1}));
      EXPECT_EQ(elements_of(view), "ABCDEFGH");
    }
  }
}

TEST(NpyReader, ReadsEveryDtype) {
  const std::pair<const char*, DType> types[] = {
      {"<f2", DType::f16}, {"<f4", DType::f32}, {"<f8", DType::f64}, {"|i1", DType::i8},
      {"<i1", DType::i8},  {"<i4", DType::i32}, {"<i8", DType::i64}};
  for (const auto& [descr, dtype] : types) {
    const std::string data(3 * size_of(dtype), 'd');
    const std::string file =
        npy_bytes(1, dict(std::string("'") + descr + "'", "False", "(3,)"), data);
    const ConstTensorView view = TensorFile(as_bytes(file), "file").tensor("");
    EXPECT_EQ(view.dtype(), dtype) << descr;
    EXPECT_EQ(shape_of(view), Shape{3}) << descr;
  }
}

TEST(NpyReader, ReadsEveryShape) {
  const std::pair<const char*, Shape> shapes[] = {
      {"()", {}},
      {"( )", {}},
      {"(4,)", {4}},
      {"(4 , )", {4}},
      {"(2,2)", {2, 2}},
      {"(2, 1, 2,)", {2, 1, 2}},
      {"(1, 1, 1, 4)", {1, 1, 1, 4}},
      {"(0,)", {0}},
      {"(7, 0, 3)", {7, 0, 3}},
  };
  for (const auto& [text, shape] : shapes) {
    std::size_t numel = 1;
    for (const std::int64_t size : shape) numel *= static_cast<std::size_t>(size);
    const std::string file =
        npy_bytes(1, dict("'|i1'", "False", text), std::string("abcd").substr(0, numel));
    const TensorFile opened(as_bytes(file), "file");
    EXPECT_EQ(shape_of(opened.tensor("")), shape) << text;
  }
}

TEST(NpyReader, ReadsDictsWrittenOtherwise) {
  for (const char* header :
       {"{'descr':'<f4','fortran_order':False,'shape':(1,)}",
        "{\"shape\": (1,), \"fortran_order\": False, \"descr\": \"<f4\"}",
        " \t\n{ 'fortran_order' : False , 'shape' : ( 1 , ) , 'descr' : '<f4' , } \n"}) {
    EXPECT_EQ(header_refusal(header), "") << header;
  }
}

TEST(NpyReader, HeaderOfFormat2MayBeLong) {
  const std::string header = dict("'<f4'", "False", "(1,)");
  const std::string padded = header + std::string(100'000, ' ');  // over the 2^16 of format 1
  EXPECT_EQ(refusal(npy_bytes(2, padded, "xxxx")), "");
  EXPECT_EQ(refusal(npy_bytes(3, padded, "xxxx")), "");
}

TEST(NpyReader, RefusesMagicVersionAndLength) {
  using std::string_literals::operator""s;
  const std::string good = dict("'<f4'", "False", "(1,)");
  ASSERT_EQ(refusal(npy_bytes(1, good, "xxxx")), "");
  const auto parse = [](const std::string& file) {
    return message_of<InvalidArgument>([&] { parse_npy(as_bytes(file), "file"); });
  };
  for (const std::string& magic : {""s, "\x93NUMP"s, "\x93NUMPY"s.substr(1), "\x93numpy\1\0"s})
    EXPECT_EQ(parse(magic), "'file': no npy magic at the start");
  // A file without the magic counts as safetensors.
  EXPECT_EQ(refusal("\x93NUMPX\1\0{}"s),
            "not a safetensors file, or cut short: the first 8 bytes tell of a header of "
            "378576894774931 bytes, but 2 follow");

  EXPECT_EQ(refusal("\x93NUMPY"s), "npy file cut short in its version");
  EXPECT_EQ(refusal("\x93NUMPY\1"s), "npy file cut short in its version");
  EXPECT_EQ(refusal("\x93NUMPY\1\0"s), "npy file cut short in its header length");
  EXPECT_EQ(refusal("\x93NUMPY\1\0\2"s), "npy file cut short in its header length");
  EXPECT_EQ(refusal("\x93NUMPY\2\0\2\0\0"s), "npy file cut short in its header length");
  const std::pair<std::string, std::string> versions[] = {
      {"\0\0"s, "0.0"}, {"\1\1"s, "1.1"}, {"\4\0"s, "4.0"}, {"\xff\xff"s, "255.255"}};
  for (const auto& [bytes, text] : versions)
    EXPECT_EQ(refusal("\x93NUMPY" + bytes + "\2\0{}"s),
              "npy format " + text + ", expected 1.0, 2.0 or 3.0");

  EXPECT_EQ(refusal(npy_bytes(1, "{}", "", 3)), "npy header of 3 bytes, but 2 follow");
  EXPECT_EQ(refusal(npy_bytes(1, "{}", "", 65535)), "npy header of 65535 bytes, but 2 follow");
  EXPECT_EQ(refusal(npy_bytes(2, "{}", "", 0x80000000u)),
            "npy header of 2147483648 bytes, but 2 follow");
  EXPECT_EQ(refusal(npy_bytes(3, "{}", "", 0xffffffffu)),
            "npy header of 4294967295 bytes, but 2 follow");
}

TEST(NpyReader, RefusesHeadersThatAreNoDict) {
  using std::string_literals::operator""s;
  const std::string keys = ", expected descr, fortran_order and shape";
  const std::pair<std::string, std::string> cases[] = {
      {"", "expected { at byte 0, found ''"},
      {"\n", "expected { at byte 1, found ''"},
      {"[1]", "expected { at byte 0, found '[1]'"},
      {"\0{}"s, "expected { at byte 0, found '?{}'"},
      {"{", "expected a string at byte 1, found ''"},
      {"{}", "no key descr"},
      {"{,}", "expected a string at byte 1, found ',}'"},
      {"{1: 2}", "expected a string at byte 1, found '1: 2}'"},
      {"{'descr", "the string at byte 1 does not end"},
      {"{'descr\"", "the string at byte 1 does not end"},
      {"{'desc\\x72': '<f4'}", "escape in the string 'desc\\x72'"},
      {"{'descr' '<f4'}", "expected : at byte 9, found ''<f4'}'"},
      {"{'descr': '<f4' 'shape': ()}", "expected } at byte 16, found ''shape': ()}'"},
      {"{'descr': '<f4'", "expected } at byte 15, found ''"},
      {"{'order': 1}", "unknown key 'order'" + keys},
      {"{'': 1}", "unknown key ''" + keys},
      {"{'Shape': ()}", "unknown key 'Shape'" + keys},
      {"{'descr': '<f4', 'descr': '<f4'}", "the key 'descr' stands twice"},
      {"{'shape': (), 'shape': ()}", "the key 'shape' stands twice"},
      {"{'descr': '<f4', 'fortran_order': False}", "no key shape"},
      {"{'descr': '<f4', 'shape': ()}", "no key fortran_order"},
      {"{'fortran_order': False, 'shape': ()}", "no key descr"},
      {dict("'<f4'", "False", "(1,)") + "{}", "unexpected '{}' after the dict"},
      {dict("'<f4'", "False", "(1,)") + "\0"s, "unexpected '?' after the dict"},
      {dict("'<f4'", "False", "(1,)") + std::string(100, 'z'),
       "unexpected '" + std::string(80, 'z') + "...' after the dict"},
  };
  for (const auto& [header, message] : cases) EXPECT_EQ(header_refusal(header), message) << header;
}

TEST(NpyReader, RefusesValuesOfTheDict) {
  const std::string rest = ", }?'";  // what a message quotes after the value
  const std::string range = ", expected integers from 0 to 2^63 - 1";
  struct Value {
    std::string descr;
    std::string order;
    std::string shape;
    std::string message;
  };
  const Value values[] = {
      {"4", "False", "()",
       "expected a string at byte 10, found '4, 'fortran_order': False, 'shape': ()" + rest},
      {"None", "False", "()",
       "expected a string at byte 10, found 'None, 'fortran_order': False, 'shape': ()" + rest},
      {"[('x', '<f4')]", "False", "()",
       "structured dtypes are not read; expected one number per element"},
      {"'<f4'", "false", "()",
       "fortran_order is 'false, 'shape': ()" + rest + ", expected True or False"},
      {"'<f4'", "0", "()", "fortran_order is '0, 'shape': ()" + rest + ", expected True or False"},
      {"'<f4'", "'False'", "()",
       "fortran_order is ''False', 'shape': ()" + rest + ", expected True or False"},
      {"'<f4'", "Falsey", "()", "expected } at byte 39, found 'y, 'shape': ()" + rest},
      {"'<f4'", "False", "[1]", "expected ( at byte 50, found '[1]" + rest},
      {"'<f4'", "False", "1", "expected ( at byte 50, found '1" + rest},
      {"'<f4'", "False", "(1)", "shape: expected a tuple, found a number in brackets"},
      {"'<f4'", "False", "(,)", "shape has ',)" + rest + range},
      {"'<f4'", "False", "(1,,)", "shape has ',)" + rest + range},
      {"'<f4'", "False", "(1 2)", "shape: expected , or ) at byte 53, found '2)" + rest},
      {"'<f4'", "False", "(1L,)", "shape: expected , or ) at byte 52, found 'L,)" + rest},
      {"'<f4'", "False", "(1.0,)", "shape: expected , or ) at byte 52, found '.0,)" + rest},
      {"'<f4'", "False", "(1e0,)", "shape: expected , or ) at byte 52, found 'e0,)" + rest},
      {"'<f4'", "False", "(0x1,)", "shape: expected , or ) at byte 52, found 'x1,)" + rest},
      {"'<f4'", "False", "(-1,)", "shape has '-1,)" + rest + range},
      {"'<f4'", "False", "(+1,)", "shape has '+1,)" + rest + range},
      {"'<f4'", "False", "(01,)", "shape has '01,)" + rest + range},
      {"'<f4'", "False", "('1',)", "shape has ''1',)" + rest + range},
      {"'<f4'", "False", "((1,),)", "shape has '(1,),)" + rest + range},
      {"'<f4'", "False", "(9223372036854775808,)",
       "shape has '9223372036854775808,)" + rest + range},
      {"'<f4'", "False", "(18446744073709551617,)",
       "shape has '18446744073709551617,)" + rest + range},
      {"'<f4'", "False", "(1, 1, 1, 1, 1)", "shape: rank is over 4"},
  };
  for (const Value& value : values) {
    const std::string header = dict(value.descr, value.order, value.shape);
    EXPECT_EQ(header_refusal(header), value.message) << header;
  }
  EXPECT_EQ(header_refusal("{'shape': (1"), "shape: expected , or ) at byte 12, found ''");
  EXPECT_EQ(header_refusal("{'shape': (" + std::string(60'000, '(')),
            "shape has '" + std::string(80, '(') + "...'" + range);
}

TEST(NpyReader, RefusesDtypesAndOrder) {
  for (const char* descr : {">f4", ">i8", ">f2", ">U7"}) {
    EXPECT_EQ(refusal(npy_bytes(1, dict(std::string("'") + descr + "'", "False", "(1,)"), "xxxx")),
              std::string("dtype '") + descr + "' is big-endian, expected little-endian");
  }
  for (const char* descr : {"", "f4", "=f4", "<f16", "<u4", "|u1", "|b1", "<c8", "|S4", "<U1", "|O",
                            "<i2", "|V4", "<f4 ", "<F4"}) {
    EXPECT_EQ(
        refusal(npy_bytes(1, dict(std::string("'") + descr + "'", "False", "(1,)"), "xxxx")),
        std::string("dtype '") + descr + "' is not read; expected <f2, <f4, <f8, |i1, <i4 or <i8");
  }
  for (const char* shape : {"(1, 1)", "(1,)", "()"}) {
    EXPECT_EQ(refusal(npy_bytes(1, dict("'<f4'", "True", shape), "xxxx")),
              "Fortran order is not read; save a C-ordered copy");
  }
}

TEST(NpyReader, RefusesDataOfAnotherSize) {
  const auto opened = [](const std::string& shape, std::size_t bytes) {
    return refusal(npy_bytes(1, dict("'<f4'", "False", shape), std::string(bytes, 'x')));
  };
  EXPECT_EQ(opened("(2,)", 8), "");
  EXPECT_EQ(opened("(2,)", 7), "<f4[2] needs 8 bytes of data, but 7 follow the header");
  EXPECT_EQ(opened("(2,)", 9), "<f4[2] needs 8 bytes of data, but 9 follow the header");
  EXPECT_EQ(opened("()", 0), "<f4[] needs 4 bytes of data, but 0 follow the header");
  EXPECT_EQ(opened("(3, 0)", 4), "<f4[3, 0] needs 0 bytes of data, but 4 follow the header");
  EXPECT_EQ(opened("(1152921504606846975,)", 0),
            "<f4[1152921504606846975] needs 4611686018427387900 bytes of data, but 0 follow the "
            "header");
  for (const char* shape : {"1152921504606846976", "9223372036854775807", "4294967296, 4294967296",
                            "4294967296, 4294967296, 0", "0, 9223372036854775807, 2"}) {
    const std::string comma = std::string(shape).find(',') == std::string::npos ? "," : "";
    EXPECT_EQ(opened("(" + std::string(shape) + comma + ")", 0),
              "shape [" + std::string(shape) + "] overflows");
  }
}

// The expected bytes are NumPy's own for the same arrays.
TEST(NpyWriter, WritesTheHeaderThatNumpyWrites) {
  using std::string_literals::operator""s;
  const std::pair<ConstTensorView, std::string> cases[] = {
      {{nullptr, DType::f32, {0}}, "{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }"},
      {{"x", DType::i8, {}}, "{'descr': '|i1', 'fortran_order': False, 'shape': (), }"},
      {{nullptr, DType::i64, {5, 0}},
       "{'descr': '<i8', 'fortran_order': False, 'shape': (5, 0), }"},
      {{nullptr, DType::f16, {0, 2, 3}},
       "{'descr': '<f2', 'fortran_order': False, 'shape': (0, 2, 3), }"},
  };
  for (const auto& [view, text] : cases) {
    EXPECT_EQ(npy_header(view, "file"),
              "\x93NUMPY\1\0\x76\0"s + text + std::string(117 - text.size(), ' ') + "\n");
  }
}

TEST(NpyWriter, AlignsTheDataWhateverTheShape) {
  const double value = 0.0;
  for (std::int64_t size = 1; size < INT64_MAX / 100; size *= 7) {
    const std::vector<std::int64_t> shape = {1, 1, 1, size};
    const std::vector<std::int64_t> strides = {0, 0, 0, 0};
    const std::string header = npy_header({&value, DType::f64, shape, strides}, "file");
    EXPECT_EQ(header.size() % 64, 0u);
    EXPECT_EQ(header.back(), '\n');
  }
}

TEST(NpyWriter, RefusesWhatNpyCannotHold) {
  const auto refused = [](const ConstTensorView& view) {
    return message_of<InvalidArgument>([&] { npy_header(view, "file"); });
  };
  EXPECT_EQ(refused({"xx", DType::bf16, {1}}),
            "'file': npy has no code for bf16; write safetensors, or convert to f32");
  EXPECT_EQ(refused({}), "'file': tensor is none, expected a view");
  EXPECT_EQ(refused({nullptr, DType::f32, {1}}), "'file': tensor has a null pointer");
}

}  // namespace
}  // namespace logitless
