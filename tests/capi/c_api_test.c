// The C ABI from C99: losses and gradients against a direct computation in doubles, plans,
// versions. Usage: c_api_test [kernel]
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "expected.h"

static const double kTolerance = 2e-5;

// Returns 64-byte aligned memory in a larger block.
static void* aligned_workspace(size_t bytes, void** block) {
  *block = malloc(bytes + 64);
  return *block == NULL ? NULL : (void*)(((uintptr_t)*block + 63) / 64 * 64);
}

static logitless_context* make_context(const char* kernel, logitless_trace_function trace,
                                       void* user) {
  logitless_context* context = NULL;
  logitless_context_options options;
  logitless_context_options_init(&options, sizeof options);
  options.threads = 2;
  options.kernel = kernel;
  options.trace = trace;
  options.trace_user = user;
  CHECK(logitless_context_create(&options, &context) == LOGITLESS_OK, "context_create");
  return context;
}

static void test_version(void) {
  static const char* const kSized[] = {"logitless_context_options",
                                       "logitless_plan_request",
                                       "logitless_plan_info",
                                       "logitless_plan_candidate",
                                       "logitless_head_features",
                                       "logitless_cross_entropy_options",
                                       "logitless_cross_entropy_inputs",
                                       "logitless_cross_entropy_outputs",
                                       "logitless_loss_statistics",
                                       "logitless_loss_terms",
                                       "logitless_token_loss_inputs",
                                       "logitless_token_loss_outputs",
                                       "logitless_head_options",
                                       "logitless_head_inputs",
                                       "logitless_head_outputs",
                                       "logitless_head_cotangents",
                                       "logitless_head_gradients",
                                       "logitless_program_options",
                                       "logitless_program_tensor",
                                       "logitless_order_options",
                                       "logitless_far_field_options",
                                       "logitless_far_field_report",
                                       "logitless_sharding"};
  int major = -1, minor = -1, patch = -1;
  size_t i;
  CHECK(sscanf(logitless_version(), "%d.%d.%d", &major, &minor, &patch) == 3, "version is %s",
        logitless_version());
  CHECK(logitless_abi_version() == LOGITLESS_ABI_VERSION, "abi is %d",
        (int)logitless_abi_version());
  for (i = 0; i < sizeof kSized / sizeof kSized[0]; ++i) {
    CHECK(logitless_struct_size(kSized[i]) > sizeof(size_t), "%s", kSized[i]);
  }
  CHECK(logitless_struct_size("logitless_tensor") == sizeof(logitless_tensor), "tensor");
  CHECK(logitless_struct_size("logitless_head_features") == sizeof(logitless_head_features),
        "features");
  CHECK(logitless_struct_size("logitless_cross_entropy_options") ==
            sizeof(logitless_cross_entropy_options),
        "options");
  CHECK(logitless_struct_size("logitless_context") == 0, "opaque");
  CHECK(logitless_struct_size(NULL) == 0, "NULL");
  CHECK(strcmp(logitless_status_name(LOGITLESS_UNSUPPORTED), "unsupported") == 0, "status name");
  CHECK(strcmp(logitless_status_name(99), "unknown status") == 0, "status name");
}

static void test_kernels(void) {
  const size_t all = logitless_kernel_count(0), here = logitless_kernel_count(1);
  size_t i;
  CHECK(here >= 1 && here <= all, "%u of %u kernels", (unsigned)here, (unsigned)all);
  CHECK(strcmp(logitless_kernel_name(1, here - 1), "reference") == 0, "last is %s",
        logitless_kernel_name(1, here - 1));
  for (i = 0; i < all; ++i) CHECK(logitless_kernel_name(0, i) != NULL, "name %u", (unsigned)i);
  CHECK(logitless_kernel_name(0, all) == NULL, "past the end");
}

static void count_trace(const char* line, void* user) {
  CHECK(strstr(line, "plan ") != NULL, "traced: %s", line);
  ++*(int*)user;
}

