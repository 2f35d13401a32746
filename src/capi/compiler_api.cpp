// The compiler over the C ABI: from a program's text to a prepared program.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"
#include "logitless/compiler.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

struct logitless_program {
  CompiledProgram program;
  std::string text;
  std::string explanation;
  std::string report;
};

struct logitless_prepared_program {
  CompiledProgram program;
  std::optional<PreparedProgram> on_gpu;
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
  options.externs = c.externs != 0;
  options.device.kind = device_from(c.device, "options.device");
  const bool gpu = options.device.kind == DeviceKind::cuda;
  require(gpu || c.compute_capability == 0,
          "options.compute_capability: expected 0 of the CPU, got ", c.compute_capability);
  if (gpu) options.device.compute_capability = c.compute_capability;
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

// Throws InvalidArgument naming a result, or the arena, and the buffer that it overlaps. The
// program itself refuses a wrong number of pointers.
void require_results_apart(const CompiledProgram& program, std::span<const void* const> parameters,
                           std::span<void* const> results, const void* arena) {
  struct Range {
    std::uintptr_t begin, end;
    const char* what;
    std::string_view name;
    bool result;
  };
  std::vector<Range> ranges;
  const auto add = [&](const void* data, std::size_t bytes, const char* what, std::string_view name,
                       bool result) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (data != nullptr && bytes > 0) ranges.push_back({begin, begin + bytes, what, name, result});
  };
  const auto add_all = [&](const auto& tensors, const auto& pointers, const char* what,
                           bool result) {
    for (std::size_t i = 0; i < std::min(tensors.size(), pointers.size()); ++i)
      add(pointers[i], static_cast<std::size_t>(tensors[i].bytes()), what, tensors[i].name, result);
  };
  add_all(program.parameters(), parameters, "parameter '", false);
  add_all(program.results(), results, "result '", true);
  add(arena, program.arena_bytes(), "the arena", "", true);
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // Parameters may overlap each other. Furthest-reaching earlier range of either kind.
  const Range* reach[2] = {nullptr, nullptr};
  const auto text = [](const Range& r) {
    return concat(r.what, r.name, r.name.empty() ? "" : "'");
  };
  for (const Range& r : ranges) {
    for (const bool result : {false, true}) {
      const Range* before = reach[result];
      if (before == nullptr || before->end <= r.begin || !(result || r.result)) continue;
      const auto& [one, other] = r.result ? std::tie(r, *before) : std::tie(*before, r);
      throw InvalidArgument(concat("run: ", text(one), " shares memory with ", text(other)));
    }
    const Range*& furthest = reach[r.result];
    if (furthest == nullptr || furthest->end < r.end) furthest = &r;
  }
}

// The arguments of a run or an enqueue.
struct Pointers {
  const void* const* parameters;
  std::size_t parameter_count;
  void* const* results;
  std::size_t result_count;
  void* arena;
  std::size_t arena_bytes;

  std::span<const void* const> in() const { return {parameters, parameter_count}; }
  std::span<void* const> out() const { return {results, result_count}; }
};

void check_pointers(const CompiledProgram& program, const Pointers& p) {
  require(p.parameters != nullptr || p.parameter_count == 0, "parameters: expected ",
          p.parameter_count, " pointers, got NULL");
  require(p.results != nullptr || p.result_count == 0, "results: expected ", p.result_count,
          " pointers, got NULL");
  require(p.arena_bytes >= program.arena_bytes(), "arena_bytes: expected ", program.arena_bytes(),
          " or more, got ", p.arena_bytes);
  require_results_apart(program, p.in(), p.out(), p.arena);
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
    const Pointers given{parameters, parameter_count, results, result_count, arena, arena_bytes};
    check_pointers(p, given);
    p.run(given.in(), given.out(), arena);
  });
}

logitless_status logitless_program_prepare(const logitless_program* program,
                                           const logitless_context* context,
                                           logitless_prepared_program** prepared) {
  return guarded([&] {
    require_pointer(prepared, "prepared");
    const CompiledProgram& p = program_of(program);
    const Context& where = context_of(context);
    auto made = std::make_unique<logitless_prepared_program>(logitless_prepared_program{p, {}});
    if (p.device().kind == DeviceKind::cuda) {
      made->on_gpu = p.prepare(where);
    } else {
      require(where.device().kind == DeviceKind::cpu,
              "prepare: context: of a GPU; the program was compiled for the CPU");
    }
    *prepared = made.release();
  });
}

void logitless_prepared_program_destroy(logitless_prepared_program* prepared) { delete prepared; }

logitless_status logitless_program_enqueue(const logitless_prepared_program* prepared,
                                           const void* const* parameters, size_t parameter_count,
                                           void* const* results, size_t result_count, void* arena,
                                           size_t arena_bytes, void* stream) {
  return guarded([&] {
    require(prepared != nullptr, "prepared: expected a handle, got NULL");
    const Pointers given{parameters, parameter_count, results, result_count, arena, arena_bytes};
    check_pointers(prepared->program, given);
    if (prepared->on_gpu) {
      prepared->on_gpu->run(given.in(), given.out(), arena, stream);
      return;
    }
    require(stream == nullptr, "stream: expected NULL of a program for the CPU");
    prepared->program.run(given.in(), given.out(), arena);
  });
}
