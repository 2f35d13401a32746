#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <vector>

#include "core/check.h"
#include "kernels/cuda/dynamic_library.h"
#include "kernels/cuda/tensor/copy_lines.h"
#include "kernels/cuda/tensor/cublaslt.h"
#include "kernels/cuda/tensor/epilogue.h"
#include "kernels/cuda/tensor/product_form.h"
#include "kernels/cuda/tensor/product_parts.h"
#include "kernels/cuda/tensor/strided_product.h"
#include "kernels/device/gemm.h"

namespace logitless::cuda {
namespace {

void require_lt(int status, const char* what) {
  if (status != 0) throw DeviceError(concat(what, ": cuBLASLt status ", status));
}

}  // namespace

namespace lt {
namespace {

Functions load() {
  DynamicLibrary library("cuBLASLt", {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"});
  Functions out;
  library.find("cublasLtCreate", out.create);
  library.find("cublasLtMatmulDescCreate", out.make_descriptor);
  library.find("cublasLtMatmulDescDestroy", out.free_descriptor);
  library.find("cublasLtMatmulDescSetAttribute", out.set_descriptor);
  library.find("cublasLtMatrixLayoutCreate", out.make_layout);
  library.find("cublasLtMatrixLayoutDestroy", out.free_layout);
  library.find("cublasLtMatrixLayoutSetAttribute", out.set_layout);
  library.find("cublasLtMatmulPreferenceCreate", out.make_preference);
  library.find("cublasLtMatmulPreferenceDestroy", out.free_preference);
  library.find("cublasLtMatmulPreferenceSetAttribute", out.set_preference);
  library.find("cublasLtMatmulAlgoGetHeuristic", out.find_algorithms);
  library.find("cublasLtMatmulAlgoConfigGetAttribute", out.get_algorithm);
  library.find("cublasLtMatmul", out.multiply);
  if (!library.missing().empty())
    out.missing = concat(library.missing(),
                         "; products of compiled programs need it: the PyPI package nvidia-cublas "
                         "has it, its folder belongs in LD_LIBRARY_PATH");
  return out;
}

}  // namespace

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

std::int64_t attribute_of(const Algorithm& algorithm, int attribute) {
  std::int32_t value = -1;
  std::int16_t narrow = -1;  // clusters alone are 16-bit
  const bool cluster = attribute == kAlgorithmCluster;
  std::size_t written = 0;
  const int status = functions().get_algorithm(&algorithm, attribute,
                                               cluster ? static_cast<void*>(&narrow) : &value,
                                               cluster ? sizeof(narrow) : sizeof(value), &written);
  return status != 0 ? -1 : cluster ? narrow : value;
}

}  // namespace lt

namespace {

lt::Handle handle() {
  static HandlePool& pool = *new HandlePool;  // threads may end after static objects
  thread_local DeviceHandles handles(&pool);
  return handles.get("cuBLASLt", lt::functions().missing, lt::functions().create);
}

int type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return lt::kBf16;
    case DType::f16:
      return lt::kF16;
    case DType::f64:
      return lt::kF64;
    default:
      return lt::kF32;
  }
}

template <int (*lt::Functions::*kFree)(void*)>
struct Freed {
  void operator()(void* object) const { (lt::functions().*kFree)(object); }
};
using DescriptorOwner = std::unique_ptr<void, Freed<&lt::Functions::free_descriptor>>;
using LayoutOwner = std::unique_ptr<void, Freed<&lt::Functions::free_layout>>;
using PreferenceOwner = std::unique_ptr<void, Freed<&lt::Functions::free_preference>>;

LayoutOwner layout_of(const ColumnMajor& m, const MatrixLayout& from, std::int64_t batch) {
  const lt::Functions& f = lt::functions();
  lt::Layout made = nullptr;
  require_lt(f.make_layout(&made, type_of(from.dtype), static_cast<std::uint64_t>(m.rows),
                           static_cast<std::uint64_t>(m.columns), m.leading),
             "cublasLtMatrixLayoutCreate");
  LayoutOwner layout(made);
  if (batch > 1) {
    const auto count = static_cast<std::int32_t>(batch);
    require_lt(f.set_layout(made, lt::kLayoutBatchCount, &count, sizeof(count)), "batch");
    require_lt(
        f.set_layout(made, lt::kLayoutBatchStride, &from.batch_stride, sizeof(from.batch_stride)),
        "batch stride");
  }
  return layout;
}

}  // namespace

struct Product::State {
  GemmShape shape;
  lt::Handle handle = nullptr;  // of the creating thread; any thread may use it
  bool swapped = false, fused = false;
  DescriptorOwner descriptor;  // null: uses the strided kernel
  mutable std::mutex held;     // guards the addresses of bias and aux in the descriptor
  LayoutOwner a, b, c, residual;
  int choice = kBest;
  std::size_t most_workspace = 0;
  lt::Algorithm algorithm{};
  std::size_t workspace_bytes = 0;

