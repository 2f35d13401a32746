// HTML of pages: escaping, documents and tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace logitless::page {

// Escapes text for elements and quoted attributes.
std::string escaped(std::string_view text);

// Returns a whole page; `body` is HTML, the title is text.
std::string document(std::string_view title, std::string_view body);

class Table {
 public:
  // align: '<' or '>' for each column.
  Table(std::vector<std::string> header, std::string align);
  // Adds a row; cells are text, not HTML.
  void add(const std::vector<std::string>& cells);
  bool empty() const { return rows_.empty(); }
  std::string html() const;

 private:
  std::string row(const std::vector<std::string>& cells, const char* element) const;
  std::vector<std::string> header_;
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
