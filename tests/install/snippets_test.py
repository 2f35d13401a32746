#!/usr/bin/env python3
"""Compiles every C++ snippet of the documents against an installed prefix, as a user would, and runs it. A snippet with a
main of its own is compiled as it is printed.

snippets_test.py SOURCE_DIR WORK_DIR CMAKE CXX. WORK_DIR/prefix is the installation. All snippets are compiled, linked
and run with the flags of pkg-config alone; whole programs by find_package as well.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
LANGUAGES = {".cpp": ["-x", "c++", "-std=c++20"], ".c": ["-x", "c", "-std=c11"]}

# Context of each snippet: (document, first line of the snippet): file scope, then the code before it in main and after
# it. Sizes are std::size_t, as containers have them.
TENSORS = """
  std::size_t n = 6, d = 16, v = 300;
  std::vector<std::uint16_t> hidden(n * d), weights(v * d), d_x(n * d);
  std::vector<std::int32_t> words(n, 3);
  std::vector<float> d_w(v * d);
  const void *x = hidden.data(), *w = weights.data(), *y = words.data();
  void *dx = d_x.data(), *dw = d_w.data();
  float loss = 0.0f;
"""
CALL = """
  using namespace logitless;
  const Context context;
  const CrossEntropyOptions options;
  CrossEntropyInputs in;
  in.hidden = {x, DType::bf16, {n, d}};
  in.weight = {w, DType::bf16, {v, d}};
  in.targets = {y, DType::i32, {n}};
  CrossEntropyOutputs out;
  out.loss = {&loss, DType::f32, {}};
  out.d_hidden = {dx, DType::bf16, {n, d}};
  out.d_weight = {dw, DType::f32, {v, d}};
"""
# All logits are 0.
EXPECT_LOG_V = "return std::abs(loss - std::log(static_cast<float>(v))) < 1e-3f ? 0 : 1;"
HEADERS = "#include <cmath>\n#include <cstdint>\n#include <iostream>\n#include <vector>\n#include <logitless/logitless.h>\n"
SNIPPETS = {
    ("docs/use/cpp.md", "#include <logitless/logitless.h>"): (
        "#include <cmath>\n#include <cstdint>\n#include <vector>\n", TENSORS, EXPECT_LOG_V),
    ("docs/use/cpp.md", "FarFieldHead head(context, {.error = 0.01});"): (HEADERS, TENSORS + CALL, "if (stats.tokens != 6) return 1;\n"
                                                                   + EXPECT_LOG_V),
    ("docs/use/cpp.md", "#include <iostream>"): ("", "", "return program.arena_bytes() < program.unchunked_arena_bytes() ? 0 : 1;"),
    ("docs/explain/compiler.md", "CompiledProgram program = compile(graph,"): (
        HEADERS,
        """
  using namespace logitless;
  Graph graph;
  graph.result("y", square(graph.parameter("x", DType::f32, {Dim::symbol("N")})));
  std::vector<float> x(4096, 3.0f), y(4096);
  const void* const parameters[] = {x.data()};
  void* const results[] = {y.data()};
  const Buffer memory(64_MiB);
  void* const arena = memory.data();
""", "return y[4095] > 8.9f && y[4095] < 9.1f ? 0 : 1;"),
    ("docs/use/gpu.md", "Context gpu("): (
        HEADERS,
        """
  using namespace logitless;
  if (!gpu_missing().empty()) return 0;  // compiled and linked all the same
  Graph graph;
  graph.result("y", square(graph.parameter("x", DType::f32, {Dim::symbol("N")})));
  const Bindings sizes = {{"N", 4096}};
  const Context here({.device = DeviceKind::cuda});
  const DeviceBuffer x(here, 4096 * 4), y(here, 4096 * 4);
  const void* const parameters[] = {x.data()};
  void* const results[] = {y.data()};
