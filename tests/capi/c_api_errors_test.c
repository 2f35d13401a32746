// Tests of errors: every status, the text of the last error, structs of other sizes, null handles.
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "expected.h"

// Checks the status of a call and a part of the error's text.
static void check_error(const char* what, logitless_status actual, logitless_status expected,
                        const char* part) {
  CHECK(actual == expected, "%s: status is '%s', expected '%s'", what,
        logitless_status_name(actual), logitless_status_name(expected));
  CHECK(strstr(logitless_last_error(), part) != NULL, "%s: expected '%s' in the text", what, part);
}

// A valid call, in which a test breaks one argument.
typedef struct Call {
  Head head;
  float loss;
  logitless_tensor hidden, weight, targets, loss_tensor;
  logitless_cross_entropy_inputs in;
  logitless_cross_entropy_outputs out;
} Call;

static void make_call(Call* call) {
  make_head(&call->head);
  call->loss = 42.0f;
  call->hidden = tensor(call->head.hidden, LOGITLESS_F32, 2, kTokens, kDim);
  call->weight = tensor(call->head.weight, LOGITLESS_F32, 2, kVocab, kDim);
  call->targets = tensor(call->head.targets, LOGITLESS_I64, 1, kTokens, 0);
  call->loss_tensor = tensor(&call->loss, LOGITLESS_F32, 0, 0, 0);
  logitless_cross_entropy_inputs_init(&call->in, sizeof call->in);
  call->in.hidden = &call->hidden;
  call->in.weight = &call->weight;
  call->in.targets = &call->targets;
  logitless_cross_entropy_outputs_init(&call->out, sizeof call->out);
  call->out.loss = &call->loss_tensor;
}

static logitless_status plan_of(logitless_context* context, const Call* call,
                                logitless_plan** plan) {
  return logitless_plan_cross_entropy(context, NULL, &call->in, &call->out, NULL, plan);
}

