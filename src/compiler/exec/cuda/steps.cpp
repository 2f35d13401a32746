#include "compiler/exec/cuda/steps.h"

#include <array>

#include "compiler/exec/head.h"
#include "compiler/target/cuda.h"
#include "core/check.h"
#include "kernels/device/attention.h"
#include "kernels/device/index.h"
#include "kernels/device/sort.h"

namespace logitless::ir {

void KernelSet::add(const std::vector<GeneratedKernel>& kernels) {
  for (const GeneratedKernel& kernel : kernels) kernels_.emplace(kernel.entry, kernel);
}

void KernelSet::load(int compute_capability) {
  if (kernels_.empty()) return;
  std::vector<GeneratedKernel> kernels;
  for (const auto& [entry, kernel] : kernels_) kernels.push_back(kernel);
  module_ = cuda::Module(cuda::cached_cubin(module_source(kernels), compute_capability));
  for (const auto& [entry, kernel] : kernels_)
    loaded_[entry] = module_.kernel(entry, kernel.shape.shared_bytes);
}

void* KernelSet::find(const std::string& entry) const { return loaded_.at(entry); }

std::shared_ptr<const cuda::Product> KernelSet::product(const cuda::GemmShape& shape) {
  for (const auto& [made, product] : products_) {
    if (made == shape) return product;
  }
  products_.emplace_back(shape, std::make_shared<const cuda::Product>(shape));
  return products_.back().second;
}

Steps::Steps(const Program& program, const std::vector<std::int64_t>& alignments, KernelSet& set)
    : program_(program) {
  for (const Instruction& instruction : program.instructions) {
    Step step;
    const auto launch = [&](std::vector<GeneratedKernel> kernels) {
      set.add(kernels);
      step = Launches{std::move(kernels), {}};
    };
    if (const auto* loop = std::get_if<Pointwise>(&instruction.what)) {
      launch(generate(*loop, alignments));
    } else if (const auto* group = std::get_if<RowGroup>(&instruction.what)) {
      launch(generate(*group, alignments));
    } else if (const auto* gemm = std::get_if<Gemm>(&instruction.what)) {
      GemmStep product{gemm_shape(*gemm, alignments), nullptr};
      // Addresses may be less aligned than the plan took them to be: the scratch is what it was.
      product.shape.workspace =
          gemm->scratch < 0 ? 0 : program.buffers[static_cast<std::size_t>(gemm->scratch)].bytes;
      step = std::move(product);
    } else if (const auto* rounds = std::get_if<LoopRun>(&instruction.what)) {
      const auto steps_of = [&](const Program& inner) {
        return std::make_unique<Steps>(inner, buffer_alignments(*rounds, inner, alignments), set);
      };
      LoopStep both;
      both.body = steps_of(*rounds->body);
      if (rounds->tail) both.tail = steps_of(*rounds->tail);
      step = std::move(both);
    }
    steps_.push_back(std::move(step));
  }
}

void Steps::bind(KernelSet& set) {
  for (Step& step : steps_) {
    if (auto* launches = std::get_if<Launches>(&step)) {
      for (const GeneratedKernel& kernel : launches->kernels)
        launches->loaded.push_back(set.find(kernel.entry));
    } else if (auto* product = std::get_if<GemmStep>(&step)) {
      product->product = set.product(product->shape);
    } else if (auto* loop = std::get_if<LoopStep>(&step)) {
      loop->body->bind(set);
      if (loop->tail) loop->tail->bind(set);
    }
  }
}

// Enqueues one instruction.
struct Steps::Enqueue {
  const Frame& frame;
  const Step& step;
  const Context& context;
  Observer* observer;
  const HeadUnder& under;
  void* const stream = context.stream();

  void* scratch(int buffer) const { return buffer >= 0 ? frame.address(buffer) : nullptr; }

  void operator()(const Pointwise& loop) const { launch_all(loop.scratch); }
  void operator()(const RowGroup& group) const { launch_all(group.scratch); }

  void launch_all(int scratch_buffer) const {
    const auto& launches = std::get<Launches>(step);
    std::int64_t first = frame.first;
    for (std::size_t k = 0; k < launches.kernels.size(); ++k) {
      const GeneratedKernel& kernel = launches.kernels[k];
      std::array<void*, kMaxRegisters + 2> addresses{};
      std::array<void*, kMaxRegisters + 2> arguments{};
      std::array<cuda::MatrixMap, kMostMatrices> maps;
      check(kernel.arguments.size() <= arguments.size(), "a kernel of many arguments");
      for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
        const KernelArgument& a = kernel.arguments[i];
        arguments[i] = &addresses[i];
        if (a.kind == KernelArgument::Kind::matrix) {
          const auto m = static_cast<std::size_t>(a.matrix);
          maps[m] = cuda::map_of(frame.address(a.buffer) + a.offset, kernel.matrices[m]);
          arguments[i] = &maps[m];
        } else if (a.kind == KernelArgument::Kind::first) {
          arguments[i] = &first;
        } else if (a.kind == KernelArgument::Kind::scratch) {
          addresses[i] = frame.address(scratch_buffer) + a.offset;
        } else {
          addresses[i] = frame.address(a.buffer) + a.offset;
        }
      }
      cuda::launch(launches.loaded[k], kernel.shape,
                   std::span(arguments).first(kernel.arguments.size()), stream);
    }
  }

