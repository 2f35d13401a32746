// Programs with the head over ranks give the results of one program with all tokens and the full
// vocabulary. Programs without such a head are refused.
#include "logitless/head_over_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "compiler/far_programs.h"
#include "logitless/memory.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 48, kVocabCount = 12345, kDim = 16;  // of a rank; of all; of both
constexpr std::size_t kGuard = 16;                                    // elements behind a tensor

CompiledProgram program_of(const std::string& body, const std::string& more, std::int64_t tokens,
                           int threads = 1) {
  CompileOptions options;
  options.threads = threads;
  FarSizes sizes;
  sizes.tokens = tokens;
  sizes.vocab_count = kVocabCount;
  sizes.dim = kDim;
  return compile(Graph::parse(far_graph(body, more, sizes)), options);
}

// With a bias, a softcap, a scale, and ignored targets.
const std::string kMore = ", %b: f32[VOCAB]";
const std::string kBody =
    "%y = dot %x, %w contract(1; 1) : f32[TOKENS, VOCAB] %a = broadcast %b dims(1) : f32[TOKENS, "
    "VOCAB] %v = add %y, %a %c = constant value(5) : f32[TOKENS, VOCAB] %r = div %v, %c %h = tanh "
    "%r %z = mul %h, %c %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %i = "
    "constant value(-100) : i64[TOKENS] %m = eq %t, %i %o = constant value(0) : f32[TOKENS] %e = "
    "select %m, %o, %d %s = reduce_sum %e dims(0) return s: %s differentiate s wrt %x, %w, %b";
using Floats = std::vector<float>;
struct Problem {
  Floats x, w, b;
  std::vector<std::int64_t> t;
};

Problem problem(int ranks) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  Problem p;
  const auto fill = [&](Floats& to, std::int64_t count, float scale) {
    for (std::int64_t i = 0; i < count; ++i) to.push_back(scale * normal(random));
  };
  fill(p.x, ranks * kTokens * kDim, 1.0f);
  fill(p.w, kVocabCount * kDim, 0.5f);
  fill(p.b, kVocabCount, 0.3f);
  for (std::int64_t i = 0; i < ranks * kTokens; ++i)
    p.t.push_back(i % 7 == 3 ? -100 : static_cast<std::int64_t>(random() % kVocabCount));
  return p;
}

struct Results {
  float loss = NAN;
  Floats d_x, d_w, d_b;
};

// Runs a program with `tokens` tokens from `first` on and the vocabulary entries from `vocab_begin`
// on.
Results run(const CompiledProgram& program, const Problem& p, std::int64_t first,
            std::int64_t tokens, std::int64_t vocab_begin, std::int64_t rows, HeadOverRanks* head) {
  // Tensors have exactly the local rows.
  const auto part = [](const Floats& of, std::int64_t begin, std::int64_t count) {
    return Floats(of.begin() + begin, of.begin() + begin + count);
  };
  const Floats x = part(p.x, first * kDim, tokens * kDim);
  Floats w = part(p.w, vocab_begin * kDim, rows * kDim), b = part(p.b, vocab_begin, rows);
  w.reserve(1);
  b.reserve(1);
  const std::vector<std::int64_t> t(p.t.begin() + first, p.t.begin() + first + tokens);
  Results r;
  r.d_x.assign(static_cast<std::size_t>(tokens * kDim), NAN);
  r.d_w.assign(static_cast<std::size_t>(rows * kDim) + kGuard, NAN);
  r.d_b.assign(static_cast<std::size_t>(rows) + kGuard, NAN);
  std::map<std::string, const void*> given = {
      {"x", x.data()}, {"w", w.data()}, {"b", b.data()}, {"t", t.data()}};
  std::map<std::string, void*> taken = {
      {"s", &r.loss}, {"d_x", r.d_x.data()}, {"d_w", r.d_w.data()}, {"d_b", r.d_b.data()}};
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const auto& tensor : program.parameters()) parameters.push_back(given.at(tensor.name));
  for (const auto& tensor : program.results()) results.push_back(taken.at(tensor.name));
  const Buffer arena(program.arena_bytes());
  if (head != nullptr) {
    program.run(parameters, results, arena.data(), *head);
  } else {
    program.run(parameters, results, arena.data());
  }
  for (auto* gradient : {&r.d_w, &r.d_b}) {
    for (std::size_t i = gradient->size() - kGuard; i < gradient->size(); ++i)
      EXPECT_TRUE(std::isnan((*gradient)[i])) << "written behind this rank's rows";
    gradient->resize(gradient->size() - kGuard);
  }
  return r;
}

