/* A saved head over the C ABI: saved_head.h in C. Its exponentials stay from the forward to the
 * backward: 3 GEMMs for both instead of 4, on a GPU. The conventions are those of c_api.h, and this
 * header is part of its ABI version. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a dense plan with all tokens in one chunk, for both calls. With request NULL or
 * memory_budget 0 it takes at most three tenths of the fp32 logits, or 19 MiB. Errors: no such plan
 * fits, naming the least (invalid argument); the CPU, a vocabulary over several ranks, a softcap
 * beside weighted_logit_sum (unsupported). */
LOGITLESS_API logitless_status logitless_plan_head_saved(const logitless_context* context,
                                                         const logitless_head_options* options,
                                                         const logitless_head_inputs* inputs,
                                                         const logitless_head_outputs* outputs,
                                                         const logitless_head_gradients* gradients,
                                                         const logitless_plan_request* request,
                                                         logitless_plan** plan);

/* Writes the outputs. Until the end of the backward nothing else may write to the workspace or to
 * d_weight, whose memory holds exponentials. */
LOGITLESS_API logitless_status logitless_head_forward_saved(
    logitless_context* context, const logitless_plan* plan, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_outputs* outputs,
    const logitless_head_gradients* gradients, void* workspace, size_t workspace_bytes);

/* Writes the gradients, once. inputs, gradients and workspace are those of the forward. A cotangent
 * of the entropy under a softcap, or of an entropy that was no output, is an error. */
LOGITLESS_API logitless_status logitless_head_backward_saved(
    logitless_context* context, const logitless_plan* plan, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_cotangents* cotangents,
    const logitless_head_gradients* gradients, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
