// The text form of graphs (docs/reference/ir.md). parse(print(g)) is g, and print(parse(t)) is t
// for printed t.
#pragma once

#include <string>
#include <string_view>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Gradients that the text itself requests: of the sum of outputs times cotangents.
//    differentiate loss wrt %h, %w          differentiate loss, aux by %g wrt %h
struct GradientRequest {
  struct Term {
    std::string output;
    std::string cotangent;  // a parameter of the output's shape; empty: ones
    bool operator==(const Term&) const = default;
  };
  std::vector<Term> terms;
  std::vector<std::string> parameters;
  bool operator==(const GradientRequest&) const = default;
};

struct ParsedGraph {
  Graph graph;
  std::vector<GradientRequest> gradients;
};

// Parses a program. Throws InvalidArgument "FILE:LINE:COLUMN: message".
ParsedGraph parse(std::string_view text, std::string_view file = "program");

std::string print(const Graph& graph, const std::vector<GradientRequest>& gradients = {});

// Parses a type, "bf16[4, N]". Throws InvalidArgument.
Type parse_type(std::string_view text);

}  // namespace logitless::ir
