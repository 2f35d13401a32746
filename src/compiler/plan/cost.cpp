#include "compiler/plan/cost.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace logitless::ir {
namespace {

double flops_per_second(DType dtype, const Rates& rates) {
  if (dtype == DType::f64) return rates.products64;
  return size_of(dtype) == 2 ? rates.products16 : rates.products32;
}

double rounded_up(std::int64_t size, std::int64_t tile) {
  return static_cast<double>((size + tile - 1) / tile * tile);
}

// Returns the number of chunks of a head beyond the first.
double more_chunks_of(const HeadRun& head) {
  if (head.plan->chunk_tokens <= 0) return 0.0;
  const auto tokens = static_cast<double>(head.plan->shape.tokens),
             chunk = static_cast<double>(head.plan->chunk_tokens);
  return std::max(tokens / chunk - 1.0, 0.0);
}

// Seconds of an instruction's arithmetic; memory traffic overlaps with it.
struct Compute {
  const Rates& rates;

  double operator()(const Pointwise& p) const {
    double elements = 1.0;
    for (const std::int64_t size : p.shape) elements *= static_cast<double>(size);
    constexpr double kCheap = 1.0 / 16.0;  // cost relative to exp
    double steps = p.reduction ? (p.reduce == Reduce::lse ? 1.0 : kCheap) : 0.0;
    for (const Pointwise::Step& s : p.steps)
      steps += s.kind == Pointwise::Step::Kind::function && is_slow(s.function) ? 1.0 : kCheap;
    return elements * steps / rates.functions;
  }
  double operator()(const RowGroup& g) const {
    if (g.product) return with_epilogue(g);
    double seconds = 0.0;
    for (const RowGroup::Stage& stage : g.stages) seconds += (*this)(stage.loop);
    return seconds;
  }
  // Tiles in rounds. An epilogue comes after its tile's product: the tensor cores wait. Its costs
  // are those of five epilogues by Hopper's kernel on an H200.
  double with_epilogue(const RowGroup& group) const {
    const Gemm& g = *group.product;
    const bool beside = group.other && !group.difference;  // half a tile for each product
    const std::int64_t side = rates.epilogue_side;
    constexpr double kPerFunction = 10.0;  // instructions as long as an exponential
    constexpr double kFill = 2e-6, kLoad = 2e-6, kStore = 1e-6, kMerge = 2.5e-6;
    const double elements = static_cast<double>(side * side),
                 results = beside ? 0.5 * elements : elements,  // of a tile
        tiles = rounded_up(g.m, side) * rounded_up(g.n, beside ? side / 2 : side) / results,
                 of_round = static_cast<double>(rates.epilogue_tiles),
                 rounds = std::ceil(tiles / of_round);
    double instructions = beside ? 2.0 : 1.0, waits = 0.0, seconds = kFill;
    std::vector<int> made = {g.c.buffer};
    if (group.other) made.push_back(group.other->c.buffer);
    for (const RowGroup::Stage& stage : group.stages) {
      const Pointwise& loop = stage.loop;
      if (loop.shape.size() < 2) continue;
      for (const Pointwise::Step& s : loop.steps)
        instructions +=
            s.kind == Pointwise::Step::Kind::function && is_slow(s.function) ? kPerFunction : 1.0;
      for (const Pointwise::Leaf& leaf : loop.leaves) {
        if (leaf.kind == Pointwise::Leaf::Kind::iota) instructions += 4.0;  // a conversion
        if (leaf.kind != Pointwise::Leaf::Kind::memory ||
            std::find(made.begin(), made.end(), leaf.view.buffer) != made.end())
          continue;
        const bool element = leaf.view.strides[0] != 0 && leaf.view.strides[1] != 0;
        instructions += element ? 3.0 : 1.0;
        if (element) waits = kLoad;
      }
      made.push_back(loop.store.view.buffer);
      if (loop.reduction) {
        instructions += loop.reduce == Reduce::lse ? 45.0 : 1.0;
        seconds += kMerge;
      } else if (stage.stored) {
        instructions += 2.0;
        seconds += rounds * kStore * results / elements;
      }
    }
    // While one warpgroup of Hopper finishes, the other multiplies a few steps, which hide more of
    // half as many results: within 4 % of two epilogues of three sizes on an H200.
    constexpr double kHalf = 0.6;
    if (beside && group.engine == ProductEngine::sm90) instructions *= kHalf;
    // A difference by mma.sync fills its pipeline twice for each tile (three sizes on an H200).
    constexpr double kRefill = 4e-6;
    if (group.difference && group.engine == ProductEngine::sm80) waits += kRefill;
    const std::int64_t depth = g.k + (group.difference ? group.other->k : 0);
    const double multiplied = 2.0 * static_cast<double>(depth) / rates.epilogue_products,
                 finished = instructions / (kPerFunction * rates.functions);
    return seconds + rounds * (waits + of_round * (elements * multiplied + results * finished));
  }
  double operator()(const Gemm& g) const {
    constexpr double kPart = 1024.0;  // of the inner dimension, which units may share (split-K)
    double outer = 1.0;
    for (const std::int64_t size : g.outer) outer *= static_cast<double>(size);
    const auto k = static_cast<double>(g.k);
    const double elements =
        outer * rounded_up(g.m, rates.tile_rows) * rounded_up(g.n, rates.tile_columns);
    const double tiles = elements / static_cast<double>(rates.tile_rows * rates.tile_columns);
    const double units = static_cast<double>(rates.units);
    const double busy = std::min(tiles * std::max(1.0, k / kPart) / units, 1.0);
    return busy > 0.0 ? 2.0 * elements * k / (busy * flops_per_second(g.a.dtype, rates)) : 0.0;
  }
  double operator()(const Attention& a) const {
    const double flops = flops_of({{}, a});
    const double of_score = (a.gradient ? 10.0 : 4.0) * static_cast<double>(a.q.shape[3]);
    const double scores = of_score > 0.0 ? flops / of_score : 0.0;
    const double functions = a.gradient ? rates.score_gradient_functions : rates.score_functions;
    const double seconds = flops / (rates.attention_products * flops_per_second(a.q.dtype, rates)) +
                           scores * functions / rates.functions;
    const double keys = std::max(static_cast<double>(a.k.shape[2]), 1.0);
    return seconds * (1.0 + (a.scores.causal ? static_cast<double>(rates.score_rows) / keys : 0.0));
  }
  double operator()(const ExternRun& e) const {
    return 2.0 * e.work / flops_per_second(e.out.dtype, rates);
  }
  double operator()(const HeadRun& h) const {
    // Without gradients a head takes as long as the product alone (two sizes on an H200).
    const double rate = h.d_lse.buffer < 0 ? 1.0 : rates.head_products;
    return flops_of({{}, h}) / (rate * flops_per_second(h.x.dtype, rates)) +
           more_chunks_of(h) * rates.head_chunk;
  }
  template <typename T>
  double operator()(const T&) const {
    return 0.0;
  }
};

// Returns the seconds of a gelu epilogue or its gradient, with its additional reads and writes.
double epilogue_seconds(const Instruction& i, const Rates& rates) {
  const auto* gemm = std::get_if<Gemm>(&i.what);
  if (gemm == nullptr || gemm->aux.buffer < 0) return 0.0;
  const double elements = static_cast<double>(gemm->m) * static_cast<double>(gemm->n);
  return elements *
         (static_cast<double>(size_of(gemm->aux.dtype)) / rates.bytes + 1.0 / rates.functions);
}

// Returns the bytes of sums that are read and written without overlap. They belong to products that
// add to their results, and to heads that add to d_weight for each chunk. Products in blocks have
// sums and copies of their own.
double sum_bytes(const Instruction& i) {
  if (const auto* gemm = std::get_if<Gemm>(&i.what)) {
    double bytes = gemm->accumulate ? 2.0 * static_cast<double>(size_of(gemm->c.dtype)) : 0.0;
    for (const std::int64_t size : gemm->outer) bytes *= static_cast<double>(size);
    return bytes * static_cast<double>(gemm->m) * static_cast<double>(gemm->n) +
           static_cast<double>(gemm->additional_bytes);
  }
  const auto* head = std::get_if<HeadRun>(&i.what);
  if (head == nullptr || head->d_w.buffer < 0) return 0.0;
  return 8.0 * static_cast<double>(elements_of(head->d_w)) * more_chunks_of(*head);
}

// Returns the additional seconds of a loop whose steps are operations of their own: each of them
// but one has a launch, and writes and reads its value.
double seconds_apart(const Instruction& i, const Rates& rates) {
  const auto* loop = std::get_if<Pointwise>(&i.what);
  if (rates.fuses || loop == nullptr) return 0.0;
  double elements = 1.0;
  for (const std::int64_t size : loop->shape) elements *= static_cast<double>(size);
  const auto operations = std::count_if(
      loop->steps.begin(), loop->steps.end(),
      [](const Pointwise::Step& s) { return s.kind == Pointwise::Step::Kind::function; });
  const double more = std::max(static_cast<double>(operations + loop->reduction - 1), 0.0);
  const double item = loop->wide ? 8.0 : 4.0;
  return more * (rates.launch + 2.0 * item * elements / rates.bytes);
}

}  // namespace

