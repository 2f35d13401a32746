#include "page/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "page/html.h"

namespace logitless::page {
namespace {

constexpr double kWidth = 900.0, kLeft = 92.0, kRight = 18.0, kTop = 14.0, kBottom = 46.0;
constexpr double kLegend = 20.0;  // height of a line of the legend
constexpr double kLetter = 6.6;   // approximate width of a letter
// Points drawn of a line: longer ones are drawn as minima and maxima
constexpr std::size_t kMostPoints = 1500;

std::string number(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}
std::string place(double value) { return number("%.1f", value); }

// Formats a number with few significant digits, without an empty fraction.
std::string digits(double value, int significant) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.*g", significant, value);
  return text;
}

template <std::size_t N>
std::string scaled(double value, double factor, const std::array<const char*, N>& names) {
  std::size_t i = 0;
  while (i + 1 < N && std::abs(value) >= factor * 0.99995) {
    value /= factor;
    ++i;
  }
  // Keeps four digits up to 9999, as in 1013 MiB.
  return digits(value, std::abs(value) >= 1000.0 ? 4 : 3) + " " + names[i];
}

}  // namespace

std::string thousands(std::int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) text.insert(at -= 3, ",");
  return text;
}

std::string text_of(double value, Unit unit) {
  switch (unit) {
    case Unit::bytes:
      return scaled(value, 1024.0, std::array{"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
    case Unit::percent:
      return digits(value, 3) + " %";
    case Unit::seconds: {
      const double size = std::abs(value);
      if (size == 0.0) return "0 s";
      if (size < 1e-6) return digits(value * 1e9, 3) + " ns";
      if (size < 1e-3) return digits(value * 1e6, 3) + " us";
      if (size < 1.0) return digits(value * 1e3, 3) + " ms";
      return (size < 1000.0 ? digits(value, 3) : number("%.0f", value)) + " s";
    }
    case Unit::number:
      break;
  }
  if (value == std::floor(value) && std::abs(value) < 1e12)
    return thousands(static_cast<std::int64_t>(value));
  return digits(value, 4);
}

std::vector<double> ticks(double least, double most, Unit unit, bool logarithmic) {
  std::vector<double> list;
  if (!(most > least)) return {least};
  if (logarithmic) {
    const double decades = std::log10(most / least);
    for (double power = std::pow(10.0, std::floor(std::log10(least))); power <= most * 1.0001;
         power *= 10.0) {
      for (const double digit : {1.0, 2.0, 5.0}) {
        if (digit > 1.0 && decades > 2.5) continue;
        if (const double at = digit * power; at >= least * 0.9999 && at <= most * 1.0001)
          list.push_back(at);
      }
    }
    if (list.size() >= 2) return list;
    list.clear();
  }
  constexpr double kMost = 6.0;
  double step = 0.0;
  if (unit == Unit::bytes) {
    step = std::exp2(std::ceil(std::log2((most - least) / kMost)));
  } else {
    const double rough = (most - least) / kMost,
                 power = std::pow(10.0, std::floor(std::log10(rough)));
    for (const double digit : {1.0, 2.0, 5.0, 10.0}) {
      if (step == 0.0 && digit * power >= rough * 0.9999) step = digit * power;
    }
  }
  const auto first = static_cast<std::int64_t>(std::ceil(least / step - 1e-9)),
             last = static_cast<std::int64_t>(std::floor(most / step + 1e-9));
  for (std::int64_t i = first; i <= last; ++i) list.push_back(static_cast<double>(i) * step);
  return list;
}

namespace {

// Maps numbers to coordinates of the drawing.
struct Scale {
  double least = 0.0, most = 1.0, from = 0.0, to = 1.0;
  bool logarithmic = false;
  double operator()(double value) const {
    if (logarithmic) return from + (to - from) * std::log(value / least) / std::log(most / least);
    return from + (to - from) * (value - least) / (most - least);
  }
};

bool drawn(const Chart& chart, const Point& p) {
  return std::isfinite(p.x) && std::isfinite(p.y) && (!chart.x.logarithmic || p.x > 0.0) &&
         (!chart.y.logarithmic || p.y > 0.0);
}

struct Range {
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  void take(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

Range widened(Range r, const Axis& axis) {
  if (axis.from_zero && !axis.logarithmic) r.take(0.0);
  if (!(r.most > r.least)) {
    const double around = r.least == 0.0 ? 1.0 : std::abs(r.least) * 0.05;
    r = axis.logarithmic ? Range{r.least / 1.5, r.most * 1.5}
                         : Range{r.least - around, r.most + around};
    if (axis.from_zero && !axis.logarithmic) r.least = std::min(0.0, r.least + around);
  }
  return r;
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart) {
    Range x, y;
    for (const Curve& curve : chart.curves) {
      for (const Point& p : curve.points) {
        if (!drawn(chart, p)) continue;
        x.take(p.x);
        y.take(p.y);
        if (curve.shape == Curve::Shape::bars && !chart.y.logarithmic) y.take(p.base);
      }
    }
    any_ = y.most >= y.least;
    if (!any_) return;
    if (chart.end > x.most) x.most = chart.end;
    if (chart.most_y > y.most) y.most = chart.most_y;
    // Labels of marks are above the curves.
    const bool labelled = std::any_of(chart.marks.begin(), chart.marks.end(),
                                      [](const Mark& m) { return !m.horizontal; });
    const double room = chart.y.logarithmic ? 0.0 : (labelled ? 0.12 : 0.05) * (y.most - y.least);
    y.most += room;
    if (!chart.y.from_zero) y.least -= room;
    x = widened(x, chart.x);
    y = widened(y, chart.y);
    layout_legend();
    top_ = kTop + static_cast<double>(legend_lines_) * kLegend;
    bottom_ = top_ + chart.height;
    x_ = {x.least, x.most, kLeft, kWidth - kRight, chart.x.logarithmic};
    y_ = {y.least, y.most, bottom_, top_, chart.y.logarithmic};
  }

  std::string svg() {
    if (!any_) return "<p class=\"note\">Nothing to draw.</p>\n";
    const double height = bottom_ + kBottom;
    out_ = "<svg viewBox=\"0 0 " + place(kWidth) + " " + place(height) +
           "\" role=\"img\" aria-label=\"" + escaped(chart_.y.name + " over " + chart_.x.name) +
           "\">\n";
    axes();
    for (const Curve& curve : chart_.curves) draw(curve);
    for (const Mark& mark : chart_.marks) draw(mark);
    out_ += legend_;
    return out_ + "</svg>\n";
  }

 private:
  const Chart& chart_;
  Scale x_, y_;
  bool any_ = false;
  double top_ = 0.0, bottom_ = 0.0;
  int legend_lines_ = 0;
  std::string legend_, out_;
  std::vector<Range> written_;  // positions of the labels of upright marks

  static std::string colour(const Curve& curve) {
    return "var(--c" + std::to_string(curve.colour % kColours) + ")";
  }

  void layout_legend() {
    double at = kLeft;
    for (const Curve& curve : chart_.curves) {
      if (curve.name.empty()) continue;
      const double width = 40.0 + kLetter * static_cast<double>(curve.name.size());
      if (legend_lines_ == 0 || (at + width > kWidth - kRight && at > kLeft)) {
        ++legend_lines_;
        at = kLeft;
      }
      const double y = kTop + kLegend * (legend_lines_ - 1);
      legend_ += "<rect x=\"" + place(at) + "\" y=\"" + place(y + 1.0) +
                 "\" width=\"12\" height=\"10\" fill=\"" + colour(curve) + "\"" +
                 (curve.faint ? " class=\"faint\"" : "") + "/><text x=\"" + place(at + 18.0) +
                 "\" y=\"" + place(y + 10.0) + "\">" + escaped(curve.name) + "</text>\n";
      at += width;
    }
  }

  void line(const char* css, double x1, double y1, double x2, double y2) {
    out_ += std::string("<line class=\"") + css + "\" x1=\"" + place(x1) + "\" y1=\"" + place(y1) +
            "\" x2=\"" + place(x2) + "\" y2=\"" + place(y2) + "\"/>\n";
  }
  void draw_text(double x, double y, const char* anchor, const std::string& text,
                 const char* more = "") {
    out_ += "<text x=\"" + place(x) + "\" y=\"" + place(y) + "\" text-anchor=\"" + anchor + "\"" +
            more + ">" + escaped(text) + "</text>\n";
  }

  void axes() {
    for (const double at : ticks(y_.least, y_.most, chart_.y.unit, chart_.y.logarithmic)) {
      line("grid", kLeft, y_(at), kWidth - kRight, y_(at));
      draw_text(kLeft - 8.0, y_(at) + 4.0, "end", text_of(at, chart_.y.unit));
    }
    for (const double at : ticks(x_.least, x_.most, chart_.x.unit, chart_.x.logarithmic)) {
      line("grid", x_(at), top_, x_(at), bottom_);
      // A centred last label would exceed the drawing.
      const bool last = x_(at) > kWidth - kRight - 24.0;
      draw_text(last ? kWidth - 4.0 : x_(at), bottom_ + 16.0, last ? "end" : "middle",
                text_of(at, chart_.x.unit));
    }
    line("axis", kLeft, bottom_, kWidth - kRight, bottom_);
    line("axis", kLeft, top_, kLeft, bottom_);
    draw_text((kLeft + kWidth - kRight) / 2.0, bottom_ + 36.0, "middle", chart_.x.name);
    const std::string middle = place((top_ + bottom_) / 2.0);
    draw_text(16.0, (top_ + bottom_) / 2.0, "middle", chart_.y.name,
              (" transform=\"rotate(-90 16 " + middle + ")\"").c_str());
  }

  // Thins very many points: returns the lowest and the highest of each run.
  std::vector<Point> thinned(const std::vector<Point>& points) const {
    if (points.size() <= kMostPoints) return points;
    std::vector<Point> kept;
    const std::size_t runs = kMostPoints / 2;
    for (std::size_t r = 0; r < runs; ++r) {
      const auto begin = points.begin() + static_cast<std::ptrdiff_t>(r * points.size() / runs);
      const auto end = points.begin() + static_cast<std::ptrdiff_t>((r + 1) * points.size() / runs);
      auto [low, high] =
          std::minmax_element(begin, end, [](const Point& a, const Point& b) { return a.y < b.y; });
      if (high < low) std::swap(low, high);
      kept.push_back(*low);
      if (low != high) kept.push_back(*high);
    }
    return kept;
  }

  void draw(const Curve& curve) {
    if (curve.shape == Curve::Shape::bars) return bars(curve);
    if (curve.shape != Curve::Shape::dots) stroke(curve);
    if (curve.shape != Curve::Shape::line) dots(curve);
  }

  void stroke(const Curve& curve) {
    std::string d;
    bool down = false;
    for (const Point& p : thinned(curve.points)) {
      if (!drawn(chart_, p)) {
        down = false;
        continue;
      }
      d += (down ? " L" : " M") + place(x_(p.x)) + " " + place(y_(p.y));
      down = true;
    }
    out_ += std::string("<path class=\"line") + (curve.faint ? " faint" : "") + "\" stroke=\"" +
            colour(curve) + "\" d=\"" + d + "\"/>\n";
  }

  void dots(const Curve& curve) {
    for (const Point& p : curve.points) {
      if (!drawn(chart_, p)) continue;
      out_ += "<circle cx=\"" + place(x_(p.x)) + "\" cy=\"" + place(y_(p.y)) +
              "\" r=\"4\" fill=\"" + colour(curve) + "\">" + title(p.name) + "</circle>\n";
    }
  }

  static std::string title(const std::string& name) {
    return name.empty() ? std::string() : "<title>" + escaped(name) + "</title>";
  }

  // Draws all bars as one path, and transparent targets for tooltips where they have names.
  void bars(const Curve& curve) {
    std::string d, over;
    const bool first = &curve == &chart_.curves.front();
    for (std::size_t i = 0; i < curve.points.size(); ++i) {
      const Point& p = curve.points[i];
      if (!drawn(chart_, p)) continue;
      const double next =
          i + 1 < curve.points.size() ? curve.points[i + 1].x : std::max(chart_.end, p.x);
      const std::string left = place(x_(p.x)), right = place(x_(next)), high = place(y_(p.y)),
                        low = place(y_(p.base));
      d += " M" + left + " " + low + " L" + left + " " + high + " L" + right + " " + high + " L" +
           right + " " + low + " Z";
      const double above = first ? top_ : y_(p.y), below = first ? bottom_ : y_(p.base);
      if (!p.name.empty())
        over += "<rect class=\"hit\" x=\"" + left + "\" y=\"" + place(above) + "\" width=\"" +
                place(x_(next) - x_(p.x)) + "\" height=\"" + place(below - above) + "\">" +
                title(p.name) + "</rect>\n";
    }
    out_ += std::string("<path") + (curve.faint ? " class=\"faint\"" : "") + " fill=\"" +
            colour(curve) + "\" d=\"" + d + "\"/>\n" + over;
  }

  void draw(const Mark& mark) {
    if (mark.horizontal) {
      const double y = y_(mark.at);
      if (!(y >= top_ && y <= bottom_)) return;
      line("mark", kLeft, y, kWidth - kRight, y);
      draw_text(kWidth - kRight - 6.0, y - 5.0, "end", mark.text, " class=\"words\"");
      return;
    }
    const double x = x_(mark.at);
    if (!(x >= kLeft && x <= kWidth - kRight)) return;
    line("mark", x, top_, x, bottom_);
    const bool right = x > (kLeft + kWidth - kRight) / 2.0;
    const double length = kLetter * static_cast<double>(mark.text.size());
    const Range text = right ? Range{x - 6.0 - length, x} : Range{x, x + 6.0 + length};
    for (const Range& other : written_) {
      if (text.least < other.most && other.least < text.most) return;  // avoids overlapping labels
    }
    written_.push_back(text);
    draw_text(right ? x - 6.0 : x + 6.0, top_ + 14.0, right ? "end" : "start", mark.text,
              " class=\"words\"");
  }
};

}  // namespace

std::string svg(const Chart& chart) { return Drawing(chart).svg(); }

}  // namespace logitless::page
