// Tests of a vocabulary-parallel head over the C ABI, on threads with one shard each, one of them
// empty. The loss is compared with the global one in doubles; and refusals.
#include "logitless/c_sharding.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "expected.h"
#include "logitless/c_far_field.h"

enum { kRanks = 3 };
static const int kFirst[kRanks + 1] = {0, 4, 4, kVocab};

// Inputs and results of a rank; only one thread counts checks.
typedef struct Rank {
  const logitless_communicator* vocab_group;
  Head* head;
  int rank, bad_target;
  int far_plan, far_head; /* far-field plan, whose small shard is selected entirely; far head */
  double selected, imbalance;
  logitless_status planned, called;
  char error[300];
  float loss, d_hidden[kTokens * kDim], d_weight[kVocab * kDim], d_bias[kVocab], lse[kTokens];
  pthread_t thread;
} Rank;

// Makes an order of a shard's rows in their own sequence, for all ranks.
static logitless_status make_order(const logitless_context* context,
                                   const logitless_sharding* sharding,
                                   const logitless_cross_entropy_inputs* in, int rows,
                                   logitless_vocab_order** shared) {
  int64_t vocab_ids[kVocab];
  float average[kVocab], of_rows[kVocab];
  logitless_vocab_order *order = NULL, *measured = NULL;
  logitless_status status;
  int j;
  for (j = 0; j < kVocab; ++j) vocab_ids[j] = j;
  status = logitless_sharded_average_probability(context, sharding, in->hidden, in->weight,
                                                 in->bias, 1.0f, 0.0f, 0, average, rows);
  for (j = 0; j < rows; ++j) of_rows[j] = average[j] + 1e-3f;
  if (status == LOGITLESS_OK && rows > 0)
    status = logitless_vocab_order_create(vocab_ids, of_rows, rows, &order);
  if (status == LOGITLESS_OK)
    status = logitless_sharded_vocab_order_measure(context, sharding, order, in->hidden, in->weight,
                                                   in->bias, 1.0f, 0.01f, &measured);
  if (status == LOGITLESS_OK) status = logitless_vocab_order_share(measured, sharding, shared);
  logitless_vocab_order_destroy(order);
  logitless_vocab_order_destroy(measured);
  return status;
}

