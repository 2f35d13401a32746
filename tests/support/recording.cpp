#include "support/recording.h"

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace logitless::test {
namespace {

std::FILE* file() {
  static std::FILE* const opened = [] {
    const char* name = std::getenv("LOGITLESS_RECORD");
    return name == nullptr || *name == 0 ? nullptr : std::fopen(name, "a");
  }();
  return opened;
}

// FNV-1a: any changed bit changes it; it need not resist attacks.
struct Hash {
  void add(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) {
      value = (value ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
    }
  }
  std::uint64_t value = 0xcbf29ce484222325u;
};

void write(std::string_view what, const Hash& hash) {
  static std::string test;
  static int count = 0;
  const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
  std::string name = "no test";
  if (info != nullptr) {
    name = std::string(info->test_suite_name()) + "." + info->name();
    if (info->value_param() != nullptr) name += std::string(" ") + info->value_param();
  }
  if (name != test) {
    test = name;
    count = 0;
  }
  // A single write for each line: programs that append to the same file do not mix within one.
  const std::string line = name + "\t" + std::to_string(count++) + "\t" + std::string(what) + "\t";
  std::fprintf(file(), "%s%016" PRIx64 "\n", line.c_str(), hash.value);
  std::fflush(file());
}

void add(Hash& hash, const ConstTensorView& x, int dim, std::int64_t offset) {
  const std::size_t size = size_of(x.dtype());
  if (dim == x.rank()) {
    const auto* at =
        static_cast<const std::byte*>(x.data()) + offset * static_cast<std::int64_t>(size);
    hash.add({at, size});
    return;
  }
  for (std::int64_t i = 0; i < x.size(dim); ++i) add(hash, x, dim + 1, offset + i * x.stride(dim));
}

}  // namespace

bool recording() { return file() != nullptr; }

void record(std::string_view what, std::span<const std::byte> bytes) {
  if (!recording()) return;
  Hash hash;
  hash.add(bytes);
  write(what, hash);
}

void record(std::string_view what, std::string_view text) {
  record(what, std::as_bytes(std::span(text.data(), text.size())));
}

void record(std::string_view what, const ConstTensorView& view) {
  if (!recording() || !view.defined()) return;
  Hash hash;
  add(hash, view, 0, 0);
  write(what, hash);
}

void record(const CrossEntropyOutputs& o, const LossStatistics& s) {
  if (!recording()) return;
  record("loss", o.loss);
  record("d_hidden", o.d_hidden);
  record("d_weight", o.d_weight);
  record("d_bias", o.d_bias);
  record("lse", o.lse);
  record("target_logit", o.target_logit);
  record("log_prob", o.log_prob);
  record("entropy", o.entropy);
  record("argmax", o.argmax);
  record("d_hidden_bound", o.d_hidden_bound);
  const double numbers[] = {static_cast<double>(s.tokens),
                            static_cast<double>(s.valid_tokens),
                            s.normalizer,
                            s.mean_lse,
                            s.mean_log_prob,
                            static_cast<double>(s.correct),
                            s.far.selected,
                            s.far.sampled,
                            s.far.passes,
                            static_cast<double>(s.far.dense_fallback),
                            s.far.bound,
                            s.far.audited_error,
                            static_cast<double>(s.far.audited_tokens),
                            s.far.audited_lse_error,
                            s.far.audited_lse_error_max,
                            s.far.sampled_lse_error,
                            s.far.sampled_most};
  record("statistics", std::as_bytes(std::span(numbers)));
}

}  // namespace logitless::test