// Checks the loss of `kind` with its gradients, or without for the forward plan.
static void check_loss(logitless_context* context, const Options* options,
                       logitless_plan_kind kind) {
  const int gradients = kind != LOGITLESS_PLAN_FORWARD;
  Head head;
  Expected expected;
  float loss = -1.0f, lse[kTokens], d_hidden[kTokens * kDim], d_weight[kVocab * kDim],
        d_bias[kVocab];
  int64_t argmax[kTokens];
  logitless_tensor t_hidden, t_weight, t_targets, t_bias, t_class, t_token;
  logitless_tensor t_loss, t_lse, t_d_hidden, t_d_weight, t_d_bias, t_argmax;
  logitless_cross_entropy_options o;
  logitless_cross_entropy_inputs in;
  logitless_cross_entropy_outputs out;
  logitless_plan_request request;
  logitless_plan_info info;
  logitless_loss_statistics statistics;
  logitless_plan* plan = NULL;
  void* block;
  void* workspace;
  size_t bytes;

  make_head(&head);
  expect_cross_entropy(&head, options, 3.0, &expected);
  t_hidden = tensor(head.hidden, LOGITLESS_F32, 2, kTokens, kDim);
  t_weight = tensor(head.weight, LOGITLESS_F32, 2, kVocab, kDim);
  t_targets = tensor(head.targets, LOGITLESS_I64, 1, kTokens, 0);
  t_bias = tensor(head.bias, LOGITLESS_F32, 1, kVocab, 0);
  t_class = tensor(head.class_weight, LOGITLESS_F32, 1, kVocab, 0);
  t_token = tensor(head.token_weight, LOGITLESS_F32, 1, kTokens, 0);
  t_loss = tensor(&loss, LOGITLESS_F32, 0, 0, 0);
  t_lse = tensor(lse, LOGITLESS_F32, 1, kTokens, 0);
  t_argmax = tensor(argmax, LOGITLESS_I64, 1, kTokens, 0);
  t_d_hidden = tensor(d_hidden, LOGITLESS_F32, 2, kTokens, kDim);
  t_d_weight = tensor(d_weight, LOGITLESS_F32, 2, kVocab, kDim);
  t_d_bias = tensor(d_bias, LOGITLESS_F32, 1, kVocab, 0);

  logitless_cross_entropy_options_init(&o, sizeof o);
  CHECK(o.ignore_index == -100 && o.reduction == LOGITLESS_REDUCTION_MEAN && o.logit_scale == 1.0f,
        "defaults");
  o.label_smoothing = (float)options->label_smoothing;
  o.z_loss = (float)options->z_loss;
  o.softcap = (float)options->softcap;
  o.logit_scale = (float)options->logit_scale;
  logitless_cross_entropy_inputs_init(&in, sizeof in);
  in.hidden = &t_hidden;
  in.weight = &t_weight;
  in.targets = &t_targets;
  in.bias = &t_bias;
  in.class_weight = options->weighted ? &t_class : NULL;
  in.token_weight = options->weighted ? &t_token : NULL;
  in.grad_loss = 3.0;
  logitless_cross_entropy_outputs_init(&out, sizeof out);
  out.loss = &t_loss;
  out.lse = &t_lse;
  out.argmax = &t_argmax;
  out.d_hidden = gradients ? &t_d_hidden : NULL;
  out.d_weight = gradients ? &t_d_weight : NULL;
  out.d_bias = gradients ? &t_d_bias : NULL;
  logitless_plan_request_init(&request, sizeof request);
  CHECK(request.kind == LOGITLESS_PLAN_ANY, "default kind is %d", (int)request.kind);
  request.kind = kind;

  CHECK(logitless_plan_cross_entropy(context, &o, &in, &out, &request, &plan) == LOGITLESS_OK,
        "plan %d", (int)kind);
  if (plan == NULL) return;
  logitless_plan_info_init(&info, sizeof info);
  CHECK(logitless_plan_get_info(plan, &info) == LOGITLESS_OK, "info");
  CHECK(info.kind == kind, "kind is %d, asked for %d", (int)info.kind, (int)kind);
  CHECK(info.tokens == kTokens && info.dim == kDim && info.vocab == kVocab, "sizes");
  CHECK(info.logits_bytes == kTokens * kVocab * 4, "logits_bytes is %u",
        (unsigned)info.logits_bytes);
  CHECK(info.passes >= (gradients ? 3.0 : 1.0) && info.passes <= 4.0, "passes is %g", info.passes);
  CHECK(info.chunk_tokens >= 1 && info.predicted_seconds >= 0.0 && info.threads == 2,
        "chunks, seconds, threads");
  bytes = logitless_plan_workspace_bytes(plan);
  CHECK(bytes == info.workspace_bytes && bytes > 0, "workspace of %u", (unsigned)bytes);

  workspace = aligned_workspace(bytes, &block);
  logitless_loss_statistics_init(&statistics, sizeof statistics);
  CHECK(logitless_cross_entropy(context, plan, &o, &in, &out, workspace, bytes, &statistics) ==
            LOGITLESS_OK,
        "run");
  CHECK(fabs(loss - expected.loss) <= kTolerance * expected.loss, "loss %.9g, expected %.9g", loss,
        expected.loss);
  check_close("lse", lse, expected.lse, kTokens, kTolerance);
  if (gradients) {
    check_close("d_hidden", d_hidden, expected.d_hidden, kTokens * kDim, kTolerance);
    check_close("d_weight", d_weight, expected.d_weight, kVocab * kDim, kTolerance);
    check_close("d_bias", d_bias, expected.d_bias, kVocab, kTolerance);
  }
  CHECK(argmax[2] == -1, "argmax of an ignored token is %d", (int)argmax[2]);
  CHECK(statistics.tokens == kTokens && statistics.valid_tokens == kTokens - 1, "tokens");
  CHECK(statistics.correct >= 0 && statistics.correct < kTokens, "correct is %d",
        (int)statistics.correct);
  CHECK(fabs(statistics.normalizer - expected.normalizer) < 1e-5, "normalizer is %g",
        statistics.normalizer);

  // Accumulating doubles the gradients, and statistics are optional.
  if (gradients) {
    int i;
    logitless_plan* adding = NULL;
    o.accumulate = 1;
    request.kind = kind;
    CHECK(logitless_plan_cross_entropy(context, &o, &in, &out, &request, &adding) == LOGITLESS_OK,
          "plan");
    free(block);
    bytes = logitless_plan_workspace_bytes(adding);
    workspace = aligned_workspace(bytes, &block);
    CHECK(logitless_cross_entropy(context, adding, &o, &in, &out, workspace, bytes, NULL) ==
              LOGITLESS_OK,
          "run");
    for (i = 0; i < kVocab * kDim; ++i) expected.d_weight[i] *= 2.0;
    check_close("doubled d_weight", d_weight, expected.d_weight, kVocab * kDim, 2.0 * kTolerance);
    logitless_plan_destroy(adding);
  }
  free(block);
  logitless_plan_destroy(plan);
}

