#include <map>
#include <set>

#include "compiler/ir/text.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

class Printer {
 public:
  std::string out;

  // Hints are made unique; values without a hint are numbered.
  void name_values(const Graph& graph) {
    names_.clear();
    std::set<std::string> taken;
    for (int id = 0; id < graph.size(); ++id) {
      const Node& n = graph.node(id);
      if (n.op == Op::parameter) taken.insert(n.attributes->name);
    }
    int statement = -1;  // parameters do not count: they are printed first
    for (int id = 0; id < graph.size(); ++id) {
      const Node& n = graph.node(id);
      if (n.op == Op::parameter) {
        names_[{id, 0}] = "%" + n.attributes->name;
        continue;
      }
      ++statement;
      const std::string hint = n.name.empty() ? std::to_string(statement) : n.name;
      const std::size_t results = n.results.size();
      const auto result = [&](const std::string& name, std::size_t i) {
        return results > 1 ? concat(name, "_", i) : name;
      };
      const auto free = [&](const std::string& name) {
        for (std::size_t i = 0; i < results; ++i) {
          if (taken.contains(result(name, i))) return false;
        }
        return true;
      };
      // Several results share one number, so that the first name determines the others.
      std::string name = hint;
      for (int k = 1; !free(name); ++k) name = concat(hint, "_", k);
      for (std::size_t i = 0; i < results; ++i) {
        taken.insert(result(name, i));
        names_[{id, static_cast<std::int32_t>(i)}] = "%" + result(name, i);
      }
    }
  }

  void statements(const Graph& graph, const std::string& indent) {
    for (int id = 0; id < graph.size(); ++id) {
      const Node& n = graph.node(id);
      if (n.op == Op::parameter) continue;
      out += indent;
      for (std::size_t i = 0; i < n.results.size(); ++i)
        out += (i > 0 ? ", " : "") + names_.at({id, static_cast<std::int32_t>(i)});
      out += " = ";
      if (n.op == Op::loop) {
        loop(n, indent);
      } else {
        operation(n);
      }
      if (!n.attributes->location.empty()) out += concat(" @ \"", n.attributes->location, "\"");
      out += "\n";
    }
  }

  void results(const Graph& graph, const std::string& indent) {
    if (graph.outputs().empty()) return;
    out += indent + "return ";
    for (std::size_t i = 0; i < graph.outputs().size(); ++i) {
      const Output& output = graph.outputs()[i];
      out += concat(i > 0 ? ", " : "", output.name, ": ", names_.at(output.value));
    }
    out += "\n";
  }

  std::string name(Value v) const { return names_.at(v); }

 private:
  std::map<Value, std::string> names_;

  void operation(const Node& n) {
    out += spelling_of(n.op, n.attributes);
    for (std::size_t i = 0; i < n.operands.size(); ++i)
      out += (i > 0 ? ", " : " ") + names_.at(n.operands[i]);
    for (const TextKey& key : row_of(n.op).keys) {
      const std::string held = key.write(n.attributes);
      if (key.required || !held.empty()) out += concat(" ", key.name, "(", held, ")");
    }
    if (n.results.size() == 1) out += " : " + text_of(n.results[0]);
  }

  void loop(const Node& n, const std::string& indent) {
    const Loop& l = *n.attributes->loop;
    const std::vector<int> parameters = l.body.parameters();
    Printer inner;
    inner.name_values(l.body);
    out += concat("loop ", l.symbol, " extent(", l.extent, ") chunk(", l.chunk, ") (",
                  inner.name({parameters[0], 0}));
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      out += concat(", ", inner.name({parameters[i + 1], 0}), " = ",
                    (l.inputs[i].kind == Loop::In::slice ? "slice" : "whole"), " ",
                    names_.at(n.operands[i]));
      if (l.inputs[i].kind == Loop::In::slice)
        out += concat(" axis(", l.inputs[i].axis, ") factor(", l.inputs[i].factor, ")");
    }
    out += ") {\n";
    inner.statements(l.body, indent + "  ");
    out += inner.out + indent + "  return ";
    constexpr const char* kKinds[] = {"stack", "sum", "max", "lse"};
    for (std::size_t i = 0; i < l.outputs.size(); ++i) {
      out += concat(i > 0 ? ", " : "", l.body.outputs()[i].name, ": ",
                    kKinds[static_cast<int>(l.outputs[i].kind)], " ",
                    inner.name(l.body.outputs()[i].value));
      if (l.outputs[i].kind == Loop::Out::stack)
        out += concat(" axis(", l.outputs[i].axis, ") factor(", l.outputs[i].factor, ")");
    }
    out += "\n" + indent + "}";
  }
};

}  // namespace

std::string print(const Graph& graph, const std::vector<GradientRequest>& gradients) {
  Printer printer;
  printer.name_values(graph);
  printer.out = "graph " + graph.name + "(";
  const std::vector<int> parameters = graph.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    printer.out += concat(i > 0 ? ", " : "", printer.name({parameters[i], 0}), ": ",
                          text_of(graph.node(parameters[i]).results[0]));
  }
  printer.out += ") {\n";
  printer.statements(graph, "  ");
  printer.results(graph, "  ");
  for (const GradientRequest& request : gradients) {
    for (std::size_t i = 0; i < request.terms.size(); ++i) {
      const GradientRequest::Term& term = request.terms[i];
      printer.out += (i > 0 ? ", " : "  differentiate ") + term.output;
      if (!term.cotangent.empty()) printer.out += " by %" + term.cotangent;
    }
    for (std::size_t i = 0; i < request.parameters.size(); ++i)
      printer.out += (i > 0 ? ", %" : " wrt %") + request.parameters[i];
    printer.out += "\n";
  }
  return printer.out + "}\n";
}

}  // namespace logitless::ir
