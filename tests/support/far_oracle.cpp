#include "support/far_oracle.h"

#include <algorithm>
#include <cmath>

namespace logitless::test {

std::vector<std::int64_t> far_tokens(const OracleProblem& p, const VocabOrder& order,
                                     const FarGrid& grid) {
  if (!grid.order_of_tokens.empty()) {
    std::vector<std::int64_t> valid;
    for (const std::int64_t token : grid.order_of_tokens)
      if (!oracle_ignored(p, token)) valid.push_back(token);
    return valid;
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> keyed;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    if (oracle_ignored(p, i)) continue;
    const std::int64_t vocab_id = p.targets[i * p.per_token];
    keyed.emplace_back(vocab_id == p.ignore_index ? -1 : order.positions()[vocab_id], i);
  }
  std::sort(keyed.begin(), keyed.end());
  std::vector<std::int64_t> out;
  for (const auto& [position, token] : keyed) out.push_back(token);
  return out;
}

namespace {

// Blocks with ignored tokens after the others, in no block.
std::vector<std::vector<std::vector<std::int64_t>>> uneven_blocks(
    const std::vector<std::int64_t>& valid, std::int64_t tokens, const FarGrid& grid) {
  const auto count = static_cast<std::int64_t>(valid.size());
  std::vector<std::vector<std::vector<std::int64_t>>> chunks;
  for (std::int64_t first = 0; first < tokens; first += grid.chunk_tokens) {
    chunks.emplace_back();
    const std::int64_t end = std::min(tokens, first + grid.chunk_tokens);
    for (std::int64_t at = first; at < std::min(end, count); at += grid.row_block) {
      chunks.back().emplace_back(valid.begin() + at,
                                 valid.begin() + std::min({count, end, at + grid.row_block}));
    }
  }
  return chunks;
}

}  // namespace

std::vector<std::vector<std::vector<std::int64_t>>> far_blocks(const OracleProblem& p,
                                                               const VocabOrder& order,
                                                               const FarGrid& grid) {
  const std::vector<std::int64_t> valid = far_tokens(p, order, grid);
  if (grid.ignored_last) return uneven_blocks(valid, p.tokens, grid);
  const auto count = static_cast<std::int64_t>(valid.size());
  std::vector<std::vector<std::vector<std::int64_t>>> chunks;
  if (count == 0) return chunks;
  const std::int64_t parts = (count + grid.chunk_tokens - 1) / grid.chunk_tokens;
  const std::int64_t step = (count + parts - 1) / parts;
  for (std::int64_t first = 0; first < count; first += step) {
    chunks.emplace_back();
    const std::int64_t end = std::min(count, first + step);
    for (std::int64_t at = first; at < end; at += grid.row_block)
      chunks.back().emplace_back(valid.begin() + at,
                                 valid.begin() + std::min(end, at + grid.row_block));
  }
  return chunks;
}

namespace {

constexpr std::int64_t kTile = 128;

// One token's terms: da_ij = soft_j + flat_j everywhere, plus hard_j at targets.
struct TokenTerms {
  std::vector<double> soft, flat, hard;
  std::vector<bool> target;
  double alpha = 0;
};

class Terms {
 public:
  Terms(const OracleProblem& p, const std::vector<double>& upstream)
      : p_(p), upstream_(upstream), logits_(oracle_logits(p)) {}

  double slope(std::int64_t i, std::int64_t j) const {
    const double z = logits_.z[i * p_.vocab + j];
    return p_.softcap > 0 ? 1 - (z / p_.softcap) * (z / p_.softcap) : 1.0;
  }
  // p_ij times the softcap's slope: the addends of a tile's mass.
  double mass(std::int64_t i, std::int64_t j) const {
    return std::exp(logits_.z[i * p_.vocab + j] - logits_.lse[i]) * slope(i, j);
  }
  double class_weight(std::int64_t j) const {
    return p_.class_weight.empty() ? 1.0 : p_.class_weight[j];
  }
  double of_token(std::int64_t i) const {
    return upstream_[i] * (p_.token_weight.empty() ? 1.0 : p_.token_weight[i]);
  }
  double of_slot(std::int64_t slot) const {
    return (1 - p_.label_smoothing) * class_weight(p_.targets[slot]) *
           (p_.target_weight.empty() ? 1.0 : p_.target_weight[slot]);
  }
  // Factor of p_ij in dz_ij.
  double alpha(std::int64_t i) const {
    double total = 2 * p_.z_loss * logits_.lse[i];
    for (std::int64_t slot = i * p_.per_token; slot < (i + 1) * p_.per_token; ++slot)
      if (p_.targets[slot] != p_.ignore_index) total += of_slot(slot);
    if (p_.label_smoothing > 0) {
      for (std::int64_t j = 0; j < p_.vocab; ++j)
        total += p_.label_smoothing / static_cast<double>(p_.vocab) * class_weight(j);
    }
    return of_token(i) * total;
  }
  TokenTerms token(std::int64_t i) const {
    TokenTerms t;
    t.alpha = alpha(i);
    const double s = p_.logit_scale;
    t.hard.assign(p_.vocab, 0.0);
    t.target.assign(p_.vocab, false);
    for (std::int64_t j = 0; j < p_.vocab; ++j) {
      t.soft.push_back(t.alpha * s * mass(i, j));
      t.flat.push_back(-of_token(i) * s * slope(i, j) * p_.label_smoothing /
                       static_cast<double>(p_.vocab) * class_weight(j));
    }
    for (std::int64_t slot = i * p_.per_token; slot < (i + 1) * p_.per_token; ++slot) {
      const std::int64_t y = p_.targets[slot];
      if (y == p_.ignore_index) continue;
      t.target[y] = true;
      t.hard[y] -= of_token(i) * of_slot(slot) * s * slope(i, y);
    }
    return t;
  }