  static std::shared_ptr<const State> make(const GemmShape& shape, int choice,
                                           std::size_t most_workspace);
  void describe(bool with_epilogue);
  bool choose();
  int best_of(std::span<const lt::Found> found) const;
  void run(const GemmCall& call) const;

 private:
  void set_epilogue();
  template <typename T>
  void set(int attribute, const T& value, const char* what) const {
    require_lt(lt::functions().set_descriptor(descriptor.get(), attribute, &value, sizeof(value)),
               what);
  }
  void set_addresses(const void* of_bias, const void* of_aux) const {
    if (shape.epilogue.bias) set(lt::kDescriptorBias, of_bias, "bias");
    if (shape.epilogue.has_aux()) set(lt::kDescriptorAux, of_aux, "aux");
  }
};

void Product::State::describe(bool with_epilogue) {
  const lt::Functions& f = lt::functions();
  handle = logitless::cuda::handle();
  fused = with_epilogue;
  const LtForm form = form_of(shape);
  const bool wide = shape.a.dtype == DType::f64;
  const int compute = wide                          ? lt::kCompute64FPedantic
                      : shape.a.dtype == DType::f32 ? lt::kCompute32FPedantic
                                                    : lt::kCompute32F;
  lt::Descriptor made = nullptr;
  require_lt(f.make_descriptor(&made, compute, wide ? lt::kF64 : lt::kF32),
             "cublasLtMatmulDescCreate");
  descriptor.reset(made);
  const std::int32_t ta = form.a.transposed ? 1 : 0, tb = form.b.transposed ? 1 : 0;
  require_lt(f.set_descriptor(made, lt::kDescriptorTransposeA, &ta, sizeof(ta)), "transpose");
  require_lt(f.set_descriptor(made, lt::kDescriptorTransposeB, &tb, sizeof(tb)), "transpose");
  swapped = form.swapped;
  a = layout_of(form.a, swapped ? shape.b : shape.a, shape.batch);
  b = layout_of(form.b, swapped ? shape.a : shape.b, shape.batch);
  c = layout_of(form.c, shape.c, shape.batch);
  residual.reset();
  if (with_epilogue) set_epilogue();
}

void Product::State::set_epilogue() {
  const GemmEpilogue& e = shape.epilogue;
  const std::int32_t kind = (e.gelu ? lt::kEpilogueGelu : 0) |
                            (e.gelu_gradient ? lt::kEpilogueGeluGradient : 0) |
                            (e.bias ? lt::kEpilogueBias : 0);
  if (kind != 0) set(lt::kDescriptorEpilogue, kind, "epilogue");
  if (e.has_aux()) set(lt::kDescriptorAuxLeading, e.aux_layout.row_stride, "aux");
  // Placeholders with the alignment of the real addresses.
  const auto* const some = reinterpret_cast<const void*>(std::uintptr_t{256});
  set_addresses(some, some);
  if (e.residual) {
    ColumnMajor like_c;
    like_c.rows = shape.n;
    like_c.columns = shape.m;
    like_c.leading = shape.epilogue.residual_layout.row_stride;
    residual = layout_of(like_c, shape.epilogue.residual_layout, 1);
  }
}

// Returns true if there is an algorithm.
bool Product::State::choose() {
  const lt::Functions& f = lt::functions();
  lt::Preference wanted = nullptr;
  require_lt(f.make_preference(&wanted), "cublasLtMatmulPreferenceCreate");
  const PreferenceOwner preference(wanted);
  require_lt(
      f.set_preference(wanted, lt::kPreferenceWorkspace, &most_workspace, sizeof(most_workspace)),
      "workspace");
  require_lt(f.set_preference(wanted, lt::kPreferenceReductions, &lt::kReduceInComputeType,
                              sizeof(lt::kReduceInComputeType)),
             "reductions");
  const std::int64_t of_a = swapped ? shape.b.alignment : shape.a.alignment;
  const std::int64_t of_b = swapped ? shape.a.alignment : shape.b.alignment;
  const std::int64_t of_c = residual ? shape.epilogue.residual_layout.alignment : shape.c.alignment;
  const std::array<std::int64_t, 4> alignments = {of_a, of_b, of_c, shape.c.alignment};
  for (std::size_t i = 0; i < alignments.size(); ++i) {
    const auto bytes = static_cast<std::uint32_t>(alignments[i]);
    require_lt(f.set_preference(wanted, lt::kPreferenceAlignment + static_cast<int>(i), &bytes,
                                sizeof(bytes)),
               "alignment");
  }
  constexpr int kNamed = 12;  // a preferred algorithm is among these or unavailable
  std::vector<lt::Found> found(static_cast<std::size_t>(std::max(kNamed, choice + 1)));
  int count = 0;
  const int status = f.find_algorithms(handle, descriptor.get(), a.get(), b.get(),
                                       residual ? residual.get() : c.get(), c.get(), wanted,
                                       static_cast<int>(found.size()), found.data(), &count);
  const int chosen =
      choice == kBest ? best_of({found.data(), static_cast<std::size_t>(count)}) : choice;
  if (status != 0 || count <= chosen || found[static_cast<std::size_t>(chosen)].status != 0)
    return false;
  algorithm = found[static_cast<std::size_t>(chosen)].algorithm;
  workspace_bytes = found[static_cast<std::size_t>(chosen)].workspace_bytes;
  return true;
}

// Returns the index of the preferred algorithm among the heuristic's.
int Product::State::best_of(std::span<const lt::Found> found) const {
  const bool fuses = fused || !shape.epilogue.any();
  if (!fuses) return 0;
  for (const LtAlgorithm& wanted : preferred_algorithms(shape)) {
    const auto is_it = [&](const lt::Found& f) {
      return f.status == 0 && lt::attribute_of(f.algorithm, lt::kAlgorithmId) == wanted.id &&
             lt::attribute_of(f.algorithm, lt::kAlgorithmTile) == wanted.tile &&
             lt::attribute_of(f.algorithm, lt::kAlgorithmCluster) == wanted.cluster;
    };
    const auto at = std::find_if(found.begin(), found.end(), is_it);
    if (at != found.end()) return static_cast<int>(at - found.begin());
  }
  return 0;
}

void Product::State::run(const GemmCall& call) const {
  static constexpr float kOne = 1.0f, kZero = 0.0f;
  static constexpr double kDoubleOne = 1.0, kDoubleZero = 0.0;
  const bool wide = shape.a.dtype == DType::f64;
  const void* const alpha = wide ? static_cast<const void*>(&kDoubleOne) : &kOne;
  const void* const zero = wide ? static_cast<const void*>(&kDoubleZero) : &kZero;
  std::unique_lock<std::mutex> lock(held, std::defer_lock);
  if (fused && (shape.epilogue.bias || shape.epilogue.has_aux())) {
    lock.lock();
    set_addresses(call.bias, call.aux);
  }
  require_lt(
      lt::functions().multiply(
          handle, descriptor.get(), alpha, swapped ? call.b : call.a, a.get(),
          swapped ? call.a : call.b, b.get(), shape.accumulate || residual ? alpha : zero,
          residual ? call.residual : call.c, residual ? residual.get() : c.get(), call.c, c.get(),
          &algorithm, call.workspace, workspace_bytes, static_cast<cudaStream_t>(call.stream)),
      "cublasLtMatmul");
}

struct Product::Part {
  GemmPart what;
  std::shared_ptr<const State> state;  // of a MultiplyPart
};

// Tries the library with a fused epilogue, then the library and a separate epilogue, then our own
// kernels.
std::shared_ptr<const Product::State> Product::State::make(const GemmShape& shape, int choice,
                                                           std::size_t most_workspace) {
  auto state = std::make_shared<State>();
  state->shape = shape;
  state->choice = choice;
  state->most_workspace = most_workspace;
  if (shape.m > 0 && shape.n > 0 && shape.batch > 0 && suits_lt(shape)) {
    const bool epilogue = shape.epilogue.any();
    if (!epilogue || suits_lt_epilogue(shape)) state->describe(epilogue);
    if (!state->descriptor || !state->choose()) {
      if (epilogue) state->describe(false);
      if (!epilogue || !state->choose()) state->descriptor.reset();
    }
  }
  return state;
}

Product::Product(const GemmShape& shape, int choice) : shape_(shape) {
  const std::size_t most_workspace = lt_bytes_of_parts(shape);
  std::vector<std::shared_ptr<const State>> states;  // blocks of equal sizes share one
  for (GemmPart& part : parts_of(shape)) {
    const auto* const multiply = std::get_if<MultiplyPart>(&part);
    std::shared_ptr<const State> state;
    if (multiply != nullptr) {
      const auto same = [&](const auto& made) { return made->shape == multiply->shape; };
      const auto found = std::find_if(states.begin(), states.end(), same);
      if (found != states.end()) {
        state = *found;
      } else {
        state = State::make(multiply->shape, states.empty() ? choice : kBest, most_workspace);
        states.push_back(state);
      }
    }
    parts_.push_back({std::move(part), std::move(state)});
  }
}
Product::~Product() = default;

const Product::State& Product::first() const {
  const auto multiplies = [](const Part& part) { return part.state != nullptr; };
  return *std::find_if(parts_.begin(), parts_.end(), multiplies)->state;
}
const char* Product::kernel() const { return first().descriptor ? "cublaslt" : "strided"; }
bool Product::fused() const { return first().descriptor && first().fused; }

std::string Product::algorithm() const {
  const State& of = first();
  if (!of.descriptor) return {};
  constexpr std::pair<const char*, int> kAttributes[] = {{"id", lt::kAlgorithmId},
                                                         {"tile", lt::kAlgorithmTile},
                                                         {"stages", lt::kAlgorithmStages},
                                                         {"cluster", lt::kAlgorithmCluster},
                                                         {"parts", lt::kAlgorithmSplit}};
  std::string text;
  for (const auto& [name, attribute] : kAttributes)
    text += concat(text.empty() ? "" : " ", name, " ", lt::attribute_of(of.algorithm, attribute));
  return text;
}

namespace {

std::byte* at(const void* data, std::int64_t bytes) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) + bytes;
}

