// A hand-written parser with one token of look-ahead. Every error has a source position; no other
// exception is thrown.
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "compiler/ir/text.h"
#include "compiler/ir/text_reader.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr int kMaxDepth = 16;  // of nested loops and of parentheses in sizes

enum class TokenKind : std::uint8_t { name, value, number, quoted, symbol, end };
struct Token {
  TokenKind kind = TokenKind::end;
  std::string_view text;
  int line = 1;
  int column = 1;
};

class Parser final : private TextReader {
 public:
  Parser(std::string_view text, std::string_view file) : text_(text), file_(file) { next(); }

  ParsedGraph program() {
    ParsedGraph parsed;
    keyword("graph");
    if (token_.kind == TokenKind::name) parsed.graph.name = std::string(take_token().text);
    Scope scope;
    symbol("(");
    if (!is(")")) {
      do {
        const Token at = token_;
        const std::string name = value_name();
        symbol(":");
        Attributes attributes;
        attributes.name = name;
        attributes.type = type();
        define(scope, name, append(parsed.graph, Op::parameter, {}, attributes, at), at);
      } while (accept(","));
    }
    symbol(")");
    symbol("{");
    statements(parsed.graph, scope, 0);
    if (accept("return")) {
      do {
        const Token at = token_;
        const std::string name = identifier("a name of a result");
        symbol(":");
        const Value v = operand(scope);
        guard(at, [&] { parsed.graph.add_output(name, v); });
      } while (accept(","));
    }
    while (accept("differentiate")) parsed.gradients.push_back(gradient(parsed.graph));
    symbol("}");
    if (token_.kind != TokenKind::end) fail(token_, concat("expected the end, got ", shown()));
    return parsed;
  }

  Type only_type() {
    const Type result = type();
    if (token_.kind != TokenKind::end) fail(token_, concat("expected the end, got ", shown()));
    return result;
  }

 private:
  using Scope = std::map<std::string, Value, std::less<>>;

  std::string_view text_;
  std::string_view file_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::size_t line_begin_ = 0;
  Token token_;

  [[noreturn]] void fail(const Token& at, const std::string& message) const {
    throw InvalidArgument(concat(file_, ":", at.line, ":", at.column, ": ", message));
  }
  // Adds the source position of `at` to errors of the graph.
  template <typename F>
  auto guard(const Token& at, F&& call) const -> decltype(call()) {
    try {
      return call();
    } catch (const Error& error) {
      fail(at, error.what());
    }
  }

