// Tensor programs over the C ABI: compiled, described, run, and every refusal.
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "expected.h"

enum { kRows = 5, kColumns = 7, kInner = 3 };

static const char kProgram[] =
    "graph head(%h: f32[N, 3], %w: f32[V, 3]) {\n"
    "  %z = dot %h, %w contract(1; 1) : f32[N, V]\n"
    "  %l = reduce_lse %z dims(1)\n"
    "  %loss = reduce_sum %l dims(0)\n"
    "  return loss: %loss\n"
    "  differentiate loss wrt %h\n"
    "}\n";

static const char* const kNames[] = {"N", "V"};
static const int64_t kValues[] = {kRows, kColumns};

static void refused(const char* what, logitless_status actual, const char* part) {
  CHECK(actual == LOGITLESS_INVALID_ARGUMENT, "%s: status is '%s'", what,
        logitless_status_name(actual));
  CHECK(strstr(logitless_last_error(), part) != NULL, "%s: expected '%s' in the text", what, part);
}

static void with_sizes(logitless_program_options* options) {
  logitless_program_options_init(options, sizeof *options);
  options->size_names = kNames;
  options->size_values = kValues;
  options->size_count = 2;
  options->threads = 1;
}

// Computes the sum over rows of the log-sum-exp of their logits, and its gradient with respect to
// h.
static void expect_lse(const float* h, const float* w, double* loss, double* d_h) {
  int row, column, i;
  *loss = 0.0;
  for (row = 0; row < kRows; ++row) {
    double sum = 0.0, p[kColumns];
    for (column = 0; column < kColumns; ++column) {
      double z = 0.0;
      for (i = 0; i < kInner; ++i) z += (double)h[row * kInner + i] * w[column * kInner + i];
      p[column] = exp(z);
      sum += p[column];
    }
    *loss += log(sum);
    for (i = 0; i < kInner; ++i) {
      d_h[row * kInner + i] = 0.0;
      for (column = 0; column < kColumns; ++column)
        d_h[row * kInner + i] += p[column] / sum * w[column * kInner + i];
    }
  }
}

static void check_tensor(const logitless_program_tensor* t, const char* name, int rank,
                         int64_t size0, uint64_t bytes) {
  CHECK(strcmp(t->name, name) == 0, "name is %s, expected %s", t->name, name);
  CHECK(t->dtype == LOGITLESS_F32 && t->rank == rank && t->bytes == bytes, "%s", name);
  CHECK(rank == 0 || t->shape[0] == size0, "%s", name);
}

// Checks the same results by logitless_program_enqueue, which serves CPU programs as well.
static void test_enqueue(const logitless_program* program, const void* const* parameters,
                         void* const* results, void* arena, size_t bytes) {
  logitless_prepared_program* prepared = NULL;
  logitless_context* context = NULL;
  CHECK(logitless_context_create(NULL, &context) == LOGITLESS_OK, "context");
  CHECK(logitless_context_compute_capability(context) == 0, "capability of the CPU");
  refused("prepare without program", logitless_program_prepare(NULL, context, &prepared),
          "program");
  refused("prepare without context", logitless_program_prepare(program, NULL, &prepared),
          "context");
  refused("prepare to nothing", logitless_program_prepare(program, context, NULL), "prepared");
  CHECK(prepared == NULL, "a failed call wrote its output");
  CHECK(logitless_program_prepare(program, context, &prepared) == LOGITLESS_OK, "prepare");
  logitless_context_destroy(context);
  refused("enqueue nothing",
          logitless_program_enqueue(NULL, parameters, 2, results, 2, arena, bytes, NULL),
          "prepared: expected a handle");
  refused("a stream",
          logitless_program_enqueue(prepared, parameters, 2, results, 2, arena, bytes, &context),
          "stream: expected NULL");
  refused("enqueue in a small arena",
          logitless_program_enqueue(prepared, parameters, 2, results, 2, arena, bytes - 1, NULL),
          "arena_bytes");
  refused("enqueue with one result",
          logitless_program_enqueue(prepared, parameters, 2, results, 1, arena, bytes, NULL),
          "1 results");
  CHECK(logitless_program_enqueue(prepared, parameters, 2, results, 2, arena, bytes, NULL) ==
            LOGITLESS_OK,
        "enqueue: %s", logitless_last_error());
  logitless_prepared_program_destroy(prepared);
  logitless_prepared_program_destroy(NULL);
}

