#include "compiler/plan/lower.h"

#include <algorithm>
#include <array>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/plan/arena.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lowering.h"
#include "core/check.h"
#include "kernels/tensor_kernels.h"

namespace logitless::ir {
namespace {

bool rows_contiguous(const View& v) {
  View row = v;
  row.shape.erase(row.shape.begin());
  row.strides.erase(row.strides.begin());
  return is_contiguous(row) && is_contiguous(v);
}

}  // namespace

Lowering::Lowering(const Graph& graph, int threads)
    : g_(graph),
      threads_(threads),
      inlined_(inlined_nodes(graph)),
      absorbed_(static_cast<std::size_t>(graph.size()), false) {
  for (const Node& n : g_.nodes()) {
    for (const Value v : n.operands) ++uses_[v];
  }
  for (const Output& o : g_.outputs()) ++uses_[o.value];
}

int Lowering::add_buffer(Place place, std::int64_t bytes, const std::string& name,
                         std::int64_t value_bytes) {
  Buffer buffer;
  buffer.place = place;
  buffer.bytes = bytes;
  buffer.value_bytes = value_bytes < 0 ? bytes : value_bytes;
  buffer.name = name;
  p_.buffers.push_back(std::move(buffer));
  return static_cast<int>(p_.buffers.size()) - 1;
}

std::string Lowering::name_of_node(int id) const {
  const Node& n = g_.node(id);
  if (!n.name.empty()) return n.name;
  if (n.op == Op::parameter) return n.attributes.name;
  return std::string(n.op == Op::map ? info_of(n.attributes.function).name : name_of(n.op)) + "." +
         std::to_string(id);
}

View Lowering::new_view(const Type& type, const std::string& name, int node) {
  View view;
  view.dtype = type.dtype;
  view.shape = sizes_of(type);
  view.strides = contiguous_strides(view.shape);
  view.buffer = add_buffer(Place::arena, std::max<std::int64_t>(bytes_of(type), 1), name);
  p_.buffers.back().node = node;
  return view;
}

void Lowering::set_parameter(int id, View view) { memory_[{id, 0}] = std::move(view); }
void Lowering::set_target(std::size_t output, Target target) {
  if (!place_result(g_.outputs()[output].value, target)) copies_.emplace_back(output, target);
}

// Whether the instruction that makes the value can write the result itself.
bool Lowering::place_result(Value v, const Target& target) {
  const Node& n = g_.node(v);
  if (targets_.contains(v)) return false;
  if (target.kind != Target::Kind::write && uses_[v] > 1) return false;
  switch (n.op) {
    case Op::reshape:
    case Op::stop_gradient: {
      const Value from = n.operands[0];
      std::optional<View> view = reshaped(target.view, sizes_of(g_.type(from)));
      return view && place_result(from, {*view, target.kind});
    }
    case Op::transpose: {
      std::vector<int> back(n.attributes.dims.size());
      for (std::size_t i = 0; i < back.size(); ++i)
        back[static_cast<std::size_t>(n.attributes.dims[i])] = static_cast<int>(i);
      return place_result(n.operands[0], {transposed(target.view, back), target.kind});
    }
    case Op::map:
      if (place_sum(v, target)) return true;
      break;
    case Op::cast:
      break;
    case Op::dot:
    case Op::reduce:
      if (n.op == Op::reduce && n.attributes.reduce != Reduce::sum &&
          target.kind != Target::Kind::write)
        return false;
      if (target.kind != Target::Kind::write && target.kind != Target::Kind::sum) return false;
      break;
    case Op::scatter_add:
      if (!is_contiguous(target.view) || size_of(target.view.dtype) < 4) return false;
      if (target.kind != Target::Kind::write && target.kind != Target::Kind::sum) return false;
      break;
    case Op::take:
    case Op::attention:
    case Op::attention_grad:
      if (target.kind != Target::Kind::write || !is_contiguous(target.view)) return false;
      break;
    case Op::head:
      if (v.index < 3 && !is_contiguous(target.view)) return false;
      if (target.kind != Target::Kind::write) return false;
      break;
    case Op::pick:
    case Op::concat:
    case Op::pad:
    case Op::loop:
      if (target.kind != Target::Kind::write) return false;
      break;
    default:
      return false;
  }
  targets_[v] = target;
  return true;
}

// a + b, where b is a sum that can be added to what is there: a is written in place, then b added.
bool Lowering::place_sum(Value v, const Target& target) {
  const Node& n = g_.node(v);
  if (n.attributes.function != Function::add || target.kind != Target::Kind::write) return false;
  if (target.view.dtype != DType::f32 && target.view.dtype != DType::f64) return false;
  const Value first = std::min(n.operands[0], n.operands[1]),
              second = std::max(n.operands[0], n.operands[1]);
  const Op op = g_.node(second).op;
  const bool sums = op == Op::dot || op == Op::scatter_add || op == Op::reduce;
  if (!sums || first.node == second.node || uses_[first] > 1) return false;
  if (!place_result(second, {target.view, Target::Kind::sum})) return false;
  if (!place_result(first, target)) {
    targets_.erase(second);
    return false;
  }
  inlined_[static_cast<std::size_t>(first.node)] = false;
  absorbed_[static_cast<std::size_t>(v.node)] = true;
  memory_[v] = target.view;
  return true;
}

View Lowering::result_of(Value v) {
  const auto found = targets_.find(v);
  View view = found != targets_.end() ? found->second.view
                                      : new_view(g_.type(v), name_of_node(v.node), v.node);
  memory_[v] = view;
  return view;
}

bool Lowering::accumulates(Value v) const {
  const auto found = targets_.find(v);
  return found != targets_.end() && found->second.kind == Target::Kind::sum;
}

View Lowering::copied(const View& view, const std::string& name) {
  View to = view;
  to.offset = 0;
  to.strides = contiguous_strides(view.shape);
  to.buffer = add_buffer(
      Place::arena,
      std::max<std::int64_t>(elements_of(view), 1) * static_cast<std::int64_t>(size_of(view.dtype)),
      name);
  p_.instructions.push_back({name, copy_loop(view, to, false)});
  return to;
}

View Lowering::contiguous(Value v) {
  const View view = memory_of(v);
  return is_contiguous(view) ? view : copied(view, name_of_node(v.node) + " copy");
}

View Lowering::memory_of(Value v) {
  const auto found = memory_.find(v);
  if (found != memory_.end()) return found->second;
  const Node& n = g_.node(v);
  const Attributes& a = n.attributes;
  View view;
  switch (n.op) {
    case Op::stop_gradient:
      view = memory_of(n.operands[0]);
      break;
    case Op::broadcast:
      view = broadcasted(memory_of(n.operands[0]), sizes_of(n.results[0]), a.dims);
      break;
    case Op::transpose:
      view = transposed(memory_of(n.operands[0]), a.dims);
      break;
    case Op::slice: {
      std::vector<std::int64_t> begin;
      for (const Dim& d : a.begin) begin.push_back(d.value());
      view = sliced(memory_of(n.operands[0]), begin, sizes_of(n.results[0]));
      break;
    }
    case Op::reshape: {
      const View from = memory_of(n.operands[0]);
      const std::vector<std::int64_t> shape = sizes_of(n.results[0]);
      std::optional<View> to = reshaped(from, shape);
      view = to ? *to : *reshaped(copied(from, name_of_node(v.node)), shape);
      break;
    }
    case Op::constant:
    case Op::iota:
    case Op::map:
    case Op::cast: {
      view = new_view(n.results[0], name_of_node(v.node), v.node);
      emit_pointwise(v, {view, Target::Kind::write});
      break;
    }
    default:
      throw InternalError(concat("lower: ", name_of(n.op), " is read before it is made"));
  }
  return memory_[v] = view;
}

void Lowering::copy_to(Value v, const Target& target) {
  const View from = memory_of(v);
  if (target.kind == Target::Kind::write || target.kind == Target::Kind::sum) {
    p_.instructions.push_back({name_of_node(v.node) + " copy",
                               copy_loop(from, target.view, target.kind == Target::Kind::sum)});
  } else {
    emit_pointwise(v, target);
  }
}

Program Lowering::run() {
  p_.instructions.reserve(static_cast<std::size_t>(g_.size()));
  for (int id = 0; id < g_.size(); ++id) emit(id);
  for (const auto& [output, target] : copies_) copy_to(g_.outputs()[output].value, target);
  plan_memory(p_);
  return std::move(p_);
}

void Lowering::emit(int id) {
  const Node& n = g_.node(id);
  const Value v{id, 0};
  switch (n.op) {
    case Op::parameter:
    case Op::constant:
    case Op::iota:
    case Op::broadcast:
    case Op::reshape:
    case Op::transpose:
    case Op::slice:
    case Op::stop_gradient:
      return;  // made where they are read
    case Op::map:
    case Op::cast: {
      if (inlined_[static_cast<std::size_t>(id)] || absorbed_[static_cast<std::size_t>(id)]) return;
      const auto found = targets_.find(v);
      const Target target =
          found != targets_.end()
              ? found->second
              : Target{new_view(n.results[0], name_of_node(id), id), Target::Kind::write};
      emit_pointwise(v, target);
      memory_[v] = target.view;
      return;
    }
    case Op::reduce:
      return emit_reduce(id);
    case Op::dot:
      return emit_dot(id);
    case Op::take: {
      const View table = memory_of(n.operands[0]);
      Take take;
      take.table = rows_contiguous(table) ? table : copied(table, name_of_node(id) + " table");
      take.index = contiguous(n.operands[1]);
      take.out = result_of(v);
      push(id, std::move(take));
      return;
    }
    case Op::scatter_add:
      return emit_scatter(id);
    case Op::pick:
      return emit_pick(id);
    case Op::attention:
    case Op::attention_grad:
      return emit_attention(id);
    case Op::concat:
    case Op::pad:
      return emit_parts(id);
    case Op::loop:
      return emit_loop(id);
    case Op::head:
      return emit_head(id);
  }
}

void Lowering::emit_pick(int id) {
  const Node& n = g_.node(id);
  Pick pick;
  pick.x = memory_of(n.operands[0]);
  pick.index = memory_of(n.operands[1]);
  pick.axis = n.attributes.axis;
  pick.out = result_of({id, 0});
  push(id, std::move(pick));
}

void Lowering::emit_scatter(int id) {
  const Node& n = g_.node(id);
  const Value v{id, 0};
  ScatterAdd scatter;
  scatter.index = contiguous(n.operands[0]);
  scatter.updates = contiguous(n.operands[1]);
  const Type type = n.results[0];
  const bool narrow = size_of(type.dtype) == 2;
  // Sums are fp32, whatever the result is.
  scatter.out =
      narrow ? new_view({DType::f32, type.shape}, name_of_node(id) + " sums") : result_of(v);
  if (!accumulates(v) || narrow) emit_fill(scatter.out, 0.0);
  push(id, scatter);
  if (narrow) {
    const View out = result_of(v);
    push(id, copy_loop(scatter.out, out, accumulates(v)));
  }
}

void Lowering::emit_parts(int id) {
  const Node& n = g_.node(id);
  const View out = result_of({id, 0});
  const auto rank = out.shape.size();
  std::vector<std::int64_t> begin(rank, 0);
  if (n.op == Op::pad) {
    emit_fill(out, 0.0);
    for (std::size_t d = 0; d < rank; ++d) begin[d] = n.attributes.begin[d].value();
    const View from = memory_of(n.operands[0]);
    push(id, copy_loop(from, sliced(out, begin, from.shape), false));
    return;
  }
  for (const Value v : n.operands) {
    const View from = memory_of(v);
    push(id, copy_loop(from, sliced(out, begin, from.shape), false));
    begin[static_cast<std::size_t>(n.attributes.axis)] +=
        from.shape[static_cast<std::size_t>(n.attributes.axis)];
  }
}

void Lowering::emit_attention(int id) {
  const Node& n = g_.node(id);
  const Attributes& at = n.attributes;
  if (g_.type(n.operands[0]).dtype == DType::f64)
    throw Unsupported("attention: no kernel takes f64; expected f32, bf16 or f16");
  const auto rows = [&](std::size_t i) {
    const View view = memory_of(n.operands[i]);
    return view.strides[3] == 1 || view.shape[3] == 1 ? view
                                                      : copied(view, name_of_node(id) + " operand");
  };
  Attention a;
  a.gradient = n.op == Op::attention_grad;
  a.causal = at.causal;
  a.scale = at.number;
  a.q = rows(0);
  a.k = rows(1);
  a.v = rows(2);
  if (a.gradient) {
    a.out = rows(3);
    a.lse = contiguous(n.operands[4]);
    a.d_out = rows(5);
    a.d_q = result_of({id, 0});
    a.d_k = result_of({id, 1});
    a.d_v = result_of({id, 2});
  } else {
    a.out = result_of({id, 0});
    a.lse = result_of({id, 1});
  }
  const AttentionShape shape = attention_shape(a, threads_);
  const auto bytes = static_cast<std::int64_t>(attention_scratch_bytes(shape, a.gradient));
  if (bytes > 0) a.scratch = add_buffer(Place::arena, bytes, name_of_node(id) + " scratch", 0);
  p_.multiply_adds += static_cast<double>(shape.batch * shape.heads * shape.queries) *
                      static_cast<double>(shape.keys * shape.dim) * (a.gradient ? 5.0 : 2.0);
  push(id, std::move(a));
}

namespace {

struct Axes {
  std::vector<std::int64_t> size, first, second;  // strides in two of the three tensors
  void add(std::int64_t n, std::int64_t s, std::int64_t t) {
    size.push_back(n);
    first.push_back(s);
    second.push_back(t);
  }
  void merge() { merge_dims(size, {&first, &second}, std::vector<bool>(size.size(), false)); }
  // The longest stays, the others go; 1 and 0 where there is none.
  std::array<std::int64_t, 3> longest() {
    if (size.empty()) return {1, 0, 0};
    const auto at =
        static_cast<std::size_t>(std::max_element(size.begin(), size.end()) - size.begin());
    const std::array<std::int64_t, 3> one = {size[at], first[at], second[at]};
    size.erase(size.begin() + static_cast<std::ptrdiff_t>(at));
    first.erase(first.begin() + static_cast<std::ptrdiff_t>(at));
    second.erase(second.begin() + static_cast<std::ptrdiff_t>(at));
    return one;
  }
};

}  // namespace

void Lowering::emit_dot(int id) {
  const Node& n = g_.node(id);
  const Attributes& at = n.attributes;
  View a = memory_of(n.operands[0]), b = memory_of(n.operands[1]);
  std::vector<int> used_a = at.batch_a, used_b = at.batch_b;
  used_a.insert(used_a.end(), at.contract_a.begin(), at.contract_a.end());
  used_b.insert(used_b.end(), at.contract_b.begin(), at.contract_b.end());
  const std::vector<int> free_a = other_dims(static_cast<int>(a.shape.size()), used_a);
  const std::vector<int> free_b = other_dims(static_cast<int>(b.shape.size()), used_b);
  const auto contracted = [&](const View& x, const View& y) {
    Axes k;
    for (std::size_t i = 0; i < at.contract_a.size(); ++i)
      k.add(x.shape[static_cast<std::size_t>(at.contract_a[i])],
            x.strides[static_cast<std::size_t>(at.contract_a[i])],
            y.strides[static_cast<std::size_t>(at.contract_b[i])]);
    k.merge();
    return k;
  };
  Axes k = contracted(a, b);
  if (k.size.size() > 1) {
    // Contracted dimensions that are not one in memory: brought together at the end of a copy.
    const auto together = [&](const View& x, const std::vector<int>& contract) {
      std::vector<int> order = other_dims(static_cast<int>(x.shape.size()), contract);
      order.insert(order.end(), contract.begin(), contract.end());
      std::vector<int> back(order.size());
      for (std::size_t i = 0; i < order.size(); ++i)
        back[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
      return transposed(copied(transposed(x, order), name_of_node(id) + " operand"), back);
    };
    a = together(a, at.contract_a);
    b = together(b, at.contract_b);
    k = contracted(a, b);
  }
  const View c = result_of({id, 0});
  struct Outer {
    std::int64_t size, a, b, c;
  };
  std::vector<Outer> outer;
  std::size_t r = 0;
  for (std::size_t i = 0; i < at.batch_a.size(); ++i, ++r)
    outer.push_back({c.shape[r], a.strides[static_cast<std::size_t>(at.batch_a[i])],
                     b.strides[static_cast<std::size_t>(at.batch_b[i])], c.strides[r]});
  Axes m, nn;
  for (const int d : free_a) {
    m.add(c.shape[r], a.strides[static_cast<std::size_t>(d)], c.strides[r]);
    ++r;
  }
  for (const int d : free_b) {
    nn.add(c.shape[r], b.strides[static_cast<std::size_t>(d)], c.strides[r]);
    ++r;
  }
  m.merge();
  nn.merge();
  const auto [m_size, m_a, m_c] = m.longest();
  const auto [n_size, n_b, n_c] = nn.longest();
  const auto [k_size, k_a, k_b] = k.longest();
  for (std::size_t i = 0; i < m.size.size(); ++i)
    outer.push_back({m.size[i], m.first[i], 0, m.second[i]});
  for (std::size_t i = 0; i < nn.size.size(); ++i)
    outer.push_back({nn.size[i], 0, nn.first[i], nn.second[i]});
  // Batch dimensions that are one in memory run as one.
  Gemm gemm;
  gemm.m = m_size;
  gemm.n = n_size;
  gemm.k = k_size;
  gemm.a = a;
  gemm.b = b;
  gemm.c = c;
  std::vector<std::int64_t> sizes, sa, sb, sc;
  for (const Outer& o : outer) {
    sizes.push_back(o.size);
    sa.push_back(o.a);
    sb.push_back(o.b);
    sc.push_back(o.c);
  }
  merge_dims(sizes, {&sa, &sb, &sc}, std::vector<bool>(sizes.size(), false));
  gemm.outer = sizes;
  gemm.a.shape = gemm.b.shape = gemm.c.shape = {};
  gemm.a.strides = sa;
  gemm.b.strides = sb;
  gemm.c.strides = sc;
  for (const std::int64_t s : {m_a, k_a}) gemm.a.strides.push_back(s);
  for (const std::int64_t s : {k_b, n_b}) gemm.b.strides.push_back(s);
  for (const std::int64_t s : {m_c, n_c}) gemm.c.strides.push_back(s);
  gemm.accumulate = accumulates({id, 0});
  const auto bytes = static_cast<std::int64_t>(gemm_scratch_bytes(gemm_problem(gemm, threads_)));
  if (bytes > 0) gemm.scratch = add_buffer(Place::arena, bytes, name_of_node(id) + " scratch", 0);
  double work =
      static_cast<double>(m_size) * static_cast<double>(n_size) * static_cast<double>(k_size);
  for (const std::int64_t s : sizes) work *= static_cast<double>(s);
  p_.multiply_adds += work;
  push(id, std::move(gemm));
}

Program lower(const Graph& graph, int threads) {
  Lowering lowering(graph, threads);
  std::vector<int> parameters, results;
  const auto external = [&](const Type& type, const std::string& name) {
    View view;
    view.dtype = type.dtype;
    view.shape = sizes_of(type);
    view.strides = contiguous_strides(view.shape);
    view.buffer = lowering.add_buffer(Place::external, bytes_of(type), name);
    return view;
  };
  for (const int id : graph.parameters()) {
    const View view = external(graph.node(id).results[0], graph.node(id).attributes.name);
    parameters.push_back(view.buffer);
    lowering.set_parameter(id, view);
  }
  for (std::size_t i = 0; i < graph.outputs().size(); ++i) {
    const Output& output = graph.outputs()[i];
    const View view = external(graph.type(output.value), output.name);
    results.push_back(view.buffer);
    lowering.set_target(i, {view, Target::Kind::write});
  }
  Program program = lowering.run();
  program.parameters = std::move(parameters);
  program.results = std::move(results);
  return program;
}

}  // namespace logitless::ir