""", "return 0;"),
    ("docs/use/groups.md", "#include <logitless/logitless.h>"): (
        "", "", "return all[0][0] + all[1][0] == 0 && all[0][1] == 10 && all[1][1] == 10 ? 0 : 1;"),
    ("docs/use/groups.md", "const auto self = logitless::make_tcp("): (
        HEADERS + "#include <string>\n", "const std::string first_host = \"localhost\";\n  const int rank = 0, size = 1;\n",
        "return self->size() == 1 ? 0 : 1;"),
    ("docs/use/distributed.md", "// On each rank:"): (
        HEADERS + "#include <thread>\n#include <utility>\n",
        """
  const std::size_t n = 6, d = 16, rows = 150;
  const std::int64_t vocab = 300;
  std::vector<std::uint16_t> hidden(n * d), weights(rows * d);
  std::vector<std::int32_t> words(n, 170);
  const void *x = hidden.data(), *w = weights.data(), *y = words.data();
""", """
  float losses[2] = {};
  const auto ranks = logitless::make_thread_group(2);
  {
    std::jthread other([&] { losses[1] = loss_of(ranks[1], 150); });
    losses[0] = loss_of(ranks[0], 0);
  }
  return losses[0] == losses[1] && std::abs(losses[0] - std::log(300.0f)) < 1e-3f ? 0 : 1;
"""),
    ("docs/use/distributed.md", "// A program on each rank: of its own"): (
        HEADERS + "#include <thread>\n#include <utility>\n",
        """
  const std::int64_t n = 64, d = 16, rows = 4100, vocab = 8200;
  std::vector<float> hidden(n * d), weights(rows * d);
  std::vector<std::int64_t> target(n, 4170);
  const void *x = hidden.data(), *w = weights.data(), *y = target.data();
""", """
  float losses[2] = {};
  const auto ranks = logitless::make_thread_group(2);
  {
    std::jthread other([&] { losses[1] = gradients_of(ranks[1], 4100); });
    losses[0] = gradients_of(ranks[0], 0);
  }
  return losses[0] == losses[1] && std::abs(losses[0] - 64 * std::log(8200.0f)) < 1e-2f ? 0 : 1;
"""),
    ("docs/use/gpu.md", "logitless_program_options options;"): (
        "#include <logitless/c_api.h>\n#include <logitless/device.h>\n",
        """
  if (!logitless::gpu_missing().empty()) return 0;  // compiled and linked all the same
  const char* text = "graph main(%x: f32[8], %y: f32[8]) {\\n  %s = add %x, %y\\n  %d = sub %x, %y\\n  return s: %s, d: %d\\n}\\n";
  logitless_context_options device;
  logitless_context_options_init(&device, sizeof device);
  device.device = LOGITLESS_DEVICE_CUDA;
  logitless_context* context = nullptr;
  logitless_context_create(&device, &context);
  logitless_program* program = nullptr;
  logitless_prepared_program* prepared = nullptr;
  const logitless::Context here({.device = logitless::DeviceKind::cuda});
  const logitless::DeviceBuffer x(here, 32), y(here, 32), sum(here, 32), difference(here, 32), memory(here, 1 << 20);
  const void* const parameters[] = {x.data(), y.data()};
  void* const results[] = {sum.data(), difference.data()};
  void *arena = memory.data(), *stream = nullptr;
""", "return 0;"),
    ("docs/use/far_field.md", "// Once in a while: an order of the vocabulary"): (
        HEADERS, TENSORS + CALL, EXPECT_LOG_V),
    ("docs/use/far_field_ranks.md", "// On each rank: the weights of all ranks"): (
        HEADERS, TENSORS + CALL + """
  const auto vocab = static_cast<std::int64_t>(v);
  const int ranks = 1, rank = 0;
  const std::shared_ptr<Communicator> group = make_thread_group(ranks)[0];