double difference(const Floats& a, const float* b) {
  double squares = 0.0, all = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    squares += (x - y) * (x - y);
    all += y * y;
  }
  return std::sqrt(squares / std::max(all, 1e-30));
}

Sharding sharding_of(const std::shared_ptr<Communicator>& ranks, std::int64_t vocab_begin) {
  Sharding sharding;
  sharding.vocab_group = ranks;
  sharding.vocab = kVocabCount;
  sharding.vocab_begin = vocab_begin;
  sharding.tokens = true;
  return sharding;
}

// Rank r holds the vocabulary entries [borders[r], borders[r + 1]).
std::vector<Results> over_ranks(const Problem& p, const std::vector<std::int64_t>& borders,
                                int threads = 1, std::size_t budget = 0) {
  const int ranks = static_cast<int>(borders.size()) - 1;
  const Ranks group = make_thread_group(ranks, std::chrono::seconds(60));
  std::vector<Results> all(static_cast<std::size_t>(ranks));
  for (const Outcome& outcome : run_ranks(group, [&](Communicator& self) {
         const auto r = static_cast<std::size_t>(self.rank());
         const CompiledProgram program = program_of(kBody, kMore, kTokens, threads);
         const std::int64_t rows = borders[r + 1] - borders[r];
         HeadOverRanks head(program, Context({.threads = threads}),
                            sharding_of(group[r], borders[r]), rows, budget);
         EXPECT_GT(head.plan().workspace_bytes(), 0U);
         EXPECT_TRUE(budget == 0 || head.plan().workspace_bytes() <= budget);
         for (int again = 0; again < 2; ++again)
           all[r] = run(program, p, self.rank() * kTokens, kTokens, borders[r], rows, &head);
       }))
    EXPECT_EQ(outcome.text, "");
  return all;
}

TEST(HeadOverRanks, IsWhatOneProgramMakesOfAllTokensAndVocab) {
  for (const std::vector<std::int64_t>& borders : {std::vector<std::int64_t>{0, kVocabCount},
                                                   {0, 6000, kVocabCount},
                                                   {0, 100, 100, kVocabCount}}) {
    const int ranks = static_cast<int>(borders.size()) - 1;
    const Problem p = problem(ranks);
    const Results whole = run(program_of(kBody, kMore, ranks * kTokens), p, 0, ranks * kTokens, 0,
                              kVocabCount, nullptr);
    const std::vector<Results> all = over_ranks(p, borders);
    double loss = 0.0;
    for (std::size_t r = 0; r < all.size(); ++r) {
      loss += static_cast<double>(all[r].loss);
      const auto tokens = static_cast<std::int64_t>(r) * kTokens;
      EXPECT_LT(difference(all[r].d_x, whole.d_x.data() + tokens * kDim), 1e-5);
      EXPECT_LT(difference(all[r].d_w, whole.d_w.data() + borders[r] * kDim), 1e-5);
      EXPECT_LT(difference(all[r].d_b, whole.d_b.data() + borders[r]), 1e-5);
    }
    EXPECT_NEAR(loss / static_cast<double>(whole.loss), 1.0, 1e-6);
  }
}

TEST(HeadOverRanks, HasTheSameBitsForAnyThreadsAndKeepsItsBudget) {
  const Problem p = problem(2);
  const std::vector<Results> one = over_ranks(p, {0, 6000, kVocabCount});
  const std::vector<Results> three = over_ranks(p, {0, 6000, kVocabCount}, 3);
  for (std::size_t r = 0; r < one.size(); ++r) {
    EXPECT_EQ(one[r].d_x, three[r].d_x);
    EXPECT_EQ(one[r].d_w, three[r].d_w);
    EXPECT_EQ(one[r].d_b, three[r].d_b);
    EXPECT_EQ(one[r].loss, three[r].loss);
  }
  const std::vector<Results> small = over_ranks(p, {0, 6000, kVocabCount}, 1, 600000);
  EXPECT_LT(difference(small[1].d_w, one[1].d_w.data()), 1e-5);
}