static void test_invalid_calls(logitless_context* context) {
  Call call;
  logitless_plan *plan = NULL, *other = NULL;
  logitless_plan_request request;
  logitless_plan_info info;
  logitless_cross_entropy_options options;
  logitless_plan_candidate candidate;
  void* block = malloc(1 << 20);
  char* workspace = (char*)(((uintptr_t)block + 63) / 64 * 64);
  size_t bytes;

  make_call(&call);
  call.hidden.dtype = 17;
  check_error("dtype", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT,
              "hidden: dtype 17");
  make_call(&call);
  call.weight.rank = 9;
  check_error("rank", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT, "weight: rank 9");
  make_call(&call);
  call.weight.shape[1] = -4;
  check_error("size", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT,
              "weight: size -4");
  make_call(&call);
  call.weight.shape[1] = kDim - 1;
  check_error("shapes", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT, "weight");
  make_call(&call);
  call.in.targets = NULL;
  check_error("targets", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT, "targets");
  CHECK(plan == NULL, "a failed call wrote its output");

  make_call(&call);
  logitless_cross_entropy_options_init(&options, sizeof options);
  options.reduction = 7;
  check_error("reduction",
              logitless_plan_cross_entropy(context, &options, &call.in, &call.out, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "reduction");
#define REFUSED_PLAN(what, status, part)                                                         \
  check_error(what,                                                                              \
              logitless_plan_cross_entropy(context, NULL, &call.in, &call.out, &request, &plan), \
              status, part)
  logitless_plan_request_init(&request, sizeof request);
  request.kind = 12;
  REFUSED_PLAN("kind", LOGITLESS_INVALID_ARGUMENT, "request.kind: 12");
  logitless_plan_request_init(&request, sizeof request);
  request.stored_fraction = 0.5;
  REFUSED_PLAN("fraction", LOGITLESS_INVALID_ARGUMENT, "stored_fraction");
  logitless_plan_request_init(&request, sizeof request);
  request.memory_budget = 1;
  REFUSED_PLAN("budget", LOGITLESS_INVALID_ARGUMENT, "memory_budget");
  request.budget_is_hint = 1; /* the byte is doubled until a plan fits */
  CHECK(logitless_plan_cross_entropy(context, NULL, &call.in, &call.out, &request, &plan) ==
            LOGITLESS_OK,
        "hint: %s", logitless_last_error());
  logitless_plan_info_init(&info, sizeof info);
  CHECK(logitless_plan_get_info(plan, &info) == LOGITLESS_OK, "info");
  CHECK(info.workspace_bytes <= info.memory_budget, "over the hint's budget");
  CHECK((info.memory_budget & (info.memory_budget - 1)) == 0, "not a double of the hint");
  logitless_plan_destroy(plan);
  plan = NULL;
  request.budget_is_hint = 0;
  request.memory_budget = info.memory_budget / 2;
  REFUSED_PLAN("half of the hint's budget", LOGITLESS_INVALID_ARGUMENT, "memory_budget");
  request.budget_is_hint = 1;
  request.memory_budget = 0;
  REFUSED_PLAN("hint without bytes", LOGITLESS_INVALID_ARGUMENT,
               "request.budget_is_hint: expected a memory_budget above 0");
  logitless_plan_request_init(&request, sizeof request);
  request.compute_capability = 90; /* these tensors lie in memory of the CPU */
  REFUSED_PLAN("absent GPU", LOGITLESS_INVALID_ARGUMENT,
               "request.compute_capability: expected 0 in a plan of");
  logitless_plan_request_init(&request, sizeof request);
  request.kind = LOGITLESS_PLAN_DENSE;
  REFUSED_PLAN("kind without gradients", LOGITLESS_UNSUPPORTED, "dense");
#undef REFUSED_PLAN
  CHECK(plan == NULL, "a failed call wrote its output");

  CHECK(plan_of(context, &call, &plan) == LOGITLESS_OK, "plan");
  bytes = logitless_plan_workspace_bytes(plan);
  CHECK(bytes + 128 < 1 << 20, "the workspace of a small call is %u", (unsigned)bytes);
#define REFUSED_RUN(what, memory, size, part)                                                      \
  check_error(                                                                                     \
      what, logitless_cross_entropy(context, plan, NULL, &call.in, &call.out, memory, size, NULL), \
      LOGITLESS_INVALID_ARGUMENT, part)
  REFUSED_RUN("workspace", NULL, 0, "workspace");
  REFUSED_RUN("workspace size", workspace, bytes - 1, "workspace");
  REFUSED_RUN("workspace alignment", workspace + 4, bytes, "workspace");
  call.hidden.shape[0] = INT64_MAX / kDim;
  check_error("size", plan_of(context, &call, &other), LOGITLESS_INVALID_ARGUMENT,
              "hidden: the number of elements overflows at dimension 0");
  call.hidden.shape[0] = kTokens;
  call.hidden.data = workspace;
  REFUSED_RUN("hidden in the workspace", workspace, bytes, "shares memory with hidden");
  call.hidden.data = call.head.hidden;
  call.head.targets[4] = kVocab;
  REFUSED_RUN("target", workspace, bytes, "targets: 11 at position 4");
#undef REFUSED_RUN
  CHECK(call.loss == 42.0f, "a failed call wrote its output");
  call.head.targets[4] = 0;
  CHECK(logitless_cross_entropy(context, plan, NULL, &call.in, &call.out, workspace, bytes, NULL) ==
            LOGITLESS_OK,
        "the call repaired");
  CHECK(call.loss != 42.0f, "the loss was not written");
  logitless_plan_candidate_init(&candidate, sizeof candidate);
  check_error("candidate", logitless_plan_get_candidate(plan, 400, &candidate),
              LOGITLESS_INVALID_ARGUMENT, "400");
  logitless_plan_destroy(plan);
  free(block);
}

// Tests strides that leave the address space, and outputs that overlap other memory.
static void test_memory(logitless_context* context) {
  static const int64_t kFar[] = {INT64_MAX, INT64_MAX / 2, INT64_MIN, INT64_MIN / 16,
                                 INT64_MAX / 16};
  Call call;
  logitless_plan* plan = NULL;
  logitless_tensor d_hidden, lse, log_prob;
  float gradient[kTokens * kDim], columns[kTokens * 2];
  size_t i;
  void* block = malloc(1 << 20);
  char* workspace = (char*)(((uintptr_t)block + 63) / 64 * 64);
  for (i = 0; i < sizeof kFar / sizeof *kFar; ++i) {
    make_call(&call);
    call.hidden.strides[0] = kFar[i];
    check_error("stride", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT,
                "hidden: the addresses of f32[6, 5] strides [");
    if (i == 4) break;  // twice this is in the address space
    make_call(&call);
    call.loss_tensor = tensor(columns, LOGITLESS_F32, 2, kTokens, 2);
    call.loss_tensor.strides[1] = kFar[i];
    check_error("output's stride", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT,
                "loss: the addresses of");
  }
  // The stride of a dimension of size 1 does not matter.
  make_call(&call);
  call.weight = tensor(call.head.weight, LOGITLESS_F32, 2, 1, kDim);
  call.weight.strides[0] = INT64_MAX;
  CHECK(plan_of(context, &call, &plan) == LOGITLESS_OK, "stride of one row");
  logitless_plan_destroy(plan);
  plan = NULL;

#define REFUSED(what, part)                                                                        \
  check_error(                                                                                     \
      what,                                                                                        \
      logitless_cross_entropy(context, plan, NULL, &call.in, &call.out, workspace, 1 << 19, NULL), \
      LOGITLESS_INVALID_ARGUMENT, part)
  make_call(&call);
  d_hidden = tensor(gradient, LOGITLESS_F32, 2, kTokens, kDim);
  lse = tensor(columns, LOGITLESS_F32, 1, kTokens, 0);
  log_prob = tensor(columns + kTokens, LOGITLESS_F32, 1, kTokens, 0);
  call.out.d_hidden = &d_hidden;
  call.out.lse = &lse;
  call.out.log_prob = &log_prob;
  CHECK(plan_of(context, &call, &plan) == LOGITLESS_OK, "plan");
  d_hidden.data = call.head.hidden;
  REFUSED("in place", "d_hidden: f32[6, 5] shares memory with hidden, f32[6, 5]");
  d_hidden.data = call.head.weight + 1;
  REFUSED("in the weights", "d_hidden: f32[6, 5] shares memory with weight, f32[11, 5]");
  d_hidden.data = gradient;
  log_prob.data = columns + kTokens - 1;
  REFUSED("two outputs", "lse: f32[6] shares memory with log_prob, f32[6]");
  call.loss_tensor.data = gradient + 7;
  log_prob.data = columns + kTokens;
  REFUSED("loss in a gradient", "loss: f32[] shares memory with d_hidden");
  CHECK(call.loss == 42.0f, "a failed call wrote its output");
  // Two columns of one matrix do not overlap; the same column twice does.
  call.loss_tensor.data = &call.loss;
  lse.data = columns;
  log_prob.data = columns + 1;
  lse.strides[0] = log_prob.strides[0] = 2;
  CHECK(logitless_cross_entropy(context, plan, NULL, &call.in, &call.out, workspace, 1 << 19,
                                NULL) == LOGITLESS_OK,
        "columns");
  log_prob.data = columns;
  REFUSED("one column", "lse: f32[6] strides [2] shares memory with log_prob");
#undef REFUSED
  logitless_plan_destroy(plan);
  free(block);
}

static void test_null(logitless_context* context) {
  Call call;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  logitless_tensor t;
  uint64_t bytes = 0;
  const int64_t too_large[2] = {INT64_MAX, 2};
  make_call(&call);
  logitless_context_destroy(NULL);
  logitless_plan_destroy(NULL);
  logitless_context_options_init(NULL, 64);
  CHECK(logitless_context_threads(NULL) == 0, "threads of NULL");
  CHECK(logitless_plan_workspace_bytes(NULL) == 0, "workspace of NULL");
  CHECK(logitless_plan_candidate_count(NULL) == 0, "candidates of NULL");
  CHECK(strcmp(logitless_plan_explain(NULL), "") == 0, "explain of NULL");
  check_error("create", logitless_context_create(NULL, NULL), LOGITLESS_INVALID_ARGUMENT,
              "context");
  check_error("no context", plan_of(NULL, &call, &plan), LOGITLESS_INVALID_ARGUMENT, "context");
  check_error("no output", plan_of(context, &call, NULL), LOGITLESS_INVALID_ARGUMENT, "plan");
  check_error("no inputs",
              logitless_plan_cross_entropy(context, NULL, NULL, &call.out, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "inputs");
  check_error("no outputs",
              logitless_plan_cross_entropy(context, NULL, &call.in, NULL, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "outputs");
  check_error("no plan",
              logitless_cross_entropy(context, NULL, NULL, &call.in, &call.out, NULL, 0, NULL),
              LOGITLESS_INVALID_ARGUMENT, "plan");
  check_error("head_forward", logitless_head_forward(context, NULL, NULL, NULL, NULL, NULL, 0),
              LOGITLESS_INVALID_ARGUMENT, "plan");
  check_error("head_backward",
              logitless_head_backward(context, NULL, NULL, NULL, NULL, NULL, NULL, 0),
              LOGITLESS_INVALID_ARGUMENT, "plan");
  check_error("plan_head_forward",
              logitless_plan_head_forward(context, NULL, NULL, NULL, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "expected a struct, got NULL");
  check_error("plan_head_backward",
              logitless_plan_head_backward(context, NULL, NULL, NULL, NULL, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "expected a struct, got NULL");
  check_error("features", logitless_plan_head(context, NULL, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "features");
  logitless_plan_info_init(&info, sizeof info);
  check_error("info", logitless_plan_get_info(NULL, &info), LOGITLESS_INVALID_ARGUMENT, "plan");
  check_error("tensor", logitless_tensor_init(NULL, NULL, LOGITLESS_F32, 0, NULL),
              LOGITLESS_INVALID_ARGUMENT, "tensor");
  check_error("shape", logitless_tensor_init(&t, NULL, LOGITLESS_F32, 2, NULL),
              LOGITLESS_INVALID_ARGUMENT, "shape");
  check_error("overflow", logitless_tensor_init(&t, NULL, LOGITLESS_F32, 2, too_large),
              LOGITLESS_INVALID_ARGUMENT, "overflow");
  check_error("bytes", logitless_parse_bytes("lots", &bytes), LOGITLESS_INVALID_ARGUMENT, "lots");
  check_error("bytes", logitless_parse_bytes(NULL, &bytes), LOGITLESS_INVALID_ARGUMENT, "text");
  CHECK(plan == NULL, "a failed call wrote its output");
}

// Structs of an older header are refused below the first version's size. Those of a newer one are
// accepted while the rest is zero.
static void test_struct_sizes(logitless_context* context) {
  struct {
    logitless_cross_entropy_options options;
    double added_later;
  } newer;
  Call call;
  logitless_plan* plan = NULL;
  logitless_cross_entropy_options options;
  make_call(&call);
  memset(&options, 0, sizeof options);
  check_error("not initialised",
              logitless_plan_cross_entropy(context, &options, &call.in, &call.out, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "options: struct_size is 0");
  logitless_cross_entropy_options_init(&options, sizeof options);
  options.struct_size =
      offsetof(logitless_cross_entropy_options, accumulate);  // no version had that size
  check_error("short",
              logitless_plan_cross_entropy(context, &options, &call.in, &call.out, NULL, &plan),
              LOGITLESS_INVALID_ARGUMENT, "struct_size");
  call.in.struct_size = 1;
  check_error("inputs", plan_of(context, &call, &plan), LOGITLESS_INVALID_ARGUMENT,
              "inputs: struct_size is 1");

  make_call(&call);
  newer.added_later = 5.0;
  logitless_cross_entropy_options_init(&newer.options, sizeof newer);
  CHECK(newer.added_later == 0.0, "_init left what it does not know");
  CHECK(newer.options.struct_size == sizeof newer, "struct_size is %u",
        (unsigned)newer.options.struct_size);
  CHECK(logitless_plan_cross_entropy(context, &newer.options, &call.in, &call.out, NULL, &plan) ==
            LOGITLESS_OK,
        "a longer struct whose rest is zero");
  logitless_plan_destroy(plan);
  plan = NULL;
  newer.added_later = 1.0;
  check_error(
      "unknown field",
      logitless_plan_cross_entropy(context, &newer.options, &call.in, &call.out, NULL, &plan),
      LOGITLESS_UNSUPPORTED, "options: byte");
  CHECK(plan == NULL, "a failed call wrote its output");
}

static void test_contexts(void) {
  logitless_context* context = NULL;
  logitless_context_options options;
  int stream = 0;
  logitless_context_options_init(&options, sizeof options);
  options.threads = -1;
  check_error("threads", logitless_context_create(&options, &context), LOGITLESS_INVALID_ARGUMENT,
              "threads");
  logitless_context_options_init(&options, sizeof options);
  options.kernel = "abacus";
  check_error("kernel", logitless_context_create(&options, &context), LOGITLESS_INVALID_ARGUMENT,
              "abacus");
  logitless_context_options_init(&options, sizeof options);
  options.stream = &stream;
  check_error("stream", logitless_context_create(&options, &context), LOGITLESS_INVALID_ARGUMENT,
              "stream");
  logitless_context_options_init(&options, sizeof options);
  options.device = 3;
  check_error("device", logitless_context_create(&options, &context), LOGITLESS_UNSUPPORTED,
              "device: 3");
  logitless_context_options_init(&options, sizeof options);
  options.device = LOGITLESS_DEVICE_CUDA;
  options.device_index = 1000;
  check_error("device_index", logitless_context_create(&options, &context), LOGITLESS_UNSUPPORTED,
              "device");
  CHECK(context == NULL, "a failed call wrote its output");
}

// An exception of a type unknown to the library must become a status, too.
static void test_internal_error(void) {
  Call call;
  logitless_plan* plan = NULL;
  logitless_context* context = NULL;
  logitless_context_options options;
  logitless_context_options_init(&options, sizeof options);
  options.trace = throwing_trace;
  CHECK(logitless_context_create(&options, &context) == LOGITLESS_OK, "context");
  make_call(&call);
  check_error("trace", plan_of(context, &call, &plan), LOGITLESS_INTERNAL_ERROR,
              "thrown by the trace");
  CHECK(plan == NULL, "a failed call wrote its output");
  logitless_context_destroy(context);
}

// Causes std::bad_alloc by a kernel name too long to be copied. Sanitizers end the process on
// failing allocations.
static void test_out_of_memory(void) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const size_t length = (size_t)64 << 20;
  struct rlimit before, limit;
  logitless_status status;
  logitless_context* context = NULL;
  logitless_context_options options;
  char* name = malloc(length + 1);
  CHECK(name != NULL && getrlimit(RLIMIT_AS, &before) == 0, "preparing");
  if (name == NULL) return;
  memset(name, 'x', length);
  name[length] = '\0';
  logitless_context_options_init(&options, sizeof options);
  options.kernel = name;
  limit = before;
  limit.rlim_cur = 1 << 20;  // below the mapped memory: no further allocation succeeds
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
  status = logitless_context_create(&options, &context);
  CHECK(setrlimit(RLIMIT_AS, &before) == 0, "setrlimit");
  check_error("out of memory", status, LOGITLESS_DEVICE_ERROR, "out of memory");
  CHECK(context == NULL, "a failed call wrote its output");
  free(name);
#endif
}

static void* read_last_error(void* text) {
  strncpy(text, logitless_last_error(), 63);
  return NULL;
}

// Each thread has its own last error.
static void test_threads(void) {
  char text[64] = "?";
  pthread_t thread;
  uint64_t bytes;
  CHECK(logitless_parse_bytes("many", &bytes) == LOGITLESS_INVALID_ARGUMENT, "parse_bytes");
  CHECK(pthread_create(&thread, NULL, read_last_error, text) == 0, "pthread_create");
  CHECK(pthread_join(thread, NULL) == 0, "pthread_join");
  CHECK(text[0] == '\0', "another thread sees '%s'", text);
  CHECK(strstr(logitless_last_error(), "many") != NULL, "this thread lost its own");
}

void test_errors(const char* kernel) {
  logitless_context* context = NULL;
  logitless_context_options options;
  logitless_context_options_init(&options, sizeof options);
  options.kernel = kernel;
  CHECK(logitless_context_create(&options, &context) == LOGITLESS_OK, "context");
  if (context == NULL) return;
  test_invalid_calls(context);
  test_memory(context);
  test_null(context);
  test_struct_sizes(context);
  test_contexts();
  test_internal_error();
  test_out_of_memory();
  test_threads();
  logitless_context_destroy(context);
}
