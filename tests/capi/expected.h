// Shared parts of the C tests: a check macro, a small head, and its loss computed directly in
// doubles.
#pragma once

#include <stdio.h>

#include "logitless/c_api.h"
#include "logitless/c_far_field.h"

#ifdef __cplusplus
extern "C" {
#endif

extern int failures;

#define CHECK(condition, ...)                                                  \
  do {                                                                         \
    if (!(condition)) {                                                        \
      ++failures;                                                              \
      fprintf(stderr, "%s:%d: %s is false; ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                            \
      fprintf(stderr, " (last error: %s)\n", logitless_last_error());          \
    }                                                                          \
  } while (0)

enum { kTokens = 6, kDim = 5, kVocab = 11 };

// hidden [kTokens, kDim], weight [kVocab, kDim]; token 2 is ignored.
typedef struct Head {
  float hidden[kTokens * kDim];
  float weight[kVocab * kDim];
  float bias[kVocab];
  float class_weight[kVocab];
  float token_weight[kTokens];
  int64_t targets[kTokens];
} Head;

typedef struct Options {
  double label_smoothing, z_loss, softcap, logit_scale;
  int weighted;  // class and token weights
} Options;

typedef struct Expected {
  double loss, normalizer;
  double lse[kTokens], log_prob[kTokens], entropy[kTokens], logit_sum[kTokens];
  double d_hidden[kTokens * kDim], d_weight[kVocab * kDim], d_bias[kVocab];
} Expected;

void make_head(Head* head);
// Computes the mean cross entropy times grad_loss, its gradients, and the outputs of each token.
void expect_cross_entropy(const Head* head, const Options* options, double grad_loss,
                          Expected* expected);
// Computes gradients of sum_i (g_lse lse_i + g_log_prob log_prob_i + g_entropy entropy_i).
void expect_head_backward(const Head* head, const Options* options, double g_lse, double g_log_prob,
                          double g_entropy, Expected* expected);
// Checks that all are within `tolerance` of the expected values, absolutely and relatively.
void check_close(const char* what, const float* actual, const double* expected, int count,
                 double tolerance);
logitless_tensor tensor(void* data, logitless_dtype dtype, int rank, int64_t size0, int64_t size1);

// A callback that throws a C++ exception.
void throwing_trace(const char* line, void* user);
// c_api_errors_test.c
void test_errors(const char* kernel);
// c_api_token_loss_test.c
void test_token_losses(void);
// c_api_program_test.c
void test_programs(void);
void test_communicators(void);
// c_far_field_test.c
void test_far_field(void);
void test_sharding(void);

// A head that gains from the far field, and the outputs of one step.
enum { kFarTokens = 64, kFarDim = 8, kFarVocab = 65536 };
typedef struct FarProblem {
  float hidden[kFarTokens * kFarDim], d_hidden[kFarTokens * kFarDim];
  float weight[kFarVocab * kFarDim], d_weight[kFarVocab * kFarDim];
  int64_t targets[kFarTokens];
  float loss;
} FarProblem;
// A head of the C++ interface with one thread, in far_field_cpp.cpp; a step returns its GEMM count.
typedef struct CppFarHead CppFarHead;
CppFarHead* cpp_far_head(const logitless_far_field_options* options);
void cpp_far_head_destroy(CppFarHead* head);
double cpp_far_step(CppFarHead* head, FarProblem* problem);

#ifdef __cplusplus
}
#endif
