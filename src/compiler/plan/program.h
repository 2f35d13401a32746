// A graph made executable: buffers, and instructions in order that read and write views of them.
// Sizes are numbers; everything that runs is decided here, and the executor only follows.
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

// Where a buffer's memory is.
enum class Place : std::uint8_t {
  arena,     // at `offset` of the program's arena
  external,  // given by the caller, or by the loop around: parameters and results
  first,     // none: the number of the chunk's first element, which a loop's body is given
};

struct Buffer {
  Place place = Place::arena;
  std::int64_t bytes = 0;
  std::int64_t value_bytes = 0;  // the same without what kernels need for themselves, by threads
  std::int64_t offset = 0;       // in the arena; multiples of the program's alignment
  int slot = -1;                 // external: of parameters and results, or of the loop's slices
  int first = -1, last = -1;     // instructions that it must live from and to, both included
  int shared_with = -1;  // memory of another buffer that ends where this one begins; -1: its own
  int node = -1;         // of the graph, whose value it holds; -1: scratch
  std::string name;      // of that value, for reports
};

// A tensor in a buffer; strides count elements.
struct View {
  int buffer = -1;
  DType dtype = DType::f32;
  std::int64_t offset = 0;  // elements
  std::vector<std::int64_t> shape, strides;
};

// Registers of one Pointwise: leaves and steps together.
inline constexpr int kMaxRegisters = 64;

// A loop over an index space that computes each element with a few steps on registers: blocks of
// the innermost dimension. Leaves, then steps, define registers in order.
struct Pointwise {
  struct Leaf {
    enum class Kind : std::uint8_t { memory, constant, iota, first };
    Kind kind = Kind::memory;
    View view;            // strides over the index space; memory
    double number = 0.0;  // constant
    int dim = 0;          // iota: of the index space
    // first: the argument of a loop's body.
  };
  struct Step {
    enum class Kind : std::uint8_t { function, round };  // round: to `dtype` and back
    Kind kind = Kind::function;
    Function function = Function::neg;
    DType dtype = DType::f32;
    int a = -1, b = -1, c = -1;  // registers
  };
  struct Store {
    int source = -1;  // register
    View view;        // strides over the index space; of a reduction, 0 along what is reduced
    bool accumulate = false;  // adds to what is there
  };
  std::vector<std::int64_t> shape;
  std::vector<Leaf> leaves;
  std::vector<Step> steps;
  Store store;
  bool wide = false;  // registers are f64
  // A reduction of one register, store.source, over `reduced` dimensions: the last ones (each
  // task owns rows of results), or, when `columns`, the first ones (each task owns columns, and the
  // first dimensions are cut into `parts` whose sums are added in order).
  bool reduction = false;
  Reduce reduce = Reduce::sum;
  int reduced = 0;
  bool columns = false;
  std::int64_t parts = 1;
  int scratch = -1;  // buffer of the parts' sums
};

// Neighbouring loops over one space [rows, columns], run a row at a time: what one of them makes
// and later ones read stays in registers. Targets that say so get them (Target::groups_rows).
struct RowGroup {
  struct Stage {
    // Over [rows, columns]: a map, a reduction of rows, or a sum of columns; over [rows]: a map. A
    // leaf reads what an earlier stage makes by just the view that it is stored with.
    Pointwise loop;
    bool stored = true;  // false: nobody outside reads it, and its buffer has no memory
  };
  std::int64_t rows = 0, columns = 0;
  std::vector<Stage> stages;
  int scratch = -1;  // of the parts of columns' sums
};

// c (+)= a . b over [outer..., m, n, k].
struct Gemm {
  View a, b, c;  // strides: outer dimensions, then (m, k), (k, n), (m, n)
  // What is done to the sums before they are stored, for targets that say so (Target::epilogues);
  // without outer dimensions and accumulate. No buffer: not there.
  Epilogue epilogue;
  View bias, residual;  // [n]; strides: (m, n)
  View aux;             // strides: (m, n); gelu: where the sum goes, its gradient: x
  std::vector<std::int64_t> outer;
  std::int64_t m = 0, n = 0, k = 0;
  bool accumulate = false;
  int scratch = -1;
};

