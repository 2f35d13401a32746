// Values of JSON. The one file that knows the headers of nlohmann::json, which read and print its
// text, is json.cpp: each file that includes them compiles the whole parser again.
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

// Text that is no JSON, or a value that is not what was asked for.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a text may have in it that is not UTF-8, as JSON is.
enum class NotUtf8 {
  refuse,         // JsonError
  replace,        // U+FFFD stands for it
  replace_ascii,  // the same, and \u for all that is not ASCII
};

// null, true or false, a number, a text, an array, or an object, whose members keep their order.
// As in braces of C++, {{"name", 1}, {"shape", {2, 3}}} is an object, as all of its elements are
// pairs that begin with a text; {1, 2} and {{1, 2}} are arrays.
class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  Json() = default;
  Json(std::nullptr_t) {}
  template <std::same_as<bool> T>  // and nothing that converts to bool
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
  // Of members of one name the last one counts. Throws JsonError, which says what and where; so are
  // more than kMostDepth arrays and objects in each other.
  static Json parse(std::string_view text);
  // None of a text that is no JSON.
  static std::optional<Json> try_parse(std::string_view text);
  static constexpr int kMostDepth = 1000;

  // On one line, or with this many blanks for each level.
  std::string dump(int indent = -1, NotUtf8 not_utf8 = NotUtf8::refuse) const;
  friend std::ostream& operator<<(std::ostream& out, const Json& json);

  bool is_null() const { return value_.index() == 0; }
  bool is_boolean() const { return std::holds_alternative<bool>(value_); }
  bool is_number() const { return is_number_integer() || std::holds_alternative<double>(value_); }
  // Written without a fraction or an exponent.
  bool is_number_integer() const;
  bool is_number_unsigned() const;  // of those, from 0 on
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  // Throws JsonError of another kind of value. Numbers become what static_cast makes of them.
  template <typename T>
  T get() const;
  const std::string& text() const;

  // Of an array, an object or neither, which has none.
  std::size_t size() const;
  bool empty() const { return size() == 0; }

  // --- arrays
  // Throws JsonError without such an element.
  const Json& at(std::size_t index) const;
  const Json& operator[](std::size_t index) const { return at(index); }
  Json& operator[](std::size_t index) { return const_cast<Json&>(at(index)); }
  // Null becomes an array.
  void push_back(Json value);
  Array::const_iterator begin() const { return elements().begin(); }
  Array::const_iterator end() const { return elements().end(); }

  // --- objects. Members are searched for one after the other.
  // nullptr without it.
  const Json* find(std::string_view name) const;
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  // Throws JsonError without it.
  const Json& at(std::string_view name) const;
  const Json& operator[](std::string_view name) const { return at(name); }
  Json value(std::string_view name, Json otherwise) const;
  // Null where there was none; null itself becomes an object.
  Json& operator[](std::string_view name);
  // Sets each member of `other`.
  void update(Json other);
  void erase(std::string_view name);
  const Object& items() const;

  // Numbers are equal if their values are.
  friend bool operator==(const Json& a, const Json& b);

 private:
  // A whole number is an int64 if it can be.
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

// What a text of JSON has in it, one after the other, for files that are not made values of. Each
// answers whether to go on.
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
  // Not JSON: after `position` bytes. The last of them.
  virtual void parse_error(std::size_t position, const std::string& what) = 0;
};
// Whether all of it was read. Nothing recurses, however deep the text is.
bool parse_json(std::string_view text, JsonEvents& events);

}  // namespace logitless
