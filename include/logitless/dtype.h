// Element types of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "logitless/export.h"

namespace logitless {

enum class DType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i64 = 4, i8 = 5, f64 = 6 };

inline constexpr int kDTypeCount = 7;

// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
    case DType::f64:
      return 8;
    case DType::i8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::i8:
      return "i8";
    case DType::f64:
      return "f64";
  }
  return "?";
}

// Parses a name. Throws InvalidArgument naming the text and the known names.
LOGITLESS_API DType parse_dtype(std::string_view text);

// The 16-bit and 32-bit floating types a head can be made of.
constexpr bool is_head_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}
constexpr bool is_index(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }

}  // namespace logitless