static void run(Rank* r, logitless_context* context) {
  const int rows = kFirst[r->rank + 1] - kFirst[r->rank];
  int64_t targets[kTokens];
  logitless_tensor hidden = tensor(r->head->hidden, LOGITLESS_F32, 2, kTokens, kDim);
  logitless_tensor weight =
      tensor(r->head->weight + kFirst[r->rank] * kDim, LOGITLESS_F32, 2, rows, kDim);
  logitless_tensor bias = tensor(r->head->bias + kFirst[r->rank], LOGITLESS_F32, 1, rows, 0);
  logitless_tensor classes = tensor(r->head->class_weight, LOGITLESS_F32, 1, kVocab, 0);
  logitless_tensor tokens = tensor(r->head->token_weight, LOGITLESS_F32, 1, kTokens, 0);
  logitless_tensor target = tensor(targets, LOGITLESS_I64, 1, kTokens, 0);
  logitless_tensor loss = tensor(&r->loss, LOGITLESS_F32, 0, 0, 0);
  logitless_tensor lse = tensor(r->lse, LOGITLESS_F32, 1, kTokens, 0);
  logitless_tensor d_hidden = tensor(r->d_hidden, LOGITLESS_F32, 2, kTokens, kDim);
  logitless_tensor d_weight = tensor(r->d_weight, LOGITLESS_F32, 2, rows, kDim);
  logitless_tensor d_bias = tensor(r->d_bias, LOGITLESS_F32, 1, rows, 0);
  logitless_cross_entropy_options options;
  logitless_cross_entropy_inputs in;
  logitless_cross_entropy_outputs out;
  logitless_sharding sharding;
  logitless_plan* plan = NULL;
  logitless_plan_request request;
  logitless_loss_statistics statistics;
  logitless_vocab_order* order = NULL;
  logitless_far_head* head = NULL;
  void* block = NULL;  // holds an aligned workspace
  memcpy(targets, r->head->targets, sizeof targets);
  if (r->bad_target) targets[0] = kVocab;
  logitless_cross_entropy_options_init(&options, sizeof options);
  options.label_smoothing = 0.1f;
  options.z_loss = 0.01f;
  logitless_cross_entropy_inputs_init(&in, sizeof in);
  in.hidden = &hidden;
  in.weight = &weight;
  in.targets = &target;
  in.bias = &bias;
  in.class_weight = &classes;
  in.token_weight = &tokens;
  in.sharding = &sharding;
  logitless_sharding_init(&sharding, sizeof sharding);
  sharding.vocab_group = r->vocab_group;
  sharding.vocab = kVocab;
  sharding.vocab_begin = kFirst[r->rank];
  logitless_cross_entropy_outputs_init(&out, sizeof out);
  out.loss = &loss;
  out.lse = &lse;
  out.d_hidden = &d_hidden;
  out.d_weight = &d_weight;
  out.d_bias = &d_bias;
  r->called = LOGITLESS_INTERNAL_ERROR;
  logitless_loss_statistics_init(&statistics, sizeof statistics);
  if (r->far_head) {
    r->planned = logitless_far_head_create(context, NULL, &head);
    if (r->planned == LOGITLESS_OK)
      r->called = logitless_far_head_step(head, &options, &in, &out, &statistics);
    if (r->called != LOGITLESS_OK)
      snprintf(r->error, sizeof r->error, "%s", logitless_last_error());
    logitless_far_head_destroy(head);
    return;
  }
  logitless_plan_request_init(&request, sizeof request);
  if (r->far_plan) {
    request.kind = LOGITLESS_PLAN_FAR_BOTH;
    r->planned = make_order(context, &sharding, &in, rows, &order);
    in.order = order;
  }
  r->planned = logitless_plan_cross_entropy(context, &options, &in, &out, &request, &plan);
  if (r->planned == LOGITLESS_OK) {
    const size_t bytes = logitless_plan_workspace_bytes(plan);
    void* workspace;
    block = malloc(bytes + 64);
    workspace = (void*)(((uintptr_t)block + 63) / 64 * 64);
    r->called =
        logitless_cross_entropy(context, plan, &options, &in, &out, workspace, bytes, &statistics);
    r->selected = statistics.selected;
    r->imbalance = statistics.imbalance;
  }
  if (r->called != LOGITLESS_OK) snprintf(r->error, sizeof r->error, "%s", logitless_last_error());
  free(block);
  logitless_plan_destroy(plan);
  logitless_vocab_order_destroy(order);
}

static void* run_rank(void* argument) {
  logitless_context* context = NULL;
  logitless_context_options options;
  logitless_context_options_init(&options, sizeof options);
  options.threads = 1;
  if (logitless_context_create(&options, &context) == LOGITLESS_OK) run(argument, context);
  logitless_context_destroy(context);
  return NULL;
}

static void test_vocab(Rank* ranks) {
  const Options options = {0.1, 0.01, 0.0, 1.0, 1};
  Expected expected;
  int r;
  expect_cross_entropy(ranks[0].head, &options, 1.0, &expected);
  for (r = 0; r < kRanks; ++r) pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]);
  for (r = 0; r < kRanks; ++r) pthread_join(ranks[r].thread, NULL);
  for (r = 0; r < kRanks; ++r) {
    const int rows = kFirst[r + 1] - kFirst[r];
    CHECK(ranks[r].planned == LOGITLESS_OK && ranks[r].called == LOGITLESS_OK, "rank %d: %s", r,
          ranks[r].error);
    check_close("loss", &ranks[r].loss, &expected.loss, 1, 2e-5);
    check_close("lse", ranks[r].lse, expected.lse, kTokens, 2e-5);
    check_close("d_hidden", ranks[r].d_hidden, expected.d_hidden, kTokens * kDim, 2e-5);
    check_close("d_weight", ranks[r].d_weight, expected.d_weight + kFirst[r] * kDim, rows * kDim,
                2e-5);
    check_close("d_bias", ranks[r].d_bias, expected.d_bias + kFirst[r], rows, 2e-5);
    CHECK(memcmp(ranks[r].d_hidden, ranks[0].d_hidden, sizeof ranks[r].d_hidden) == 0, "rank %d",
          r);
  }
}