// A program and the error that each rank throws when it makes the head.
struct Wanted {
  std::string body = kBody, more = kMore;
  std::int64_t rows = 6000;  // of the first rank; the second has the rest
  std::int64_t vocab = kVocabCount;
  bool tokens = true, replicas = false;
  WeightSharding weight = WeightSharding::rows;
};
void expect_refused(const Wanted& wanted, const std::string& kind, const std::string& text) {
  const Ranks group = make_thread_group(2, std::chrono::seconds(60));
  for (const Outcome& outcome : run_ranks(group, [&](Communicator& self) {
         const CompiledProgram program = program_of(wanted.body, wanted.more, kTokens);
         Sharding sharding =
             sharding_of(group[static_cast<std::size_t>(self.rank())], self.rank() == 0 ? 0 : 6000);
         sharding.vocab = wanted.vocab;
         sharding.tokens = wanted.tokens;
         sharding.weight = wanted.weight;
         if (wanted.replicas) sharding.replicas = make_thread_group(1)[0];
         HeadOverRanks head(program, Context({.threads = 1}), sharding,
                            self.rank() == 0 ? wanted.rows : kVocabCount - 6000);
       })) {
    EXPECT_EQ(outcome.kind, kind) << outcome.text;
    EXPECT_NE(outcome.text.find(text), std::string::npos) << outcome.text;
  }
}

TEST(HeadOverRanks, IsRefusedOnAllRanks) {
  expect_refused({.rows = 5999}, "InvalidArgument", "vocabulary entry 5999");
  expect_refused({.rows = -1}, "InvalidArgument", "rows: expected 0 or more, got -1");
  expect_refused({.vocab = kVocabCount + 1}, "InvalidArgument",
                 "sharding: vocab: expected the program's 12345, got 12346");
  expect_refused({.tokens = false}, "InvalidArgument", "sharding: tokens: expected true");
  expect_refused({.replicas = true}, "InvalidArgument", "sharding: replicas: expected none");
  expect_refused({.weight = WeightSharding::columns}, "InvalidArgument",
                 "sharding: weight: expected rows");
  expect_refused({.body = "%s = reduce_sum %x dims(0, 1) return s: %s", .more = ""}, "Unsupported",
                 "has no head operation");
  // The embedding table is the head's weight, too.
  const std::string tied =
      "%u = take %w, %i %k = add %x, %u %z = dot %k, %w contract(1; 1) : f32[TOKENS, VOCAB]";
  expect_refused({.body = tied + kFarLoss + kFarGrad, .more = ", %i: i64[TOKENS]"}, "Unsupported",
                 "the weight of its head elsewhere");
  const std::string own =
      "%z = dot %w, %w contract(1; 1) : f32[VOCAB, VOCAB] %l = reduce_lse %z dims(1) %p = pick %z, "
      "%i axis(1) %d = sub %l, %p %s = reduce_sum %d dims(0) return s: %s";
  expect_refused({.body = own, .more = ", %i: i64[VOCAB]"}, "Unsupported",
                 "the program reads the weight of its head as another operand of the head, too");
  const std::string decayed =
      std::string(kFarLogits) +
      " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %k = reduce_sum %d "
      "dims(0) %q = mul %w, %w %n = reduce_sum %q dims(0, 1) %s = add %k, %n return s: %s" +
      kFarGrad;
  expect_refused({.body = decayed, .more = ""}, "Unsupported",
                 "the program reads the weight of its head elsewhere, too: n");
}

