// The program's command line: commands, and the options of each. The one file that knows the
// parser's headers is options.cpp, as each file that includes them compiles the whole parser again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace logitless::cli {

// A command line that asks for something wrong: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws UsageError unless the whole text is a finite number.
double parse_number(const std::string& text);

// One option, as long as the command line it is of. Each setter returns the option itself.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}

  // The heading of the help text that it stands under.
  Option& group(const std::string& heading);
  Option& required(bool yes = true);
  // What stands for its value in the help text.
  Option& placeholder(const std::string& text);
  // What `problem` says of a value, if anything, is the error of the command line.
  Option& check(std::function<std::string(const std::string&)> problem);

 private:
  CLI::Option* option_;
};

// The options of one command, as long as the command line it is of. Values stay as they are until
// the command line is parsed, and where an option is not given; they must live that long.
class Options {
 public:
  explicit Options(CLI::App& app) : app_(&app) {}

  // An option whose text `parse` turns into the value; InvalidArgument or UsageError from it names
  // the option. An empty text is refused.
  Option add_parsed(const std::string& name, const std::string& placeholder,
                    std::function<void(const std::string&)> parse, const std::string& description);
  // The same with any number of values, one after the other.
  Option add_parsed_list(const std::string& name, std::function<void(const std::string&)> parse,
                         const std::string& description);
  Option add_number(const std::string& name, double& value, const std::string& description);
  Option add_number(const std::string& name, float& value, const std::string& description);
  Option add_number(const std::string& name, std::optional<double>& value,
                    const std::string& description);
  // A whole number in [least, most].
  Option add_integer(const std::string& name, std::int64_t& value, std::int64_t least,
                     std::int64_t most, const std::string& description);
  // Not empty. A name without dashes is that of a value told by its place.
  Option add_text(const std::string& name, std::string& value, const std::string& description);
  Option add_texts(const std::string& name, std::vector<std::string>& values,
                   const std::string& description);
  Option add_flag(const std::string& name, bool& value, const std::string& description);
  // The end of the help text.
  void footer(const std::string& text);

  // Once the command line is parsed: whether it has this command, and the names (without dashes) of
  // the options that it gives.
  bool chosen() const;
  std::set<std::string> given() const;

 private:
  CLI::App* app_;
};

// The whole of it: commands, of which one is to be given, --help and --version.
class CommandLine {
 public:
  // `version` is what --version prints.
  CommandLine(const std::string& name, const std::string& description, const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  // All commands are added before the footer, which they would have as well otherwise.
  Options add_command(const std::string& name, const std::string& description);
  void footer(const std::string& text);

  // Sets the values of the options. False: help or the version was asked for, and is printed.
  // Throws UsageError, and what the options' own functions throw.
  bool parse(int count, const char* const* arguments);
  // The command that was read, even where what follows it is wrong; empty where there was none.
  const std::string& command() const { return command_; }

 private:
  std::unique_ptr<CLI::App> app_;
  std::vector<std::string> names_;
  std::string command_;
};

}  // namespace logitless::cli
