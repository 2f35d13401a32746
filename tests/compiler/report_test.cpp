// Names and source locations of operations through the compiler, and in reports.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "compiler/compiled.h"
#include "compiler/graph_access.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/report/facts.h"
#include "compiler/report/page.h"
#include "core/check.h"
#include "logitless/compiler.h"
#include "logitless/error.h"
#include "page/chart.h"
#include "page/html.h"

namespace logitless::test {
namespace {

constexpr const char* kHead =
    "graph head(%h: f32[N, 16], %w: f32[3000, 16], %t: i64[N]) {\n"
    "  %z = dot %h, %w contract(1; 1) : f32[N, 3000] @ \"loss.py:7\"\n"
    "  %y = tanh %z : f32[N, 3000] @ \"loss.py:8\"\n"
    "  %l = reduce_lse %y dims(1) : f32[N] @ \"loss.py:9, in \\tail (x)\"\n"
    "  %p = pick %y, %t axis(1) : f32[N]\n"
    "  %4 = sub %l, %p : f32[N]\n"
    "  %loss = reduce_sum %4 dims(0) : f32[]\n"
    "  return loss: %loss\n"
    "  differentiate loss wrt %h, %w\n"
    "}\n";

std::string refusal(const std::string& text) {
  try {
    ir::parse(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(Locations, AreReadAndPrintedAgain) {
  const ir::ParsedGraph parsed = ir::parse(kHead);
  EXPECT_EQ(ir::print(parsed.graph, parsed.gradients), kHead);
  EXPECT_EQ(parsed.graph.node(3).attributes->location, "loss.py:7");
}

TEST(Locations, OfLoopsAreReadAndPrintedAgain) {
  const std::string text =
      "graph g(%x: f32[4]) {\n"
      "  %y = loop c extent(4) chunk(2) (%first, %a = slice %x axis(0) factor(1)) {\n"
      "    %b = exp %a : f32[c] @ \"in.py:2\"\n"
      "    return r: stack %b axis(0) factor(1)\n"
      "  } @ \"out.py:3\"\n"
      "  return y: %y\n"
      "}\n";
  EXPECT_EQ(ir::print(ir::parse(text).graph), text);
}

TEST(Locations, ThatAreNoneAreRefusedWithTheirPlace) {
  const std::string begin = "graph g(%x: f32[4]) { %y = exp %x ";
  EXPECT_EQ(refusal(begin + "@ }"), "program:1:37: expected a location in quotes, got '}'");
  EXPECT_EQ(refusal(begin + "@ \"a\n\" }"),
            "program:1:37: expected a location in quotes, got '\"'");
  EXPECT_EQ(refusal(begin + "@ \"a\tb\" }"),
            "program:1:28: map: the location holds a quote or a control character");
  EXPECT_EQ(refusal(begin + "\"a\" }"), "program:1:35: expected '}', got '\"a\"'");
}

TEST(Locations, AreThoseOfTheForwardOperationInGradients) {
  const ir::ParsedGraph parsed = ir::parse(kHead);
  const ir::Graph graph = ir::differentiate(parsed.graph, parsed.gradients);
  int found = 0;
  for (int id = parsed.graph.size(); id < graph.size(); ++id) {
    const ir::Node& n = graph.node(id);
    if (n.op != ir::Op::dot) continue;
    ++found;
    EXPECT_EQ(n.attributes->location, "loss.py:7");
  }
  EXPECT_EQ(found, 2);
}

// Visits all matrix products and exponentials of a compiled program, also in loops.
void visit(const ir::Graph& graph, const std::function<void(const ir::Node&)>& see) {
  for (const ir::Node& n : graph.nodes()) {
    see(n);
    if (n.op == ir::Op::loop) visit(n.attributes->loop->body, see);
  }
}

TEST(Locations, LiveThroughEveryPass) {
  for (const std::int64_t chunks : {0, 7}) {
    CompileOptions options;
    options.sizes = {{"N", 64}};
    options.chunks = chunks;
    options.memory_budget = chunks > 0 ? 0 : 400000;
    const CompiledProgram program = compile(Graph::parse(kHead), options);
    const CompiledProgram::State& state = CompilerAccess::state(program);
    ASSERT_FALSE(state.regions.empty()) << program.explain();
    int products = 0;
    visit(state.graph, [&](const ir::Node& n) {
      if (n.op == ir::Op::dot) {
        EXPECT_EQ(n.attributes->location, "loss.py:7");
        ++products;
      }
      if (ir::title_of(n) == "tanh") {
        EXPECT_EQ(n.attributes->location, "loss.py:8");
      }
    });
    EXPECT_GE(products, 3);
    // Without loops the gradient of the logits, which has their memory, is the largest value.
    EXPECT_NE(program.explain().find(" d_z (mul) f32[64, 3000], loss.py:8\n"), std::string::npos)
        << program.explain();
    EXPECT_NE(program.report_html().find("<td>loss.py:8</td>"), std::string::npos);
    const auto json = nlohmann::json::parse(program.report_json());
    EXPECT_EQ(json["before"]["at_peak"][0]["operation"].get<std::string>().substr(0, 4), "mul ");
  }
}

TEST(Names, OfGradientsSayWhatTheyAreOf) {
  const ir::ParsedGraph parsed = ir::parse(kHead);
  const ir::Graph graph = ir::differentiate(parsed.graph, parsed.gradients);
  EXPECT_EQ(graph.node(graph.outputs()[1].value).name, "d_h");
  EXPECT_EQ(graph.node(graph.outputs()[2].value).name, "d_w");
  bool logits = false;
  for (const ir::Node& n : graph.nodes()) logits = logits || n.name == "d_z";
  EXPECT_TRUE(logits);
}

TEST(Names, OfScopesStandInOneAnother) {
  Graph g;
  const Value x = g.parameter("x", DType::f32, {4});
  {
    const Scope layer(g, "layer3");
    Value y;
    {
      const Scope mlp(g, "mlp.gelu");
      y = gelu(x);
    }
    g.result("y", exp(y));
  }
  g.result("z", exp(x));
  const std::string text = g.text();
  EXPECT_NE(text.find("%layer3.mlp.gelu = mul"), std::string::npos) << text;
  EXPECT_NE(text.find("%layer3 = exp %layer3.mlp.gelu_"), std::string::npos) << text;
  EXPECT_EQ(text.find("%x_1"), std::string::npos) << text;
  EXPECT_EQ(Graph::parse(text).text(), text);
  for (const char* name : {"", "3", ".a", "a b", "a\"", "%a"})
    EXPECT_THROW(Scope(g, name), InvalidArgument) << name;
  // A refused name leaves the outer ones unchanged.
  EXPECT_EQ(GraphAccess::of(g).origin_name(), "");
}

TEST(Names, OfLayersAreAlikeButForTheirNumber) {
  ir::Graph g;
  ir::Attributes a;
  a.name = "x";
  a.type = {DType::f32, {2}};
  const ir::Value x = g.add(ir::Op::parameter, {}, a);
  const auto kind = [&](const std::string& name) {
    ir::Attributes map;
    map.function = ir::Function::exp;
    return ir::kind_of(g.node(g.add(ir::Op::map, {x}, map, name)));
  };
  EXPECT_EQ(kind("layer3.mlp.gelu"), "layer.mlp.gelu (exp) f32[2]");
  EXPECT_EQ(kind("layer3.mlp.gelu"), kind("layer12.mlp.gelu"));
  EXPECT_NE(kind("layer3.mlp"), kind("layer3.attn"));
  EXPECT_NE(kind("ln_1"), kind("ln_2"));
  EXPECT_NE(kind("layer3.ln_1"), kind("layer3.ln_2"));
  EXPECT_EQ(kind(""), "exp f32[2]");
}

TEST(Reports, CountTheWorkOfLoopsInFull) {
  CompileOptions options;
  options.sizes = {{"N", 64}};
  options.chunks = 7;  // 10 rows each, the last of them 4
  const CompiledProgram program = compile(Graph::parse(kHead), options);
  double work = 0.0;
  for (const report::Work& w : report::work_by_layer(CompilerAccess::state(program).program))
    work += w.forward + w.backward;
  EXPECT_EQ(work, CompilerAccess::state(program).program.multiply_adds);
  EXPECT_EQ(work, 3.0 * 64 * 3000 * 16);
}

// Equal loops share a body, which has the names of one of them.
TEST(Reports, CountTheWorkOfEachLayerWhoseLoopsAreAlike) {
  std::string parameters = "%x: f32[512, 64]", text, x = "x";
  for (const char* k : {"0", "1", "2"}) {
    const std::string layer = concat("%layer", k);
    parameters +=
        concat(", %w", k, ": f32[1024, 64], %u", k, ": f32[64, 1024], %m", k, ": f32[512, 512]");
    text += concat(layer, ".z = dot %", x, ", %w", k, " contract(1; 1) ", layer, ".a = tanh ",
                   layer, ".z ", layer, ".o = dot ", layer, ".a, %u", k, " contract(1; 1) ", layer,
                   ".m = dot %m", k, ", ", layer, ".o contract(1; 0) ", layer, ".r = add %", x,
                   ", ", layer, ".m ");
    x = concat("layer", k, ".r");
  }
  const Graph graph =
      Graph::parse(concat("graph g(", parameters, ") { ", text, "return y: %", x, " }"));
  const CompiledProgram program = compile(graph, {.chunks = 8});
  const ir::Program& made = CompilerAccess::state(program).program;
  const ir::Program* shared = nullptr;
  int uses = 0;
  for (const ir::Instruction& i : made.instructions) {
    const auto* loop = std::get_if<ir::LoopRun>(&i.what);
    if (loop == nullptr) continue;
    if (shared == nullptr) shared = loop->body.get();
    uses += loop->body.get() == shared;
  }
  EXPECT_EQ(uses, 3) << program.text();
  const std::vector<report::Work> work = report::work_by_layer(made);
  ASSERT_EQ(work.size(), 3U);
  for (const report::Work& w : work) {
    EXPECT_EQ(w.forward, made.multiply_adds / 3.0) << w.layer;
    EXPECT_EQ(w.backward, 0.0);
  }
}

TEST(Reports, LayTheMemoryWithLoopsOverThatWithout) {
  const CompiledProgram program =
      compile(Graph::parse(kHead), {.sizes = {{"N", 64}}, .memory_budget = 400000});
  const std::string page = program.report_html({}, {{"command", "logitless <it>"}});
  EXPECT_NE(page.find("<td>command</td><td>logitless &lt;it&gt;</td>"), std::string::npos);
  const std::size_t before = page.find(">without loops: peak "), after = page.find(">with loops");
  ASSERT_NE(before, std::string::npos);
  ASSERT_NE(after, std::string::npos);
  EXPECT_EQ(page.substr(0, before).rfind("<svg"), page.substr(0, after).rfind("<svg"));  // one
  // A program without loops has one curve.
  const std::string plain =
      compile(Graph::parse(kHead), {.sizes = {{"N", 64}}, .chunk = false}).report_html();
  EXPECT_NE(plain.find("<h2>Memory: no loops</h2>"), std::string::npos);
}

TEST(Reports, ShowMeasuredTimes) {
  const CompiledProgram program = compile(Graph::parse(kHead), {.sizes = {{"N", 64}}});
  EXPECT_EQ(program.report_html().find("Measured time"), std::string::npos);
  const std::string page = program.report_html({{"product <1>", "z", 2, 0.25, 1e6, 2e9}});
  EXPECT_NE(page.find("Measured time: 250 ms"), std::string::npos);
  EXPECT_NE(page.find("product &lt;1&gt;"), std::string::npos);
  EXPECT_NE(page.find("8.0 GFLOP/s"), std::string::npos);
}

TEST(Reports, DrawTheTradeOfMemoryAgainstTime) {
  EXPECT_EQ(report::trade_off({}), "");
  const std::vector<PlanPoint> points = {{2 << 20, 3 << 20, 0.02, 0.0, "no loops"},
                                         {1 << 20, 1 << 20, 0.03, 0.25, "all <loops>", true}};
  const std::string timed = report::trade_off(points);
  EXPECT_NE(timed.find(">predicted time of a run</text>"), std::string::npos);
  EXPECT_NE(timed.find("<td>all &lt;loops&gt; (this one)</td>"), std::string::npos);
  EXPECT_LT(timed.find("<td>all"), timed.find("<td>no loops</td>"));  // by memory
  // Without predicted times, multiply-adds are the cost.
  std::vector<PlanPoint> untimed = points;
  untimed[0].seconds = 0.0;
  EXPECT_NE(report::trade_off(untimed).find(">more multiply-adds</text>"), std::string::npos);
}

TEST(Tables, MergeEqualLayers) {
  const std::vector<page::Row> rows = {
      {"8 B", "z"},         {"6 B", "layer1.a"},    {"6 B", "layer0.a"},  {"6 B", "layer0.b"},
      {"6 B", "layer2.a"},  {"4 B", "layer3.a"},    {"6 B", "layer7.a"},  {"8 B", "z"},
      {"6 B", "d_layer5"},  {"6 B", "d_layer4"},    {"2 B", "1234567.a"}, {"2 B", "a.b1"},
      {"6 B", "d_layer10"}, {"2 B", "x1234567890"}, {"2 B", ""}};
  const std::vector<page::MergedRow> merged = page::merge_layers(rows, 1);
  std::string names;
  std::size_t count = 0;
  for (const page::MergedRow& row : merged) {
    names += row.cells[1] + " ";
    count += row.from.size();
    for (const std::size_t i : row.from) EXPECT_EQ(rows[i][0], row.cells[0]);
  }
  EXPECT_EQ(names,
            "z layer{0-2,7}.a layer0.b layer3.a z d_layer{4,5,10} 1234567.a a.b1 x1234567890  ");
  EXPECT_EQ(count, rows.size());
  EXPECT_NE(page::merged_note(merged).find("Equal layers are one row"), std::string::npos);
  EXPECT_EQ(page::merged_note(page::merge_layers({{"z"}, {"layer0"}}, 0)), "");
}

TEST(Charts, HaveRoundTicks) {
  using page::Unit;
  EXPECT_EQ(page::ticks(0, 10, Unit::number, false), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(page::ticks(0, 3 << 20, Unit::bytes, false),
            (std::vector<double>{0, 1 << 19, 1 << 20, 3 << 19, 1 << 21, 5 << 19, 3 << 20}));
  EXPECT_EQ(page::ticks(1, 1000, Unit::number, true), (std::vector<double>{1, 10, 100, 1000}));
  EXPECT_EQ(page::ticks(5, 5, Unit::number, false), (std::vector<double>{5}));
}

TEST(Charts, WriteNumbersInTheirUnit) {
  using page::Unit;
  EXPECT_EQ(page::text_of(0, Unit::bytes), "0 B");
  EXPECT_EQ(page::text_of(1536, Unit::bytes), "1.5 KiB");
  EXPECT_EQ(page::text_of(1013.0 * 1048576, Unit::bytes), "1013 MiB");
  EXPECT_EQ(page::text_of(0.02, Unit::seconds), "20 ms");
  EXPECT_EQ(page::text_of(12345.6, Unit::seconds), "12346 s");
  EXPECT_EQ(page::text_of(12.5, Unit::percent), "12.5 %");
  EXPECT_EQ(page::text_of(3e-4, Unit::number), "0.0003");
  EXPECT_EQ(page::text_of(50257, Unit::number), "50,257");
  EXPECT_EQ(page::thousands(999), "999");
  EXPECT_EQ(page::thousands(-1234567), "-1,234,567");
  EXPECT_EQ(page::thousands(-123), "-123");
}

TEST(Charts, BreakAtWhatIsNoNumber) {
  page::Chart chart{{"x"}, {"y"}};
  EXPECT_NE(page::svg(chart).find("Nothing to draw"), std::string::npos);
  chart.curves.push_back(
      {"a<b", page::Curve::Shape::line, 0, false, {{0, 1}, {1, NAN}, {2, 3}, {3, 4}}});
  const std::string svg = page::svg(chart);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  const std::string path = svg.substr(svg.find(" d=\""));
  EXPECT_EQ(std::count(path.begin(), path.end(), 'M'), 2);
}

TEST(Charts, KeepThePeaksOfManyPoints) {
  page::Chart chart{{"x"}, {"y"}};
  page::Curve curve{"c"};
  for (int i = 0; i < 100000; ++i) curve.points.push_back({1.0 * i, i == 77777 ? 1000.0 : 1.0});
  chart.curves.push_back(curve);
  const std::string svg = page::svg(chart);
  EXPECT_LT(svg.size(), 60000u);
  // The highest point of the drawing is 5 % below its upper edge.
  chart.curves[0].points = {{0, 1.0}, {77777, 1000.0}, {99999, 1.0}};
  const std::string few = page::svg(chart);
  const auto highest = [](const std::string& text) {
    double y = 1e9;
    for (std::size_t at = text.find(" d=\"");
         (at = text.find_first_of("LM", at)) != std::string::npos &&
         at < text.find("\"/>", text.find(" d=\""));
         ++at)
      y = std::min(y, std::stod(text.substr(text.find(' ', at) + 1)));
    return y;
  };
  EXPECT_EQ(highest(svg), highest(few));
}

}  // namespace
}  // namespace logitless::test
