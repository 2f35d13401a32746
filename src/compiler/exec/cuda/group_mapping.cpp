#include "compiler/exec/cuda/group_mapping.h"

#include <bit>

#include "compiler/exec/cuda/stage_reads.h"

namespace logitless::ir {
namespace {

bool is_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

class Mapper {
 public:
  Mapper(const RowGroup& group, const StageReads& reads)
      : g_(group), reads_(reads), has_sums_(!column_sums(group).empty()) {}

  RowMapping run(std::span<const std::int64_t> alignments) {
    constexpr std::int64_t kMostWidth = 8, kAccess = 16, kMostItems = 8;
    constexpr std::int64_t kRegisters = 120;        // for elements, approximately
    constexpr std::int64_t kMostShared = 32 << 10;  // bytes
    const auto fits = [&](const View& v, std::int64_t width) {
      const auto size = static_cast<std::int64_t>(size_of(v.dtype));
      const std::int64_t access = std::min(width * size, kAccess);
      return v.strides[0] % width == 0 && v.offset * size % access == 0 &&
             alignments[static_cast<std::size_t>(v.buffer)] % access == 0;
    };
    std::vector<const View*> views;
    // Bytes of registers for each element of a row that a thread holds.
    std::int64_t bytes = 4 * static_cast<std::int64_t>(column_sums(g_).size() + 1);
    for (const View& v : reads_.elements()) bytes += static_cast<std::int64_t>(size_of(v.dtype));
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      const Pointwise& loop = g_.stages[s].loop;
      const StageKind kind = kind_of(loop);
      if (kind == StageKind::rows) continue;
      for (const Pointwise::Leaf& leaf : loop.leaves) {
        if (is_memory(leaf) && leaf.view.strides[1] == 1 && maker_of(g_, s, leaf) < 0)
          views.push_back(&leaf.view);
      }
      if (kind != StageKind::elements) continue;
      if (g_.stages[s].stored) views.push_back(&loop.store.view);
      if (reads_.is_forwarded(s)) bytes += 4;
    }
    m_.width = kMostWidth;
    while (m_.width > 1 && (g_.columns % m_.width != 0 ||
                            !std::all_of(views.begin(), views.end(),
                                         [&](const View* v) { return fits(*v, m_.width); })))
      m_.width /= 2;
    const std::int64_t row = ceil_div(g_.columns, m_.width);  // items
    if (g_.columns > RowGroup::kMostColumnsOfBlock) {
      choose_cluster(row);
      return m_;
    }
    // Rows with sums use as few threads as can hold the row in registers, since threads exchange
    // sums. Other rows use as many threads as they have items, for more loads in flight.
    const std::int64_t some =
        has_row_sums(g_)
            ? std::clamp<std::int64_t>(kRegisters * 4 / (bytes * m_.width), 1, kMostItems)
            : ceil_div(row, kMostGroupThreads);
    const auto is_possible = [](std::int64_t threads) {
      return threads <= 32 ? std::has_single_bit(static_cast<std::uint64_t>(threads))
                           : threads % 32 == 0 && threads <= kMostGroupThreads;
    };
    m_.threads = row <= 32 * some
                     ? std::min<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(row)), 32)
                     : ceil_div(row, 32 * some) * 32;
    for (std::int64_t items = some; items > 0; --items) {
      if (row % items != 0 || !is_possible(row / items)) continue;
      m_.threads = row / items;
      break;
    }
    m_.items = ceil_div(row, m_.threads);
    m_.rows = std::max<std::int64_t>(kGroupThreads / m_.threads, 1);
    while (has_sums_ && m_.rows > 1 && m_.rows * g_.columns * 4 > kMostShared) m_.rows /= 2;
    return m_;
  }

 private:
  const RowGroup& g_;
  const StageReads& reads_;
  const bool has_sums_;  // of columns
  RowMapping m_;

  // Returns the most bytes of registers that an element takes at a time: operands until a stage
  // reads them last, and values from the stage that makes them.
  std::int64_t held_bytes() const {
    std::vector<std::size_t> last_of_operand(reads_.elements().size(), 0);
    std::vector<std::size_t> last_of_stage(g_.stages.size(), 0);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      for (const Pointwise::Leaf& leaf : g_.stages[s].loop.leaves) {
        if (!is_memory(leaf)) continue;
        if (const int maker = maker_of(g_, s, leaf); maker >= 0) {
          const auto made = static_cast<std::size_t>(maker);
          if (kind_of(g_.stages[made].loop) == StageKind::elements) last_of_stage[made] = s;
        } else if (reads_.read_of(s, leaf.view) == StageReads::Read::element) {
          last_of_operand[reads_.element_of(leaf.view)] = s;
        }
      }
    }
    std::int64_t most = 0;
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      std::int64_t bytes = 0;
      for (std::size_t i = 0; i < last_of_operand.size(); ++i) {
        if (last_of_operand[i] >= s)
          bytes += static_cast<std::int64_t>(size_of(reads_.elements()[i].dtype));
      }
      for (std::size_t made = 0; made <= s; ++made)
        bytes += last_of_stage[made] >= s && last_of_stage[made] > made ? 4 : 0;
      most = std::max(most, bytes);
    }
    return most;
  }

  // Maps a row of so many items to the blocks of a cluster. Blocks of few threads are preferred:
  // an SM then holds several rows, of which one waits while another is loaded. Threads have half of
  // the elements where their registers would spill most.
  void choose_cluster(std::int64_t row) {
    constexpr std::int64_t kMostBlocks = 8, kMostThreadsOfBlock = 512;
    constexpr std::int64_t kElements = 32, kMostHeld = 16;
    const std::int64_t elements = held_bytes() <= kMostHeld ? kElements : kElements / 2;
    const std::int64_t few = std::max<std::int64_t>(elements / m_.width, 1);
    m_.blocks = 2;
    while (m_.blocks < kMostBlocks && ceil_div(row, m_.blocks * few) > kGroupThreads)
      m_.blocks *= 2;
    const std::int64_t own = ceil_div(row, m_.blocks);
    m_.items = std::max(few, ceil_div(own, kMostThreadsOfBlock));
    m_.threads = ceil_div(ceil_div(own, m_.items), 32) * 32;
    m_.rows = 1;
  }
};

}  // namespace

bool has_row_sums(const RowGroup& group) {
  return std::any_of(group.stages.begin(), group.stages.end(), [](const RowGroup::Stage& stage) {
    return kind_of(stage.loop) == StageKind::row_sum;
  });
}

RowMapping choose_mapping(const RowGroup& group, const StageReads& reads,
                          std::span<const std::int64_t> alignments) {
  return Mapper(group, reads).run(alignments);
}

}  // namespace logitless::ir
