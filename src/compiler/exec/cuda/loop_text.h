// The parts that the texts of all kernels of one loop are put together from: coordinates, loads,
// steps, stores.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/plan/program.h"
#include "core/check.h"

namespace logitless::ir {

// Lines of CUDA C++, indented by the braces they hold.
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

// How elements are taken together.
struct Vectors {
  int width = 1;      // elements of one item
  bool flat = false;  // items run over all elements in order, not along the innermost dimension
};
// The widest items that the views allow. `stores`: the result is written along the innermost
// dimension, too.
Vectors choose_vectors(const Pointwise& loop, std::span<const std::int64_t> alignments,
                       bool stores);

class LoopText {
 public:
  LoopText(const Pointwise& loop, Vectors vectors);

  std::string_view real() const { return loop_.wide ? "double" : "float"; }
  std::string_view index() const { return wide_index_ ? "long long" : "unsigned"; }
  std::string number(std::int64_t n) const;  // of type index()

  // `const bf16* a0, float* to`, and what they are.
  std::string parameters() const;
  std::vector<KernelArgument> arguments() const;

  // Declares i<d> of dimensions [first, last) from their flat number.
  void coordinates(Lines& lines, std::size_t first, std::size_t last,
                   const std::string& flat) const;
  // Declares arrays for what leaves read: x<leaf>, `copies` of them where that is more than 1.
  void declare_loads(Lines& lines, int copies) const;
  // Reads an item; `copy`: "" or "[u]". `flat`: its first element, where items are flat.
  void loads(Lines& lines, const std::string& copy, const std::string& flat = {}) const;
  // Computes element j of an item; returns the name of what is stored or reduced.
  std::string steps(Lines& lines, const std::string& copy, const std::string& flat = {}) const;

  // The element of the result at coordinates of dimensions [first, last), and its new value.
  std::string stored_offset(std::size_t first, std::size_t last) const;
  void store_one(Lines& lines, const std::string& offset, const std::string& value) const;
  bool stores_vectors() const;
  std::string converted(const std::string& value) const;  // to the result's dtype
  std::string_view stored_type() const;

 private:
  struct Parameter {
    std::string_view type;
    KernelArgument argument;
  };
  const Pointwise& loop_;
  Vectors vectors_;
  bool wide_index_ = false;
  std::vector<Parameter> parameters_;  // of leaves in memory, without the result
  std::vector<int> parameter_of_;      // by leaf; -1
  std::vector<bool> used_;             // registers

  enum class Read { vector, one, each };
  Read read_of(const View& view) const;
  std::string offset(const View& view, std::size_t first, std::size_t last,
                     std::string_view element) const;
  std::string register_name(int r) const;
  void mark_used();
};

std::string_view cuda_type(DType dtype);

// entry, source, arguments of a kernel with these lines as its body. `blocks`: that a
// multiprocessor is to hold at a time, which bounds the registers of a thread.
GeneratedKernel make_kernel(const std::string& kind, const std::string& comment,
                            const std::string& parameters, const Lines& body, unsigned block,
                            unsigned blocks = 1);

}  // namespace logitless::ir
