#include "page/html.h"

namespace logitless::page {
namespace {

// The palette is safe for red-green colour blindness (Okabe and Ito 2008).
constexpr std::string_view kStyle = R"(
:root { --ink: #222; --paper: #fff; --panel: #f7f7f5; --rule: #d8d8d4; --faint: #666;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #777; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #1b1b1b; --panel: #242424;
  --rule: #444; --faint: #999; --c0: #56b4e9; --c5: #2f7fb5; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
h1 { margin-bottom: .2rem; } h2 { margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; } .note { color: var(--faint); }
svg { display: block; margin: .4rem 0; width: 100%; height: auto; background: var(--panel); border: 1px solid var(--rule); }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--faint); }
svg .mark { stroke: var(--c1); stroke-dasharray: 5 4; }
svg .words { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; stroke-linejoin: round; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .faint { opacity: .35; }
svg .hit { fill: transparent; } svg .hit:hover { fill: var(--ink); fill-opacity: .2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--rule); }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--panel); border: 1px solid var(--rule); padding: 1rem; overflow-x: auto; font-size: 13px; }
)";

}  // namespace

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

Table::Table(std::vector<std::string> header, std::string align)
    : header_(std::move(header)), align_(std::move(align)) {}

std::string Table::row(const std::vector<std::string>& cells, const char* element) const {
  std::string html = "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    html += "<";
    html += element;
    html += align_[i] == '>' ? " class=\"right\">" : ">";
    html += escaped(cells[i]) + "</" + element + ">";
  }
  return html + "</tr>\n";
}

void Table::add(const std::vector<std::string>& cells) { rows_ += row(cells, "td"); }

std::string Table::html() const {
  return "<div class=\"scroll\"><table>\n" +
         (header_.empty() ? std::string() : row(header_, "th")) + rows_ + "</table></div>\n";
}

}  // namespace logitless::page