static void test_run(int64_t chunks) {
  float h[kRows * kInner], w[kColumns * kInner], loss = -1.0f, d_h[kRows * kInner];
  double expected_loss, expected_d_h[kRows * kInner];
  logitless_program_options options;
  logitless_program_tensor tensor;
  logitless_program* program = NULL;
  const void* parameters[2];
  void* results[2];
  void* block;
  void* arena;
  size_t bytes, i;
  for (i = 0; i < kRows * kInner; ++i) h[i] = (float)((int)(i * 7 % 11) - 5) / 4.0f;
  for (i = 0; i < kColumns * kInner; ++i) w[i] = (float)((int)(i * 5 % 13) - 6) / 5.0f;
  expect_lse(h, w, &expected_loss, expected_d_h);

  with_sizes(&options);
  CHECK(options.chunk == 1 && options.head_engine == 1, "defaults");
  options.chunks = chunks;
  CHECK(logitless_program_compile(kProgram, &options, &program) == LOGITLESS_OK, "compile");
  if (program == NULL) return;
  CHECK((strstr(logitless_program_text(program), "loop c0") != NULL) == (chunks > 0), "%s",
        logitless_program_text(program));
  CHECK(strstr(logitless_program_explain(program), "head: parameters") != NULL, "%s",
        logitless_program_explain(program));
  CHECK(logitless_program_report_json(program)[0] == '{', "%s",
        logitless_program_report_json(program));
  CHECK(logitless_program_threads(program) == 1, "threads");
  CHECK(logitless_program_parameter_count(program) == 2, "parameters");
  CHECK(logitless_program_result_count(program) == 2, "results");
  logitless_program_tensor_init(&tensor, sizeof tensor);
  CHECK(logitless_program_get_parameter(program, 1, &tensor) == LOGITLESS_OK, "parameter 1");
  check_tensor(&tensor, "w", 2, kColumns, sizeof w);
  CHECK(logitless_program_get_result(program, 0, &tensor) == LOGITLESS_OK, "result 0");
  check_tensor(&tensor, "loss", 0, 0, sizeof loss);
  CHECK(logitless_program_get_result(program, 1, &tensor) == LOGITLESS_OK, "result 1");
  check_tensor(&tensor, "d_h", 2, kRows, sizeof d_h);
  refused("parameter 2", logitless_program_get_parameter(program, 2, &tensor), "2");
  refused("result 2", logitless_program_get_result(program, 2, &tensor), "2 results");

  bytes = logitless_program_arena_bytes(program);
  CHECK(logitless_program_unchunked_arena_bytes(program) >= sizeof(float) * kRows * kColumns,
        "arena without loops");
  block = malloc(bytes + 64);
  if (block == NULL) exit(1);
  arena = (void*)(((uintptr_t)block + 63) / 64 * 64);
  parameters[0] = h;
  parameters[1] = w;
  results[0] = &loss;
  results[1] = d_h;
  refused("small arena",
          logitless_program_run(program, parameters, 2, results, 2, arena, bytes - 1),
          "arena_bytes");
  refused("no arena", logitless_program_run(program, parameters, 2, results, 2, NULL, bytes),
          "arena");
  refused("one parameter", logitless_program_run(program, parameters, 1, results, 2, arena, bytes),
          "parameters");
  refused("no parameters", logitless_program_run(program, NULL, 2, results, 2, arena, bytes),
          "parameters: expected");
  refused("no results", logitless_program_run(program, parameters, 2, NULL, 2, arena, bytes),
          "results: expected");
  results[1] = NULL;
  refused("no d_h", logitless_program_run(program, parameters, 2, results, 2, arena, bytes),
          "'d_h'");
  results[1] = h;
  refused("in place", logitless_program_run(program, parameters, 2, results, 2, arena, bytes),
          "run: result 'd_h' shares memory with parameter 'h'");
  results[1] = &loss;
  refused("one result twice",
          logitless_program_run(program, parameters, 2, results, 2, arena, bytes),
          "shares memory with result '");
  results[1] = arena;
  refused("in the arena", logitless_program_run(program, parameters, 2, results, 2, arena, bytes),
          "the arena");
  results[1] = d_h;
  CHECK(loss == -1.0f, "a failed call wrote its output");
  CHECK(logitless_program_run(program, parameters, 2, results, 2, arena, bytes) == LOGITLESS_OK,
        "run");
  check_close("loss", &loss, &expected_loss, 1, 1e-5);
  check_close("d_h", d_h, expected_d_h, kRows * kInner, 1e-5);

  loss = -1.0f;
  memset(d_h, 0, sizeof d_h);
  test_enqueue(program, parameters, results, arena, bytes);
  check_close("loss, enqueued", &loss, &expected_loss, 1, 1e-5);
  check_close("d_h, enqueued", d_h, expected_d_h, kRows * kInner, 1e-5);
  free(block);
  logitless_program_destroy(program);
}

