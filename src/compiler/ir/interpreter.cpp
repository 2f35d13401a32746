#include "compiler/ir/interpreter.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "core/check.h"

namespace logitless::ir {
namespace {

using Index = std::vector<std::int64_t>;

Index sizes(const Type& type) {
  Index shape;
  for (const Dim& dim : type.shape) shape.push_back(dim.value());
  return shape;
}
std::int64_t count(const Index& shape) {
  std::int64_t n = 1;
  for (const std::int64_t s : shape) n *= s;
  return n;
}
Tensor tensor_of(const Type& type, double fill = 0.0) {
  Tensor t{sizes(type), {}};
  t.data.assign(static_cast<std::size_t>(count(t.shape)), fill);
  return t;
}
std::size_t offset(const Index& shape, const Index& at) {
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + at[d];
  return static_cast<std::size_t>(flat);
}
// Calls visit(index) for each index of the shape, in row-major order.
template <typename F>
void each(const Index& shape, F&& visit) {
  Index at(shape.size(), 0);
  for (std::int64_t n = count(shape), i = 0; i < n; ++i) {
    visit(at);
    for (std::size_t d = shape.size(); d-- > 0 && ++at[d] == shape[d];) at[d] = 0;
  }
}
Index permuted(const Index& at, const std::vector<int>& dims) {
  Index result;
  for (const int d : dims) result.push_back(at[static_cast<std::size_t>(d)]);
  return result;
}
double log_add(double a, double b) {
  const double top = std::max(a, b);
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}
double merged(Reduce kind, double a, double b) {
  switch (kind) {
    case Reduce::sum:
      return a + b;
    case Reduce::max:
      return evaluate(Function::max, a, b, 0.0);
    default:
      return log_add(a, b);
  }
}
double start(Reduce kind) {
  return kind == Reduce::sum ? 0.0 : -std::numeric_limits<double>::infinity();
}

bool is_integer(DType dtype) { return dtype == DType::i8 || is_index(dtype); }

class Interpreter {
 public:
  explicit Interpreter(const Graph& graph)
      : graph_(graph), values_(static_cast<std::size_t>(graph.size())) {}

  void run(const std::function<Tensor(const Node&)>& parameter) {
    for (int id = 0; id < graph_.size(); ++id) {
      const Node& n = graph_.node(id);
      values_[static_cast<std::size_t>(id)] =
          n.op == Op::parameter ? std::vector<Tensor>{parameter(n)} : evaluate_node(n);
    }
  }
  const Tensor& value(Value v) const {
    return values_[static_cast<std::size_t>(v.node)][static_cast<std::size_t>(v.index)];
  }

 private:
  const Graph& graph_;
  std::vector<std::vector<Tensor>> values_;

