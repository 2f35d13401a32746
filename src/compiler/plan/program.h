// An executable graph: buffers, and ordered instructions that read and write views of them. Sizes
// are numbers. All decisions are made here, and the executor only follows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "compiler/ir/graph.h"
#include "logitless/context.h"
#include "logitless/plan.h"

namespace logitless::ir {

// The location of a buffer's memory.
enum class Place : std::uint8_t {
  arena,     // memory of the caller or the enclosing loop: parameters and results
  external,  // index of the chunk's first element, an argument of a loop's body; no memory
  first,     // none: the number of the chunk's first element, which a loop's body is given
};

struct Buffer {
  Place place = Place::arena;
  std::int64_t bytes = 0;
  std::int64_t value_bytes = 0;  // the same without scratch that depends on threads
  // Offset from the start of the arena, or of a result's memory. A multiple of the alignment.
  std::int64_t offset = 0;
  // External: index of the parameter or result, or of the loop's slice.
  int slot = -1;
  bool overwritten = false;  // a result's memory, whose contents before `first` do not count
  bool unaligned = false;    // a slice that may begin between multiples of 16 bytes
  int inside = -1;  // the result's buffer in whose memory it is, until that is made; -1: the arena
  int first = -1, last = -1;  // instructions between which it is live, inclusive
  int shared_with = -1;       // the buffer that ends here and whose memory it reuses; -1: separate
  int node = -1;              // of the graph, whose value it holds; -1: scratch
  std::string name;           // of the value, for reports
};

// A tensor in a buffer; strides are in elements.
struct View {
  int buffer = -1;
  DType dtype = DType::f32;
  std::int64_t offset = 0;  // in elements
  std::vector<std::int64_t> shape, strides;
};

// The most registers of one Pointwise: leaves and steps together.
inline constexpr int kMaxRegisters = 64;

// A loop over an index space that computes each element with a few steps on registers, in blocks of
// the innermost dimension. Leaves define the first registers, steps the next ones.
struct Pointwise {
  struct Leaf {
    enum class Kind : std::uint8_t { memory, constant, iota, first };
    Kind kind = Kind::memory;
    View view;            // memory: strides over the index space
    double number = 0.0;  // constant; first: its greatest value
    int dim = 0;          // iota: dimension of the index space
    // first: the argument of a loop's body.
  };
  struct Step {
    enum class Kind : std::uint8_t { function, round };  // round: to `dtype` and back
    Kind kind = Kind::function;
    Function function = Function::neg;
    DType dtype = DType::f32;    // function: the result's, where it is i32 or i64
    int a = -1, b = -1, c = -1;  // registers
    bool near = false;           // the function may be off by 2 units in the last place
  };
  struct Store {
    int source = -1;          // register
    View view;                // strides over the index space; 0 along reduced dimensions
    bool accumulate = false;  // adds to existing values
  };
  std::vector<std::int64_t> shape;
  std::vector<Leaf> leaves;
  std::vector<Step> steps;
  Store store;
  bool wide = false;  // registers are f64
  // Registers of i32 and i64 hold integers that wrap, because floats of this width would round
  // them.
  bool exact = false;
  // A reduction of one register, store.source, over `reduced` dimensions. By default these are the
  // last ones, and each task owns rows of results. With `columns` they are the first ones, and each
  // task owns columns; they are split into `parts` whose sums are added in order.
  bool reduction = false;
  Reduce reduce = Reduce::sum;
  int reduced = 0;
  bool columns = false;
  std::int64_t parts = 1;
  int scratch = -1;  // buffer of the parts' sums
};

// c (+)= a . b over [outer..., m, n, k].
struct Gemm {
  View a, b, c;  // strides: outer dimensions, then (m, k), (k, n), (m, n)
  // The epilogue, for targets with Target::epilogues(); not with outer dimensions or accumulate.
  // Absent operands have no buffer.
  Epilogue epilogue;
  View bias, residual;  // [n]; strides: (m, n)
  View aux;             // strides: (m, n); gelu: the stored sum, its gradient: x
  std::vector<std::int64_t> outer;
  std::int64_t m = 0, n = 0, k = 0;
  bool accumulate = false;
  int scratch = -1;
  // Bytes that its kernels move beside operands and result (Target::additional_bytes).
  std::int64_t additional_bytes = 0;
};

// Neighbouring loops over one space [rows, columns], fused to run one row at a time. Values between
// stages stay in registers. Only for targets with Target::most_group_columns().
// The kernel of a product with an epilogue: by Hopper's instructions, or by mma.sync of compute
// capability 8.0 and later.
enum class ProductEngine : std::uint8_t { sm90, sm80 };

struct RowGroup {
  // The most columns whose rows one block of a GPU owns. Longer rows take a cluster of blocks, and
  // have no sums of columns.
  static constexpr std::int64_t kMostColumnsOfBlock = 8192;

