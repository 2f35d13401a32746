#include "json/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

namespace logitless {
namespace {

using Other = nlohmann::ordered_json;

// Forwards nlohmann's events to JsonEvents.
struct Forward {
  JsonEvents& to;

  bool null() { return to.null(); }
  bool boolean(bool value) { return to.boolean(value); }
  bool number_integer(std::int64_t value) { return to.number_integer(value); }
  bool number_unsigned(std::uint64_t value) { return to.number_unsigned(value); }
  bool number_float(double value, const std::string& text) { return to.number_float(value, text); }
  bool string(std::string& text) { return to.string(text); }
  bool binary(Other::binary_t&) { return false; }  // does not occur in text
  bool start_object(std::size_t) { return to.start_object(); }
  bool key(std::string& name) { return to.key(name); }
  bool end_object() { return to.end_object(); }
  bool start_array(std::size_t) { return to.start_array(); }
  bool end_array() { return to.end_array(); }
  bool parse_error(std::size_t position, const std::string&, const Other::exception& error) {
    to.parse_error(position, error.what());
    return false;
  }
};

// Keeps the last member of each name, at the position of the first.
void drop_repeated(Json::Object& members) {
  std::vector<std::size_t> order(members.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return members[a].first < members[b].first;
  });
  std::vector<bool> dropped(members.size());
  bool any = false;
  for (std::size_t i = 0; i < order.size();) {
    const std::size_t first = order[i];
    std::size_t last = i + 1;
    for (; last < order.size() && members[order[last]].first == members[first].first; ++last)
      any = dropped[order[last]] = true;
    if (last > i + 1) members[first].second = std::move(members[order[last - 1]].second);
    i = last;
  }
  if (!any) return;
  Json::Object kept;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!dropped[i]) kept.push_back(std::move(members[i]));
  }
  members = std::move(kept);
}

// Builds a value from events.
class Builder : public JsonEvents {
 public:
  Json take() { return std::move(result_); }
  const std::string& error() const { return error_; }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& text) override { return add(std::move(text)); }
  bool start_object() override { return open(true); }
  bool start_array() override { return open(false); }
  bool key(std::string& name) override {
    open_.back().members.emplace_back(std::move(name), nullptr);
    return true;
  }
  bool end_object() override {
    drop_repeated(open_.back().members);
    Json value(std::move(open_.back().members));
    open_.pop_back();
    return add(std::move(value));
  }
  bool end_array() override {
    Json value(std::move(open_.back().elements));
    open_.pop_back();
    return add(std::move(value));
  }
  void parse_error(std::size_t, const std::string& what) override { error_ = what; }

 private:
  struct Open {
    bool is_object = false;
    Json::Array elements;
    Json::Object members;
  };

  bool open(bool is_object) {
    if (open_.size() == Json::kMostDepth) {
      error_ =
          "more than " + std::to_string(Json::kMostDepth) + " arrays and objects in each other";
      return false;
    }
    open_.push_back({is_object, {}, {}});
    return true;
  }
  bool add(Json value) {
    if (open_.empty()) {
      result_ = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().members.back().second = std::move(value);
    } else {
      open_.back().elements.push_back(std::move(value));
    }
    return true;
  }

  std::vector<Open> open_;
  Json result_;
  std::string error_;
};

Other other_of(const Json& json) {
  if (json.is_null()) return nullptr;
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned()) return json.get<std::uint64_t>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.text();
  if (json.is_array()) {
    Other::array_t elements;
    elements.reserve(json.size());
    for (const Json& element : json) elements.push_back(other_of(element));
    return elements;
  }
  Other::object_t members;  // a vector; its emplace would search
  members.reserve(json.size());
  for (const auto& [name, value] : json.items()) members.push_back({name, other_of(value)});
  return members;
}

}  // namespace

bool parse_json(std::string_view text, JsonEvents& events) {
  Forward forward{events};
  return Other::sax_parse(text.begin(), text.end(), &forward);
}

Json::Json(const char* text) : value_(std::string(text)) {}
Json::Json(std::string_view text) : value_(std::string(text)) {}
Json::Json(std::string text) : value_(std::move(text)) {}
Json::Json(Array array) : value_(std::move(array)) {}
Json::Json(Object object) : value_(std::move(object)) {}
Json::~Json() = default;
Json::Json(const Json& other) = default;
Json::Json(Json&& other) noexcept = default;
// `other` may be an element of this one and is destroyed with the old value.
Json& Json::operator=(const Json& other) { return *this = Json(other); }
Json& Json::operator=(Json&& other) noexcept {
  Value taken = std::move(other.value_);
  value_ = std::move(taken);
  return *this;
}

Json::Json(std::initializer_list<Json> elements) {
  const bool is_object = std::all_of(elements.begin(), elements.end(), [](const Json& element) {
    return element.is_array() && element.size() == 2 && element.at(std::size_t{0}).is_string();
  });
  if (!is_object) {
    value_ = Array(elements);
    return;
  }
  Object members;
  members.reserve(elements.size());
  for (const Json& element : elements)
    members.emplace_back(element.at(std::size_t{0}).text(), element.at(std::size_t{1}));
  drop_repeated(members);
  value_ = std::move(members);
}

