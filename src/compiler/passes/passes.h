// The passes: each is a function from a graph to a graph, in the file of its name; pipeline.cpp has
// their order. Unless its contract says otherwise, a pass keeps parameters, results, their order
// and their types, and expects bound sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/ir/text.h"

namespace logitless::ir {

// --- differentiate: reverse mode, one rule for each operation

// Appends the gradients of sum_i <outputs[i], cotangents[i]> with respect to `wrt` to the graph.
// Each has the type of its value, and is zero if no output depends on it. An invalid cotangent
// stands for ones.
//
// Where a function has no derivative (ties of max, abs at 0) the choice is PyTorch's. Throws
// InvalidArgument with the operation if it has no rule: loops, and second derivatives of attention.
std::vector<Value> gradients(Graph& graph, const std::vector<Value>& outputs,
                             const std::vector<Value>& cotangents, const std::vector<Value>& wrt);

// Adds the results d_PARAMETER of a request, or OUTPUT.d_PARAMETER if there are several requests.
Graph differentiate(const Graph& graph, const std::vector<GradientRequest>& requests);

// --- eliminate: removes redundant nodes, of any sizes

// Removes nodes that no result depends on; parameters stay.
Graph eliminate_dead(const Graph& graph);
Graph eliminate_dead(Graph&& graph);
// Merges equal operations on equal operands.
Graph eliminate_common(const Graph& graph);
Graph eliminate_common(Graph&& graph);
// Merges only equal values that one loop reads: copies that were made for distant readers are now
// adjacent.
Graph eliminate_common_of_loops(Graph graph);

// --- lift-transposes
//
//   transpose(eq(iota axis(1), broadcast(x, {0})), {1, 0})
//     ->   eq(iota axis(0), broadcast(x, {1}))
//
// So that a mask or a one-hot tensor in another order needs no memory: loops compute its elements.
// Applies to elementwise values of constants, indices and broadcasts alone.
Graph lift_transposes(const Graph& graph);

// --- near-results: marks divisions and square roots whose last bits make no difference
//
// Marks the divisions and square roots that may be off by 2 units in the last place of f32. Those
// of 16 bits may: they are rounded again. Of f32 those may on which no function that jumps depends,
// as floor and comparisons do; behind one that rounds anyway, such as exp, a jump does not count. A
// GPU multiplies by the reciprocal. All copies of a node have its mark, so that a logit that is
// picked equals the one of the row's log-sum-exp.
Graph mark_near_results(const Graph& graph);

// --- narrow: computes values only where they are read and not zero
//
//   slice(dot(h, w))      ->  dot(slice(h), w)
//   dot(pad(d), w)        ->  pad(dot(d, w))
//   dot(pad(d)^T, h)      ->  dot(d^T, slice(h))
//   pad(a) + pad(b)       ->  pad(a + b), over the hull of both
//
// and the same through operations in between. Each value is computed in one box: the hull over all
// readers, without indices where only zeros are. Matrix products with the zeros of a pad are
// skipped, so an infinite factor of such a zero makes no NaN.
Graph narrow(const Graph& graph);

// Also refines the rows of the largest matrix product if that saves work.
Graph narrow_products(const Graph& graph);

// --- refine-axes: splits the rows of a matrix product into the dimensions that its readers use

// Refines dimensions around `seed`, the result of a matrix product. A dimension that a reshape
// splits later is split from the product on. A dimension that is sliced at multiples of a part (the
// chosen and the rejected half of a batch) is split into these parts. All operations in between are
// rewritten. Reshapes are added at operands of matrix products, parameters and results.
//
//    reshape(dot(h[6, D], w)) : [2, 3, V]   ->   dot(reshape(h) [2, 3, D], w)
//
// This adds no work, lets a slice move above the product (narrow) and lets a chunk hold full
// sequences or pairs of them. Returns nothing if nothing changes.
std::optional<Graph> refine_axes(const Graph& graph, Value seed);

// Returns the largest result of a matrix product; invalid if there is none.
Value largest_product(const Graph& graph);

// --- part-products: splits dimensions of matrix products that have no single stride
//
// A reshape can merge dimensions that are not adjacent in memory. Examples are the experts and
// their units in an einsum, and the rows and columns of images with channels first. The matrix
// product then gets the original dimensions instead:
//    dot (reshape %x : [N, E F]), %w  ->  reshape (dot %x : [N, E, F], %w)
// So the operand needs no copy, and a transposed result can be written in place. Chains of reshapes
// become one. Meant for targets whose matrix products take any strides. Results are equal up to the
// order of sums over split dimensions.
Graph part_products(const Graph& graph);

// --- spread-masks: recomputes masks of indices and small values where they are read
//
//   broadcast(f(iota, small))  ->  f(iota, broadcast(small)), in the shape of the broadcast
//
// This concerns masks of positions and biases by distance. They are elementwise operations, few
// enough for every reader to recompute. Their operands are indices, constants and values of at most
// an eighth of the elements. A broadcast would hold the mask in memory; rewritten it needs none,
// and a chunk makes its own part. Only if all readers are elementwise operations and reductions.
Graph spread_masks(const Graph& graph);

// --- sink-puts: adds elements to a value after it is computed
//
//   p = put(i, u)  x = ...  y = p + x     ->     x = ...  p = put(i, u)  y = p + x
//
// Applies if only the sum reads p, which is then added to the memory of x, not stored beside it.
Graph sink_puts(const Graph& graph);

// --- join-pads
//
//   pad(a) + pad(b)  ->  concat(a, b)
//
// Several slices of one value give it a gradient that is a sum of pads. Pads along one axis with
// disjoint parts become one value that is written once. Parts of a longer sum are joined if each is
// added to the same rest. The pass looks through casts of pads and pads of pads. Holes between
// parts stay zero: they are padding of the part before. Sums with other readers and pads that
// overlap stay.
//
// Keeps every bit of the graph's meaning (ir/interpreter.h). Adding 0 changes only -0, which
// becomes 0. So a part that may contain -0 is written as x + 0 if the sign can reach a result or a
// quotient. Removes nodes without readers.
Graph join_pads(const Graph& graph);

// --- widen-sums
//
//   cast f32 (dot ... : bf16)  ->  dot ... : f32
//
// Keeps the fp32 sum if the rounded 16-bit result is only widened again, as in gradients of fp32
// weights that are used in bf16. Looks through transposes and reshapes. Expects a single reader of
// the widened value.
Graph widen_sums(const Graph& graph);

// --- split-lse
//
//   x - reduce_lse(y)  ->  (x - high) - low
//
// The log-sum-exp is made in f64; high is its f32 and low what that leaves. An offset that all
// logits have cancels in x - high, so losses and probabilities are as exact with it as without.
// Differences are found through views and selects of either side. Other readers get high.
// Log-sum-exps that no difference reads stay as they are.
//
// widen_lse is for programs that a framework runs, whose own operations take a log-sum-exp from
// logits: it computes differences of rows in f64 and leaves those of the logits alone.
Graph split_lse(const Graph& graph);
Graph widen_lse(const Graph& graph);

// --- sink-picks: reads elements of a value's operands instead of the value
//
//   y = exp(x - r)  p = pick(y, i)     ->     p = exp(pick(x, i) - r), 0 where i is out of range
//
// Applies to big values of elementwise operations on other values, rows' numbers, constants and
// indices. Elements are computed once more; the value itself need not be stored for the pick.
Graph sink_picks(const Graph& graph);

// --- rows-first: reduces the last dimension of a big value first, and its results next
//
//   reduce_sum(x, {0, 1}): f32     ->     reduce_sum(reduce_sum(x, {1}): f32[N], {0})
//
// So that a reduction of a whole value is one of its rows, which loops over rows fuse with the
// others. Sums in between are at least f32.
Graph rows_first(const Graph& graph);

// --- recompute-cheap: recomputes elementwise values after the peak
//
// Splits the graph where the most bytes are live, and chooses the values to store by a minimum cut.
// All other values must follow from the stored ones by elementwise operations and views. The cut
// has the fewest bytes and, among equals, the least recomputation. Matrix products, reductions and
// gathers never run twice.
Graph recompute_cheap(const Graph& graph);

// --- settle: log-sum-exps that a softmax subtracts, and heads
//
//   select(abs(lse) < inf, lse, NaN)  ->  lse, of a lse that a head of the engine makes.
//
// Frontends write that of a softmax, which is NaN of a row that holds inf. The engine's head is no
// number there, either. Nothing else changes; find_head() sees heads in the result.
Graph drop_settling(const Graph& graph);

// --- lower-heads: losses over a large vocabulary become calls of the head engine

inline constexpr std::int64_t kLeastLogits = 1 << 20;

// Replaces each head that the engine has a kernel for by the operation `head`:
//
//    z = dot x, w, with a scale, a bias along the vocabulary or a softcap;  f32
//    reduce_lse z, or pick of z or of z - lse, or both
//
// and the matrix products with the gradient of z if the graph differentiates them. Gradients are
// recognised by differentiating the head alone and comparing.
//
// A head stays as it is if its logits have other readers, or take less than `least_logits` bytes.
// Each head takes at most `workspace` bytes if a plan fits into them; 0: no limit, and nothing is
// recomputed. Expects common subexpressions eliminated.
Graph lower_heads(const Graph& graph, std::int64_t workspace,
                  std::int64_t least_logits = kLeastLogits);

// Limits the workspace of each head to `workspace` bytes.
Graph limit_heads(const Graph& graph, std::int64_t workspace);

}  // namespace logitless::ir
