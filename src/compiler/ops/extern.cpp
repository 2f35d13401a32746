// extern: a call that the compiler's caller runs. The compiler knows its types, and the dimensions
// along which chunks of it are computed from chunks.
#include <algorithm>
#include <cmath>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

constexpr int kWhole = Extern::kWhole, kSum = Extern::kSum;

// --- types

std::vector<Type> extern_type(const Typing& r) {
  const Type& result = r.a.type;
  const std::size_t operands = r.operands.size();
  std::vector<std::vector<bool>> used(operands + 1);
  for (std::size_t i = 0; i < operands; ++i) used[i].resize(r.operands[i]->shape.size());
  used[operands].resize(result.shape.size());
  for (const std::vector<int>& row : r.a.call.along) {
    r.expect(row.size() == operands + 1, "along names ", row.size(), " dimensions, expected ",
             operands, " of operands and one of the result");
    const Dim* size = nullptr;
    for (std::size_t i = 0; i <= operands; ++i) {
      const Type& type = i < operands ? *r.operands[i] : result;
      if (row[i] == (i < operands ? kWhole : kSum)) continue;
      r.expect(row[i] >= 0 && row[i] < type.rank(), "along names dimension ", row[i], " of ", type);
      const auto d = static_cast<std::size_t>(row[i]);
      r.expect(!used[i][d], "along names dimension ", row[i], " of ", type, " twice");
      used[i][d] = true;
      r.expect(size == nullptr || *size == type.shape[d], "along meets dimension ", row[i], " of ",
               type, " with one of size ", size == nullptr ? "" : size->text());
      size = &type.shape[d];
    }
    r.expect(std::any_of(row.begin(), row.end() - 1, [](int d) { return d >= 0; }),
             "along cuts no operand");
  }
  return {result};
}

// --- text

void read_along(TextReader& in, Attributes& a) {
  do {
    std::vector<int>& row = a.call.along.emplace_back();
    do {
      row.push_back(in.accept("whole") ? kWhole : in.accept("sum") ? kSum : in.dimension());
    } while (in.accept(","));
  } while (in.accept(";"));
}
std::string written_along(const Attributes& a) {
  std::string text;
  for (const std::vector<int>& row : a.call.along) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      text += i > 0 ? ", " : text.empty() ? "" : "; ";
      text += row[i] == kWhole ? "whole" : row[i] == kSum ? "sum" : std::to_string(row[i]);
    }
  }
  return text;
}
constexpr TextKey kKeys[] = {
    {"call", [](TextReader& in, Attributes& a) { a.call.id = in.integer(); },
     [](const Attributes& a) { return written(a.call.id); }},
    {"result", [](TextReader& in, Attributes& a) { a.call.result = in.dimension(); },
     [](const Attributes& a) { return written(a.call.result); }},
    {"along", read_along, written_along, false},
};

// --- float64: the caller gives the value

std::vector<Tensor> extern_value(const Evaluation& e) {
  require(e.externs != nullptr, "interpret: extern: call ", e.node.attributes->call.id,
          " has no value here");
  return {e.externs(e.node, e.operands)};
}

// --- chunks

// Returns the part of each operand that a chunk reads if dimensions `row` are cut.
Needs needs_of(const std::vector<int>& row, const Split& s) {
  Needs needs;
  for (std::size_t i = 0; i + 1 < row.size(); ++i)
    needs.push_back(row[i] == kWhole ? Need{} : part({row[i], 1, s.factor}));
  return needs;
}
// Cuts single dimensions only, since the rank of a call's tensors is fixed.
std::optional<Chunked> extern_cut(const CutNode& c, const Split& s) {
  for (const std::vector<int>& row : c.a.call.along) {
    if (s.count == 1 && row.back() == s.dim) return cut(s, needs_of(row, s));
  }
  return std::nullopt;
}
Lead extern_lead(const CutNode& c, std::size_t i, const Split& s) {
  for (const std::vector<int>& row : c.a.call.along) {
    if (s.count != 1 || row[i] != s.dim) continue;
    if (row.back() == kSum) return {std::nullopt, partial(Chunked::Kind::sum, needs_of(row, s))};
    return {Split{row.back(), 1, s.factor}};
  }
  return {};
}
Value extern_clone(ChunkClone& c) {
  c.a.type.shape = c.result.shape(c.n.results[0].shape);
  return c.add();
}

// --- instructions

bool extern_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void extern_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  ExternRun run;
  run.id = n.attributes->call.id;
  for (const Value v : n.operands) run.operands.push_back(l.memory_of(v));
  run.out = l.result_of({id, 0});
  run.work = extern_work(l.graph(), n);
  l.count_work(run.work);
  l.push(id, std::move(run));
}

constexpr Operation kOperations[] = {{
    .op = Op::extern_call,
    .name = "extern",
    .infer = extern_type,
    .typed = true,
    .keys = kKeys,
    .evaluate = extern_value,
    .cut_by_result = extern_cut,
    .cut_by_operand = extern_lead,
    .clone = extern_clone,
    .place = extern_place,
    .emit = extern_emit,
}};

}  // namespace

double extern_work(const Graph& graph, const Node& node) {
  constexpr double kForEach = 8.0;
  const auto type = [&](std::size_t i) -> const Type& {
    return i < node.operands.size() ? graph.type(node.operands[i]) : node.results[0];
  };
  double rows = 1.0, rest = 0.0;
  std::vector<double> shares(node.operands.size() + 1, 1.0);  // fraction of each tensor's rows
  for (const std::vector<int>& row : node.attributes->call.along) {
    double size = 1.0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] < 0) continue;
      size = static_cast<double>(type(i).shape[static_cast<std::size_t>(row[i])].value());
      shares[i] *= size;
    }
    rows *= size;
  }
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const auto elements = static_cast<double>(elements_of(type(i)));
    rest = std::max(rest, elements > 0.0 ? elements / shares[i] : 0.0);
  }
  return kForEach * rows * rest;
}

std::span<const Operation> extern_operations() { return kOperations; }

}  // namespace logitless::ir