struct Take {
  View table, index, out;  // contiguous
};
struct ScatterAdd {
  View index, updates, out;  // contiguous; out is f32 or f64, and added to
  int scratch = -1;
};
struct Pick {
  View x, index, out;  // one index for each row, or, of the rank of x, several along axis
  int axis = 0;
};
struct Put {
  View index, updates, out;  // out is f32, f64, i32 or i64, and added to
  int axis = 0;
};
struct ArgMax {
  View x, out;  // dims of out, then the one searched
};
struct Scan {
  View x, out;  // of one shape
  int axis = 0;
  Reduce kind = Reduce::sum;  // or lse
  bool reverse = false;
};
struct Sort {
  View x, values, index;  // index: i64; as many along axis as are kept
  int axis = 0;
  bool descending = false;
};
// What the caller runs.
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
// Views that are not there have no buffer. bias: a stride of 0 where its size is 1.
struct Attention {
  bool gradient = false;
  double scale = 1.0;
  Scores scores;
  View q, k, v, out, lse, d_out, d_q, d_k, d_v, bias, query_segments, key_segments;
  int scratch = -1;
};

// The head engine's call. Views that are not wanted have no buffer.
struct HeadRun {
  View x, w, targets, bias, d_lse, d_logit, lse, logit, d_x, d_w, d_bias;
  std::optional<std::int64_t> ignored;
  std::shared_ptr<const LossPlan> plan;
  std::shared_ptr<const Context> context;
  int scratch = -1;  // targets as the engine takes them [rows] i64, then its workspace
  std::int64_t scratch_bytes = 0;
};

struct Program;
struct LoopRun {
  struct Slice {
    int outer = -1;           // buffer here
    std::int64_t offset = 0;  // bytes
    std::int64_t step = 0;    // bytes for each element of the axis; 0: whole
  };
  std::string symbol;  // of the loop's chunk: its name
  std::int64_t extent = 0, chunk = 0;
  std::vector<Slice> slices;                  // by the slot of the body's external buffers
  std::shared_ptr<const Program> body, tail;  // tail: null when chunk divides extent
  int arena = -1;                             // buffer the body's arena lies in
};

struct Instruction {
  std::string name;  // of the value made
  std::variant<Pointwise, Gemm, Take, ScatterAdd, Pick, ArgMax, Fill, Attention, LoopRun, HeadRun,
               RowGroup, Put, Scan, Sort, ExternRun>
      what;
  int node = -1;  // of the graph, that it was written for; -1: none
};

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Instruction> instructions;
  std::vector<int> parameters;  // buffers, in the order of the graph's
  std::vector<int> results;
  std::int64_t alignment = 64;  // of the arena and of offsets in it
  // The values, and a pointer for each buffer: what a backend may keep of them is counted here,
  // wherever it lies.
  std::int64_t arena_bytes = 0;
  // What the arena would take without the scratch of kernels: does not depend on threads, so that
  // neither do decisions.
  std::int64_t value_bytes = 0;
  double multiply_adds = 0.0;  // of products, loops counted in full
  double merged_bytes = 0.0;   // of results that loops read and write again in each round
};

// Buffers read and written by an instruction, scratch included.
std::vector<int> reads_of(const Instruction& instruction);
std::vector<int> writes_of(const Instruction& instruction);
// The same, appended: for those who ask about many.
void add_reads_of(const Instruction& instruction, std::vector<int>& buffers);
void add_writes_of(const Instruction& instruction, std::vector<int>& buffers);

// Bytes that the instructions name: each operand once, each result once, twice where it is added
// to, what is repeated by a stride of 0 once; loops counted in full. Not what kernels read again,
// nor their scratch.
double bytes_moved(const Program& program);
double bytes_moved(const Instruction& instruction);

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape);
bool is_contiguous(const View& view);
std::int64_t elements_of(const View& view);

}  // namespace logitless::ir
