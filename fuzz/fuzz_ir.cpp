// Parses any bytes as the text of a program. The parser must refuse them with a position, or return
// a graph that verifies. The printed graph must read back as the same.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "compiler/ir/text.h"
#include "logitless/error.h"

namespace logitless {
namespace {

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_ir: %s\n", what);
  std::abort();
}

bool has_place(const std::string& message) {
  // The message must begin with "input:LINE:COLUMN: ".
  const std::string_view start = "input:";
  if (message.rfind(start, 0) != 0) return false;
  const std::size_t line = message.find_first_not_of("0123456789", start.size());
  if (line == std::string::npos || message[line] != ':' || line == start.size()) return false;
  const std::size_t column = message.find_first_not_of("0123456789", line + 1);
  return column != std::string::npos && column > line + 1 && message.compare(column, 2, ": ") == 0;
}

void check(std::string_view text) {
  ir::ParsedGraph parsed;
  try {
    parsed = ir::parse(text, "input");
  } catch (const InvalidArgument& error) {
    expect(has_place(error.what()), "an error has no place");
    return;
  }
  ir::verify(parsed.graph);
  const std::string printed = ir::print(parsed.graph, parsed.gradients);
  const ir::ParsedGraph again = ir::parse(printed, "printed");
  expect(ir::print(again.graph, again.gradients) == printed,
         "a printed program reads back otherwise");
  expect(again.gradients == parsed.gradients, "requests for gradients read back otherwise");
}

}  // namespace
}  // namespace logitless

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  logitless::check(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
