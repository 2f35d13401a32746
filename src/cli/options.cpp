#include "cli/options.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>

#include "cli/output.h"
#include "logitless/error.h"

namespace logitless::cli {
namespace {

std::int64_t parse_integer(const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || value < least || value > most) {
    const bool bounded = most < INT64_MAX;
    const std::string range = least == INT64_MIN ? std::string()
                              : bounded          ? fmt::format(" from {} to {}", least, most)
                                                 : fmt::format(" of at least {}", least);
    throw UsageError(fmt::format("expected a whole number{}, got '{}'", range, text));
  }
  return value;
}

std::string if_empty(const std::string& text) {
  return text.empty() ? "expected a value, got ''" : "";
}

// Returns a word as a shell takes it.
std::string quoted(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos)
    return std::string(word);
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// Returns CLI11's help text without its runs of empty lines.
std::string tidy(std::string help) {
  for (std::size_t at = 0; (at = help.find("\n\n\n", at)) != std::string::npos;) help.erase(at, 1);
  return help;
}

// Returns CLI11's error, in clearer terms for some cases. `command` is empty where none was read;
// `commands` are all commands.
std::string explain(const CLI::ParseError& error, const CLI::App& app, const std::string& command,
                    const std::vector<std::string>& commands) {
  const std::vector<std::string> rest = app.remaining(true);
  if (!rest.empty() && (rest.front().front() == '-' || !command.empty())) {
    return fmt::format("'{}' is not an option; see {}{}{} --help", rest.front(), app.get_name(),
                       command.empty() ? "" : " ", command);
  }
  if (command.empty()) {
    std::string expected;
    for (std::size_t i = 0; i < commands.size(); ++i) {
      expected += i == 0 ? "" : i + 1 < commands.size() ? ", " : " or ";
      expected += commands[i];
    }
    return fmt::format("{}; expected {} (see {} --help)",
                       rest.empty() ? "no command was given"
                                    : fmt::format("there is no command '{}'", rest.front()),
                       expected, app.get_name());
  }
  const std::string text = error.what();
  const std::string option = text.substr(0, text.find(':'));
  if (text.find("At Most 1 required") != std::string::npos)
    return option + ": given more than once";
  if (text.find("flag override") != std::string::npos)
    return "--" + text.substr(0, text.find(' ')) + ": takes no value";
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return option + ": expected a value after it";
  return text;
}

}  // namespace

double parse_number(const std::string& text) {
  double value = 0.0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !std::isfinite(value)) {
    throw UsageError(fmt::format("expected a number, got '{}'", text));
  }
  return value;
}

Option& Option::group(const std::string& heading) {
  option_->group(heading);
  return *this;
}

Option& Option::required(bool yes) {
  option_->required(yes);
  return *this;
}

Option& Option::placeholder(const std::string& text) {
  option_->type_name(text);
  return *this;
}

Option& Option::check(std::function<std::string(const std::string&)> problem) {
  option_->check(std::move(problem));
  return *this;
}

Option Options::add_parsed(const std::string& name, const std::string& placeholder,
                           std::function<void(const std::string&)> parse,
                           const std::string& description) {
  const std::function<void(const std::string&)> read =
      [name, placeholder, parse = std::move(parse)](const std::string& text) {
        try {
          // An empty value is refused everywhere, because an empty text stands for an option that
          // was not given.
          if (text.empty()) throw UsageError(fmt::format("expected {}, got ''", placeholder));
          parse(text);
        } catch (const InvalidArgument& e) {
          throw UsageError(fmt::format("{}: {}", name, e.what()));
        } catch (const UsageError& e) {
          throw UsageError(fmt::format("{}: {}", name, e.what()));
        }
      };
  return Option(*app_->add_option_function<std::string>(name, read, description))
      .placeholder(placeholder);
}

Option Options::add_parsed_list(const std::string& name,
                                std::function<void(const std::string&)> parse,
                                const std::string& description) {
  const std::function<void(const std::vector<std::string>&)> read =
      [name, parse = std::move(parse)](const std::vector<std::string>& list) {
        try {
          for (const std::string& text : list) parse(text);
        } catch (const InvalidArgument& e) {
          throw CLI::ValidationError(name, e.what());
        } catch (const UsageError& e) {
          throw CLI::ValidationError(name, e.what());
        }
      };
  return Option(*app_->add_option_function<std::vector<std::string>>(name, read, description));
}

Option Options::add_number(const std::string& name, double& value, const std::string& description) {
  return add_parsed(
      name, "X", [&value](const std::string& text) { value = parse_number(text); }, description);
}

Option Options::add_number(const std::string& name, float& value, const std::string& description) {
  return add_parsed(
      name, "X",
      [&value](const std::string& text) { value = static_cast<float>(parse_number(text)); },
      description);
}

Option Options::add_number(const std::string& name, std::optional<double>& value,
                           const std::string& description) {
  return add_parsed(
      name, "X", [&value](const std::string& text) { value = parse_number(text); }, description);
}

Option Options::add_integer(const std::string& name, std::int64_t& value, std::int64_t least,
                            std::int64_t most, const std::string& description) {
  return add_parsed(
      name, "N",
      [&value, least, most](const std::string& text) { value = parse_integer(text, least, most); },
      description);
}

Option Options::add_text(const std::string& name, std::string& value,
                         const std::string& description) {
  return Option(*app_->add_option(name, value, description)).check(if_empty);
}

Option Options::add_texts(const std::string& name, std::vector<std::string>& values,
                          const std::string& description) {
  return Option(*app_->add_option(name, values, description)).check(if_empty);
}

Option Options::add_flag(const std::string& name, bool& value, const std::string& description) {
  return Option(*app_->add_flag(name, value, description)->disable_flag_override());
}

void Options::footer(const std::string& text) { app_->footer(text); }

bool Options::chosen() const { return app_->parsed(); }

std::set<std::string> Options::given() const {
  std::set<std::string> names;
  for (const CLI::Option* option : app_->get_options()) {
    if (option->count() > 0) names.insert(option->get_single_name());
  }
  return names;
}

CommandLine::CommandLine(const std::string& name, const std::string& description,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->set_version_flag("--version", version, "print the version and leave");
  app_->set_help_flag("-h,--help", "print this help and leave");
  app_->require_subcommand(1);
  app_->get_formatter()->column_width(30);
}

CommandLine::~CommandLine() = default;

Options CommandLine::add_command(const std::string& name, const std::string& description) {
  CLI::App* command = app_->add_subcommand(name, description);
  // Recorded before the whole line is parsed, so that errors in options can name the command.
  command->preparse_callback([this, name](std::size_t) { command_ = name; });
  names_.push_back(name);
  return Options(*command, line_);
}

void CommandLine::footer(const std::string& text) { app_->footer(text); }

bool CommandLine::parse(int count, const char* const* arguments) {
  *line_ = app_->get_name();
  for (int i = 1; i < count; ++i) *line_ += " " + quoted(arguments[i]);
  try {
    app_->parse(count, arguments);
    return true;
  } catch (const CLI::CallForHelp&) {
    print(tidy(app_->help()));
  } catch (const CLI::CallForVersion& e) {
    print(fmt::format("{}\n", e.what()));
  } catch (const CLI::ParseError& e) {
    throw UsageError(explain(e, *app_, command_, names_));
  }
  return false;
}

}  // namespace logitless::cli
