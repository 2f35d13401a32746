// Hashes of test results in a file, so that two builds can be compared to the bit
// (tests/record.py). Nothing is done unless LOGITLESS_RECORD names a file to append to.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "logitless/logitless.h"

namespace logitless::test {

bool recording();

// Writes one line: the running test, the number of its record, `what`, and the bytes' hash.
void record(std::string_view what, std::span<const std::byte> bytes);
void record(std::string_view what, std::string_view text);

// Records the elements in the order of their indices; host memory.
void record(std::string_view what, const ConstTensorView& view);

// Records every defined output, in host memory, and the statistics.
void record(const CrossEntropyOutputs& outputs, const LossStatistics& statistics);

}  // namespace logitless::test