  void operator()(const Gemm& g) const {
    const cuda::Product& product = *std::get<GemmStep>(step).product;
    cuda::GemmCall call;
    if (g.epilogue.bias) call.bias = frame.address(g.bias);
    if (g.epilogue.residual) call.residual = frame.address(g.residual);
    if (g.aux.buffer >= 0) call.aux = frame.address(g.aux);
    call.workspace = scratch(g.scratch);
    call.stream = stream;
    for_each_batch(g, frame, [&](const std::byte* a, const std::byte* b, std::byte* c) {
      call.a = a;
      call.b = b;
      call.c = c;
      product.run(call);
    });
  }

  void operator()(const Take& t) const {
    cuda::TakeCall call;
    call.table = frame.address(t.table);
    call.index = frame.address(t.index);
    call.out = frame.address(t.out);
    call.index_dtype = t.index.dtype;
    call.rows = t.table.shape[0];
    call.count = elements_of(t.index);
    call.row_bytes = call.count > 0 ? elements_of(t.out) / call.count *
                                          static_cast<std::int64_t>(size_of(t.out.dtype))
                                    : 0;
    call.stream = stream;
    cuda::take_rows(call);
  }

  void operator()(const ScatterAdd& s) const {
    cuda::ScatterCall call = scatter_call(s);
    call.index = frame.address(s.index);
    call.updates = frame.address(s.updates);
    call.out = frame.address(s.out);
    call.workspace = scratch(s.scratch);
    call.stream = stream;
    cuda::scatter_add_rows(call);
  }

  static cuda::StridedSpace space_of(const View& out) {
    cuda::StridedSpace space;
    space.rank = static_cast<int>(out.shape.size());
    for (std::size_t d = 0; d < out.shape.size(); ++d) space.sizes[d] = out.shape[d];
    return space;
  }
  // Returns the strides without dimension `axis`; -1: all.
  static cuda::Strides strides_of(const View& v, int axis = -1) {
    cuda::Strides strides;
    int to = 0;
    for (std::size_t d = 0; d < v.strides.size(); ++d) {
      if (static_cast<int>(d) != axis) strides.of[to++] = v.strides[d];
    }
    return strides;
  }

  void operator()(const Pick& p) const {
    const auto axis = static_cast<std::size_t>(p.axis);
    cuda::PickCall call;
    const bool several = p.out.shape.size() == p.x.shape.size();
    call.space = space_of(p.out);
    call.x = frame.address(p.x);
    call.index = frame.address(p.index);
    call.out = frame.address(p.out);
    call.x_strides = strides_of(p.x, several ? -1 : p.axis);
    if (several) call.x_strides.of[p.axis] = 0;
    call.index_strides = strides_of(p.index);
    call.out_strides = strides_of(p.out);
    call.size = p.x.shape[axis];
    call.step = p.x.strides[axis];
    call.index_dtype = p.index.dtype;
    call.element_bytes = static_cast<int>(size_of(p.x.dtype));
    call.stream = stream;
    cuda::pick_elements(call);
  }

  void operator()(const Put& p) const {
    const auto axis = static_cast<std::size_t>(p.axis);
    cuda::PutCall call;
    call.space = space_of(p.updates);
    call.space.sizes[axis] = 1;
    call.index = frame.address(p.index);
    call.updates = frame.address(p.updates);
    call.out = frame.address(p.out);
    call.index_strides = strides_of(p.index);
    call.update_strides = strides_of(p.updates);
    call.out_strides = strides_of(p.out);
    call.axis = p.axis;
    call.count = p.updates.shape[axis];
    call.size = p.out.shape[axis];
    call.index_dtype = p.index.dtype;
    call.dtype = p.updates.dtype;
    call.out_dtype = p.out.dtype;
    call.distinct = p.distinct;
    call.whole = p.whole;
    call.stream = stream;
    cuda::put_elements(call);
  }

  void operator()(const ArgMax& m) const {
    cuda::ArgMaxCall call;
    call.space = space_of(m.out);
    call.x = frame.address(m.x);
    call.out = reinterpret_cast<std::int64_t*>(frame.address(m.out));
    call.x_strides = strides_of(m.x, static_cast<int>(m.x.shape.size()) - 1);
    call.out_strides = strides_of(m.out);
    call.size = m.x.shape.back();
    call.step = m.x.strides.back();
    call.dtype = m.x.dtype;
    call.stream = stream;
    cuda::find_largest(call);
  }