TEST(HeadOverRanks, KeepsATableOfItsOwn) {
  const Problem p = problem(2);
  const std::vector<Results> all = over_ranks(p, {0, 6000, kVocabCount});
  const Ranks group = make_thread_group(2, std::chrono::seconds(60));
  std::vector<Results> tables(2);
  for (const Outcome& outcome : run_ranks(group, [&](Communicator& self) {
         const auto r = static_cast<std::size_t>(self.rank());
         const std::int64_t first = r == 0 ? 0 : 6000, rows = r == 0 ? 6000 : kVocabCount - 6000;
         const CompiledProgram program = program_of(kBody, kMore, kTokens);
         std::vector<std::int32_t> table(static_cast<std::size_t>(rows));
         std::iota(table.begin(), table.end(), static_cast<std::int32_t>(first));
         Sharding sharding = sharding_of(group[r], 0);
         sharding.vocab_ids = {table.data(), DType::i32, {table.size()}};
         HeadOverRanks head(program, Context({.threads = 1}), sharding, rows);
         std::fill(table.begin(), table.end(), -1);
         tables[r] = run(program, p, self.rank() * kTokens, kTokens, first, rows, &head);
       }))
    EXPECT_EQ(outcome.text, "");
  for (const std::size_t r : {0U, 1U}) {
    EXPECT_EQ(tables[r].d_w, all[r].d_w);
    EXPECT_EQ(tables[r].d_x, all[r].d_x);
  }
}

TEST(HeadOverRanks, RunsWhereWeightsMove) {
  const Problem p = problem(2);
  const std::vector<Results> all = over_ranks(p, {0, 6000, kVocabCount});
  const Ranks group = make_thread_group(2, std::chrono::seconds(60));
  for (const Outcome& outcome : run_ranks(group, [&](Communicator& self) {
         const auto r = static_cast<std::size_t>(self.rank());
         const std::int64_t first = r == 0 ? 0 : 6000, rows = r == 0 ? 6000 : kVocabCount - 6000;
         const CompiledProgram program = program_of(kBody, kMore, kTokens);
         Sharding sharding = sharding_of(group[r], first);
         sharding.exchange = ExchangeMode::weights;
         HeadOverRanks head(program, Context({.threads = 1}), sharding, rows);
         EXPECT_GT(head.plan().slice_rows, 0);
         const Results moved = run(program, p, self.rank() * kTokens, kTokens, first, rows, &head);
         EXPECT_LT(difference(moved.d_w, all[r].d_w.data()), 1e-5);
         EXPECT_LT(difference(moved.d_b, all[r].d_b.data()), 1e-5);
         EXPECT_LT(difference(moved.d_x, all[r].d_x.data()), 1e-5);
       }))
    EXPECT_EQ(outcome.text, "");
}

TEST(HeadOverRanks, RunsItsOwnProgramAlone) {
  const std::shared_ptr<Communicator> alone = make_thread_group(1, std::chrono::seconds(5))[0];
  const Problem p = problem(1);
  const CompiledProgram program = program_of(kBody, kMore, kTokens);
  const CompiledProgram other = program_of(kBody, kMore, kTokens);
  HeadOverRanks head(program, Context({.threads = 1}), sharding_of(alone, 0), kVocabCount);
  const Outcome outcome = outcome_of([&] { run(other, p, 0, kTokens, 0, kVocabCount, &head); });
  EXPECT_EQ(outcome.kind, "InvalidArgument");
  EXPECT_EQ(outcome.text, "head: expected a HeadOverRanks that was made of this program");
  HeadOverRanks moved = std::move(head);
  EXPECT_TRUE(std::isfinite(run(program, p, 0, kTokens, 0, kVocabCount, &moved).loss));
}

TEST(HeadOverRanks, NeedsNoGradients) {
  const Problem p = problem(1);
  const std::shared_ptr<Communicator> alone = make_thread_group(1, std::chrono::seconds(5))[0];
  const std::string body =
      std::string(kFarLogits) +
      " %l = reduce_lse %z dims(1) %p = pick %z, %t axis(1) %d = sub %l, %p %s = reduce_sum %d "
      "dims(0) return s: %s";
  const CompiledProgram program = program_of(body, "", kTokens);
  HeadOverRanks head(program, Context({.threads = 1}), sharding_of(alone, 0), kVocabCount);
  const float over = run(program, p, 0, kTokens, 0, kVocabCount, &head).loss;
  EXPECT_NEAR(over / run(program, p, 0, kTokens, 0, kVocabCount, nullptr).loss, 1.0f, 1e-6f);
}

}  // namespace
}  // namespace logitless::test
