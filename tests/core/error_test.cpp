#include "logitless/error.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "core/printable.h"
#include "core/stored_tensor.h"
#include "logitless/dtype.h"
#include "test_files.h"

namespace logitless {
namespace {

TEST(Concat, JoinsPartsOfAnyKind) {
  EXPECT_EQ(concat("weight is [", 3, ", ", std::string("D"), "] at ", 1.5),
            "weight is [3, D] at 1.5");
  EXPECT_EQ(concat(), "");
}

TEST(Require, ThrowsInvalidArgumentOnlyWhenFalse) {
  EXPECT_NO_THROW(require(true, "unused"));
  EXPECT_EQ(message_of<InvalidArgument>([] { require(false, "dim is ", 7); }), "dim is 7");
}

TEST(Check, ThrowsInternalErrorOnlyWhenFalse) {
  EXPECT_NO_THROW(check(true, "unused"));
  EXPECT_EQ(message_of<InternalError>([] { check(false, "state ", 2); }), "state 2");
}

TEST(Error, IsTheBaseOfAllFour) {
  EXPECT_THROW(throw InvalidArgument("a"), Error);
  EXPECT_THROW(throw Unsupported("a"), Error);
  EXPECT_THROW(throw DeviceError("a"), Error);
  EXPECT_THROW(throw InternalError("a"), Error);
}

TEST(DType, NamesParseBack) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
    EXPECT_GT(size_of(dtype), 0u);
  }
}

TEST(DType, UnknownNameIsQuoted) {
  const std::string message = message_of<InvalidArgument>([] { parse_dtype("F32"); });
  EXPECT_NE(message.find("'F32'"), std::string::npos) << message;
  EXPECT_NE(message.find("bf16"), std::string::npos) << message;
}

TEST(Quoted, IsSafeToPrint) {
  EXPECT_EQ(quoted_text("plain"), "'plain'");
  EXPECT_EQ(quoted_text(std::string_view("a\n\x1b\0b", 5)), "'a???b'");
  const std::string cut = quoted_text(std::string(1000, 'x'));
  EXPECT_EQ(cut, "'" + std::string(80, 'x') + "...'");
}

TEST(Quoted, CutsBetweenCharacters) {
  // Byte 80 is the second half of a two-byte character.
  const std::string text = std::string(79, 'x') + "\xc3\xa9" + "yyy";
  EXPECT_EQ(quoted_text(text), "'" + std::string(79, 'x') + "...'");
}

TEST(Printable, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("rank 1: \u00e9\u20ac\U0001f600 'a\\b'"),
            "rank 1: \u00e9\u20ac\U0001f600 'a\\b'");
  EXPECT_EQ(printable("\x1b[31m\a\r\b\t\x7f"), "\\x1b[31m\\x07\\x0d\\x08\\x09\\x7f");
  EXPECT_EQ(printable("one\ntwo"), "one\\ntwo");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\u009b31m"), "\\xc2\\x9b31m");  // a control character of two bytes
  EXPECT_EQ(printable("\u202e\u2066\u2028\u200f"),
            "\\xe2\\x80\\xae\\xe2\\x81\\xa6\\xe2\\x80\\xa8\\xe2\\x80\\x8f");
}

TEST(Printable, WritesOutWhatIsNoUtf8) {
  EXPECT_EQ(printable("\xff\x80x"), "\\xff\\x80x");
  EXPECT_EQ(printable("\xc3"), "\\xc3");  // ends early
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");  // overlong
  EXPECT_EQ(printable("\xe0\x80\x9b"), "\\xe0\\x80\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // half of a surrogate pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond the last code point
}

TEST(CheckedNumel, LeavesZerosOutOfTheOverflowCheck) {
  const std::int64_t big = std::int64_t{1} << 40;
  EXPECT_EQ(checked_numel({}), 1);
  EXPECT_EQ(checked_numel({3, 4}), 12);
  EXPECT_EQ(checked_numel({3, 0, 4}), 0);
  EXPECT_EQ(checked_numel({(std::int64_t{1} << 60) - 1}), (std::int64_t{1} << 60) - 1);
  EXPECT_EQ(checked_numel({std::int64_t{1} << 60}), std::nullopt);
  EXPECT_EQ(checked_numel({big, big}), std::nullopt);
  EXPECT_EQ(checked_numel({0, big, big}), std::nullopt);
}

}  // namespace
}  // namespace logitless
