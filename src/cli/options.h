// The program's command line: commands and their options. Only options.cpp includes the parser's
// headers, because each file that includes them compiles the whole parser.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace logitless::cli {

// An invalid command line: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Parses a number. Throws UsageError unless the whole text is a finite number.
double parse_number(const std::string& text);

// One option; valid as long as its command line. Each setter returns the option itself.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}

  // Sets the heading of its group in the help text.
  Option& group(const std::string& heading);
  Option& required(bool yes = true);
  // Sets the symbol of its value in the help text.
  Option& placeholder(const std::string& text);
  // Adds a check: problem(value) returns an error message, or "".
  Option& check(std::function<std::string(const std::string&)> problem);

 private:
  CLI::Option* option_;
};

// The options of one command; valid as long as its command line. Parsing sets the values of given
// options only; the values must outlive it.
class Options {
 public:
  Options(CLI::App& app, std::shared_ptr<const std::string> line)
      : app_(&app), line_(std::move(line)) {}

  // Adds an option with a parser for its text; the messages of its InvalidArgument or UsageError
  // get the option's name. An empty text is refused.
  Option add_parsed(const std::string& name, const std::string& placeholder,
                    std::function<void(const std::string&)> parse, const std::string& description);
  // Does the same for an option with any number of values, one after the other.
  Option add_parsed_list(const std::string& name, std::function<void(const std::string&)> parse,
                         const std::string& description);
  Option add_number(const std::string& name, double& value, const std::string& description);
  Option add_number(const std::string& name, float& value, const std::string& description);
  Option add_number(const std::string& name, std::optional<double>& value,
                    const std::string& description);
  // Adds a whole number in [least, most].
  Option add_integer(const std::string& name, std::int64_t& value, std::int64_t least,
                     std::int64_t most, const std::string& description);
  // Adds a text that must not be empty. A name without dashes is that of a positional argument.
  Option add_text(const std::string& name, std::string& value, const std::string& description);
  Option add_texts(const std::string& name, std::vector<std::string>& values,
                   const std::string& description);
  Option add_flag(const std::string& name, bool& value, const std::string& description);
  // Sets the end of the help text.
  void footer(const std::string& text);

  // After parsing: whether the command line has this command, and the names (without dashes) of its
  // given options.
  bool chosen() const;
  std::set<std::string> given() const;
  // Returns the whole command line, as a shell takes it.
  const std::string& command_line() const { return *line_; }

 private:
  CLI::App* app_;
  std::shared_ptr<const std::string> line_;
};

// The whole command line: commands, exactly one of which must be given, --help and --version.
class CommandLine {
 public:
  // `version` is what --version prints.
  CommandLine(const std::string& name, const std::string& description, const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  // Add all commands before the footer, which they would inherit otherwise.
  Options add_command(const std::string& name, const std::string& description);
  void footer(const std::string& text);

  // Sets the values of the options. Returns false if help or the version was requested, and prints
  // it. Throws UsageError, and the exceptions of the options' parsers.
  bool parse(int count, const char* const* arguments);
  // Returns the command that was read, even if its options are invalid; empty if there was none.
  const std::string& command() const { return command_; }

 private:
  std::unique_ptr<CLI::App> app_;
  std::vector<std::string> names_;
  std::string command_;
  std::shared_ptr<std::string> line_ = std::make_shared<std::string>();
};

}  // namespace logitless::cli
