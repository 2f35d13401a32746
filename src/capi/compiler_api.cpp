// The compiler over the C ABI: a program's text in, a program ready to run out.
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "logitless/compiler.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

struct logitless_program {
  CompiledProgram program;
  std::string text;
  std::string explanation;
  std::string report;
};

namespace {

const CompiledProgram& program_of(const logitless_program* program) {
  require(program != nullptr, "program: expected a handle, got NULL");
  return program->program;
}

CompileOptions compile_options_from(const logitless_program_options* from) {
  const logitless_program_options c = read_optional_struct(from, "options");
  CompileOptions options;
  if (c.size_count > 0) {
    require_pointer(c.size_names, "options.size_names");
    require_pointer(c.size_values, "options.size_values");
  }
  for (std::size_t i = 0; i < c.size_count; ++i) {
    require(c.size_names[i] != nullptr, "options.size_names: expected a name, name ", i,
            " is NULL");
    require(options.sizes.emplace(c.size_names[i], c.size_values[i]).second,
            "options.size_names: ", c.size_names[i], " is given twice");
  }
  options.memory_budget = c.memory_budget;
  options.chunks = c.chunks;
  options.threads = c.threads;
  options.chunk = c.chunk != 0;
  options.head_engine = c.head_engine != 0;
  options.strict = c.strict != 0;
  return options;
}

void write_tensor(const std::vector<CompiledProgram::Tensor>& all, std::size_t index,
                  const char* what, logitless_program_tensor* to) {
  require(index < all.size(), "index: ", index, " is not below the ", all.size(), " ", what,
          " of the program");
  const CompiledProgram::Tensor& t = all[index];
  auto c = defaults<logitless_program_tensor>();
  c.name = t.name.c_str();
  c.shape = t.shape.data();
  c.bytes = static_cast<std::uint64_t>(t.bytes());
  c.dtype = static_cast<logitless_dtype>(t.dtype);
  c.rank = static_cast<std::int32_t>(t.shape.size());
  write_struct(c, to, "tensor");
}

}  // namespace

logitless_status logitless_program_compile(const char* text,
                                           const logitless_program_options* options,
                                           logitless_program** program) {
  return guarded([&] {
    require_pointer(text, "text");
    require_pointer(program, "program");
    auto made = std::make_unique<logitless_program>();
    made->program = compile(Graph::parse(text), compile_options_from(options));
    made->text = made->program.text();
    made->explanation = made->program.explain();
    made->report = made->program.report_json();
    *program = made.release();
  });
}

void logitless_program_destroy(logitless_program* program) { delete program; }

const char* logitless_program_text(const logitless_program* program) {
  return program == nullptr ? "" : program->text.c_str();
}
const char* logitless_program_explain(const logitless_program* program) {
  return program == nullptr ? "" : program->explanation.c_str();
}
const char* logitless_program_report_json(const logitless_program* program) {
  return program == nullptr ? "" : program->report.c_str();
}

size_t logitless_program_parameter_count(const logitless_program* program) {
  return program == nullptr ? 0 : program->program.parameters().size();
}
size_t logitless_program_result_count(const logitless_program* program) {
  return program == nullptr ? 0 : program->program.results().size();
}

logitless_status logitless_program_get_parameter(const logitless_program* program, size_t index,
                                                 logitless_program_tensor* tensor) {
  return guarded(
      [&] { write_tensor(program_of(program).parameters(), index, "parameters", tensor); });
}
logitless_status logitless_program_get_result(const logitless_program* program, size_t index,
                                              logitless_program_tensor* tensor) {
  return guarded([&] { write_tensor(program_of(program).results(), index, "results", tensor); });
}

size_t logitless_program_arena_bytes(const logitless_program* program) {
  return program == nullptr ? 0 : program->program.arena_bytes();
}
size_t logitless_program_unchunked_arena_bytes(const logitless_program* program) {
  return program == nullptr ? 0 : program->program.unchunked_arena_bytes();
}
int32_t logitless_program_threads(const logitless_program* program) {
  return program == nullptr ? 0 : program->program.threads();
}

logitless_status logitless_program_run(const logitless_program* program,
                                       const void* const* parameters, size_t parameter_count,
                                       void* const* results, size_t result_count, void* arena,
                                       size_t arena_bytes) {
  return guarded([&] {
    const CompiledProgram& p = program_of(program);
    require(parameters != nullptr || parameter_count == 0, "parameters: expected ", parameter_count,
            " pointers, got NULL");
    require(results != nullptr || result_count == 0, "results: expected ", result_count,
            " pointers, got NULL");
    require(arena_bytes >= p.arena_bytes(), "arena_bytes: expected ", p.arena_bytes(),
            " or more, got ", arena_bytes);
    p.run({parameters, parameter_count}, {results, result_count}, arena);
  });
}