Json Json::parse(std::string_view text) {
  Builder builder;
  if (!parse_json(text, builder)) throw JsonError(builder.error());
  return builder.take();
}

std::optional<Json> Json::try_parse(std::string_view text) {
  Builder builder;
  if (!parse_json(text, builder)) return std::nullopt;
  return builder.take();
}

std::string Json::dump(int indent, NotUtf8 not_utf8) const {
  const auto handler = not_utf8 == NotUtf8::refuse ? Other::error_handler_t::strict
                                                   : Other::error_handler_t::replace;
  try {
    return other_of(*this).dump(indent, ' ', not_utf8 == NotUtf8::replace_ascii, handler);
  } catch (const Other::exception& error) {
    throw JsonError(error.what());
  }
}

std::ostream& operator<<(std::ostream& out, const Json& json) {
  return out << json.dump(-1, NotUtf8::replace);
}

bool Json::is_number_integer() const {
  return std::holds_alternative<std::int64_t>(value_) ||
         std::holds_alternative<std::uint64_t>(value_);
}

bool Json::is_number_unsigned() const {
  const auto* whole = std::get_if<std::int64_t>(&value_);
  return std::holds_alternative<std::uint64_t>(value_) || (whole != nullptr && *whole >= 0);
}

void Json::set(std::uint64_t value) {
  if (value <= INT64_MAX) {
    value_ = static_cast<std::int64_t>(value);
  } else {
    value_ = value;
  }
}

void Json::refuse(const char* expected) const {
  constexpr const char* kNames[] = {"null",   "boolean", "number", "number",
                                    "number", "string",  "array",  "object"};
  throw JsonError(std::string("type must be ") + expected + ", but is " + kNames[value_.index()]);
}

bool Json::as_bool() const {
  if (!is_boolean()) refuse("boolean");
  return std::get<bool>(value_);
}

std::int64_t Json::as_integer() const {
  if (const auto* whole = std::get_if<std::int64_t>(&value_)) return *whole;
  if (const auto* big = std::get_if<std::uint64_t>(&value_)) return static_cast<std::int64_t>(*big);
  return static_cast<std::int64_t>(as_double());
}

double Json::as_double() const {
  if (const auto* whole = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*whole);
  if (const auto* big = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*big);
  if (const auto* real = std::get_if<double>(&value_)) return *real;
  refuse("number");
}

const std::string& Json::text() const {
  if (!is_string()) refuse("string");
  return std::get<std::string>(value_);
}

std::size_t Json::size() const {
  if (is_array()) return elements().size();
  return is_object() ? items().size() : 0;
}

const Json::Array& Json::elements() const {
  static const Array kNone;
  const auto* array = std::get_if<Array>(&value_);
  return array != nullptr ? *array : kNone;
}

const Json& Json::at(std::size_t index) const {
  if (!is_array()) refuse("array");
  if (index >= size())
    throw JsonError("there is no element " + std::to_string(index) + " of " +
                    std::to_string(size()));
  return elements()[index];
}

void Json::push_back(Json value) {
  if (is_null()) value_ = Array();
  if (!is_array()) refuse("array");
  std::get<Array>(value_).push_back(std::move(value));
}

const Json* Json::find(std::string_view name) const {
  const auto* members = std::get_if<Object>(&value_);
  if (members == nullptr) return nullptr;
  const auto found = std::find_if(members->begin(), members->end(),
                                  [&](const Member& member) { return member.first == name; });
  return found == members->end() ? nullptr : &found->second;
}

const Json& Json::at(std::string_view name) const {
  if (!is_object()) refuse("object");
  const Json* found = find(name);
  if (found == nullptr) throw JsonError("key '" + std::string(name) + "' not found");
  return *found;
}

Json Json::value(std::string_view name, Json otherwise) const {
  if (!is_object()) refuse("object");
  const Json* found = find(name);
  return found != nullptr ? *found : std::move(otherwise);
}

Json& Json::operator[](std::string_view name) {
  if (is_null()) value_ = Object();
  if (!is_object()) refuse("object");
  if (const Json* found = find(name)) return const_cast<Json&>(*found);
  return std::get<Object>(value_).emplace_back(name, nullptr).second;
}

void Json::update(Json other) {
  if (!other.is_object()) other.refuse("object");
  for (auto& [name, value] : std::get<Object>(other.value_)) (*this)[name] = std::move(value);
}

void Json::erase(std::string_view name) {
  if (!is_object()) refuse("object");
  std::erase_if(std::get<Object>(value_), [&](const Member& m) { return m.first == name; });
}

const Json::Object& Json::items() const {
  if (!is_object()) refuse("object");
  return std::get<Object>(value_);
}

bool operator==(const Json& a, const Json& b) {
  if (a.is_number() && b.is_number() && a.value_.index() != b.value_.index()) {
    // Different kinds: an integer above INT64_MAX equals no signed one.
    return !(a.is_number_integer() && b.is_number_integer()) && a.as_double() == b.as_double();
  }
  return a.value_ == b.value_;
}

}  // namespace logitless
