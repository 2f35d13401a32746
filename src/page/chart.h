// Curves as SVG for pages that stand alone: axes with names and units, a legend, and names of
// points that a browser shows where the pointer is. No scripts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::page {

enum class Unit : std::uint8_t { number, bytes, seconds, percent };
// "1.5 MiB", "20 ms", "12 %", "3e-4": as axes and tables write it.
std::string text_of(double value, Unit unit);

struct Axis {
  std::string name = {};
  Unit unit = Unit::number;
  bool from_zero = false;
  bool logarithmic = false;  // of positive numbers; others are left out
};

struct Point {
  double x = 0.0, y = 0.0;
  double base = 0.0;      // of bars: their lower end
  std::string name = {};  // shown where the pointer is
};

struct Curve {
  enum class Shape : std::uint8_t {
    line,  // broken where a number is not finite
    dots,
    line_and_dots,
    bars,  // from `base` to y, as wide as from x to the next point's
  };
  std::string name;  // in the legend; empty: none
  Shape shape = Shape::line;
  int colour = 0;  // 0 to kColours - 1
  bool faint = false;
  std::vector<Point> points = {};  // ascending x
};
inline constexpr int kColours = 7;

// A dashed line across, with words beside it.
struct Mark {
  double at = 0.0;
  bool horizontal = false;
  std::string text = {};
};

struct Chart {
  Axis x = {}, y = {};
  std::vector<Curve> curves = {};
  std::vector<Mark> marks = {};
  double end = 0.0;     // of x, where bars end; 0: at the last point
  double most_y = 0.0;  // of y, so that charts share a scale; 0: the largest
  double height = 260.0;
};

// An <svg> element; a line that says so where there is nothing to draw.
std::string svg(const Chart& chart);

// Positions of an axis from `least` to `most`, 3 to 7 of them: round in the unit.
std::vector<double> ticks(double least, double most, Unit unit, bool logarithmic);

}  // namespace logitless::page
