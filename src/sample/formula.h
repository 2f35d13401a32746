// The formulas of sample.h as tensor programs.
#pragma once

#include "logitless/graph.h"
#include "sample/form.h"

namespace logitless {

// A program that returns `tokens` [N]. Its parameters have the names of the fields of SampleInputs;
// `key` i64 [2] is noise_key() of the seed. temperature, top_p and min_p are f32 [] without
// tensors.
Graph sample_graph(const SampleForm& form);

// A program that returns `wanted` i64 [N, M]: the ids of the k largest logits in ascending order
// and the target, if there is one.
Graph best_graph(const TopForm& form);

// A program that sorts `wanted` [N, M] by the log-probabilities `found` f32 [N, M]. It returns
// top_log_probs and top_ids [N, K], and with a target log_prob [N].
Graph order_graph(const TopForm& form);

}  // namespace logitless