  std::vector<Tensor> evaluate_node(const Node& n) const {
    const Attributes& a = n.attributes;
    const auto in = [&](std::size_t i) -> const Tensor& { return value(n.operands[i]); };
    if (n.op == Op::loop) return loop(n);
    if (n.op == Op::head) return head(n);
    if (n.op == Op::attention) return attention(n);
    if (n.op == Op::attention_grad) return attention_grad(n);
    Tensor out = tensor_of(n.results[0]);
    const Index& shape = out.shape;
    const auto fill = [&](auto&& element) {
      std::size_t i = 0;
      each(shape, [&](const Index& at) { out.data[i++] = element(at); });
    };
    switch (n.op) {
      case Op::constant:
        std::fill(out.data.begin(), out.data.end(),
                  a.number * (a.begin.empty() ? 1.0 : static_cast<double>(a.begin[0].value())));
        break;
      case Op::iota:
        fill([&](const Index& at) {
          return static_cast<double>(at[static_cast<std::size_t>(a.axis)]);
        });
        break;
      case Op::map: {
        const std::size_t operands = n.operands.size();
        for (std::size_t i = 0; i < out.data.size(); ++i) {
          out.data[i] = evaluate(a.function, in(0).data[i], operands > 1 ? in(1).data[i] : 0.0,
                                 operands > 2 ? in(2).data[i] : 0.0);
        }
        break;
      }
      case Op::cast: {
        const bool whole =
            is_integer(a.type.dtype) && !is_integer(graph_.type(n.operands[0]).dtype);
        for (std::size_t i = 0; i < out.data.size(); ++i)
          out.data[i] = whole ? std::trunc(in(0).data[i]) : in(0).data[i];
        break;
      }
      case Op::reshape:
      case Op::stop_gradient:
        out.data = in(0).data;
        break;
      case Op::broadcast:
        fill(
            [&](const Index& at) { return in(0).data[offset(in(0).shape, permuted(at, a.dims))]; });
        break;
      case Op::transpose:
        each(in(0).shape, [&](const Index& at) {
          out.data[offset(shape, permuted(at, a.dims))] = in(0).data[offset(in(0).shape, at)];
        });
        break;
      case Op::slice:
        fill([&](Index at) {
          for (std::size_t d = 0; d < at.size(); ++d) at[d] += a.begin[d].value();
          return in(0).data[offset(in(0).shape, at)];
        });
        break;
      case Op::pad:
        each(in(0).shape, [&](Index at) {
          const double x = in(0).data[offset(in(0).shape, at)];
          for (std::size_t d = 0; d < at.size(); ++d) at[d] += a.begin[d].value();
          out.data[offset(shape, at)] = x;
        });
        break;
      case Op::concat: {
        std::int64_t begin = 0;
        const auto axis = static_cast<std::size_t>(a.axis);
        for (std::size_t i = 0; i < n.operands.size(); ++i) {
          each(in(i).shape, [&](Index at) {
            const double x = in(i).data[offset(in(i).shape, at)];
            at[axis] += begin;
            out.data[offset(shape, at)] = x;
          });
          begin += in(i).shape[axis];
        }
        break;
      }
      case Op::reduce:
        reduce(n, in(0), out);
        break;
      case Op::dot:
        dot(n, in(0), in(1), out);
        break;
      case Op::take: {
        const std::int64_t rows = in(0).shape[0];
        const std::size_t width =
            in(0).data.size() / static_cast<std::size_t>(std::max<std::int64_t>(rows, 1));
        for (std::size_t i = 0; i < in(1).data.size(); ++i) {
          const double row = in(1).data[i];
          if (row < 0 || row >= static_cast<double>(rows)) continue;
          std::copy_n(in(0).data.begin() +
                          static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * width),
                      width, out.data.begin() + static_cast<std::ptrdiff_t>(i * width));
        }
        break;
      }
      case Op::scatter_add: {
        const std::int64_t rows = shape[0];
        const std::size_t width =
            out.data.size() / static_cast<std::size_t>(std::max<std::int64_t>(rows, 1));
        for (std::size_t i = 0; i < in(0).data.size(); ++i) {
          const double row = in(0).data[i];
          if (row < 0 || row >= static_cast<double>(rows)) continue;
          for (std::size_t j = 0; j < width; ++j)
            out.data[static_cast<std::size_t>(row) * width + j] += in(1).data[i * width + j];
        }
        break;
      }
      case Op::pick:
        fill([&](Index at) {
          const double k = in(1).data[offset(shape, at)];
          const auto axis = static_cast<std::size_t>(a.axis);
          if (k < 0 || k >= static_cast<double>(in(0).shape[axis])) return 0.0;
          at.insert(at.begin() + a.axis, static_cast<std::int64_t>(k));
          return in(0).data[offset(in(0).shape, at)];
        });
        break;
      default:
        throw InternalError(concat("the interpreter has no ", name_of(n.op)));
    }
    return {std::move(out)};
  }

