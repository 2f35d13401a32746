// main() for a fuzz target without libFuzzer. It runs the corpus, then mutations of it. The seed
// and a mutation's number determine the mutation, so any one can be run again.
//
//    fuzz_x [--seed N] [--first N] [--runs N] [--dict FILE] PATH...
//
// PATH is a file, or a folder of files.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/mutate.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Defined under AddressSanitizer and UndefinedBehaviorSanitizer.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace logitless::fuzz {
namespace {

constexpr unsigned kSecondsForOneInput = 30;
constexpr int kCrashStatus = 70;

// The current input, for reports from a signal handler, which must not allocate.
std::string current_input;
std::string current_command;
constexpr char kCrashFile[] = "crash-input";

void say(const char* text, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(STDERR_FILENO, text, size);
    if (written <= 0) return;
    text += written;
    size -= static_cast<std::size_t>(written);
  }
}

void report() {
  static volatile std::sig_atomic_t reported = 0;
  if (reported) return;
  reported = 1;
  const int file = ::open(kCrashFile, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  const bool saved = file >= 0 && ::write(file, current_input.data(), current_input.size()) ==
                                      static_cast<ssize_t>(current_input.size());
  constexpr char kReproduce[] = "\nfuzz: reproduce with: ";
  constexpr char kSaved[] = "\nfuzz: the input is in the file crash-input of this folder\n";
  say(kReproduce, sizeof(kReproduce) - 1);
  say(current_command.data(), current_command.size());
  say(kSaved, saved ? sizeof(kSaved) - 1 : 1);
}

[[noreturn]] void on_signal(int signal) {
  if (signal == SIGALRM) {
    constexpr char kSlow[] = "fuzz: the input took too long\n";
    say(kSlow, sizeof(kSlow) - 1);
  }
  report();
  ::_exit(kCrashStatus);
}

void install_handlers() {
  std::vector<int> signals = {SIGABRT, SIGALRM};
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(report);  // the sanitizer reports more about the other signals
  } else {
    signals.insert(signals.end(), {SIGSEGV, SIGBUS, SIGFPE, SIGILL});
  }
  for (const int signal : signals) std::signal(signal, on_signal);
}

void run(const std::string& input, std::string command) {
  current_input = input;
  current_command = std::move(command);
  ::alarm(kSecondsForOneInput);
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current_input.data()),
                         current_input.size());
  ::alarm(0);
}

struct Arguments {
  std::string program;
  std::uint64_t seed = 1;
  std::uint64_t first = 0;
  std::uint64_t runs = 0;
  std::string dict;
  std::vector<std::string> paths;
};

[[noreturn]] void usage(const std::string& problem) {
  std::fprintf(stderr,
               "%s\nusage: [--seed N] [--first N] [--runs N] [--dict FILE] PATH...\n"
               "Runs each file, and then mutations number `first` to `first + runs - 1`.\n",
               problem.c_str());
  std::exit(2);
}

std::uint64_t number(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end != '\0')
    usage(option + " is '" + text + "', expected a number from 0");
  return value;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  arguments.program = argv[0];
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (!text.starts_with("--")) {
      arguments.paths.push_back(text);
      continue;
    }
    if (++i == argc) usage(text + " needs a value");
    if (text == "--seed") {
      arguments.seed = number(text, argv[i]);
    } else if (text == "--first") {
      arguments.first = number(text, argv[i]);
    } else if (text == "--runs") {
      arguments.runs = number(text, argv[i]);
    } else if (text == "--dict") {
      arguments.dict = argv[i];
    } else {
      usage("unknown option " + text);
    }
  }
  return arguments;
}

std::string whole_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) usage("cannot read '" + path + "'");
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Returns the files that the paths name, sorted, so that numbers mean the same everywhere.
std::vector<std::string> list_files(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    const std::size_t begin = files.size();
    for (const auto& entry : std::filesystem::directory_iterator(path))
      if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(begin), files.end());
  }
  return files;
}

int fuzz(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  const std::vector<std::string> files = list_files(arguments.paths);
  if (files.empty()) usage("no input: expected files, or folders of files");
  const std::vector<std::string> tokens =
      arguments.dict.empty() ? std::vector<std::string>() : parse_dict(whole_file(arguments.dict));
  install_handlers();

  std::vector<std::string> corpus;
  for (const std::string& file : files) {
    corpus.push_back(whole_file(file));
    run(corpus.back(), arguments.program + " " + file);
  }
  std::string command = arguments.program + " --seed " + std::to_string(arguments.seed) +
                        (arguments.dict.empty() ? "" : " --dict " + arguments.dict);
  for (std::uint64_t i = arguments.first; i < arguments.first + arguments.runs; ++i) {
    std::string again = command + " --runs 1 --first " + std::to_string(i);
    for (const std::string& path : arguments.paths) again += " " + path;
    run(mutate(corpus, tokens, arguments.seed, i), std::move(again));
  }
  std::printf("%zu files of the corpus and %llu mutations passed\n", corpus.size(),
              static_cast<unsigned long long>(arguments.runs));
  return 0;
}

}  // namespace
}  // namespace logitless::fuzz

int main(int argc, char** argv) { return logitless::fuzz::fuzz(argc, argv); }