 private:
  const OracleProblem& p_;
  const std::vector<double>& upstream_;
  OracleLogits logits_;
};

double norm(const double* row, std::int64_t n) {
  double sum = 0;
  for (std::int64_t k = 0; k < n; ++k) sum += row[k] * row[k];
  return std::sqrt(sum);
}
void add(double factor, const double* from, std::int64_t n, double* to) {
  for (std::int64_t k = 0; k < n; ++k) to[k] += factor * from[k];
}

// Centroids of the tiles.
struct Tiles {
  Tiles(const OracleProblem& p, const VocabOrder& order)
      : count((p.vocab + kTile - 1) / kTile), share(p.vocab), centroid(count * p.dim, 0.0) {
    for (std::int64_t tile = 0; tile < count; ++tile) {
      const std::int64_t end = std::min(p.vocab, (tile + 1) * kTile);
      double total = 0;
      for (std::int64_t at = tile * kTile; at < end; ++at)
        total += static_cast<double>(order.average()[order.vocab_ids()[at]]);
      double farthest = 0;
      for (std::int64_t at = tile * kTile; at < end; ++at) {
        const std::int64_t j = order.vocab_ids()[at];
        share[at] = total > 0 ? static_cast<double>(order.average()[j]) / total
                              : 1.0 / static_cast<double>(end - tile * kTile);
        add(share[at], p.weight.data() + j * p.dim, p.dim, centroid.data() + tile * p.dim);
      }
      for (std::int64_t at = tile * kTile; at < end; ++at) {
        std::vector<double> d(p.weight.begin() + order.vocab_ids()[at] * p.dim,
                              p.weight.begin() + (order.vocab_ids()[at] + 1) * p.dim);
        add(-1.0, centroid.data() + tile * p.dim, p.dim, d.data());
        farthest = std::max(farthest, norm(d.data(), p.dim));
      }
      radius.push_back(farthest);
      size.push_back(norm(centroid.data() + tile * p.dim, p.dim));
    }
  }
  std::int64_t count;
  std::vector<double> share, centroid, radius, size;
};

}  // namespace

std::vector<std::vector<double>> far_pair_masses(const OracleProblem& p,
                                                 const std::vector<double>& upstream,
                                                 const VocabOrder& order, const FarGrid& grid) {
  const Terms terms(p, upstream);
  const std::int64_t tiles = (p.vocab + kTile - 1) / kTile;
  std::vector<std::vector<double>> out;
  for (const auto& chunk : far_blocks(p, order, grid)) {
    out.emplace_back();
    for (const auto& block : chunk) {
      std::vector<double> largest(tiles, 0.0);
      for (const std::int64_t i : block) {
        if (terms.alpha(i) == 0.0) continue;
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          double mass = 0;
          for (std::int64_t at = tile * kTile; at < std::min(p.vocab, (tile + 1) * kTile); ++at)
            mass += terms.mass(i, order.vocab_ids()[at]);
          largest[tile] = std::max(largest[tile], mass);
        }
      }
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t first = tile / grid.tiles * grid.tiles;
        const std::int64_t end = std::min(tiles, first + grid.tiles);
        out.back().push_back(*std::max_element(largest.begin() + first, largest.begin() + end));
      }
    }
  }
  return out;
}

float far_tau(const OracleProblem& p, const std::vector<double>& upstream, const VocabOrder& order,
              const FarGrid& grid, double fraction) {
  std::vector<double> masses;
  for (const auto& chunk : far_pair_masses(p, upstream, order, grid))
    masses.insert(masses.end(), chunk.begin(), chunk.end());
  std::sort(masses.begin(), masses.end(), std::greater<>());
  const auto count = static_cast<std::int64_t>(masses.size());
  const auto wanted = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(fraction * static_cast<double>(count)), 1, count - 1);
  // Finds the nearest position of the list with a gap of at least 5 %.
  for (std::int64_t away = 0; away < count; ++away) {
    for (const std::int64_t at : {wanted - away, wanted + away}) {
      if (at < 1 || at >= count || masses[at - 1] < 1.05 * masses[at]) continue;
      const double low = std::max(masses[at], masses[at - 1] * 1e-3);
      return static_cast<float>(std::sqrt(low * std::min(masses[at - 1], 1.0)));
    }
  }
  return 0.003f;
}

