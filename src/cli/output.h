// What the commands print: aligned tables and JSON, on standard output.
#pragma once

#include <string>
#include <vector>

#include "json/json.h"
#include "logitless/logitless.h"

namespace logitless::cli {

// Columns aligned by the widest cell: the first and those marked '<' to the left, numbers to the
// right.
class Table {
 public:
  // align: one '<' or '>' for each column.
  Table(std::vector<std::string> header, std::string align);
  void add(std::vector<std::string> cells);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::string align_;
};

// "name   value" lines, values aligned.
class Facts {
 public:
  void add(std::string name, std::string value);
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

// "12.3 ms", "1.23 s".
std::string format_seconds(double seconds);
// "3", "3.5": as few digits as it needs, two at most.
std::string format_passes(double passes);
double median(std::vector<double> values);

// What the library says of its own arguments, with the names of the command line's options.
std::string in_options(std::string text);

// To standard output, whole. Throws DeviceError when that is not possible (disk full, pipe closed).
void print(const std::string& text);
void print_json(const Json& object);

}  // namespace logitless::cli