static void test_refusals(void) {
  static const char* const kTwice[] = {"N", "N"};
  static const char* const kMissing[] = {"N", NULL};
  logitless_program_options options;
  logitless_program_tensor tensor;
  logitless_program* program = NULL;
  logitless_program_destroy(NULL);
  CHECK(strcmp(logitless_program_text(NULL), "") == 0, "text of NULL");
  CHECK(strcmp(logitless_program_explain(NULL), "") == 0, "explain of NULL");
  CHECK(strcmp(logitless_program_report_json(NULL), "") == 0, "report of NULL");
  CHECK(logitless_program_parameter_count(NULL) == 0, "parameters of NULL");
  CHECK(logitless_program_result_count(NULL) == 0, "results of NULL");
  CHECK(logitless_program_arena_bytes(NULL) == 0, "arena of NULL");
  CHECK(logitless_program_unchunked_arena_bytes(NULL) == 0, "arena of NULL");
  CHECK(logitless_program_threads(NULL) == 0, "threads of NULL");
  logitless_program_tensor_init(&tensor, sizeof tensor);
  refused("tensor of NULL", logitless_program_get_result(NULL, 0, &tensor), "program");
  refused("run of NULL", logitless_program_run(NULL, NULL, 0, NULL, 0, NULL, 0), "program");

  with_sizes(&options);
  refused("no text", logitless_program_compile(NULL, &options, &program), "text");
  refused("no program", logitless_program_compile(kProgram, &options, NULL), "program");
  refused("no sizes", logitless_program_compile(kProgram, NULL, &program), "size N");
  refused("text", logitless_program_compile("graph main() {\n  %x = wave %y\n}\n", NULL, &program),
          "program:2:");
  options.size_names = kTwice;
  refused("twice", logitless_program_compile(kProgram, &options, &program), "N is given twice");
  options.size_names = kMissing;
  refused("a NULL name", logitless_program_compile(kProgram, &options, &program), "name 1");
  options.size_names = NULL;
  refused("no names", logitless_program_compile(kProgram, &options, &program), "size_names");
  with_sizes(&options);
  options.size_values = NULL;
  refused("no values", logitless_program_compile(kProgram, &options, &program), "size_values");
  with_sizes(&options);
  options.chunks = -1;
  refused("chunks", logitless_program_compile(kProgram, &options, &program), "chunks is -1");
  with_sizes(&options);
  options.memory_budget = 1;
  options.strict = 1;
  refused("strict", logitless_program_compile(kProgram, &options, &program), "budget is 1");
  memset(&options, 0, sizeof options);
  refused("not initialised", logitless_program_compile(kProgram, &options, &program),
          "options: struct_size is 0");
  CHECK(program == NULL, "a failed call wrote its output");
}

// Compiling for a GPU needs none, and a struct of a header before GPUs means the CPU.
static void test_devices(void) {
  logitless_program_options options;
  logitless_program* program = NULL;
  logitless_prepared_program* prepared = NULL;
  logitless_context* context = NULL;
  float memory[64];
  const void* parameters[2];
  void* results[2];
  void* block;
  size_t bytes;
  with_sizes(&options);
  CHECK(options.device == LOGITLESS_DEVICE_CPU && options.compute_capability == 0, "defaults");
  options.compute_capability = 90;
  refused("capability of the CPU", logitless_program_compile(kProgram, &options, &program),
          "options.compute_capability");
  options.struct_size = offsetof(logitless_program_options, device);
  CHECK(logitless_program_compile(kProgram, &options, &program) == LOGITLESS_OK, "older struct: %s",
        logitless_last_error());
  CHECK(logitless_program_threads(program) == 1, "a program of the CPU");
  logitless_program_destroy(program);
  program = NULL;

  with_sizes(&options);
  options.device = LOGITLESS_DEVICE_CUDA;
  options.compute_capability = 90;
  refused("threads of a GPU", logitless_program_compile(kProgram, &options, &program), "threads");
  options.threads = 0;
  options.compute_capability = 70;
  refused("an old GPU", logitless_program_compile(kProgram, &options, &program),
          "compute capability 70");
  options.device = 7;
  CHECK(logitless_program_compile(kProgram, &options, &program) == LOGITLESS_UNSUPPORTED,
        "a device that is none");
  options.device = LOGITLESS_DEVICE_CUDA;
  options.compute_capability = 90;
  options.head_engine = 0;
  CHECK(program == NULL, "a failed call wrote its output");
  CHECK(logitless_program_compile(kProgram, &options, &program) == LOGITLESS_OK, "for a GPU: %s",
        logitless_last_error());
  CHECK(logitless_program_threads(program) == 0, "threads of a GPU's program");
  bytes = logitless_program_arena_bytes(program);
  block = malloc(bytes + 256);
  if (block == NULL) exit(1);
  parameters[0] = parameters[1] = memory;
  results[0] = memory + 32;
  results[1] = memory + 40;
  refused("run of a GPU's",
          logitless_program_run(program, parameters, 2, results, 2,
                                (void*)(((uintptr_t)block + 255) / 256 * 256), bytes),
          "run: the program was compiled for a GPU");
  free(block);
  CHECK(logitless_context_create(NULL, &context) == LOGITLESS_OK, "context");
  refused("prepared for the CPU", logitless_program_prepare(program, context, &prepared),
          "context: of the CPU");
  CHECK(prepared == NULL, "a failed call wrote its output");
  logitless_context_destroy(context);
  logitless_program_destroy(program);
  CHECK(logitless_context_compute_capability(NULL) == 0, "capability of NULL");
}

void test_programs(void) {
  test_run(0);
  test_run(2);
  test_run(5);
  test_refusals();
  test_devices();
}
