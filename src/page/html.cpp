#include "page/html.h"

#include <algorithm>
#include <map>
#include <optional>

namespace logitless::page {
namespace {

// The palette is safe for red-green colour blindness (Okabe and Ito 2008).
constexpr std::string_view kStyle = R"(
:root { --ink: #222; --paper: #fff; --panel: #f7f7f5; --rule: #d8d8d4; --faint: #666;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #777;
  --through: .35; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #1b1b1b; --panel: #242424;
  --rule: #444; --faint: #999; --c0: #56b4e9; --c5: #2f7fb5; --through: .6; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
h1 { margin-bottom: .2rem; } h2 { margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; } .note { color: var(--faint); }
svg { display: block; margin: .4rem 0; width: 100%; height: auto; background: var(--panel); border: 1px solid var(--rule); }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--faint); }
svg .mark { stroke: var(--c1); stroke-dasharray: 5 4; }
svg .words { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; stroke-linejoin: round; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .faint { opacity: var(--through); }
svg .hit { fill: transparent; } svg .hit:hover { fill: var(--ink); fill-opacity: .2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--rule); }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--panel); border: 1px solid var(--rule); padding: 1rem; overflow-x: auto; font-size: 13px; }
)";

// A name with the number of a layer: begin, number, end.
struct Numbered {
  std::string begin, end;
  int number = 0;
};

std::optional<Numbered> numbered(const std::string& name) {
  constexpr std::size_t kMostDigits = 6;
  const std::size_t end = std::min(name.find('.'), name.size());
  std::size_t begin = end;
  while (begin > 0 && name[begin - 1] >= '0' && name[begin - 1] <= '9') --begin;
  if (begin == 0 || begin == end || end - begin > kMostDigits) return std::nullopt;
  return Numbered{name.substr(0, begin), name.substr(end),
                  std::stoi(name.substr(begin, end - begin))};
}

// Writes ascending numbers as "{0-5,7}".
std::string braces(std::vector<int> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (i == 0 ? "" : ",") + std::to_string(numbers[i]);
    if (last > i) text += (last > i + 1 ? "-" : ",") + std::to_string(numbers[last]);
    i = last + 1;
  }
  return "{" + text + "}";
}

}  // namespace

std::vector<MergedRow> merge_layers(const std::vector<Row>& rows, std::size_t column) {
  std::vector<MergedRow> merged;
  std::vector<std::vector<int>> numbers;  // of each merged row
  std::map<Row, std::size_t> known;       // by the cells with the name in two parts
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::optional<Numbered> name = numbered(rows[i].at(column));
    if (!name) {
      merged.push_back({rows[i], {i}});
      numbers.emplace_back();
      continue;
    }
    Row key = rows[i];
    key[column] = name->begin;
    key.push_back(name->end);
    const auto [at, is_new] = known.emplace(std::move(key), merged.size());
    if (is_new) {
      merged.push_back({rows[i], {}});
      numbers.emplace_back();
    }
    merged[at->second].from.push_back(i);
    numbers[at->second].push_back(name->number);
    if (!is_new)
      merged[at->second].cells[column] = name->begin + braces(numbers[at->second]) + name->end;
  }
  return merged;
}

std::string merged_note(const std::vector<MergedRow>& rows) {
  if (std::none_of(rows.begin(), rows.end(), [](const MergedRow& r) { return r.from.size() > 1; }))
    return {};
  return "<p class=\"note\">Equal layers are one row, such as layer{0-3}; its numbers are those of "
         "each.</p>\n";
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string document(std::string_view title, std::string_view body) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>";
  html += escaped(title);
  html += "</title>\n<style>";
  html += kStyle;
  html += "</style></head>\n<body>\n";
  html += body;
  return html + "</body></html>\n";
}

Table::Table(Row header, std::string align)
    : header_(std::move(header)), align_(std::move(align)) {}

std::string Table::row(const Row& cells, const char* element) const {
  std::string html = "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    html += "<";
    html += element;
    html += align_[i] == '>' ? " class=\"right\">" : ">";
    html += escaped(cells[i]) + "</" + element + ">";
  }
  return html + "</tr>\n";
}

void Table::add(const Row& cells) { rows_ += row(cells, "td"); }

std::string Table::html() const {
  return "<div class=\"scroll\"><table>\n" +
         (header_.empty() ? std::string() : row(header_, "th")) + rows_ + "</table></div>\n";
}

}  // namespace logitless::page
