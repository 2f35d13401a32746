#include "logitless/tensor_view.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "test_files.h"

namespace logitless {
namespace {

TEST(TensorView, DefaultIsNoTensor) {
  const TensorView view;
  EXPECT_FALSE(view.defined());
  EXPECT_EQ(view.data(), nullptr);
  EXPECT_EQ(view.numel(), 0);
  EXPECT_EQ(view.bytes(), 0);
  EXPECT_EQ(describe(view), "none");
}

TEST(TensorView, ContiguousStridesFollowTheShape) {
  float memory[24] = {};
  const TensorView view(memory, DType::f32, {2, 3, 4});
  EXPECT_TRUE(view.defined());
  EXPECT_EQ(view.data(), memory);
  EXPECT_EQ(view.rank(), 3);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.bytes(), 96);
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(describe(view), "f32[2, 3, 4]");
}

// Sizes of the types that users have.
TEST(TensorView, TakesAnyWholeNumbers) {
  float memory[24] = {};
  std::size_t rows = 2;
  int columns = 3;
  const std::int64_t depth = 4;
  EXPECT_EQ(describe(TensorView(memory, DType::f32, {rows, columns, depth})), "f32[2, 3, 4]");
  EXPECT_EQ(describe(TensorView(memory, DType::f32, {std::vector<float>(24).size()})), "f32[24]");
  EXPECT_THROW(TensorView(memory, DType::f32, {SIZE_MAX}), InvalidArgument);
  EXPECT_THROW(TensorView(memory, DType::f32, {1, 1, 1, 1, 1}), InvalidArgument);
}

TEST(TensorView, ScalarHasOneElement) {
  double value = 1.0;
  const TensorView view(&value, DType::f64, {});
  EXPECT_TRUE(view.defined());
  EXPECT_EQ(view.rank(), 0);
  EXPECT_EQ(view.numel(), 1);
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(describe(view), "f64[]");
}

TEST(TensorView, NoElementsNeedNoMemory) {
  const ConstTensorView view(nullptr, DType::bf16, {0, 512});
  EXPECT_TRUE(view.defined());
  EXPECT_EQ(view.numel(), 0);
  EXPECT_EQ(view.bytes(), 0);
}

TEST(TensorView, StridesMayBeZeroOrNegative) {
  std::int32_t memory[6] = {};
  const std::array<std::int64_t, 2> shape = {2, 3};
  const std::array<std::int64_t, 2> strides = {0, -1};
  const TensorView view(memory + 2, DType::i32, shape, strides);
  EXPECT_EQ(view.numel(), 6);
  EXPECT_EQ(view.stride(0), 0);
  EXPECT_EQ(view.stride(1), -1);
  EXPECT_FALSE(view.contiguous());
  EXPECT_EQ(describe(view), "i32[2, 3] strides [0, -1]");
}

TEST(TensorView, StrideOfASingleElementDoesNotMatter) {
  float memory[4] = {};
  const std::array<std::int64_t, 2> shape = {1, 4};
  const std::array<std::int64_t, 2> strides = {999, 1};
  EXPECT_TRUE(TensorView(memory, DType::f32, shape, strides).contiguous());
}

TEST(TensorView, MutableBecomesReadOnlyWithItsStrides) {
  std::int8_t memory[12] = {};
  const std::array<std::int64_t, 2> shape = {3, 2};
  const std::array<std::int64_t, 2> strides = {1, 6};
  const TensorView view(memory, DType::i8, shape, strides);
  const ConstTensorView constant = view;
  EXPECT_EQ(constant.data(), memory);
  EXPECT_EQ(constant.dtype(), DType::i8);
  EXPECT_EQ(describe(constant), "i8[3, 2] strides [1, 6]");
  EXPECT_FALSE(ConstTensorView(TensorView()).defined());
}

TEST(TensorView, RefusesWhatIsNoShape) {
  float memory[1] = {};
  const auto message = [&](std::vector<std::int64_t> shape) {
    return message_of<InvalidArgument>([&] { TensorView(memory, DType::f32, shape); });
  };
  EXPECT_NE(message({1, 1, 1, 1, 1}).find("rank 5"), std::string::npos);
  EXPECT_NE(message({2, -3}).find("-3 of dimension 1 is negative"), std::string::npos);
  EXPECT_NE(
      message({std::int64_t{1} << 40, std::int64_t{1} << 40}).find("overflows at dimension 1"),
      std::string::npos);
  EXPECT_NE(message({std::int64_t{1} << 60}).find("overflows"), std::string::npos);
}

TEST(TensorView, RefusesStridesOfAnotherRank) {
  float memory[4] = {};
  const std::array<std::int64_t, 2> shape = {2, 2};
  const std::array<std::int64_t, 1> strides = {1};
  const std::string message =
      message_of<InvalidArgument>([&] { TensorView(memory, DType::f32, shape, strides); });
  EXPECT_NE(message.find("1 strides for rank 2"), std::string::npos) << message;
}

}  // namespace
}  // namespace logitless