bool is_slow(Function function) {
  constexpr Function kSlow[] = {
      Function::exp,    Function::log,     Function::log1p,    Function::expm1,
      Function::tanh,   Function::erf,     Function::erfc,     Function::sigmoid,
      Function::sin,    Function::cos,     Function::atan,     Function::pow,
      Function::lgamma, Function::digamma, Function::trigamma, Function::fmod};
  return std::find(std::begin(kSlow), std::end(kSlow), function) != std::end(kSlow);
}

double predicted_seconds(const Instruction& i, const Rates& rates) {
  if (const auto* loop = std::get_if<LoopRun>(&i.what))
    return static_cast<double>(loop->extent / loop->chunk) * predicted_seconds(*loop->body, rates) +
           (loop->tail ? predicted_seconds(*loop->tail, rates) : 0.0);
  const double sums = sum_bytes(i);
  const auto* group = std::get_if<RowGroup>(&i.what);
  const bool product = std::holds_alternative<Gemm>(i.what) || (group && group->product);
  const double bytes = product ? bytes_moved(i) - sums : bytes_moved(i);
  const double compute = std::visit(Compute{rates}, i.what), memory = bytes / rates.bytes;
  return rates.launch + sums / rates.bytes + epilogue_seconds(i, rates) + seconds_apart(i, rates) +
         (product && rates.products_wait ? std::hypot(compute, memory) : std::max(compute, memory));
}

double predicted_seconds(const Program& program, const Rates& rates) {
  double seconds = 0.0;
  for (const Instruction& i : program.instructions) seconds += predicted_seconds(i, rates);
  return seconds;
}

}  // namespace logitless::ir
