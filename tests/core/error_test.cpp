#include "logitless/error.h"

#include <gtest/gtest.h>

#include "core/check.h"
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