  static void reduce(const Node& n, const Tensor& x, Tensor& out) {
    const Attributes& a = n.attributes;
    std::vector<int> kept;
    for (int d = 0; d < static_cast<int>(x.shape.size()); ++d) {
      if (std::find(a.dims.begin(), a.dims.end(), d) == a.dims.end()) kept.push_back(d);
    }
    if (a.reduce == Reduce::argmax) {
      Tensor best = out;
      std::vector<bool> seen(out.data.size());
      each(x.shape, [&](const Index& at) {
        const std::size_t to = offset(out.shape, permuted(at, kept));
        const double v = x.data[offset(x.shape, at)];
        // The first of equals; a NaN is greater than all.
        if (!seen[to] || v > best.data[to] || (std::isnan(v) && !std::isnan(best.data[to]))) {
          best.data[to] = v;
          out.data[to] = static_cast<double>(at[static_cast<std::size_t>(a.dims[0])]);
          seen[to] = true;
        }
      });
      return;
    }
    std::fill(out.data.begin(), out.data.end(), start(a.reduce));
    Tensor top = out;  // lse: two passes, as sums of exponentials against the maximum
    if (a.reduce == Reduce::lse) {
      each(x.shape, [&](const Index& at) {
        double& to = top.data[offset(out.shape, permuted(at, kept))];
        to = merged(Reduce::max, to, x.data[offset(x.shape, at)]);
      });
      std::fill(out.data.begin(), out.data.end(), 0.0);
    }
    each(x.shape, [&](const Index& at) {
      const std::size_t to = offset(out.shape, permuted(at, kept));
      const double v = x.data[offset(x.shape, at)];
      if (a.reduce != Reduce::lse) {
        out.data[to] = merged(a.reduce, out.data[to], v);
      } else if (!std::isinf(top.data[to])) {
        out.data[to] += std::exp(v - top.data[to]);
      }
    });
    if (a.reduce != Reduce::lse) return;
    for (std::size_t i = 0; i < out.data.size(); ++i)
      out.data[i] = std::isinf(top.data[i]) ? top.data[i] : top.data[i] + std::log(out.data[i]);
  }

  static void dot(const Node& n, const Tensor& x, const Tensor& y, Tensor& out) {
    const Attributes& a = n.attributes;
    Index contracted;
    for (const int d : a.contract_a) contracted.push_back(x.shape[static_cast<std::size_t>(d)]);
    // Where dimension d of an operand is found: in the result's index, or -1 - i: contracted one i.
    const auto places = [](std::size_t rank, const std::vector<int>& batch,
                           const std::vector<int>& contract, int& next) {
      std::vector<int> place(rank, 0);
      std::vector<bool> used(rank);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        place[static_cast<std::size_t>(batch[i])] = static_cast<int>(i);
        used[static_cast<std::size_t>(batch[i])] = true;
      }
      for (std::size_t i = 0; i < contract.size(); ++i) {
        place[static_cast<std::size_t>(contract[i])] = -1 - static_cast<int>(i);
        used[static_cast<std::size_t>(contract[i])] = true;
      }
      for (std::size_t d = 0; d < rank; ++d) {
        if (!used[d]) place[d] = next++;
      }
      return place;
    };
    int next = static_cast<int>(a.batch_a.size());
    const std::vector<int> place_x = places(x.shape.size(), a.batch_a, a.contract_a, next);
    const std::vector<int> place_y = places(y.shape.size(), a.batch_b, a.contract_b, next);
    const auto find = [](const Tensor& t, const std::vector<int>& place, const Index& at,
                         const Index& k) {
      Index index(place.size());
      for (std::size_t d = 0; d < place.size(); ++d)
        index[d] = place[d] >= 0 ? at[static_cast<std::size_t>(place[d])]
                                 : k[static_cast<std::size_t>(-1 - place[d])];
      return t.data[offset(t.shape, index)];
    };
    std::size_t i = 0;
    each(out.shape, [&](const Index& at) {
      double sum = 0.0;
      each(contracted,
           [&](const Index& k) { sum += find(x, place_x, at, k) * find(y, place_y, at, k); });
      out.data[i++] = sum;
    });
  }

  // probabilities [B, H, T, S] of the scores; lse if wanted.
  static Tensor probabilities(const Attributes& a, const Tensor& q, const Tensor& k, Tensor* lse) {
    Tensor p{{q.shape[0], q.shape[1], q.shape[2], k.shape[2]}, {}};
    p.data.resize(static_cast<std::size_t>(count(p.shape)));
    const std::int64_t group = q.shape[1] / std::max<std::int64_t>(k.shape[1], 1);
    const std::int64_t keys = k.shape[2], shift = keys - q.shape[2];
    each({q.shape[0], q.shape[1], q.shape[2]}, [&](const Index& at) {
      std::vector<double> z(static_cast<std::size_t>(keys),
                            -std::numeric_limits<double>::infinity());
      double top = start(Reduce::max);
      for (std::int64_t s = 0; s < keys; ++s) {
        if (a.causal && s > at[2] + shift) break;
        double sum = 0.0;
        for (std::int64_t d = 0; d < q.shape[3]; ++d)
          sum += q.data[offset(q.shape, {at[0], at[1], at[2], d})] *
                 k.data[offset(k.shape, {at[0], at[1] / group, s, d})];
        z[static_cast<std::size_t>(s)] = a.number * sum;
        top = merged(Reduce::max, top, a.number * sum);
      }
      double total = 0.0;
      for (double& x : z) total += x = std::isinf(top) ? 0.0 : std::exp(x - top);
      for (std::int64_t s = 0; s < keys; ++s)
        p.data[offset(p.shape, {at[0], at[1], at[2], s})] =
            total > 0.0 || std::isnan(total) ? z[static_cast<std::size_t>(s)] / total : 0.0;
      if (lse != nullptr)
        lse->data[offset(lse->shape, at)] = std::isinf(top) ? top : top + std::log(total);
    });
    return p;
  }

