// The common parts of the texts of a loop's kernels: coordinates, loads, steps, stores.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/exec/cuda/step_text.h"
#include "compiler/plan/program.h"
#include "core/check.h"

namespace logitless::ir {

// Lines of CUDA C++, indented by their braces.
class Lines {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    put(concat(parts...));
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  int depth_ = 0;
  void put(const std::string& line);
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b);
std::int64_t count_of(const std::vector<std::int64_t>& shape, std::size_t first, std::size_t last);

// How elements are vectorised.
struct Vectors {
  int width = 1;      // elements of an item
  bool flat = false;  // items cover all elements in order, not rows along the innermost dimension
};
// Returns the widest items that the views allow. `stores`: the result, too, is written along the
// innermost dimension.
Vectors choose_vectors(const Pointwise& loop, std::span<const std::int64_t> alignments,
                       bool stores);

class LoopText {
 public:
  LoopText(const Pointwise& loop, Vectors vectors);

  std::string_view index() const { return wide_index_ ? "long long" : "unsigned"; }
  std::string number(std::int64_t n) const;  // literal of type index()

  // Returns the parameters, `const bf16* a0, float* to`, and the arguments for them.
  std::string parameters() const;
  std::vector<KernelArgument> arguments() const;

  // Declares i<d> of the dimensions [first, last), computed from their flat index.
  void coordinates(Lines& lines, std::size_t first, std::size_t last,
                   const std::string& flat) const;
  // Declares arrays x<leaf> for the loaded elements; `copies` of them if more than 1.
  void declare_loads(Lines& lines, int copies) const;
  // Loads an item; `copy` is "" or "[u]". `flat`: index of its first element if items are flat.
  void loads(Lines& lines, const std::string& copy, const std::string& flat = {}) const;
  // loads() reads leaf `leaf` from the array `tile`, at [q][p] for an item's first element and at
  // [q + j][p] for the others.
  void read_from_tile(std::size_t leaf, std::string tile);
  // Returns the address of a leaf's element at the declared coordinates.
  std::string address_of(std::size_t leaf) const;
  // The registers, whose steps() computes element j of an item and returns the name of the value to
  // be stored or reduced.
  const RegisterText& registers() const { return registers_; }
  std::string steps(Lines& lines, const std::string& copy, const std::string& flat = {}) const;

  // Returns the offset of the result's element at coordinates of dimensions [first, last).
  std::string stored_offset(std::size_t first, std::size_t last) const;
  void store_one(Lines& lines, const std::string& offset, const std::string& value) const;
  bool stores_vectors() const;
  std::string converted(const std::string& value) const;  // converted to the result's dtype
  // Returns the element that is stored: the value, or its sum with the old one.
  std::string stored(const std::string& old, const std::string& value) const;
  std::string_view stored_type() const;

 private:
  struct Parameter {
    std::string_view type;
    KernelArgument argument;
  };
  const Pointwise& loop_;
  RegisterText registers_;
  Vectors vectors_;
  bool wide_index_ = false;
  std::vector<Parameter> parameters_;  // of leaves in memory, without the result
  std::vector<int> parameter_of_;      // by leaf; -1: none
  std::vector<bool> used_;             // by register
  std::vector<std::string> tiles_;     // by leaf; empty: read from memory

  enum class Read { vector, one, each };
  Read read_of(const View& view) const;
  std::string offset(const View& view, std::size_t first, std::size_t last,
                     std::string_view element) const;
  void mark_used();
};

std::string_view cuda_type(DType dtype);

// Blocks that an SM must hold at a time, which bounds the registers of a thread, and blocks of a
// cluster.
struct Blocks {
  unsigned of_sm = 1, of_cluster = 1;
};
// Returns the kernel with these lines as its body: entry, source and arguments.
GeneratedKernel make_kernel(const std::string& kind, const std::string& comment,
                            const std::string& parameters, const Lines& body, unsigned block,
                            Blocks blocks = {});

}  // namespace logitless::ir