static void test_a_bad_target(Rank* ranks) {
  int r;
  ranks[1].bad_target = 1;
  for (r = 0; r < kRanks; ++r) pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]);
  for (r = 0; r < kRanks; ++r) pthread_join(ranks[r].thread, NULL);
  for (r = 0; r < kRanks; ++r)
    CHECK(
        ranks[r].called == LOGITLESS_INVALID_ARGUMENT &&
            strstr(ranks[r].error, "rank 1: targets: 11 at position 0" + (r == 1 ? 8 : 0)) != NULL,
        "rank %d: %s", r, ranks[r].error);
  ranks[1].bad_target = 0;
}

// A struct that cannot be read fails on one rank alone, without notice to the others.
static void test_refusals(Head* head) {
  logitless_communicator* alone = NULL;
  logitless_tensor hidden = tensor(head->hidden, LOGITLESS_F32, 2, kTokens, kDim);
  logitless_tensor weight = tensor(head->weight, LOGITLESS_F32, 2, kVocab, kDim);
  logitless_tensor target = tensor(head->targets, LOGITLESS_I64, 1, kTokens, 0);
  float numbers[kTokens];
  logitless_tensor lse = tensor(numbers, LOGITLESS_F32, 1, kTokens, 0);
  logitless_head_inputs in;
  logitless_head_outputs out;
  logitless_sharding sharding;
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  CHECK(logitless_context_create(NULL, &context) == LOGITLESS_OK, "context");
  CHECK(logitless_communicator_threads(1, 1000, &alone) == LOGITLESS_OK, "threads");
  logitless_head_inputs_init(&in, sizeof in);
  logitless_head_outputs_init(&out, sizeof out);
  logitless_sharding_init(&sharding, sizeof sharding);
  in.hidden = &hidden;
  in.weight = &weight;
  in.targets = &target;
  in.sharding = &sharding;
  out.lse = &lse;
#define REFUSED(part)                                                         \
  CHECK(logitless_plan_head_forward(context, NULL, &in, &out, NULL, &plan) == \
                LOGITLESS_INVALID_ARGUMENT &&                                 \
            strstr(logitless_last_error(), part) != NULL,                     \
        "expected '%s'", part)
  REFUSED("sharding.vocab_group: expected a communicator, got NULL");
  sharding.vocab_group = alone;
  REFUSED("vocab: expected the vocabulary of all ranks, 1 or more, got 0");
  sharding.vocab = kVocab + 1;
  REFUSED("vocabulary entry 11 is on no rank");
  sharding.vocab = kVocab;
  sharding.exchange = 3;
  REFUSED("sharding.exchange: 3 is none of LOGITLESS_EXCHANGE_*");
  sharding.exchange = LOGITLESS_EXCHANGE_WEIGHTS;
  REFUSED("exchange: expected planned where all ranks have all tokens, got weights");
  sharding.exchange = LOGITLESS_EXCHANGE_PLANNED;
  sharding.weight = 2;
  REFUSED("sharding.weight: 2 is none of LOGITLESS_WEIGHT_*");
  sharding.weight = LOGITLESS_WEIGHT_COLUMNS;
  sharding.columns = kDim;
  REFUSED("weight by columns: its rows move to each rank's own tokens");
  sharding.tokens = 1;
  CHECK(logitless_plan_head_forward(context, NULL, &in, &out, NULL, &plan) == LOGITLESS_OK, "%s",
        logitless_last_error());
  CHECK(strstr(logitless_plan_explain(plan), "weights move: ") != NULL, "%s",
        logitless_plan_explain(plan));
  logitless_plan_destroy(plan);
  sharding.tokens = 0;
  sharding.columns = 0;
  sharding.weight = LOGITLESS_WEIGHT_ROWS;
  sharding.struct_size = 8;
  REFUSED("sharding: struct_size is 8");
  sharding.struct_size = sizeof sharding;
  CHECK(logitless_plan_head_forward(context, NULL, &in, &out, NULL, &plan) == LOGITLESS_OK, "plan");
  logitless_plan_destroy(plan);
  sharding.tokens = 1;
  sharding.exchange = LOGITLESS_EXCHANGE_WEIGHTS;
  CHECK(logitless_plan_head_forward(context, NULL, &in, &out, NULL, &plan) == LOGITLESS_OK, "plan");
  CHECK(strstr(logitless_plan_explain(plan), "weights move: ") != NULL, "%s",
        logitless_plan_explain(plan));
  logitless_plan_destroy(plan);
  logitless_communicator_destroy(alone);
  logitless_context_destroy(context);
}

