#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>

#include "logitless/plan.h"
#include "test_files.h"

namespace logitless {
namespace {

TEST(ParseBytes, KnowsBinaryAndDecimalUnits) {
  const std::pair<const char*, std::size_t> cases[] = {
      {"0", 0},
      {"4096", 4096},
      {"4096B", 4096},
      {"512MiB", std::size_t{512} << 20},
      {"512 MiB", std::size_t{512} << 20},
      {"2GiB", std::size_t{2} << 30},
      {"2G", std::size_t{2} << 30},
      {"3K", 3072},
      {"3KiB", 3072},
      {"3KB", 3000},
      {"7M", std::size_t{7} << 20},
      {"7MB", 7'000'000},
      {"1.5GB", 1'500'000'000},
      {"0.5KiB", 512},
      {"1e3", 1000},
      {"2TiB", std::size_t{2} << 40},
      {"1T", std::size_t{1} << 40},
      {"1TB", 1'000'000'000'000},
      {"256mib", std::size_t{256} << 20},
      {"256 MIB", std::size_t{256} << 20},
      {"2gb", 2'000'000'000},
      {"3k", 3072},
      {"3kb", 3000},
      {"7b", 7},
  };
  for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(ParseBytes, RefusesTheRestAndQuotesIt) {
  for (const char* text : {"", "MiB", "-1", "-1MiB", "12XB", "12 mibs", "1,5GB", "nan", "inf",
                           "1e400", "9999999TiB", "5MiB more", "0x10", " 5", "+5"}) {
    const std::string message = message_of<InvalidArgument>([&] { parse_bytes(text); });
    EXPECT_NE(message.find("'" + std::string(text) + "'"), std::string::npos)
        << text << ": " << message;
  }
}

TEST(FormatBytes, ChoosesTheUnit) {
  const std::pair<std::size_t, const char*> cases[] = {
      {0, "0 B"},
      {1, "1 B"},
      {1023, "1023 B"},
      {1024, "1.0 KiB"},
      {1536, "1.5 KiB"},
      {(std::size_t{1} << 20) - 1, "1.0 MiB"},  // never "1024.0 KiB"
      {std::size_t{512} << 20, "512.0 MiB"},
      {std::size_t{3} << 30, "3.0 GiB"},
      {std::size_t{5} << 40, "5.0 TiB"},
      {std::size_t{2000} << 40, "2000.0 TiB"},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(format_bytes(bytes), text);
}

TEST(FormatBytes, ParsesBack) {
  for (int shift = 0; shift < 44; ++shift) {
    const std::size_t bytes = std::size_t{1} << shift;
    EXPECT_EQ(parse_bytes(format_bytes(bytes)), bytes);
  }
}

}  // namespace
}  // namespace logitless