""", "if (rows != vocab || stats.tokens != 6) return 1;\n" + EXPECT_LOG_V),
    ("docs/use/far_field.md", "logitless_far_field_options wanted;"): (
        "#include <math.h>\n#include <stdint.h>\n#include <stdio.h>\n#include <logitless/c_far_field.h>\n",
        """
  enum { N = 3, D = 2, V = 5 };
  float hidden[N * D] = {0}, weight[V * D] = {0}, d_hidden[N * D], loss = 0.0f;
  int64_t targets[N] = {3, 0, 1}, hidden_shape[] = {N, D}, weight_shape[] = {V, D}, targets_shape[] = {N};
  logitless_tensor x, w, y, l, dx;
  logitless_tensor_init(&x, hidden, LOGITLESS_F32, 2, hidden_shape);
  logitless_tensor_init(&w, weight, LOGITLESS_F32, 2, weight_shape);
  logitless_tensor_init(&y, targets, LOGITLESS_I64, 1, targets_shape);
  logitless_tensor_init(&l, &loss, LOGITLESS_F32, 0, NULL);
  logitless_tensor_init(&dx, d_hidden, LOGITLESS_F32, 2, hidden_shape);
  logitless_cross_entropy_options options;
  logitless_cross_entropy_options_init(&options, sizeof options);
  logitless_cross_entropy_inputs in;
  logitless_cross_entropy_inputs_init(&in, sizeof in);
  in.hidden = &x;
  in.weight = &w;
  in.targets = &y;
  logitless_cross_entropy_outputs out;
  logitless_cross_entropy_outputs_init(&out, sizeof out);
  out.loss = &l;
  out.d_hidden = &dx;
  logitless_context* context = NULL;
  if (logitless_context_create(NULL, &context) != LOGITLESS_OK) return 1;
""", "return status == LOGITLESS_OK && bytes > 0 && fabsf(loss - logf(5.0f)) < 1e-5f ? 0 : 1;"),
}

# One field of each struct by its name, and sizes of any type: none may cause a warning.
FIELDS = """
  std::size_t n = 4;
  use(CrossEntropyOptions{.label_smoothing = 0.1f}, CrossEntropyInputs{.grad_loss = 2.0}, CrossEntropyOutputs{.loss = {}});
  use(HeadOptions{.softcap = 30.0f}, HeadInputs{.hidden = {}}, HeadOutputs{.lse = {}}, HeadCotangents{.lse = {}});
  use(HeadGradients{.d_hidden = {}}, HeadShape{.tokens = 3}, HeadFeatures{.bias = true}, LossStatistics{.tokens = 1});
  use(Sharding{.vocab = 3}, SampleOptions{.top_k = 5}, SampleInputs{.hidden = {}}, SampleOutputs{.tokens = {}});
  use(TopLogProbsOptions{.k = 2}, TopLogProbsInputs{.hidden = {}}, TopLogProbsOutputs{.top_ids = {}});
  use(PlanRequest{.memory_budget = 256_MiB}, PlanRequest{.kind = PlanKind::dense}, DeviceLimits{.threads = 2});
  use(PlanCandidate{.kind = PlanKind::dense}, ContextOptions{.threads = 2}, ContextOptions{.kernel = "scalar"});
  use(FarFieldOptions{.error = 0.02}, FarFieldReport{.steps = 1}, FarFieldStatistics{.selected = 0.5}, OrderOptions{.seed = 1});
  use(CompileOptions{.memory_budget = 1_GiB}, DotOptions{.contract_a = {1}, .contract_b = {0}}, NamedTensor{.name = "x"});
  use(CommunicatorCallbacks{.size = 2}, NcclOptions{.max_ctas = 4});
  use(CompiledProgram::Tensor{.name = "x"}, Shape{Dim::symbol("N"), n, 3, 5u}, TensorView(nullptr, DType::f32, {0, n, 2, 3u}));
"""
FIELDS_BEFORE = HEADERS + "using namespace logitless;\ntemplate <typename... T>\nvoid use(const T&...) {}\n"

CMAKE = """cmake_minimum_required(VERSION 3.25)
project(snippets LANGUAGES C CXX)
find_package(logitless 0.1 REQUIRED)
foreach(source IN LISTS SOURCES)
  cmake_path(GET source STEM name)
  add_executable(${name} ${source})
  target_compile_options(${name} PRIVATE -Wall -Wextra -Wconversion -Werror)
  target_link_libraries(${name} PRIVATE logitless::logitless)
