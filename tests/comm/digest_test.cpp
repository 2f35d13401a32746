#include "comm/digest.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "comm/collective_calls.h"
#include "comm/ranks.h"
#include "comm/status.h"

namespace logitless {
namespace {

using Fill = std::function<void(int rank, PlanDigest& digest)>;

// Returns the exception that every rank throws; all must be the same.
Outcome refusal(int size, const Fill& fill) {
  const Ranks ranks = make_thread_group(size);
  const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
    RandomDelays delay(c.rank(), static_cast<unsigned>(size));
    delay();
    agree(c, [&](PlanDigest& digest) { fill(c.rank(), digest); });
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  // The group stays usable.
  const auto after = run_ranks(ranks, [](Communicator& c) { agree(c, [](PlanDigest&) {}); });
  EXPECT_EQ(after, std::vector<Outcome>(ranks.size()));
  return outcomes[0];
}

Outcome invalid(const std::string& text) { return {"InvalidArgument", text}; }

TEST(Digest, RanksAgree) {
  for (int size = 1; size <= 8; ++size) {
    const Ranks ranks = make_thread_group(size);
    std::vector<Agreement> agreements(ranks.size());
    const std::int64_t vocab = 10 * size - 3;
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      RandomDelays delay(c.rank(), static_cast<unsigned>(size));
      delay();
      agreements[static_cast<std::size_t>(c.rank())] = agree(c, [&](PlanDigest& digest) {
        digest.same("dim", 4096);
        digest.same("dtype", "bf16");
        digest.own("tokens", 100 + c.rank());
        const std::int64_t first = 10 * c.rank();
        const VocabRun run{first, std::min(first + 10, vocab)};
        digest.add_vocab(vocab, {&run, 1});
        delay();
      });
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(ranks.size()));
    for (const Agreement& agreement : agreements) {
      EXPECT_EQ(agreement.plan, agreements[0].plan);
      EXPECT_NE(agreement.plan, 0u);
      for (int r = 0; r < size; ++r) {
        EXPECT_EQ(agreement.value_of(r, "tokens"), 100 + r);
        const std::int64_t end = r + 1 < size ? 10 * r + 10 : vocab;
        EXPECT_EQ(agreement.vocab_runs[static_cast<std::size_t>(r)],
                  (std::vector<VocabRun>{{10 * r, end}}));
      }
    }
  }
}

TEST(Digest, PlansOfDifferentRequestsDiffer) {
  const Ranks ranks = make_thread_group(1);
  const auto plan = [&](std::int64_t dim, std::int64_t tokens) {
    return agree(*ranks[0],
                 [&](PlanDigest& digest) {
                   digest.same("dim", dim);
                   digest.own("tokens", tokens);
                 })
        .plan;
  };
  EXPECT_EQ(plan(8, 5), plan(8, 5));
  EXPECT_NE(plan(8, 5), plan(16, 5));
  EXPECT_NE(plan(8, 5), plan(8, 6));
}

TEST(Digest, NamesTheFirstDifference) {
  EXPECT_EQ(refusal(3,
                    [](int rank, PlanDigest& digest) {
                      digest.same("dtype", "bf16");
                      digest.same("dim", rank == 2 ? 4096 : 4100);
                      digest.same("softcap", rank == 1 ? "30" : "0");
                    }),
            invalid("rank 1: softcap 30, rank 0: 0"));
  EXPECT_EQ(
      refusal(3, [](int rank, PlanDigest& digest) { digest.same("dim", rank == 2 ? 4096 : 4100); }),
      invalid("rank 2: dim 4096, rank 0: 4100"));
  EXPECT_EQ(refusal(2,
                    [](int rank, PlanDigest& digest) {
                      digest.same("dim", 8);
                      if (rank == 1) digest.same("bias", "f32");
                    }),
            invalid("rank 1: bias f32, rank 0: nothing"));
  EXPECT_EQ(
      refusal(2, [](int rank,
                    PlanDigest& digest) { digest.same(rank == 0 ? "entropy" : "argmax", "yes"); }),
      invalid("rank 1: argmax yes, rank 0: entropy yes"));
}

TEST(Digest, PropagatesWhatARankThrew) {
  for (int size = 1; size <= 8; ++size) {
    const int bad = size / 2;
    EXPECT_EQ(refusal(size,
                      [&](int rank, PlanDigest& digest) {
                        digest.same("dim", rank);  // would differ, but exceptions come first
                        if (rank == bad) throw InvalidArgument("weight is [3, 4100]\x1b[m");
                      }),
              invalid("rank " + std::to_string(bad) + ": weight is [3, 4100]\\x1b[m"));
  }
  EXPECT_EQ(refusal(4,
                    [](int rank, PlanDigest&) {
                      if (rank == 1) throw Unsupported("no plan fits");
                      if (rank == 3) throw std::bad_alloc();
                    }),
            (Outcome{"Unsupported", "rank 1: no plan fits; rank 3: out of memory"}));
  EXPECT_EQ(refusal(2,
                    [](int rank, PlanDigest&) {
                      if (rank == 1) throw DeviceError(std::string(3000, 'x'));
                    }),
            (Outcome{"DeviceError", "rank 1: " + std::string(1000, 'x')}));
}

// Rank r has runs[r] of [0, 10).
Outcome cover(const std::vector<std::vector<VocabRun>>& runs) {
  return refusal(static_cast<int>(runs.size()), [&](int rank, PlanDigest& digest) {
    digest.add_vocab(10, runs[static_cast<std::size_t>(rank)]);
  });
}

TEST(Digest, VocabIsCoveredOnce) {
  const Outcome fine;
  EXPECT_EQ(cover({{{0, 10}}}), fine);
  EXPECT_EQ(cover({{{5, 10}}, {}, {{0, 5}}}), fine);
  EXPECT_EQ(
      cover({{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}}, {{1, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 10}}}),
      fine);
  EXPECT_EQ(cover({{{0, 5}, {7, 7}}, {{5, 10}}}), fine);  // an empty run is ignored
  EXPECT_EQ(cover({{{0, 5}}, {{6, 10}}}), invalid("vocabulary entry 5 is on no rank"));
  EXPECT_EQ(cover({{{1, 5}}, {{5, 10}}}), invalid("vocabulary entry 0 is on no rank"));
  EXPECT_EQ(cover({{{0, 5}}, {{5, 9}}}), invalid("vocabulary entry 9 is on no rank"));
  EXPECT_EQ(cover({{}, {}}), invalid("vocabulary entry 0 is on no rank"));
  EXPECT_EQ(cover({{{0, 5}}, {{5, 8}}, {{7, 10}}}),
            invalid("vocabulary entry 7 is on rank 1 and on rank 2"));
  EXPECT_EQ(cover({{{0, 10}}, {{0, 10}}}),
            invalid("vocabulary entry 0 is on rank 0 and on rank 1"));
  EXPECT_EQ(cover({{{0, 10}}, {{3, 4}}}), invalid("vocabulary entry 3 is on rank 0 and on rank 1"));
  EXPECT_EQ(cover({{{0, 5}, {4, 10}}}), invalid("vocabulary entry 4 is on rank 0 twice"));
  EXPECT_EQ(cover({{{0, 5}}, {{5, 11}}}),
            invalid("rank 1: vocabulary entries [5, 11) are not in [0, 10)"));
  EXPECT_EQ(cover({{{-1, 10}}}), invalid("rank 0: vocabulary entries [-1, 10) are not in [0, 10)"));
  EXPECT_EQ(cover({{{7, 3}, {0, 10}}}),
            invalid("rank 0: vocabulary entries [7, 3) are not in [0, 10)"));
  EXPECT_EQ(refusal(2, [](int rank, PlanDigest& digest) { digest.add_vocab(10 + rank, {}); }),
            invalid("rank 1: vocab 11, rank 0: 10"));
}

