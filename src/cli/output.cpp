#include "cli/output.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

namespace logitless::cli {

Table::Table(std::vector<std::string> header, std::string align) : align_(std::move(align)) {
  add(std::move(header));
}

void Table::add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string Table::text() const {
  std::vector<std::size_t> widths(align_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i > 0 ? "  " : "";
      line += align_[i] == '<' ? fmt::format("{:<{}}", row[i], widths[i])
                               : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void Facts::add(std::string name, std::string value) {
  facts_.emplace_back(std::move(name), std::move(value));
}

std::string Facts::text() const {
  std::size_t width = 0;
  for (const auto& [name, value] : facts_) width = std::max(width, name.size());
  std::string text;
  for (const auto& [name, value] : facts_) text += fmt::format("{:<{}}  {}\n", name, width, value);
  return text;
}

std::string format_seconds(double seconds) {
  if (seconds >= 0.9995) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 0.9995e-3) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.1f} us", seconds * 1e6);
}

std::string format_passes(double passes) {
  std::string text = fmt::format("{:.2f}", passes);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

std::string in_options(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"d_weight_dtype f32", "--grad-dtype f32"}, {"a memory_budget", "a --budget"}};
  for (const auto& [name, option] : kNames) {
    for (std::size_t at = 0; (at = text.find(name, at)) != std::string::npos; at += option.size())
      text.replace(at, name.size(), option);
  }
  return text;
}

void print(const std::string& text) {
  const bool ok =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!ok) throw DeviceError("standard output cannot be written");
}

void print_note(const std::string& text) { static_cast<void>(std::fputs(text.c_str(), stderr)); }

void print_json(const Json& object) {
  // JSON is UTF-8, but paths may have other bytes.
  print(object.dump(2, NotUtf8::replace) + "\n");
}

}  // namespace logitless::cli
