#include "comm/digest.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <tuple>

#include "comm/status.h"
#include "core/check.h"
#include "core/hash.h"
#include "core/printable.h"
#include "logitless/version.h"

namespace logitless {
namespace {

constexpr std::uint64_t kVersion = (std::uint64_t{LOGITLESS_VERSION_MAJOR} << 32) |
                                   (std::uint64_t{LOGITLESS_VERSION_MINOR} << 16) |
                                   std::uint64_t{LOGITLESS_VERSION_PATCH};

// Serialises numbers in the machine's byte order: ranks of a group run the same version on the same
// kind of machine.
class Writer {
 public:
  void number(std::int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void text(std::string_view value) {
    number(static_cast<std::int64_t>(value.size()));
    bytes_ += value;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  std::int64_t number() {
    std::int64_t value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string text() { return printable(take(static_cast<std::size_t>(number()))); }

 private:
  std::string_view take(std::size_t bytes) {
    check(bytes <= bytes_.size(), "agree: a digest ends early");
    const std::string_view taken = bytes_.substr(0, bytes);
    bytes_.remove_prefix(bytes);
    return taken;
  }
  std::string_view bytes_;
};

}  // namespace

struct DigestBytes {
  static std::string write(const PlanDigest& digest) {
    Writer out;
    out.number(static_cast<std::int64_t>(digest.same_.size()));
    for (const auto& [name, value] : digest.same_) {
      out.text(name);
      out.text(value);
    }
    out.number(static_cast<std::int64_t>(digest.own_.size()));
    for (const auto& [name, value] : digest.own_) {
      out.text(name);
      out.number(value);
    }
    out.number(digest.vocab_);
    out.number(static_cast<std::int64_t>(digest.runs_.size()));
    for (const VocabRun& run : digest.runs_) {
      out.number(run.first);
      out.number(run.end);
    }
    return out.take();
  }

  static PlanDigest read(std::string_view bytes) {
    Reader in(bytes);
    PlanDigest digest;
    for (std::int64_t n = in.number(); n > 0; --n) {
      std::string name = in.text();
      digest.same_.emplace_back(std::move(name), in.text());
    }
    for (std::int64_t n = in.number(); n > 0; --n) {
      std::string name = in.text();
      digest.own_.emplace_back(std::move(name), in.number());
    }
    digest.vocab_ = in.number();
    for (std::int64_t n = in.number(); n > 0; --n) {
      const std::int64_t first = in.number();
      digest.runs_.push_back({first, in.number()});
    }
    return digest;
  }

  static void require_same(const std::vector<PlanDigest>& all) {
    const auto& first = all.front().same_;
    for (std::size_t r = 1; r < all.size(); ++r) {
      const auto& other = all[r].same_;
      for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
        if (i < first.size() && i < other.size() && first[i].first == other[i].first) {
          require(first[i].second == other[i].second, "rank ", r, ": ", other[i].first, " ",
                  other[i].second, ", rank 0: ", first[i].second);
        } else {
          const auto said = [&](const auto& same) {
            return i < same.size() ? concat(same[i].first, " ", same[i].second) : "nothing";
          };
          throw InvalidArgument(concat("rank ", r, ": ", said(other), ", rank 0: ", said(first)));
        }
      }
    }
  }

  static void require_cover(const std::vector<PlanDigest>& all) {
    const std::int64_t vocab = all.front().vocab_;
    std::vector<std::tuple<std::int64_t, std::int64_t, std::size_t>> runs;  // first, end, rank
    for (std::size_t r = 0; r < all.size(); ++r) {
      require(all[r].vocab_ == vocab, "rank ", r, ": vocab ", all[r].vocab_, ", rank 0: ", vocab);
      for (const VocabRun& run : all[r].runs_) {
        require(0 <= run.first && run.first <= run.end && run.end <= vocab, "rank ", r,
                ": vocabulary entries [", run.first, ", ", run.end, ") are not in [0, ", vocab,
                ")");
        if (run.first < run.end) runs.emplace_back(run.first, run.end, r);
      }
    }
    std::sort(runs.begin(), runs.end());
    std::int64_t covered = 0;
    std::size_t by = 0;
    for (const auto& [first, end, rank] : runs) {
      require(first <= covered, "vocabulary entry ", covered, " is on no rank");
      require(first >= covered, "vocabulary entry ", first, " is on rank ", by,
              by == rank ? "" : concat(" and on rank ", rank), by == rank ? " twice" : "");
      covered = end;
      by = rank;
    }
    require(covered == vocab, "vocabulary entry ", covered, " is on no rank");
  }

  static Agreement agreement(std::vector<PlanDigest> all, std::string_view bytes) {
    Agreement agreement;
    agreement.plan = std::stoull(content_name(bytes).substr(0, 16), nullptr, 16) | 1;
    for (PlanDigest& digest : all) {
      agreement.vocab_runs.push_back(std::move(digest.runs_));
      agreement.own.push_back(std::move(digest.own_));
    }
    return agreement;
  }
};

namespace {

Agreement exchange_digests(Communicator& communicator, const std::string& mine,
                           const std::vector<StatusHeader>& headers) {
  std::size_t most = 0;
  for (const StatusHeader& header : headers)
    most = std::max(most, static_cast<std::size_t>(header.bytes_each));
  std::string padded = mine;
  padded.resize(most);
  std::string gathered(most * headers.size(), '\0');
  communicator.all_gather_host(padded.data(), gathered.data(), most);

  std::vector<PlanDigest> all;
  for (std::size_t r = 0; r < headers.size(); ++r)
    all.push_back(DigestBytes::read(std::string_view(gathered).substr(r * most, most)));
  DigestBytes::require_same(all);
  DigestBytes::require_cover(all);
  return DigestBytes::agreement(std::move(all), gathered);
}

}  // namespace

std::vector<VocabRun> runs_of(std::span<const std::int32_t> table) {
  std::vector<VocabRun> runs;
  for (const std::int32_t vocab_id : table) {
    if (!runs.empty() && runs.back().end == vocab_id) {
      ++runs.back().end;
    } else {
      runs.push_back({vocab_id, std::int64_t{vocab_id} + 1});
    }
  }
  return runs;
}

void PlanDigest::same(std::string_view name, std::int64_t value) {
  same_.emplace_back(name, std::to_string(value));
}
void PlanDigest::same(std::string_view name, std::string_view value) {
  same_.emplace_back(name, value);
}
void PlanDigest::own(std::string_view name, std::int64_t value) { own_.emplace_back(name, value); }
void PlanDigest::add_vocab(std::int64_t vocab, std::span<const VocabRun> runs) {
  vocab_ = vocab;
  runs_.assign(runs.begin(), runs.end());
}

std::int64_t Agreement::value_of(int rank, std::string_view name) const {
  for (const auto& [said, value] : own[static_cast<std::size_t>(rank)]) {
    if (said == name) return value;
  }
  throw InternalError(concat("agreement: rank ", rank, " said nothing of ", name));
}

Agreement agree(Communicator& communicator, const std::function<void(PlanDigest&)>& fill) {
  StatusHeader header;
  header.stage = Stage::plan;
  header.plan = kVersion;
  std::string mine, text;
  try {
    PlanDigest digest;
    fill(digest);
    mine = DigestBytes::write(digest);
    header.bytes_each = mine.size();
  } catch (...) {
    header.status = status_of(std::current_exception(), text);
  }
  try {
    std::vector<StatusHeader> headers;
    exchange_status(communicator, header, text, headers);
    return exchange_digests(communicator, mine, headers);
  } catch (const std::bad_alloc&) {
    communicator.abort("out of memory while ranks agree on a plan");
    throw;
  }
}

}  // namespace logitless
