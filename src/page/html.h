// HTML of pages: escaping, documents and tables.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace logitless::page {

// Escapes text for elements and quoted attributes.
std::string escaped(std::string_view text);

// Returns a whole page; `body` is HTML, the title is text.
std::string document(std::string_view title, std::string_view body);

// The cells of a row; text, not HTML.
using Row = std::vector<std::string>;

// Rows that are equal but for the number of a layer in one cell.
struct MergedRow {
  Row cells;  // the cell with the number has all of them: "layer{0-11}.mlp.gelu"
  std::vector<std::size_t> from;  // the rows that were merged
};
// Merges rows that differ in the number of a layer in the cell of `column` alone. The number ends
// the first part of a name: "layer3.mlp.gelu". Merged rows are in the order of their first ones.
std::vector<MergedRow> merge_layers(const std::vector<Row>& rows, std::size_t column);
// Explains the names of merged rows; empty where there are none.
std::string merged_note(const std::vector<MergedRow>& rows);

class Table {
 public:
  // align: '<' or '>' for each column.
  Table(Row header, std::string align);
  void add(const Row& cells);
  bool empty() const { return rows_.empty(); }
  std::string html() const;

 private:
  std::string row(const Row& cells, const char* element) const;
  Row header_;
  std::string align_, rows_;
};

// A table of two columns without a header.
class Facts {
 public:
  void add(const std::string& name, const std::string& value) { table_.add({name, value}); }
  std::string html() const { return table_.html(); }

 private:
  Table table_{{}, "<<"};
};

}  // namespace logitless::page