TEST(Digest, TablesAsRuns) {
  EXPECT_EQ(runs_of({}), std::vector<VocabRun>{});
  const std::vector<std::int32_t> table{4, 5, 6, 2, 1, 8, 9};
  EXPECT_EQ(runs_of(table), (std::vector<VocabRun>{{4, 7}, {2, 3}, {1, 2}, {8, 10}}));
}

TEST(Digest, ARankElsewhereIsNamed) {
  const auto outcomes = run_ranks(make_thread_group(3), [](Communicator& c) {
    if (c.rank() == 1) {
      StatusHeader header;
      header.stage = Stage::exchange;
      header.call = 5;
      std::vector<StatusHeader> all;
      exchange_status(c, header, "", all);
    } else {
      agree(c, [](PlanDigest&) {});
    }
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, invalid("rank 1: call 5, rank 0: makes a plan")));
}

TEST(Digest, VersionsAreNamed) {
  const auto of = [](std::uint32_t protocol, std::uint64_t version) {
    return run_ranks(make_thread_group(2), [&](Communicator& c) {
      StatusHeader header;
      header.plan = 0x0000000100020003;
      if (c.rank() == 1) {
        header.protocol = protocol;
        header.plan = version;
      }
      std::vector<StatusHeader> all;
      exchange_status(c, header, "", all);
    });
  };
  EXPECT_EQ(of(kStatusProtocol, 0x0000000100020004),
            std::vector<Outcome>(2, invalid("rank 1: logitless 1.2.4, rank 0: logitless 1.2.3")));
  EXPECT_EQ(
      of(kStatusProtocol + 1, 0x0000000100020003),
      std::vector<Outcome>(2, invalid("rank 1: protocol 4c4c0003, rank 0: protocol 4c4c0002")));
}

TEST(Digest, ARankThatEndsIsMissed) {
  Ranks ranks = make_thread_group(3, std::chrono::hours(1));
  ranks[1].reset();
  const auto outcomes =
      run_ranks({ranks[0], ranks[2]}, [](Communicator& c) { agree(c, [](PlanDigest&) {}); });
  EXPECT_EQ(outcomes,
            std::vector<Outcome>(2, {"DeviceError",
                                     "communicator: call 1 (all_gather of 64 bytes): rank 1 of 3 "
                                     "left before it"}));
}

}  // namespace
}  // namespace logitless