// Returns the call with the addresses of a part's matrices.
GemmCall call_of(const MultiplyPart& part, const GemmCall& call) {
  const auto address = [&](const PartPlace& place, const void* callers) {
    return at(place.in_workspace ? call.workspace : callers, place.bytes);
  };
  GemmCall own = call;
  own.a = address(part.a, call.a);
  own.b = address(part.b, call.b);
  own.c = address(part.c, call.c);
  return own;
}

void run(const CopyPart& part, const GemmCall& call) {
  CopyLines copy;
  copy.from = at(part.of_a ? call.a : call.b, part.from);
  copy.to = at(call.workspace, part.to);
  copy.lines = part.lines;
  copy.length = part.length;
  copy.from_stride = part.from_stride;
  copy.to_stride = part.to_stride;
  copy_lines(copy, call.stream);
}

void run(const FinishPart& part, const GemmShape& shape, const GemmCall& call) {
  GemmCall own = call;
  own.a = at(call.a, part.a);
  own.b = at(call.b, part.b);
  own.c = at(call.c, part.c);
  BlockSums block;
  block.sums = reinterpret_cast<const float*>(at(call.workspace, part.sums));
  block.stride = part.sums_stride;
  block.parts = part.parts;
  block.first_row = part.first_row;
  block.rows = part.rows;
  block.first_column = part.first_column;
  block.columns = part.columns;
  block.first_k = part.first_k;
  finish_block(shape, own, block);
}

}  // namespace

void Product::run(const GemmCall& call) const {
  for (const Part& part : parts_) {
    if (const auto* copy = std::get_if<CopyPart>(&part.what)) {
      cuda::run(*copy, call);
    } else if (const auto* finish = std::get_if<FinishPart>(&part.what)) {
      cuda::run(*finish, shape_, call);
    } else {
      const State& s = *part.state;
      if (s.shape.m == 0 || s.shape.n == 0 || s.shape.batch == 0) continue;
      const GemmCall own = call_of(std::get<MultiplyPart>(part.what), call);
      if (s.descriptor) {
        s.run(own);
      } else {
        multiply_strided(s.shape, own.a, own.b, own.c, call.stream);
      }
      if (s.shape.epilogue.any() && !(s.descriptor && s.fused)) apply_epilogue(s.shape, own);
    }
  }
}

}  // namespace logitless::cuda
