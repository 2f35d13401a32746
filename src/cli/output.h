// Output of the commands: aligned tables and JSON, on standard output.
#pragma once

#include <string>
#include <vector>

#include "json/json.h"
#include "logitless/logitless.h"

namespace logitless::cli {

// A table with columns as wide as their widest cell. The first column and those marked '<' are
// left-aligned, numbers right-aligned.
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

// Lines "name   value" with aligned values.
class Facts {
 public:
  void add(std::string name, std::string value);
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

// Formats "12.3 ms", "1.23 s".
std::string format_seconds(double seconds);
// Formats "3", "3.5": with as few digits as possible, at most two.
std::string format_passes(double passes);
double median(std::vector<double> values);

// Replaces argument names of the library in a message by those of the command line's options.
std::string in_options(std::string text);

// Writes the whole text to standard output. Throws DeviceError when that fails (disk full, pipe
// closed).
void print(const std::string& text);
// Writes the text to standard error, and nothing where that is full or closed.
void print_note(const std::string& text);
void print_json(const Json& object);

}  // namespace logitless::cli