  // --- tokens
  void next() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') {
        ++line_;
        line_begin_ = ++at_;
      } else if (c == ' ' || c == '\t' || c == '\r') {
        ++at_;
      } else if (c == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else {
        break;
      }
    }
    token_ = {TokenKind::end, {}, line_, static_cast<int>(at_ - line_begin_) + 1};
    if (at_ >= text_.size()) return;
    const std::size_t begin = at_;
    const auto letter = [&](std::size_t i) {
      return i < text_.size() &&
             (std::isalnum(static_cast<unsigned char>(text_[i])) || text_[i] == '_');
    };
    const auto digit = [&](std::size_t i) {
      return i < text_.size() && std::isdigit(static_cast<unsigned char>(text_[i]));
    };
    if (text_[at_] == '%') {
      ++at_;
      while (letter(at_) || (at_ < text_.size() && text_[at_] == '.')) ++at_;
      token_.kind = TokenKind::value;
    } else if (digit(at_)) {
      while (letter(at_) || (at_ < text_.size() && text_[at_] == '.') ||
             (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-') &&
              (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E')))
        ++at_;
      token_.kind = TokenKind::number;
    } else if (letter(at_)) {
      while (letter(at_) || (at_ < text_.size() && text_[at_] == '.')) ++at_;
      token_.kind = TokenKind::name;
    } else if (const std::size_t length = quoted(at_); length > 0) {
      at_ += length;
      token_.kind = TokenKind::quoted;
    } else {
      ++at_;
      token_.kind = TokenKind::symbol;
    }
    token_.text = text_.substr(begin, at_ - begin);
  }
  // Returns the length of the quoted text that begins at i, with its quotes; 0 if there is none or
  // it does not end in its line.
  std::size_t quoted(std::size_t i) const {
    if (text_[i] != '"') return 0;
    const std::size_t end = text_.find_first_of("\"\n", i + 1);
    return end == std::string_view::npos || text_[end] != '"' ? 0 : end + 1 - i;
  }
  Token take_token() {
    const Token token = token_;
    next();
    return token;
  }
  bool is(std::string_view wanted) const {
    return token_.kind != TokenKind::end && token_.text == wanted;
  }
  bool accept(std::string_view wanted) final {
    if (!is(wanted)) return false;
    next();
    return true;
  }
  std::string shown() const {
    if (token_.kind == TokenKind::end) return "the end";
    const auto first = static_cast<unsigned char>(token_.text[0]);
    if (first >= ' ' && first <= '~') return concat("'", token_.text, "'");
    return concat("the byte ", static_cast<int>(first));
  }
  void symbol(std::string_view wanted) final {
    if (!accept(wanted)) fail(token_, concat("expected '", wanted, "', got ", shown()));
  }
  void keyword(std::string_view wanted) { symbol(wanted); }
  std::string identifier(std::string_view what) {
    if (token_.kind != TokenKind::name) fail(token_, concat("expected ", what, ", got ", shown()));
    return std::string(take_token().text);
  }
  std::string value_name() {
    if (token_.kind != TokenKind::value || token_.text.size() < 2)
      fail(token_, concat("expected a value such as %x, got ", shown()));
    return std::string(take_token().text.substr(1));
  }
  std::int64_t integer() final {
    std::int64_t value = 0;
    const std::string_view text = token_.text;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (token_.kind != TokenKind::number || error != std::errc() ||
        end != text.data() + text.size())
      fail(token_, concat("expected a whole number of 64 bits, got ", shown()));
    next();
    return value;
  }
  double real() final {
    const bool negative = accept("-");
    double value = 0.0;
    if (token_.kind == TokenKind::name && (token_.text == "inf" || token_.text == "nan")) {
      value = token_.text == "inf" ? HUGE_VAL : std::nan("");
    } else {
      const std::string_view text = token_.text;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (token_.kind != TokenKind::number || error != std::errc() ||
          end != text.data() + text.size())
        fail(token_, concat("expected a number, got ", shown()));
    }
    next();
    return negative ? -value : value;
  }

  // --- sizes and types
  Dim factor(int depth) {
    if (depth > kMaxDepth) fail(token_, "a size nests too deep");
    if (accept("-")) return factor(depth + 1) * Dim(-1);
    if (accept("(")) {
      const Dim inner = size(depth + 1);
      symbol(")");
      return inner;
    }
    if (token_.kind == TokenKind::number) return Dim(integer());
    const Token at = token_;
    const std::string name = identifier("a size");
    return guard(at, [&] { return Dim::symbol(name); });
  }
  Dim term(int depth) {
    Dim result = factor(depth);
    while (is("*")) {
      const Token at = take_token();
      const Dim other = factor(depth);
      guard(at, [&] { result = result * other; });
    }
    return result;
  }
  Dim size(int depth = 0) {
    Dim result = term(depth);
    while (is("+") || is("-")) {
      const Token at = take_token();
      const Dim other = term(depth);
      guard(at, [&] { at.text == "+" ? result += other : result -= other; });
    }
    return result;
  }
  Shape sizes_until(std::string_view close) {
    Shape shape;
    if (!is(close)) {
      do {
        shape.push_back(size());
      } while (accept(","));
    }
    return shape;
  }
  Type type() {
    const Token at = token_;
    const std::string name = identifier("a type such as f32[4, N]");
    Type result;
    result.dtype = guard(at, [&] { return parse_dtype(name); });
    symbol("[");
    result.shape = sizes_until("]");
    symbol("]");
    return result;
  }

  // --- values
  Value operand(const Scope& scope) {
    const Token at = token_;
    const std::string name = value_name();
    const auto found = scope.find(name);
    if (found == scope.end()) fail(at, concat("%", name, " is not defined"));
    return found->second;
  }
  void define(Scope& scope, const std::string& name, Value value, const Token& at) const {
    if (!scope.emplace(name, value).second) fail(at, concat("%", name, " is defined twice"));
  }
  // Parses an optional location: @ "loss.py:12".
  std::string location() {
    if (!accept("@")) return {};
    if (token_.kind != TokenKind::quoted)
      fail(token_, concat("expected a location in quotes, got ", shown()));
    const std::string_view text = take_token().text;
    return std::string(text.substr(1, text.size() - 2));
  }
  Value append(Graph& graph, Op op, std::vector<Value> operands, Attributes attributes,
               const Token& at, std::string hint = {}) const {
    return guard(at, [&] {
      return graph.add(op, std::move(operands), std::move(attributes), std::move(hint));
    });
  }

  GradientRequest gradient(const Graph& graph) {
    GradientRequest request;
    const auto parameter = [&] {
      const Token at = token_;
      std::string name = value_name();
      if (graph.find_parameter(name) < 0) fail(at, concat("%", name, " is no parameter"));
      return name;
    };
    do {
      const Token at = token_;
      GradientRequest::Term term{identifier("a name of a result"), {}};
      bool known = false;
      for (const Output& output : graph.outputs()) known = known || output.name == term.output;
      if (!known) fail(at, concat("there is no result '", term.output, "'"));
      if (accept("by")) term.cotangent = parameter();
      request.terms.push_back(std::move(term));
    } while (accept(","));
    keyword("wrt");
    do {
      request.parameters.push_back(parameter());
    } while (accept(","));
    return request;
  }

  void statements(Graph& graph, Scope& scope, int depth) {
    while (token_.kind == TokenKind::value) {
      const Token at = token_;
      std::vector<std::pair<std::string, Token>> names;
      do {
        const Token where = token_;
        names.emplace_back(value_name(), where);
      } while (accept(","));
      symbol("=");
      const Token what = token_;
      // Several results are printed as NAME_0, NAME_1: the hint is the name without its number.
      std::string hint = names[0].first;
      if (names.size() > 1 && hint.size() > 2 && hint.ends_with("_0")) hint.resize(hint.size() - 2);
      if (std::isdigit(static_cast<unsigned char>(hint[0])) != 0) hint.clear();
      const Value first =
          is("loop") ? loop(graph, scope, depth, hint) : operation(graph, scope, hint);
      const std::size_t results = graph.node(first).results.size();
      if (results != names.size())
        fail(at, concat(what.text, " gives ", results, " values, not ", names.size()));
      for (std::size_t i = 0; i < names.size(); ++i)
        define(scope, names[i].first, {first.node, static_cast<std::int32_t>(i)}, names[i].second);
    }
  }

  // Returns the operation of a name, "reduce_sum", "exp", "dot", and sets the attributes in the
  // name.
  static const Operation* operation_of(std::string_view name, Attributes& attributes) {
    for (const Operation* row : operations()) {
      if (row->reads != nullptr ? row->reads(name, attributes)
                                : row->statement && name == row->name)
        return row;
    }
    return nullptr;
  }

  Value operation(Graph& graph, const Scope& scope, const std::string& hint) {
    const Token at = token_;
    const std::string name = identifier("an operation");
    Attributes a;
    const Operation* row = operation_of(name, a);
    if (row == nullptr) fail(at, concat("there is no operation '", name, "'"));
    std::vector<Value> operands;
    if (token_.kind == TokenKind::value) {
      do {
        operands.push_back(operand(scope));
      } while (accept(","));
    }
    keys(*row, name, a, at);
    std::optional<Type> declared;
    if (accept(":")) declared = type();
    if (row->typed && !declared)
      fail(at, concat(name, " needs the type of its result: ... : f32[4, 8]"));
    if (declared && (row->typed || row->sums)) {
      a.type.dtype = declared->dtype;
      if (row->typed) a.type.shape = declared->shape;
    }
    a.location = location();
    const Value value = append(graph, row->op, std::move(operands), std::move(a), at, hint);
    if (declared && (graph.node(value).results.size() != 1 || graph.type(value) != *declared))
      fail(at, concat(name, " gives ", text_of(graph.type(value)), ", declared is ",
                      text_of(*declared)));
    return value;
  }

  // Parses the keys of the operation at `at`, in any order.
  void keys(const Operation& row, const std::string& name, Attributes& a, const Token& at) {
    std::vector<bool> seen(row.keys.size());
    while (token_.kind == TokenKind::name && !is("return") && !is("differentiate")) {
      const Token key_at = token_;
      const std::string key = identifier("an attribute");
      std::size_t k = 0;
      while (k < row.keys.size() && row.keys[k].name != key) ++k;
      if (k == row.keys.size()) fail(key_at, concat(name, " has no attribute '", key, "'"));
      if (seen[k]) fail(key_at, concat("'", key, "' is given twice"));
      seen[k] = true;
      symbol("(");
      row.keys[k].read(*this, a);
      symbol(")");
    }
    for (std::size_t k = 0; k < row.keys.size(); ++k) {
      if (row.keys[k].required && !seen[k])
        fail(at, concat(name, " needs ", row.keys[k].name, "(...)"));
    }
  }

  // --- contents of keys: TextReader
  int dimension() final {
    const Token at = token_;
    const std::int64_t value = integer();
    if (value > 1000) fail(at, concat("expected a dimension, got ", value));
    return static_cast<int>(value);
  }
  std::vector<int> dimensions() final {
    std::vector<int> dims;
    if (token_.kind == TokenKind::number) {
      do {
        dims.push_back(dimension());
      } while (accept(","));
    }
    return dims;
  }
  Shape sizes() final { return sizes_until(")"); }
  std::int64_t signed_integer() final {
    const Token at = token_;
    const double value = real();
    if (value != std::trunc(value) || std::abs(value) > 0x1p53)
      fail(at, concat("expected a whole number of 53 bits, got ", value));
    return static_cast<std::int64_t>(value);
  }
  DType gradient_dtype() final {
    const Token at = token_;
    const std::string name = identifier("f32, bf16, f16 or none");
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (name == name_of(dtype)) return dtype;
    }
    if (name != "none") fail(at, concat("expected f32, bf16, f16 or none, got '", name, "'"));
    return DType::i8;
  }

  std::int64_t positive(std::string_view key) {
    symbol(key);
    symbol("(");
    const std::int64_t value = integer();
    symbol(")");
    return value;
  }

  int axis() {
    symbol("axis");
    symbol("(");
    const int value = dimension();
    symbol(")");
    return value;
  }

  Value loop(Graph& graph, const Scope& scope, int depth, const std::string& hint) {
    const Token at = take_token();
    if (depth >= kMaxDepth) fail(at, "loops nest too deep");
    auto loop = std::make_shared<Loop>();
    loop->symbol = identifier("the symbol of a chunk's size");
    loop->extent = positive("extent");
    loop->chunk = positive("chunk");
    loop->body.name = loop->symbol;
    Scope inner;
    std::vector<Value> operands;
    symbol("(");
    const auto parameter = [&](Type type, const std::string& name, const Token& where) {
      Attributes attributes;
      attributes.name = name;
      attributes.type = std::move(type);
      define(inner, name, append(loop->body, Op::parameter, {}, attributes, where), where);
    };
    Token where = token_;
    parameter({DType::i64, {}}, value_name(), where);
    while (accept(",")) {
      where = token_;
      const std::string name = value_name();
      symbol("=");
      Loop::Input input;
      const std::string kind = identifier("slice or whole");
      if (kind != "slice" && kind != "whole")
        fail(where, concat("expected slice or whole, got '", kind, "'"));
      const Value outer = operand(scope);
      Type type = graph.type(outer);
      if (kind == "slice") {
        input.kind = Loop::In::slice;
        input.axis = axis();
        input.factor = positive("factor");
        if (input.axis >= type.rank())
          fail(where, concat("axis is ", input.axis, " of ", text_of(type)));
        guard(where, [&] {
          type.shape[static_cast<std::size_t>(input.axis)] =
              Dim::symbol(loop->symbol) * Dim(input.factor);
        });
      }
      loop->inputs.push_back(input);
      operands.push_back(outer);
      parameter(type, name, where);
    }
    symbol(")");
    symbol("{");
    statements(loop->body, inner, depth + 1);
    keyword("return");
    do {
      where = token_;
      const std::string name = identifier("a name of a result");
      symbol(":");
      Loop::Result result;
      const std::string kind = identifier("stack, sum, max or lse");
      constexpr std::array<std::string_view, 4> kKinds = {"stack", "sum", "max", "lse"};
      std::size_t k = 0;
      while (k < kKinds.size() && kKinds[k] != kind) ++k;
      if (k == kKinds.size())
        fail(where, concat("expected stack, sum, max or lse, got '", kind, "'"));
      result.kind = static_cast<Loop::Out>(k);
      const Value v = operand(inner);
      if (result.kind == Loop::Out::stack) {
        result.axis = axis();
        result.factor = positive("factor");
      }
      loop->outputs.push_back(result);
      guard(where, [&] { loop->body.add_output(name, v); });
    } while (accept(","));
    symbol("}");
    Attributes attributes;
    attributes.loop = std::move(loop);
    attributes.location = location();
    return append(graph, Op::loop, std::move(operands), std::move(attributes), at, hint);
  }
};

}  // namespace

ParsedGraph parse(std::string_view text, std::string_view file) {
  return Parser(text, file).program();
}

Type parse_type(std::string_view text) { return Parser(text, "type").only_type(); }

}  // namespace logitless::ir
