#include "head/cuda/exchange.h"

#include "core/check.h"
#include "head/vocab_order_access.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"

namespace logitless::cuda {

void comm_stream_waits(const Run& run) {
  record_event(comm_of(run).start.get(), run.all.stream);
  stream_wait(comm_stream_of(run), comm_of(run).start.get());
}

namespace {

// Makes the call's stream wait for the communication stream, so that whoever waits for the former
// waits for both.
void join_comm_stream(const Run& run) {
  record_event(comm_of(run).exchanged.get(), comm_stream_of(run));
  stream_wait(run.all.stream, comm_of(run).exchanged.get());
}

}  // namespace

void with_exchange_memory(const Run& run, const std::function<void()>& body) {
  void* const released = comm_of(run).memory_released.get();
  if (released != nullptr) stream_wait_if_running(run.all.stream, released);
  const auto release = [&] {
    if (released != nullptr) record_event_if_running(released, run.all.stream);
  };
  try {
    body();
  } catch (...) {
    join_comm_stream(run);  // exchanges that were enqueued before the error still use the memory
    release();
    throw;
  }
  release();
}

void require_same_tokens(const Run& run) {
  const std::uint64_t order = run.sizes.far ? VocabOrderAccess::of(*run.call.far.order).common : 0;
  run.call.shard.calls->require_same_tokens(
      run.call.shard.tokens_sharded ? 0 : run.all.shape.tokens, order);
}

void require_aligned_operands(const Run& run) {
  const auto aligned = [](std::string_view name, const void* data, std::int64_t stride,
                          DType dtype) {
    const auto row = stride * static_cast<std::int64_t>(size_of(dtype));
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0 || row % 16 != 0)
      throw Unsupported(
          concat(name, ": expected an address and rows that are multiples of 16 bytes"));
  };
  aligned("hidden", run.all.hidden, run.all.hidden_stride, run.all.shape.dtype);
  if (run.features.gathered_columns == 0)  // else copied
    aligned("weight", run.all.weight, run.all.weight_stride, run.all.shape.dtype);
  if (run.d_weight.data != nullptr &&
      !sums_weight(run.kernel, run.plan_tokens(), run.features, run.sizes) && !run.gathered())
    aligned("d_weight", run.d_weight.data, run.d_weight.stride, run.d_weight.dtype);
}

void reset_bad_targets(const Run& run) {
  static_assert(kNoBadTarget == ~std::uint64_t{0});
  static_assert(offsetof(DeviceStatistics, bad_rank) == sizeof(std::uint64_t));
  // All bits of bad_target (kNoBadTarget) and of bad_rank (-1) are 1.
  fill_device(run.statistics(), 0xff, sizeof(std::uint64_t) + sizeof(std::int64_t), run.all.stream);
}

const double* global_denominator(const Run& run, const LossCall& loss) {
  const ShardOperands& shard = run.call.shard;
  if (!run.sharded() || (!shard.tokens_sharded && shard.replicas == nullptr)) return nullptr;
  require_same_tokens(run);
  auto* const of_ranks = run.at<double>(run.layout.shard.denominators);
  double* const sum = of_ranks + kMostRanks;  // after the values of all ranks
  sum_shares(loss, run.all, sum);
  const auto sum_over = [&](CollectiveCalls& calls) {
    calls.all_gather(sum, of_ranks, sizeof(double), run.all.stream);
    add_slices(of_ranks, calls.communicator().size(), 1, sum, run.all.stream);
  };
  if (shard.tokens_sharded) sum_over(*shard.calls);
  // Each replica is a group with other tokens: its sum counts once.
  if (shard.replicas != nullptr) sum_over(*shard.replicas);
  return sum;
}

void finish_sharded(const Run& run, const LossCall& loss) {
  auto* const losses = run.at<RankLoss>(run.layout.shard.losses);
  RankLoss* const mine = losses + run.call.shard.rank();
  sum_losses(loss, run.all, mine);
  run.call.shard.calls->all_gather(mine, losses, sizeof(RankLoss), run.all.stream);
  finish_loss(loss, run.all, losses, run.call.shard.ranks());
}

}  // namespace logitless::cuda