  std::vector<Tensor> attention(const Node& n) const {
    const Tensor &q = value(n.operands[0]), &k = value(n.operands[1]), &v = value(n.operands[2]);
    Tensor out = tensor_of(n.results[0]), lse = tensor_of(n.results[1]);
    const Tensor p = probabilities(n.attributes, q, k, &lse);
    const std::int64_t group = q.shape[1] / std::max<std::int64_t>(k.shape[1], 1);
    each(p.shape, [&](const Index& at) {
      const double weight = p.data[offset(p.shape, at)];
      for (std::int64_t d = 0; d < q.shape[3]; ++d)
        out.data[offset(out.shape, {at[0], at[1], at[2], d})] +=
            weight * v.data[offset(v.shape, {at[0], at[1] / group, at[3], d})];
    });
    return {out, lse};
  }

  std::vector<Tensor> attention_grad(const Node& n) const {
    const Tensor &q = value(n.operands[0]), &k = value(n.operands[1]), &v = value(n.operands[2]);
    const Tensor &out = value(n.operands[3]), &d_out = value(n.operands[5]);
    Tensor dq = tensor_of(n.results[0]), dk = tensor_of(n.results[1]), dv = tensor_of(n.results[2]);
    const Tensor p = probabilities(n.attributes, q, k, nullptr);
    const std::int64_t group = q.shape[1] / std::max<std::int64_t>(k.shape[1], 1), dim = q.shape[3];
    each(p.shape, [&](const Index& at) {
      const double weight = p.data[offset(p.shape, at)];
      const Index query = {at[0], at[1], at[2], 0}, key = {at[0], at[1] / group, at[3], 0};
      const std::size_t iq = offset(q.shape, query), ik = offset(k.shape, key);
      double dp = 0.0, row = 0.0;
      for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
        dp += d_out.data[iq + d] * v.data[ik + d];
        row += d_out.data[iq + d] * out.data[iq + d];
        dv.data[ik + d] += weight * d_out.data[iq + d];
      }
      const double dz = weight * (dp - row) * n.attributes.number;
      for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
        dq.data[iq + d] += dz * k.data[ik + d];
        dk.data[ik + d] += dz * q.data[iq + d];
      }
    });
    return {dq, dk, dv};
  }

  std::vector<Tensor> head(const Node& n) const {
    const Head& h = n.attributes.head;
    const Tensor &x = value(n.operands[0]), &w = value(n.operands[1]),
                 &targets = value(n.operands[2]);
    std::vector<Tensor> results;
    for (const Type& type : n.results) results.push_back(tensor_of(type));
    std::size_t next = 2;
    Tensor* dx = h.d_x != DType::i8 ? &results[next++] : nullptr;
    Tensor* dw = h.d_w != DType::i8 ? &results[next++] : nullptr;
    Tensor* db = h.d_bias != DType::i8 ? &results[next++] : nullptr;
    const auto vocab = static_cast<std::size_t>(w.shape[0]);
    const auto dim = static_cast<std::size_t>(w.shape[1]);
    std::vector<double> z(vocab), slope(vocab, 1.0);
    for (std::size_t i = 0; i < targets.data.size(); ++i) {
      const double target = targets.data[i];
      if (h.ignored && target == static_cast<double>(*h.ignored)) continue;
      double top = start(Reduce::max), sum = 0.0;
      for (std::size_t j = 0; j < vocab; ++j) {
        double u = h.bias ? value(n.operands[3]).data[j] : 0.0;
        for (std::size_t d = 0; d < dim; ++d) u += x.data[i * dim + d] * w.data[j * dim + d];
        u *= h.scale;
        z[j] = h.softcap > 0.0 ? h.softcap * std::tanh(u / h.softcap) : u;
        if (h.softcap > 0.0) slope[j] = 1.0 - z[j] * z[j] / (h.softcap * h.softcap);
        top = merged(Reduce::max, top, z[j]);
      }
      for (const double v : z) sum += std::exp(v - top);
      const double lse = top + std::log(sum);
      const bool hit = target >= 0.0 && target < static_cast<double>(vocab);
      results[0].data[i] = lse;
      results[1].data[i] = hit ? z[static_cast<std::size_t>(target)] : 0.0;
      if (!h.gradients) continue;
      const double d_lse = value(n.operands[n.operands.size() - 2]).data[i];
      const double d_logit = value(n.operands.back()).data[i];
      for (std::size_t j = 0; j < vocab; ++j) {
        double dz = d_lse * std::exp(z[j] - lse);
        if (static_cast<double>(j) == target) dz += d_logit;
        dz *= slope[j] * h.scale;
        if (db != nullptr) db->data[j] += dz;
        for (std::size_t d = 0; d < dim; ++d) {
          if (dx != nullptr) dx->data[i * dim + d] += dz * w.data[j * dim + d];
          if (dw != nullptr) dw->data[j * dim + d] += dz * x.data[i * dim + d];
        }
      }
    }
    return results;
  }

  std::vector<Tensor> loop(const Node& n) const {
    const Loop& l = *n.attributes.loop;
    std::vector<Tensor> results;
    for (std::size_t i = 0; i < n.results.size(); ++i) {
      constexpr Reduce kKinds[] = {Reduce::sum, Reduce::sum, Reduce::max, Reduce::lse};
      results.push_back(
          tensor_of(n.results[i], start(kKinds[static_cast<int>(l.outputs[i].kind)])));
    }
    const std::vector<int> parameters = l.body.parameters();
    for (std::int64_t first = 0; first < l.extent; first += l.chunk) {
      const std::int64_t size = std::min(l.chunk, l.extent - first);
      const Graph body = bind(l.body, {{l.symbol, size}});
      Interpreter inner(body);
      std::size_t next = 0;
      inner.run([&](const Node& p) {
        if (next++ == 0) return Tensor{{}, {static_cast<double>(first)}};
        const std::size_t i = next - 2;
        const Tensor& whole = value(n.operands[i]);
        if (l.inputs[i].kind == Loop::In::whole) return whole;
        Tensor part = tensor_of(p.results[0]);
        std::size_t k = 0;
        each(part.shape, [&](Index at) {
          at[static_cast<std::size_t>(l.inputs[i].axis)] += first * l.inputs[i].factor;
          part.data[k++] = whole.data[offset(whole.shape, at)];
        });
        return part;
      });
      for (std::size_t i = 0; i < results.size(); ++i) {
        const Tensor& part = inner.value(body.outputs()[i].value);
        const Loop::Result& how = l.outputs[i];
        std::size_t k = 0;
        each(part.shape, [&](Index at) {
          const double x = part.data[k++];
          if (how.kind == Loop::Out::stack)
            at[static_cast<std::size_t>(how.axis)] += first * how.factor;
          double& to = results[i].data[offset(results[i].shape, at)];
          to = how.kind == Loop::Out::stack ? x
               : how.kind == Loop::Out::sum ? to + x
               : how.kind == Loop::Out::max ? merged(Reduce::max, to, x)
                                            : log_add(to, x);
        });
      }
    }
    return results;
  }
};

}  // namespace

Tensors interpret(const Graph& graph, const Tensors& parameters) {
  require(graph.symbols().empty(), "interpret: the size ",
          graph.symbols().empty() ? "" : graph.symbols()[0], " is not bound");
  Interpreter interpreter(graph);
  interpreter.run([&](const Node& n) {
    const auto found = parameters.find(n.attributes.name);
    require(found != parameters.end(), "interpret: parameter '", n.attributes.name, "' is missing");
    require(found->second.shape == sizes(n.results[0]) &&
                static_cast<std::int64_t>(found->second.data.size()) == count(found->second.shape),
            "interpret: parameter '", n.attributes.name, "' is not ", text_of(n.results[0]));
    return found->second;
  });
  Tensors results;
  for (const Output& output : graph.outputs())
    results[output.name] = interpreter.value(output.value);
  return results;
}

}  // namespace logitless::ir