FarOracle far_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                     const VocabOrder& order, const FarGrid& grid, double tau) {
  const Terms terms(p, upstream);
  const Tiles tiles(p, order);
  const std::int64_t dim = p.dim;
  FarOracle out;
  out.exact = oracle_gradients(p, upstream);
  out.valid = far_tokens(p, order, grid);
  out.row_size.assign(p.tokens, 0.0);
  out.bound.assign(p.tokens, 0.0);
  out.slack.assign(p.tokens, 0.0);
  out.far.d_hidden.assign(p.tokens * dim, 0.0);
  out.far.d_weight.assign(p.vocab * dim, 0.0);
  out.far.d_bias.assign(p.vocab, 0.0);
  out.nearest = INFINITY;
  std::vector<double> tile_hidden(tiles.count, 0.0), tile_sum(tiles.count, 0.0);  // of the slack
  const auto masses = far_pair_masses(p, upstream, order, grid);
  const auto chunks = far_blocks(p, order, grid);
  double hidden_slack = 0;
  std::int64_t selected_pairs = 0, pairs = 0;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    std::int64_t selected = 0;
    std::int64_t all = 0;
    for (std::size_t at = 0; at < masses[c].size(); ++at) {
      const double mass = masses[c][at];
      if (mass > 0) out.nearest = std::min(out.nearest, std::abs(std::log(mass / tau)));
      if (static_cast<std::int64_t>(at) % tiles.count % grid.tiles != 0) continue;
      selected += mass > tau ? 1 : 0;
      ++all;
    }
    const bool fall_back =
        static_cast<double>(selected) > grid.most_selected * static_cast<double>(all);
    if (fall_back) selected = all;
    out.fallback = out.fallback || fall_back;
    selected_pairs += selected;
    pairs += all;
    for (std::size_t b = 0; b < chunks[c].size(); ++b) {
      for (const std::int64_t i : chunks[c][b]) {
        const TokenTerms t = terms.token(i);
        const double* x = p.hidden.data() + i * dim;
        double* d_hidden = out.far.d_hidden.data() + i * dim;
        double slack = 0;
        for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
          const bool near = fall_back || masses[c][b * tiles.count + tile] > tau;
          double far = 0, whole = 0;
          for (std::int64_t at = tile * kTile; at < std::min(p.vocab, (tile + 1) * kTile); ++at) {
            const std::int64_t j = order.vocab_ids()[at];
            whole += t.soft[j];
            const bool exact = near || t.target[j];
            if (!exact) far += t.soft[j];
            const double da = (exact ? t.soft[j] : 0.0) + t.flat[j] + t.hard[j];
            const double* w = p.weight.data() + j * dim;
            out.row_size[i] +=
                (std::abs(t.soft[j]) + std::abs(t.flat[j]) + std::abs(t.hard[j])) * norm(w, dim);
            add(da, w, dim, d_hidden);
            add(da, x, dim, out.far.d_weight.data() + j * dim);
            out.far.d_bias[j] += da;
          }
          if (near) continue;
          add(far, tiles.centroid.data() + tile * dim, dim, d_hidden);
          for (std::int64_t at = tile * kTile; at < std::min(p.vocab, (tile + 1) * kTile); ++at) {
            const std::int64_t j = order.vocab_ids()[at];
            add(tiles.share[at] * far, x, dim, out.far.d_weight.data() + j * dim);
            out.far.d_bias[j] += tiles.share[at] * far;
          }
          out.bound[i] += std::abs(far) * tiles.radius[tile];
          // Rounded once as a whole, and again without its targets.
          const double lost = std::abs(whole) + (whole != far ? std::abs(far) : 0.0);
          slack += lost * tiles.size[tile];
          tile_hidden[tile] += lost * norm(x, dim);
          tile_sum[tile] += lost;
          out.far_mass += lost;
        }
        hidden_slack += slack * slack;
        out.slack[i] = grid.mass_error * slack;
      }
    }
  }
  out.selected = pairs > 0 ? static_cast<double>(selected_pairs) / static_cast<double>(pairs) : 1.0;
  double weight_slack = 0, bias_slack = 0;
  for (std::int64_t at = 0; at < p.vocab; ++at) {
    weight_slack += std::pow(tiles.share[at] * tile_hidden[at / kTile], 2);
    bias_slack += std::pow(tiles.share[at] * tile_sum[at / kTile], 2);
  }
  out.hidden_slack = grid.mass_error * std::sqrt(hidden_slack);
  out.weight_slack = grid.mass_error * std::sqrt(weight_slack);
  out.bias_slack = grid.mass_error * std::sqrt(bias_slack);
  return out;
}

}  // namespace logitless::test
