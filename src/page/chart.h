// Curves as SVG for self-contained pages: axes with names and units, a legend, and tooltips for
// named points. No scripts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::page {

enum class Unit : std::uint8_t { number, bytes, seconds, percent };
// Formats a value for axes and tables: "1.5 MiB", "20 ms", "12 %", "3e-4", "12,000".
std::string text_of(double value, Unit unit);
// Writes a whole number with its thousands separated: "50,257".
std::string thousands(std::int64_t value);

struct Axis {
  std::string name = {};
  Unit unit = Unit::number;
  bool from_zero = false;
  bool logarithmic = false;  // omits numbers that are not positive
};

struct Point {
  double x = 0.0, y = 0.0;
  double base = 0.0;      // lower end of a bar
  std::string name = {};  // tooltip: over the whole height of the first curve, else over its bar
};

struct Curve {
  enum class Shape : std::uint8_t {
    line,  // interrupted where a number is not finite
    dots,
    line_and_dots,
    bars,  // from `base` to y, as wide as from x to the next point
  };
  std::string name;  // in the legend; empty: none
  Shape shape = Shape::line;
  int colour = 0;  // 0 to kColours - 1
  bool faint = false;
  std::vector<Point> points = {};  // ascending x
};
inline constexpr int kColours = 7;

// A dashed line with a label beside it.
struct Mark {
  double at = 0.0;
  bool horizontal = false;
  std::string text = {};
};

struct Chart {
  Axis x = {}, y = {};
  std::vector<Curve> curves = {};
  std::vector<Mark> marks = {};
  double end = 0.0;     // end of the last bar in x; 0: at the last point
  double most_y = 0.0;  // largest y, so that charts share a scale; 0: automatic
  double height = 260.0;
};

// Returns an <svg> element, or a line of text if there is nothing to draw.
std::string svg(const Chart& chart);

// Returns 3 to 7 positions of an axis from `least` to `most`, round in the unit.
std::vector<double> ticks(double least, double most, Unit unit, bool logarithmic);

}  // namespace logitless::page