  // Programs with externs are not run.
  void operator()(const ExternRun&) const { throw InternalError("an extern on a GPU"); }

  static cuda::StridedSpace rows_of(const View& x, int axis) {
    cuda::StridedSpace rows = space_of(x);
    rows.sizes[axis] = 1;
    return rows;
  }

  static cuda::ScanKind kind_of(const Scan& s) {
    if (s.factors.buffer >= 0) return cuda::ScanKind::recurrence;
    switch (s.kind) {
      case Reduce::max:
        return cuda::ScanKind::max;
      case Reduce::lse:
        return cuda::ScanKind::log_sum_exp;
      case Reduce::product:
        return cuda::ScanKind::product;
      default:
        return cuda::ScanKind::sum;
    }
  }

  void operator()(const Scan& s) const {
    cuda::ScanRowsCall call;
    call.rows = rows_of(s.x, s.axis);
    call.x = frame.address(s.x);
    call.out = frame.address(s.out);
    call.x_strides = strides_of(s.x);
    call.out_strides = strides_of(s.out);
    call.kind = kind_of(s);
    if (call.kind == cuda::ScanKind::recurrence) {
      call.factors = frame.address(s.factors);
      call.factor_strides = strides_of(s.factors);
    }
    call.axis = s.axis;
    call.size = s.x.shape[static_cast<std::size_t>(s.axis)];
    call.dtype = s.x.dtype;
    call.reverse = s.reverse;
    call.stream = stream;
    cuda::scan_rows(call);
  }

  void operator()(const Sort& s) const {
    cuda::SortRowsCall call;
    call.rows = rows_of(s.x, s.axis);
    call.x = frame.address(s.x);
    call.values = frame.address(s.values);
    call.index = reinterpret_cast<std::int64_t*>(frame.address(s.index));
    call.x_strides = strides_of(s.x);
    call.value_strides = strides_of(s.values);
    call.index_strides = strides_of(s.index);
    call.axis = s.axis;
    call.size = s.x.shape[static_cast<std::size_t>(s.axis)];
    call.kept = s.values.shape[static_cast<std::size_t>(s.axis)];
    call.dtype = s.x.dtype;
    call.descending = s.descending;
    call.stream = stream;
    cuda::sort_rows(call);
  }

  void operator()(const Fill& f) const {
    cuda::FillCall call;
    call.space = space_of(f.out);
    call.out = frame.address(f.out);
    call.out_strides = strides_of(f.out);
    call.dtype = f.out.dtype;
    call.number = f.number;
    call.stream = stream;
    cuda::fill_elements(call);
  }

  void operator()(const Attention& a) const {
    cuda::AttentionCall call = attention_call(a);
    const auto in = [&](const View& v) {
      return cuda::AttentionCall::Operand{frame.address(v), v.strides[0], v.strides[1],
                                          v.strides[2]};
    };
    const auto out = [&](const View& v) {
      return cuda::AttentionCall::Output{frame.address(v), v.strides[0], v.strides[1],
                                         v.strides[2]};
    };
    call.q = in(a.q);
    call.k = in(a.k);
    call.v = in(a.v);
    call.lse = reinterpret_cast<float*>(frame.address(a.lse));
    call.scratch = scratch(a.scratch);
    call.stream = stream;
    if (a.gradient) {
      call.out = in(a.out);
      call.d_out = in(a.d_out);
      call.d_q = out(a.d_q);
      call.d_k = out(a.d_k);
      call.d_v = out(a.d_v);
      cuda::attention_backward(call);
    } else {
      call.result = out(a.out);
      cuda::attention_forward(call);
    }
  }

  void operator()(const LoopRun& loop) const {
    const auto& both = std::get<LoopStep>(step);
    std::byte* const arena = loop.arena >= 0 ? frame.address(loop.arena) : nullptr;
    for (std::int64_t first = 0; first < loop.extent; first += loop.chunk) {
      const bool whole = first + loop.chunk <= loop.extent;
      (whole ? both.body : both.tail)
          ->enqueue({whole ? *loop.body : *loop.tail, arena, {}, {}, &loop, &frame, first}, context,
                    observer);
    }
  }

  void operator()(const HeadRun& h) const { run_head(h, frame, context, under); }
};

void Steps::enqueue(const Frame& frame, const Context& context, Observer* observer,
                    const HeadUnder& under) const {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Instruction& instruction = program_.instructions[i];
    std::visit(Enqueue{frame, steps_[i], context, observer, under}, instruction.what);
    if (observer == nullptr) continue;
    if (std::holds_alternative<LoopRun>(instruction.what)) {
      observer->after_loop(instruction);
    } else {
      observer->after(instruction);
    }
  }
}

}  // namespace logitless::ir
