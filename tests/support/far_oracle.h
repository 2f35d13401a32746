// The far field in float64, written apart from the library from the formulas of its headers: which
// tiles are kept, and gradients with the others at their mass.
#pragma once

#include <cstdint>
#include <vector>

#include "logitless/logitless.h"
#include "support/oracle.h"

namespace logitless::test {

// What the library makes of a plan: tokens of a block share the tiles they keep.
struct FarGrid {
  std::int64_t row_block = 128;  // HeadKernel::far_row_block
  std::int64_t tiles = 1;        // that are kept together
  // Blocks and chunks are of all tokens, ignored ones last; or of the valid ones, evenly.
  bool ignored_last = false;
  std::int64_t chunk_tokens = 0;  // LossPlan::chunk_tokens
  double most_kept = 2.0 / 3.0;   // above it all tiles of a chunk are kept
  // The tokens in the order of their blocks, where the call has chosen it: HeadAnswer's.
  std::vector<std::int64_t> order_of_tokens;
  // far_both keeps a target's tile where the target has more than tau, not in any case.
  bool only_likely_targets = false;
  double mass_error = 1.5e-3;  // relative, of a mass in 16 bit: 2^(1/512) - 1, rounded up
};

struct FarOracle {
  OracleGradients exact, far;
  // What the 16 bits of the masses may change, relative to nothing: 2-norms over all elements.
  double hidden_slack = 0, weight_slack = 0, bias_slack = 0;
  double kept = 0;  // pairs (tile, block), all of a chunk where it falls back
  bool fallback = false;
  double nearest = 0;   // least |log(P / tau)| of a pair's largest mass: how clear the choice is
  double far_mass = 0;  // sum |da| at far tiles over all tokens: what d_bias may lose
  std::vector<double> slack;     // [N] hidden_slack of each token
  std::vector<double> row_size;  // [N] sum_j |da_ij| |w_j|: what a row's rounding is relative to
  // [N] sum over far tiles of F r, the bound of the headers without its share for the 16 bits.
  std::vector<double> bound;
  std::vector<std::int64_t> valid;  // tokens not ignored, in the order of blocks
};

// Tokens not ignored: by grid.order_of_tokens or, without it, by the position of their first
// target, which is before all positions where it is ignored; and the blocks they make, by chunk.
std::vector<std::int64_t> far_tokens(const OracleProblem& p, const VocabOrder& order,
                                     const FarGrid& grid);
std::vector<std::vector<std::vector<std::int64_t>>> far_blocks(const OracleProblem& p,
                                                               const VocabOrder& order,
                                                               const FarGrid& grid);

// Largest mass P_iJ of each pair (block, tile), by chunk; tokens without gradient left out.
std::vector<std::vector<double>> far_pair_masses(const OracleProblem& p,
                                                 const std::vector<double>& upstream,
                                                 const VocabOrder& order, const FarGrid& grid);

// A tau that keeps about `fraction` of the pairs and lies in a gap: no pair within 1 % of it.
float far_tau(const OracleProblem& p, const std::vector<double>& upstream, const VocabOrder& order,
              const FarGrid& grid, double fraction);

FarOracle far_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                     const VocabOrder& order, const FarGrid& grid, double tau);

}  // namespace logitless::test
