#include "expected.h"

#include <math.h>
#include <string.h>

int failures = 0;

// Returns a number in [-1, 1) from a fixed sequence.
static float next_random(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

void make_head(Head* head) {
  uint32_t state = 7;
  int i;
  for (i = 0; i < kTokens * kDim; ++i) head->hidden[i] = 2.0f * next_random(&state);
  for (i = 0; i < kVocab * kDim; ++i) head->weight[i] = next_random(&state);
  for (i = 0; i < kVocab; ++i) head->bias[i] = next_random(&state);
  for (i = 0; i < kVocab; ++i) head->class_weight[i] = 1.5f + next_random(&state);
  for (i = 0; i < kTokens; ++i) head->token_weight[i] = 1.25f + next_random(&state);
  for (i = 0; i < kTokens; ++i) head->targets[i] = (3 * i + 1) % kVocab;
  head->targets[2] = -100;
}

// Computes the logits z of one token and the per-token outputs.
static void forward_token(const Head* head, const Options* options, int i, double* z, Expected* e) {
  double top = -INFINITY, sum = 0.0, weighted = 0.0;
  int j, d;
  e->logit_sum[i] = 0.0;
  for (j = 0; j < kVocab; ++j) {
    double a = head->bias[j];
    for (d = 0; d < kDim; ++d) a += (double)head->hidden[i * kDim + d] * head->weight[j * kDim + d];
    z[j] = options->logit_scale * a;
    if (options->softcap > 0.0) z[j] = options->softcap * tanh(z[j] / options->softcap);
    if (z[j] > top) top = z[j];
  }
  for (j = 0; j < kVocab; ++j) sum += exp(z[j] - top);
  e->lse[i] = top + log(sum);
  for (j = 0; j < kVocab; ++j) {
    weighted += exp(z[j] - e->lse[i]) * z[j];
    e->logit_sum[i] += z[j];
  }
  e->entropy[i] = e->lse[i] - weighted;
  e->log_prob[i] = z[head->targets[i]] - e->lse[i];
}

// Adds one token's gradients, given those of its logits.
static void backward_token(const Head* head, const Options* options, int i, const double* z,
                           const double* dz, Expected* e) {
  int j, d;
  for (j = 0; j < kVocab; ++j) {
    double slope = options->logit_scale, da;
    if (options->softcap > 0.0)
      slope *= 1.0 - (z[j] / options->softcap) * (z[j] / options->softcap);
    da = dz[j] * slope;
    e->d_bias[j] += da;
    for (d = 0; d < kDim; ++d) {
      e->d_hidden[i * kDim + d] += da * head->weight[j * kDim + d];
      e->d_weight[j * kDim + d] += da * head->hidden[i * kDim + d];
    }
  }
}

void expect_cross_entropy(const Head* head, const Options* options, double grad_loss, Expected* e) {
  const double eps = options->label_smoothing;
  double class_sum = 0.0;
  int i, j;
  memset(e, 0, sizeof *e);
  for (j = 0; j < kVocab; ++j) class_sum += options->weighted ? head->class_weight[j] : 1.0;
  for (i = 0; i < kTokens; ++i) {
    const int64_t y = head->targets[i];
    if (y >= 0)
      e->normalizer +=
          options->weighted ? (double)head->token_weight[i] * head->class_weight[y] : 1.0;
  }
  for (i = 0; i < kTokens; ++i) {
    double z[kVocab], dz[kVocab], token, hard, loss;
    const int64_t y = head->targets[i];
    if (y < 0) continue;
    forward_token(head, options, i, z, e);
    token = (options->weighted ? head->token_weight[i] : 1.0) / e->normalizer;
    hard = (1.0 - eps) * (options->weighted ? head->class_weight[y] : 1.0);
    loss = -hard * e->log_prob[i] + options->z_loss * e->lse[i] * e->lse[i];
    for (j = 0; j < kVocab; ++j) {
      const double soft = eps / kVocab * (options->weighted ? head->class_weight[j] : 1.0);
      const double p = exp(z[j] - e->lse[i]);
      loss += soft * (e->lse[i] - z[j]);
      dz[j] = p * (hard + eps / kVocab * class_sum + 2.0 * options->z_loss * e->lse[i]) - soft -
              (j == y ? hard : 0.0);
      dz[j] *= token * grad_loss;
    }
    e->loss += token * loss;
    backward_token(head, options, i, z, dz, e);
  }
}

void expect_head_backward(const Head* head, const Options* options, double g_lse, double g_log_prob,
                          double g_entropy, Expected* e) {
  int i, j;
  memset(e, 0, sizeof *e);
  for (i = 0; i < kTokens; ++i) {
    double z[kVocab], dz[kVocab];
    if (head->targets[i] < 0) continue;
    forward_token(head, options, i, z, e);
    for (j = 0; j < kVocab; ++j) {
      const double p = exp(z[j] - e->lse[i]);
      dz[j] = p * (g_lse - g_log_prob + g_entropy * (e->lse[i] - e->entropy[i] - z[j]));
      if (j == head->targets[i]) dz[j] += g_log_prob;
    }
    backward_token(head, options, i, z, dz, e);
  }
}

void check_close(const char* what, const float* actual, const double* expected, int count,
                 double tolerance) {
  int i;
  for (i = 0; i < count; ++i) {
    const double error = fabs(actual[i] - expected[i]);
    CHECK(error <= tolerance * (1.0 + fabs(expected[i])), "%s[%d] is %.9g, expected %.9g", what, i,
          actual[i], expected[i]);
  }
}

logitless_tensor tensor(void* data, logitless_dtype dtype, int rank, int64_t size0, int64_t size1) {
  logitless_tensor t;
  const int64_t shape[2] = {size0, size1};
  memset(&t, 0, sizeof t);
  CHECK(logitless_tensor_init(&t, data, dtype, rank, shape) == LOGITLESS_OK, "tensor_init");
  return t;
}