static void test_cross_entropy(const char* kernel) {
  static const Options kOptions[] = {{0.0, 0.0, 0.0, 1.0, 0},
                                     {0.1, 0.0, 0.0, 1.0, 0},
                                     {0.0, 1e-3, 5.0, 0.7, 0},
                                     {0.2, 1e-2, 0.0, 1.3, 1}};
  int traced = 0;
  logitless_context* context = make_context(kernel, count_trace, &traced);
  size_t i;
  int kind;
  if (context == NULL) return;
  CHECK(logitless_context_threads(context) == 2, "threads");
  for (i = 0; i < sizeof kOptions / sizeof kOptions[0]; ++i) {
    for (kind = LOGITLESS_PLAN_FORWARD; kind <= LOGITLESS_PLAN_STORED; ++kind) {
      const int stores = kind == LOGITLESS_PLAN_DENSE || kind == LOGITLESS_PLAN_STORED;
      if (stores && kernel != NULL && strcmp(kernel, "reference") == 0) continue;
      check_loss(context, &kOptions[i], kind);
    }
  }
  CHECK(traced > 0, "the trace was never called");
  logitless_context_destroy(context);
}

static void test_head(const char* kernel) {
  static const Options kOptions = {0.0, 0.0, 4.0, 1.2, 0};
  const double g_lse = 0.5, g_log_prob = -0.75, g_entropy = 0.25;
  logitless_context* context = make_context(kernel, NULL, NULL);
  Head head;
  Expected expected;
  float lse[kTokens], log_prob[kTokens], entropy[kTokens], logit_sum[kTokens];
  float d_hidden[kTokens * kDim], d_weight[kVocab * kDim], d_bias[kVocab];
  float c_lse[kTokens], c_log_prob[kTokens], c_entropy[kTokens];
  logitless_tensor t[14];
  logitless_head_options o;
  logitless_head_inputs in;
  logitless_head_outputs out;
  logitless_head_cotangents cotangents;
  logitless_head_gradients gradients;
  logitless_plan* plan = NULL;
  void* block;
  void* workspace;
  size_t bytes;
  int i;
  if (context == NULL) return;

  make_head(&head);
  expect_head_backward(&head, &kOptions, g_lse, g_log_prob, g_entropy, &expected);
  for (i = 0; i < kTokens; ++i) {
    c_lse[i] = (float)g_lse;
    c_log_prob[i] = (float)g_log_prob;
    c_entropy[i] = (float)g_entropy;
  }
  t[0] = tensor(head.hidden, LOGITLESS_F32, 2, kTokens, kDim);
  t[1] = tensor(head.weight, LOGITLESS_F32, 2, kVocab, kDim);
  t[2] = tensor(head.targets, LOGITLESS_I64, 1, kTokens, 0);
  t[3] = tensor(head.bias, LOGITLESS_F32, 1, kVocab, 0);
  t[4] = tensor(lse, LOGITLESS_F32, 1, kTokens, 0);
  t[5] = tensor(log_prob, LOGITLESS_F32, 1, kTokens, 0);
  t[6] = tensor(entropy, LOGITLESS_F32, 1, kTokens, 0);
  t[7] = tensor(logit_sum, LOGITLESS_F32, 1, kTokens, 0);
  t[8] = tensor(c_lse, LOGITLESS_F32, 1, kTokens, 0);
  t[9] = tensor(c_log_prob, LOGITLESS_F32, 1, kTokens, 0);
  t[10] = tensor(c_entropy, LOGITLESS_F32, 1, kTokens, 0);
  t[11] = tensor(d_hidden, LOGITLESS_F32, 2, kTokens, kDim);
  t[12] = tensor(d_weight, LOGITLESS_F32, 2, kVocab, kDim);
  t[13] = tensor(d_bias, LOGITLESS_F32, 1, kVocab, 0);

  logitless_head_options_init(&o, sizeof o);
  o.softcap = (float)kOptions.softcap;
  o.logit_scale = (float)kOptions.logit_scale;
  logitless_head_inputs_init(&in, sizeof in);
  in.hidden = &t[0];
  in.weight = &t[1];
  in.targets = &t[2];
  in.bias = &t[3];
  logitless_head_outputs_init(&out, sizeof out);
  out.lse = &t[4];
  out.log_prob = &t[5];
  out.entropy = &t[6];
  out.weighted_logit_sum = &t[7];
  CHECK(logitless_plan_head_forward(context, &o, &in, &out, NULL, &plan) == LOGITLESS_OK,
        "plan_head_forward");
  bytes = logitless_plan_workspace_bytes(plan);
  workspace = aligned_workspace(bytes, &block);
  CHECK(logitless_head_forward(context, plan, &o, &in, &out, workspace, bytes) == LOGITLESS_OK,
        "head_forward");
  check_close("lse", lse, expected.lse, kTokens, kTolerance);
  check_close("log_prob", log_prob, expected.log_prob, kTokens, kTolerance);
  check_close("entropy", entropy, expected.entropy, kTokens, kTolerance);
  check_close("weighted_logit_sum", logit_sum, expected.logit_sum, kTokens, kTolerance);
  free(block);
  logitless_plan_destroy(plan);

  logitless_head_cotangents_init(&cotangents, sizeof cotangents);
  cotangents.lse = &t[8];
  cotangents.log_prob = &t[9];
  cotangents.entropy = &t[10];
  logitless_head_gradients_init(&gradients, sizeof gradients);
  gradients.d_hidden = &t[11];
  gradients.d_weight = &t[12];
  gradients.d_bias = &t[13];
  plan = NULL;
  CHECK(logitless_plan_head_backward(context, &o, &in, &cotangents, &gradients, NULL, &plan) ==
            LOGITLESS_OK,
        "plan");
  bytes = logitless_plan_workspace_bytes(plan);
  workspace = aligned_workspace(bytes, &block);
  CHECK(logitless_head_backward(context, plan, &o, &in, &cotangents, &gradients, workspace,
                                bytes) == LOGITLESS_OK,
        "head_backward");
  check_close("d_hidden", d_hidden, expected.d_hidden, kTokens * kDim, kTolerance);
  check_close("d_weight", d_weight, expected.d_weight, kVocab * kDim, kTolerance);
  check_close("d_bias", d_bias, expected.d_bias, kVocab, kTolerance);
  free(block);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

// Tests a plan made from sizes alone, and its description.
static void test_plan_head(void) {
  logitless_context* context = make_context(NULL, NULL, NULL);
  logitless_head_features features;
  logitless_plan_request request;
  logitless_plan_info info;
  logitless_plan_candidate candidate;
  logitless_plan* plan = NULL;
  size_t i, chosen = 0;
  if (context == NULL) return;
  logitless_head_features_init(&features, sizeof features);
  features.tokens = 4096;
  features.dim = 512;
  features.vocab = 100000;
  features.dtype = LOGITLESS_BF16;
  features.d_hidden = features.d_weight = 1;
  features.d_hidden_dtype = features.d_weight_dtype = LOGITLESS_BF16;
  logitless_plan_request_init(&request, sizeof request);
  CHECK(logitless_parse_bytes("1GiB", &request.memory_budget) == LOGITLESS_OK, "parse_bytes");
  CHECK(request.memory_budget == (uint64_t)1 << 30, "1GiB");
  CHECK(logitless_plan_head(context, &features, &request, &plan) == LOGITLESS_OK, "plan_head");
  if (plan == NULL) return;
  logitless_plan_info_init(&info, sizeof info);
  CHECK(logitless_plan_get_info(plan, &info) == LOGITLESS_OK, "info");
  CHECK(info.workspace_bytes <= request.memory_budget, "over the budget");
  CHECK(info.memory_budget == request.memory_budget, "budget");
  CHECK(info.logits_bytes == (uint64_t)4096 * 100000 * 4, "logits");
  CHECK(info.dtype == LOGITLESS_BF16 && info.kernel != NULL && info.kernel[0] != '\0',
        "dtype, kernel");
  CHECK(strstr(logitless_plan_explain(plan), info.kernel) != NULL, "%s",
        logitless_plan_explain(plan));
  CHECK(logitless_plan_candidate_count(plan) == 4, "%u candidates",
        (unsigned)logitless_plan_candidate_count(plan));
  for (i = 0; i < logitless_plan_candidate_count(plan); ++i) {
    logitless_plan_candidate_init(&candidate, sizeof candidate);
    CHECK(logitless_plan_get_candidate(plan, i, &candidate) == LOGITLESS_OK, "candidate %u",
          (unsigned)i);
    if (strcmp(candidate.reason, "chosen") != 0) continue;
    ++chosen;
    CHECK(candidate.kind == info.kind && candidate.possible, "the chosen one");
    CHECK(candidate.workspace_bytes == info.workspace_bytes, "its workspace");
  }
  CHECK(chosen == 1, "%u were chosen", (unsigned)chosen);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

int main(int count, char** arguments) {
  const char* kernel = count > 1 && arguments[1][0] != '\0' ? arguments[1] : NULL;
  test_version();
  test_kernels();
  test_cross_entropy(kernel);
  test_head(kernel);
  test_plan_head();
  test_errors(kernel);
  test_token_losses();
  test_programs();
  test_communicators();
  test_sharding();
  if (kernel == NULL) test_far_field();  // its heads are large for the reference kernel
  CHECK(logitless_process_peak_bytes() > 0, "peak of the process");
  if (failures != 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