// A GPU is named, and need not be present.
static void test_support(void) {
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CPU, 0, LOGITLESS_F32, 7) == 1, "CPU");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 90, LOGITLESS_BF16, 64) == 1,
        "bf16 on 9.0");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 90, LOGITLESS_BF16, 60) == 1,
        "a width that is no multiple of 8");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 90, LOGITLESS_F16, 64) == 1,
        "f16 on 9.0");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 80, LOGITLESS_BF16, 64) == 1,
        "bf16 on 8.0");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 90, LOGITLESS_F32, 64) == 0,
        "f32 on 9.0");
  CHECK(logitless_supports_vocab_parallel(LOGITLESS_DEVICE_CUDA, 75, LOGITLESS_F16, 64) == 0,
        "f16 on 7.5");
}

static void test_interleaved_vocab(void) {
  int32_t interleaved[kVocab];
  int64_t first = -1;
  int j, seen = 0;
  CHECK(logitless_interleave_vocab(kVocab, kRanks, NULL, 0, interleaved) == LOGITLESS_OK, "%s",
        logitless_last_error());
  for (j = 0; j < kVocab; ++j) seen |= 1 << interleaved[j];
  CHECK(seen == (1 << kVocab) - 1, "vocabulary entries %x", (unsigned)seen);
  CHECK(logitless_interleaved_begin(kVocab, kRanks, kRanks, &first) == LOGITLESS_OK &&
            first == kVocab,
        "first %d", (int)first);
  CHECK(logitless_interleave_vocab(kVocab, 0, NULL, 0, interleaved) == LOGITLESS_INVALID_ARGUMENT,
        "0 ranks");
  CHECK(logitless_interleave_vocab(kVocab, kRanks, NULL, 0, NULL) == LOGITLESS_INVALID_ARGUMENT,
        "NULL");
  CHECK(
      logitless_interleaved_begin(kVocab, kRanks, kRanks + 1, &first) == LOGITLESS_INVALID_ARGUMENT,
      "rank 4 of 3");
}

void test_sharding(void) {
  static Head head;
  static Rank ranks[kRanks];
  logitless_communicator* made[kRanks];
  int r;
  make_head(&head);
  CHECK(logitless_communicator_threads(kRanks, 60000, made) == LOGITLESS_OK, "threads");
  for (r = 0; r < kRanks; ++r) {
    ranks[r].vocab_group = made[r];
    ranks[r].head = &head;
    ranks[r].rank = r;
  }
  test_vocab(ranks);
  test_a_bad_target(ranks);
  test_vocab(ranks);
  test_refusals(&head);
  test_support();
  for (r = 0; r < kRanks; ++r) ranks[r].far_plan = 1;
  test_vocab(ranks);
  // Each of the two ranks with a shard has one tile.
  for (r = 0; r < kRanks; ++r)
    CHECK(ranks[r].selected == 1.0 && ranks[r].imbalance == 1.5,
          "rank %d: selected %g, imbalance %g", r, ranks[r].selected, ranks[r].imbalance);
  for (r = 0; r < kRanks; ++r) ranks[r].far_head = 1;
  test_vocab(ranks);
  test_a_bad_target(ranks);
  test_interleaved_vocab();
  for (r = 0; r < kRanks; ++r) logitless_communicator_destroy(made[r]);
}