  struct Stage {
    // Over [rows, columns]: a map, a row reduction or a column sum; over [rows]: a map. A leaf that
    // reads an earlier stage's result has the same view as its store.
    Pointwise loop;
    bool stored = true;  // false: only this group reads it, and its buffer has no memory
  };
  std::int64_t rows = 0, columns = 0;
  std::vector<Stage> stages;
  // The stages are the epilogue of this product. They read its result [rows, columns] by its view,
  // whose memory is written only by a stage, if at all. They sum no columns, and none reads a sum
  // of rows.
  std::optional<Gemm> product;
  // A second product of the same size that the kernel computes, too. Stages read its result by its
  // view, and it has the first's left operand. Or, with `difference`, no stage reads it: the view
  // of the first product stands for the first minus the second.
  std::optional<Gemm> other;
  bool difference = false;
  ProductEngine engine = ProductEngine::sm90;  // of the products
  int scratch = -1;                            // buffer of the parts of sums
};

struct Take {
  View table, index, out;  // contiguous
};
struct ScatterAdd {
  View index, updates, out;  // contiguous; out is f32 or f64, and is added to
  int scratch = -1;
};
struct Pick {
  View x, index, out;  // one index for each row, or several along axis if index has x's rank
  int axis = 0;
};
struct Put {
  View index, updates, out;  // out is f32, f64, i32 or i64 unless indices are distinct
  int axis = 0;
  // distinct: no two indices of a row are equal (analysis/values.h). whole: they are also all
  // indices of out, whose elements are written; otherwise out is added to.
  bool distinct = false, whole = false;
};
struct ArgMax {
  View x, out;  // dims of out, then the searched dimension
};
struct Scan {
  View x, out;   // of one shape
  View factors;  // of a recurrence: x is added to its products; no buffer otherwise
  int axis = 0;
  Reduce kind = Reduce::sum;  // of no recurrence
  bool reverse = false;
};
// Returns "cumsum", "recurrence".
std::string scan_text(const Scan& scan);
struct Sort {
  View x, values, index;  // index is i64; both have the sorted elements along axis
  int axis = 0;
  bool descending = false;
};
// An operation that the caller runs.
struct ExternRun {
  std::int64_t id = 0;
  std::vector<View> operands;
  View out;
  double work = 0.0;  // extern_work()
};
struct Fill {
  View out;
  double number = 0.0;
};
// Absent operands have no buffer. bias: a stride is 0 where its size is 1.
struct Attention {
  bool gradient = false;
  double scale = 1.0;
  Scores scores;
  View q, k, v, out, lse, d_out, d_q, d_k, d_v, bias, query_segments, key_segments;
  int scratch = -1;
};

// A call of the head engine. Absent operands have no buffer.
struct HeadRun {
  View x, w, targets, bias, d_lse, d_logit, lse, logit, log_prob, d_x, d_w, d_bias;
  std::optional<std::int64_t> ignored;
  std::shared_ptr<const LossPlan> plan;
  std::shared_ptr<const Context> context;
  int scratch = -1;  // targets [rows] i64, then the engine's workspace
  std::int64_t scratch_bytes = 0;
};

struct Program;
struct LoopRun {
  struct Slice {
    int outer = -1;           // buffer of the surrounding program
    std::int64_t offset = 0;  // in bytes
    std::int64_t step = 0;    // bytes for each element of the axis; 0: not cut
  };
  std::string symbol;  // name of the chunk's size
  std::int64_t extent = 0, chunk = 0;
  std::vector<Slice> slices;                  // by slot of the body's external buffers
  std::shared_ptr<const Program> body, tail;  // tail: null if chunk divides extent
  int arena = -1;                             // buffer of the body's arena
};

struct Instruction {
  std::string name;  // of the value that it makes
  std::variant<Pointwise, Gemm, Take, ScatterAdd, Pick, ArgMax, Fill, Attention, LoopRun, HeadRun,
               RowGroup, Put, Scan, Sort, ExternRun>
      what;
  int node = -1;  // node of the graph; -1: none
};

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Instruction> instructions;
  std::vector<int> parameters;  // buffers, in the order of the graph's parameters
  std::vector<int> results;
  std::int64_t alignment = 64;  // of the arena and of offsets in it
  // Bytes of the values, and a pointer for each buffer. Counts the tables that a backend may keep
  // of these, wherever they are stored.
  std::int64_t arena_bytes = 0;
  // Bytes of the arena without the scratch of kernels. Independent of threads, so decisions based
  // on it are, too.
  std::int64_t value_bytes = 0;
  double multiply_adds = 0.0;  // of matrix products; loops count in full
  double merged_bytes = 0.0;   // of results that loops read and write in each round
};

// Return the buffers that an instruction reads and writes, scratch included.
std::vector<int> reads_of(const Instruction& instruction);
std::vector<int> writes_of(const Instruction& instruction);
// Append to a list, for callers with many instructions.
void add_reads_of(const Instruction& instruction, std::vector<int>& buffers);
void add_writes_of(const Instruction& instruction, std::vector<int>& buffers);

// Returns the bytes of an instruction's operands and results. Results that are added to count
// twice, and elements repeated by a stride of 0 once. Loops count in full. Repeated reads of
// kernels and scratch do not count.
double bytes_moved(const Program& program);
double bytes_moved(const Instruction& instruction);

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape);
bool is_contiguous(const View& view);
std::int64_t elements_of(const View& view);

}  // namespace logitless::ir