endforeach()
"""


def fail(message):
    sys.exit(f"snippets_test: {message}")


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}\nexited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def snippets_of(path):
    """Yields (number of the line after the fence, suffix of its file, text) of each C or C++ snippet."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"^[ \t]*```(c|cpp|c\+\+|cc|cxx)[ \t]*\n(.*?)^[ \t]*```", text, re.M | re.S | re.I):
        yield text.count("\n", 0, found.start(2)) + 1, ".c" if found.group(1).lower() == "c" else ".cpp", found.group(2)


def unit(document, line, text, before, setup, after):
    """Returns a translation unit: the snippet in main, its #include lines at file scope."""
    body = text.splitlines()
    includes = [row for row in body if row.startswith("#include")]
    body = ["" if row.startswith("#include") else row for row in body]
    return (before + "\n".join(includes) + "\nint main() {" + setup + f'\n#line {line} "{document}"\n' + "\n".join(body)
            + f'\n#line 1 "after the snippet of {document}:{line}"\n{after}\n}}\n')


def main(source, work, cmake, cxx):
    prefix, folder = work / "prefix", work / "snippets"
    folder.mkdir(exist_ok=True)
    documents = [source / "README.md", *sorted((source / "docs").glob("**/*.md")), *sorted((source / "examples").glob("*/*.md"))]
    units, whole, left = [], [], dict(SNIPPETS)
    for path in documents:
        document = path.relative_to(source).as_posix()
        for line, suffix, text in snippets_of(path):
            if "int main(" in text:
                file = folder / f"{path.stem}_{line}{suffix}"
                file.write_text(text, encoding="utf-8")
                whole.append((document, file))
                continue
            keys = [key for key in left if key[0] == document and text.startswith(key[1])]
            if not keys:
                fail(f"{document}:{line}: no entry in SNIPPETS says what stands before this snippet:\n{text}")
            name = f"{path.stem}_{line}".lower()
            context = left.pop(keys[0])
            unit_file = folder / f"{name}{'.cpp' if 'logitless::' in context[1] else suffix}"
            unit_file.write_text(unit(document, line, text, *context), encoding="utf-8")
            units.append((document, unit_file))
    fields = folder / "fields.cpp"
    fields.write_text(unit("tests/install/snippets_test.py", 1, "", FIELDS_BEFORE, FIELDS, ""), encoding="utf-8")
    units.append(("the public structs", fields))
    if left:
        fail(f"no snippet begins as these entries of SNIPPETS say: {sorted(left)}")

    # Only the flags of pkg-config, and no path of a library in the environment.
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    config = next(prefix.glob("**/logitless.pc"), None) or fail(f"no logitless.pc below {prefix}")
    flags = run("pkg-config", "--cflags", "--libs", "logitless",
                env={**environment, "PKG_CONFIG_PATH": str(config.parent)}).split()
    for document, file in units + whole:
        program = file.with_suffix("")
        run(cxx, *WARNINGS, *LANGUAGES[file.suffix], file, "-x", "none", *flags, "-o", program)
        printed = run(program, env=environment)
        # A comment "// prints X" at a line's end or "/* prints X */" says what a run prints.
        for said in re.findall(r"/[/*] prints (.*?)(?: \*/)?$", file.read_text(encoding="utf-8"), re.M):
            if said not in printed:
                fail(f"{document}: {file.name} says that it prints {said!r}, and printed {printed!r}")
        print(f"{document}: {file.name} compiled, linked and run by pkg-config")

    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "CMakeLists.txt").write_text(CMAKE, encoding="utf-8")
    sources = [file for _, file in whole]
    run(cmake, "-S", project, "-B", project / "build", f"-DCMAKE_CXX_COMPILER={cxx}", f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF", "-DCMAKE_CXX_STANDARD=20", f"-DSOURCES={';'.join(map(str, sources))}")
    run(cmake, "--build", project / "build")
    for file in sources:
        run(project / "build" / file.stem, env=environment)
        print(f"{file.name} compiled, linked and run by find_package")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
