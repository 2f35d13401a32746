// JSON values. Only json.cpp includes the headers of nlohmann::json, which read and print the text:
// each file that includes them compiles the whole parser.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace logitless {

// Error for text that is not JSON, or a value of another kind than requested.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Treatment of text that is not valid UTF-8, which JSON requires.
enum class NotUtf8 {
  refuse,         // JsonError
  replace,        // U+FFFD replaces it
  replace_ascii,  // the same, with \u for all that is not ASCII
};

// A JSON value: null, a boolean, a number, a string, an array, or an object that keeps the order of
// its members. In braces, {{"name", 1}, {"shape", {2, 3}}} is an object, as all of its elements are
// pairs that begin with a string. {1, 2} and {{1, 2}} are arrays.
class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  Json() = default;
  Json(std::nullptr_t) {}
  template <std::same_as<bool> T>  // excludes types that convert to bool
  Json(T value) : value_(value) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) Json(T value) {
    if constexpr (std::unsigned_integral<T>) {
      set(static_cast<std::uint64_t>(value));
    } else {
      value_ = static_cast<std::int64_t>(value);
    }
  }
  template <std::floating_point T>
  Json(T value) : value_(static_cast<double>(value)) {}
  Json(const char* text);
  Json(std::string_view text);
  Json(std::string text);
  Json(Array array);
  Json(Object object);
  template <typename T>
  Json(const std::vector<T>& values) : Json(Array(values.begin(), values.end())) {}
  Json(std::initializer_list<Json> elements);
  ~Json();
  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(const Json& other);
  Json& operator=(Json&& other) noexcept;

  static Json array() { return Json(Array()); }
  static Json object() { return Json(Object()); }
  // Parses a text; the last member of a repeated name counts. Throws JsonError with reason and
  // position, also for more than kMostDepth nested arrays and objects.
  static Json parse(std::string_view text);
  // Returns nothing for a text that is not JSON.
  static std::optional<Json> try_parse(std::string_view text);
  static constexpr int kMostDepth = 1000;

  // Prints on one line, or with this many blanks for each level.
  std::string dump(int indent = -1, NotUtf8 not_utf8 = NotUtf8::refuse) const;
  friend std::ostream& operator<<(std::ostream& out, const Json& json);

  bool is_null() const { return value_.index() == 0; }
  bool is_boolean() const { return std::holds_alternative<bool>(value_); }
  bool is_number() const { return is_number_integer() || std::holds_alternative<double>(value_); }
  // Returns whether it was written without a fraction or an exponent.
  bool is_number_integer() const;
  bool is_number_unsigned() const;  // a non-negative integer
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  // Throws JsonError for another kind of value. Numbers are converted by static_cast.
  template <typename T>
  T get() const;
  const std::string& text() const;

  // Number of elements or members; 0 for other kinds.
  std::size_t size() const;
  bool empty() const { return size() == 0; }

  // --- arrays
  // Throws JsonError for a missing element.
  const Json& at(std::size_t index) const;
  const Json& operator[](std::size_t index) const { return at(index); }
  Json& operator[](std::size_t index) { return const_cast<Json&>(at(index)); }
  // Appends a value; null becomes an array first.
  void push_back(Json value);
  Array::const_iterator begin() const { return elements().begin(); }
  Array::const_iterator end() const { return elements().end(); }

  // --- objects. Members are searched linearly. Returns nullptr for a missing member.
  const Json* find(std::string_view name) const;
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  // Throws JsonError for a missing member.
  const Json& at(std::string_view name) const;
  const Json& operator[](std::string_view name) const { return at(name); }
  Json value(std::string_view name, Json otherwise) const;
  // Inserts null for a missing member; null itself becomes an object first.
  Json& operator[](std::string_view name);
  // Sets each member of `other`.
  void update(Json other);
  void erase(std::string_view name);
  const Object& items() const;

  // Numbers are equal if their values are.
  friend bool operator==(const Json& a, const Json& b);

 private:
  // An integer is stored as int64 where possible.
  using Value = std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string,
                             Array, Object>;

  void set(std::uint64_t value);
  const Array& elements() const;
  [[noreturn]] void refuse(const char* expected) const;
  bool as_bool() const;
  std::int64_t as_integer() const;
  double as_double() const;

  Value value_;
};

template <typename T>
T Json::get() const {
  if constexpr (std::same_as<T, bool>) {
    return as_bool();
  } else if constexpr (std::integral<T>) {
    return static_cast<T>(as_integer());
  } else if constexpr (std::floating_point<T>) {
    return static_cast<T>(as_double());
  } else if constexpr (std::same_as<T, std::string>) {
    return text();
  } else {
    T values;
    if (!is_array()) refuse("array");
    for (const Json& element : elements()) values.push_back(element.get<typename T::value_type>());
    return values;
  }
}

// Events of a JSON text in order, for files that are read without building values. Each returns
// whether to continue.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual bool null() = 0;
  virtual bool boolean(bool value) = 0;
  virtual bool number_integer(std::int64_t value) = 0;  // below 0
  virtual bool number_unsigned(std::uint64_t value) = 0;
  virtual bool number_float(double value, const std::string& text) = 0;
  virtual bool string(std::string& text) = 0;
  virtual bool start_object() = 0;
  virtual bool key(std::string& name) = 0;
  virtual bool end_object() = 0;
  virtual bool start_array() = 0;
  virtual bool end_array() = 0;
  // Not JSON, after `position` bytes; the last event.
  virtual void parse_error(std::size_t position, const std::string& what) = 0;
};
// Parses a text and returns whether all of it was read. It does not recurse, whatever the nesting.
bool parse_json(std::string_view text, JsonEvents& events);

}  // namespace logitless
