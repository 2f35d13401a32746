#include "head/shard_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/check.h"
#include "head/cuda/layout.h"
#include "head/exchange_choice.h"
#include "head/plan/choose.h"
#include "head/plan_layout.h"
#include "head/shard_far_plan.h"
#include "kernels/cpu_head.h"
#include "kernels/device/stream.h"

namespace logitless {
namespace {

std::span<const std::int32_t> table_of(const Sharding& sharding) {
  return {static_cast<const std::int32_t*>(sharding.vocab_ids.data()),
          static_cast<std::size_t>(sharding.vocab_ids.numel())};
}

void add_features(const HeadFeatures& f, PlanDigest& digest) {
  digest.same("targets_per_token", f.targets_per_token);
  digest.same("bias", f.bias);
  digest.same("logit_scale", concat(f.logit_scale));
  digest.same("softcap", concat(f.softcap));
  digest.same("precision", static_cast<int>(f.precision));
  digest.same("label smoothing", f.label_smoothing);
  digest.same("class or vocab weights", f.vocab_weight);
  digest.same("entropy", f.entropy);
  digest.same("argmax", f.argmax);
  digest.same("d_hidden", f.d_hidden);
  digest.same("d_weight", f.d_weight);
  digest.same("d_bias", f.d_bias);
  digest.same("gradient of the entropy", f.entropy_gradient);
  digest.same("accumulate", f.accumulate);
  digest.same("ranks of the vocabulary entries", f.vocab_ranks);
  digest.same("sharded tokens", f.tokens_sharded);
  // If all ranks have the same tokens, partial sums of d_hidden are exchanged in its dtype, which
  // therefore must agree.
  const bool everywhere = f.vocab_ranks > 0 && !f.tokens_sharded && f.d_hidden;
  digest.same("dtype of d_hidden", everywhere ? name_of(f.d_hidden_dtype) : "each rank's own");
}

void say(const ShardedHead& head, const Sharding& sharding, PlanDigest& digest) {
  digest.same("vocab", sharding.vocab);
  digest.same("dim", head.shape.dim);
  digest.same("dtype", name_of(head.shape.dtype));
  add_features(head.features, digest);
  if (head.options) head.options(digest);
  digest.same("what moves", name_of(sharding.exchange));
  digest.same("interleaved vocabulary", sharding.interleaved);
  digest.same("weight by columns", by_columns(sharding));
  if (by_columns(sharding)) digest.own("columns", sharding.columns);
  digest.same("replicas", sharding.replicas == nullptr ? 0 : sharding.replicas->size());
  sharding.tokens ? digest.own("tokens", head.shape.tokens)
                  : digest.same("tokens", head.shape.tokens);
  // Sharded by columns, each rank has columns of the whole vocabulary: rank 0 reports it.
  const bool others = by_columns(sharding) && sharding.vocab_group->rank() > 0;
  digest.add_vocab(sharding.vocab,
                   others ? std::vector<VocabRun>{} : vocab_of(sharding, head.shape.vocab));
}

// Returns the columns of each rank. Throws InvalidArgument unless they add up to those of hidden.
std::vector<std::int64_t> columns_of_ranks(const Sharding& sharding, std::int64_t dim,
                                           const Agreement& agreed) {
  std::vector<std::int64_t> columns;
  if (!by_columns(sharding)) return columns;
  std::int64_t sum = 0;
  for (int r = 0; r < sharding.vocab_group->size(); ++r) {
    columns.push_back(agreed.value_of(r, "columns"));
    sum += columns.back();
  }
  require(sum == dim, "sharding: columns: expected ", dim,
          " on all ranks together, as hidden has, got ", sum);
  return columns;
}

// Returns the most tokens that a rank may bring to a call.
std::int64_t tokens_of_rank(const Sharding& sharding, const HeadShape& shape,
                            const Agreement& agreed) {
  if (!sharding.tokens) return shape.tokens;
  std::int64_t most = 0;
  const int ranks = sharding.vocab_group->size();
  for (int r = 0; r < ranks; ++r) most = std::max(most, agreed.value_of(r, "tokens"));
  return most;
}

std::string_view text_of(DeviceKind device) {
  return device == DeviceKind::cpu ? "the CPU" : "a GPU";
}

// Returns the tiles of the ranks before `rank`. The last tile of a rank may be partial.
std::int64_t tiles_before(const std::vector<std::vector<VocabRun>>& vocab_runs, int rank) {
  std::int64_t tiles = 0;
  for (int r = 0; r < rank; ++r) {
    std::int64_t rows = 0;
    for (const VocabRun& run : vocab_runs[static_cast<std::size_t>(r)]) rows += run.end - run.first;
    tiles += ceil_div(rows, kVocabTile);
  }
  return tiles;
}

// Moves the receive buffers from the workspace into the group's exchange memory. Collective.
// Returns null if the group has no such memory.
void* take_exchange_memory(Communicator& vocab_group, LossPlan& plan) {
  const auto bytes_of = [](const LossPlan& p) {
    return LossPlanAccess::layout<cuda::Layout>(p).exchange_bytes();
  };
  const std::size_t bytes = bytes_of(plan);
  // An audit is another call with the same vocabulary, so it uses the same memory.
  const std::size_t most = plan.audit == nullptr ? bytes : std::max(bytes, bytes_of(*plan.audit));
  void* const memory = bytes == 0 ? nullptr : vocab_group.exchange_memory(most);
  if (memory == nullptr) return nullptr;
  plan.exchange_bytes = bytes;
  LossPlanAccess::set_workspace_bytes(plan, plan.workspace_bytes() - bytes);
  return memory;
}

// Returns the event that is shared by all plans that receive into this memory.
std::shared_ptr<void> event_of_memory(const void* memory) {
  static std::mutex mutex;
  static std::map<const void*, std::weak_ptr<void>> events;
  const std::lock_guard lock(mutex);
  std::weak_ptr<void>& known = events[memory];
  std::shared_ptr<void> event = known.lock();
  if (event == nullptr) known = event = cuda::make_event();
  return event;
}

// Plans for the ranks of one vocabulary group.
LossPlan plan_vocab(const LocalPlanner& planner, const Sharding& sharding,
                    const PlanRequest& request, const std::function<ShardedHead()>& head) {
  Communicator& vocab_group = *sharding.vocab_group;
  ShardedHead mine;
  const auto add_sizes = [&](PlanDigest& digest) {
    mine = head();
    require_device(sharding, mine.device.kind);
    describe_far_field(request, digest);
    say(mine, sharding, digest);
    if (mine.device.kind != DeviceKind::cpu) add_card(mine.device, digest);
  };
  const Agreement sizes = agree(vocab_group, add_sizes);

  HeadShape shape = mine.shape;
  shape.vocab = std::max<std::int64_t>(shape.vocab, 1);  // a rank without vocabulary entries runs
                                                         // no kernels
  shape.global_vocab = sharding.vocab;
  const std::int64_t tokens = tokens_of_rank(sharding, shape, sizes);
  const GatheredVocab of_ranks =
      gathered_vocab(sizes.vocab_runs, columns_of_ranks(sharding, shape.dim, sizes));
  ExchangePlans plans(sharding, {shape, mine.features, mine.device.kind, tokens, of_ranks,
                                 vocab_group.rank(), allows_far(request)});
  const auto make = [&](std::uint64_t said_before, const PlanRequest& wanted) {
    return agree(vocab_group, [&](PlanDigest& digest) {
      digest.same("sizes", static_cast<std::int64_t>(said_before));
      plans.make(
          [&](const HeadShape& s, const HeadFeatures& f) { return planner.plan(s, f, wanted); },
          digest);
      describe_far_plan(plans.with_tokens(), mine.shape.vocab, digest);
    });
  };
  PlanRequest of_rank = request;
  of_rank.sharding = sharding;
  if (mine.device.kind != DeviceKind::cpu) of_rank.device.card = card_of_rank_0(sizes);
  Agreement chunks = make(sizes.plan, of_rank);
  std::optional<LossPlan> wanted;
  if (const auto common = common_request(of_rank, chunks)) {
    wanted = plans.with_tokens();
    of_rank = *common;
    chunks = make(chunks.plan, of_rank);
  }
  if (!plans.agree_on_begin(chunks)) chunks = make(chunks.plan, of_rank);
  LossPlan made = with_common_audit(plans.agreed(chunks), chunks, mine.device.kind);
  if (wanted) describe_request(*wanted, made);
  CommStream comm_stream;
  if (mine.device.kind != DeviceKind::cpu)
    comm_stream.memory = take_exchange_memory(vocab_group, made);
  const std::span<const std::int32_t> table = table_of(sharding);
  made.agreement = std::make_shared<ShardAgreement>(
      ShardAgreement{sharding,
                     mine.shape.vocab,
                     tokens,
                     tiles_before(sizes.vocab_runs, vocab_group.rank()),
                     tiles_before(sizes.vocab_runs, vocab_group.size()),
                     CollectiveCalls(sharding.vocab_group, chunks.plan),
                     {},
                     of_ranks,
                     {table.begin(), table.end()},
                     std::move(comm_stream)});
  return made;
}

// Plans for plan_head, which has the shape and features but no tensors.
LossPlan plan_shape(const LocalPlanner& planner, const HeadShape& shape,
                    const HeadFeatures& features, const PlanRequest& request) {
  if (!is_sharded(request.sharding)) {
    require(features.vocab_ranks == 0 && !features.tokens_sharded && features.gathered_rows == 0,
            "sharding: the features are of a sharded vocabulary, and the request has no sharding");
    return planner.plan(shape, features, request);
  }
  const auto head = [&]() -> ShardedHead {
    require_sharding(request.sharding, shape.vocab);
    ShardedHead mine{.shape = shape, .features = features, .device = planner.device(request)};
    set_sharding(request.sharding, mine.features);
    return mine;
  };
  return plan_sharded(planner, request.sharding, request, head);
}

}  // namespace

LossPlan plan_head(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  return plan_shape({}, shape, features, request);
}

LossPlan plan_head(const Context& context, const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  return plan_shape(context, shape, features, request);
}

void require_device(const Sharding& sharding, DeviceKind device) {
  for (const auto* group : {&sharding.vocab_group, &sharding.replicas}) {
    if (*group == nullptr) continue;
    require((*group)->device() == device,
            "sharding: ", group == &sharding.vocab_group ? "vocab_group" : "replicas",
            ": expected a communicator of ", text_of(device), "'s memory, got one of ",
            text_of((*group)->device()), "'s");
  }
  if (device == DeviceKind::cpu) return;
  require(sharding.replicas == nullptr || sharding.replicas->size() <= cuda::kMostRanks,
          "sharding: replicas: expected at most ", cuda::kMostRanks, " on a GPU, got ",
          sharding.replicas == nullptr ? 0 : sharding.replicas->size());
}

void set_sharding(const Sharding& sharding, HeadFeatures& features) {
  if (!is_sharded(sharding)) return;
  features.vocab_ranks = sharding.vocab_group->size();
  features.tokens_sharded = sharding.tokens;
  features.gathered_rows = features.gathered_columns = 0;  // the plan sets them
}

std::vector<VocabRun> vocab_of(const Sharding& sharding, std::int64_t rows) {
  if (sharding.vocab_ids.defined()) return runs_of(table_of(sharding));
  if (rows == 0) return {};
  return {{sharding.vocab_begin, sharding.vocab_begin + rows}};
}

std::int64_t columns_of(const Sharding& sharding) {
  return is_sharded(sharding) && by_columns(sharding) ? sharding.columns : -1;
}

std::int64_t global_vocab(const Sharding& sharding, std::int64_t rows) {
  return is_sharded(sharding) ? sharding.vocab : rows;
}

namespace {

void require_columns(const Sharding& sharding, std::int64_t rows) {
  require(sharding.tokens && sharding.exchange != ExchangeMode::tokens,
          "sharding: weight by columns: its rows move to each rank's own tokens; expected tokens = "
          "true and exchange planned or weights");
  require(sharding.vocab_begin == 0 && !sharding.vocab_ids.defined() && rows == sharding.vocab,
          "sharding: weight by columns: expected all ", sharding.vocab, " vocabulary entries, got ",
          rows, " rows, vocab_begin ", sharding.vocab_begin,
          sharding.vocab_ids.defined() ? " and vocab_ids" : "");
  require(sharding.columns >= 0, "sharding: columns: expected 0 or more, got ", sharding.columns);
}

}  // namespace

void require_sharding(const Sharding& sharding, std::int64_t rows) {
  require(sharding.weight <= WeightSharding::columns,
          "sharding: weight: ", static_cast<int>(sharding.weight), " is no WeightSharding");
  require(by_columns(sharding) || sharding.columns == 0, "sharding: columns: ", sharding.columns,
          " with a weight by rows; they are for WeightSharding::columns");
  if (by_columns(sharding)) require_columns(sharding, rows);
  require(sharding.exchange <= ExchangeMode::weights,
          "sharding.exchange: ", static_cast<int>(sharding.exchange), " is no ExchangeMode");
  require(sharding.tokens || sharding.exchange == ExchangeMode::planned,
          "sharding.exchange: expected planned "
          "where all ranks have all tokens, got ",
          name_of(sharding.exchange), "; it is for tokens = true");
  require(sharding.vocab >= 1,
          "sharding: vocab: expected the vocabulary of all ranks, 1 or more, got ", sharding.vocab);
  const ConstTensorView& table = sharding.vocab_ids;
  if (!table.defined()) return;
  require(sharding.vocab_begin == 0, "sharding: vocab_begin ", sharding.vocab_begin,
          " and vocab_ids; give one of them");
  require(table.rank() == 1 && table.size(0) == rows && table.dtype() == DType::i32 &&
              table.contiguous(),
          "sharding: vocab_ids: expected i32[", rows, "] without gaps, got ", describe(table));
  require(table.data() != nullptr || rows == 0, "sharding: vocab_ids has no data");
  const auto vocab_count = table_of(sharding);
  const auto at = std::adjacent_find(vocab_count.begin(), vocab_count.end(),
                                     [](std::int32_t a, std::int32_t b) { return a >= b; });
  if (at == vocab_count.end()) return;
  throw InvalidArgument(concat("sharding: vocab_ids: expected ascending vocabulary entries, got ",
                               *at, " before ", *(at + 1), " at row ", at - vocab_count.begin()));
}

void require_rows(const Sharding& sharding) {
  if (by_columns(sharding))
    throw Unsupported("sharding: a weight sharded by columns has no far field");
}

LossPlan plan_sharded(const LocalPlanner& planner, const Sharding& sharding,
                      const PlanRequest& request, const std::function<ShardedHead()>& head) {
  if (sharding.replicas == nullptr) return plan_vocab(planner, sharding, request, head);
  LossPlan made;
  // An error in one vocabulary group is propagated to the replicas in the others.
  const Agreement agreed = agree(*sharding.replicas, [&](PlanDigest& digest) {
    made = plan_vocab(planner, sharding, request, head);
    digest.same("vocab", sharding.vocab);
    digest.same("ranks of the vocabulary entries", sharding.vocab_group->size());
  });
  made.agreement->replicas = std::make_unique<CollectiveCalls>(sharding.replicas, agreed.plan);
  return made;
}

void set_shard(const LossPlan& plan, const Sharding& sharding, HeadCall& call) {
  if (plan.agreement == nullptr) return;
  call.shard = {.calls = &plan.agreement->calls,
                .replicas = plan.agreement->replicas.get(),
                .vocab = VocabShard(sharding, call.shape.vocab),
                .tokens_sharded = sharding.tokens,
                .first_tile = plan.agreement->first_tile,
                .tiles = plan.agreement->tiles};
  require(call.shape.vocab == plan.agreement->rows, "plan: made for ", plan.agreement->rows,
          " vocabulary entries here, called with ", call.shape.vocab);
  require(call.shape.tokens <= plan.agreement->tokens, "plan: made for at most ",
          plan.agreement->tokens, " tokens of a rank, called with ", call.shape.tokens);
  call.shape.vocab = std::max<std::int64_t>(call.shape.vocab, 1);
  call.shape.global_vocab = sharding.vocab;
  call.features.gathered_rows = plan.features.gathered_rows;
  call.features.gathered_columns = plan.features.gathered_columns;
  if (call.features.gathered_rows > 0) {
    call.shape.vocab = sharding.vocab;
    call.shard.gathered = &plan.agreement->vocab;
  }
  if (call.context->device().kind == DeviceKind::cpu) return;
  CommStream& comm_stream = plan.agreement->comm_stream;
  call.shard.comm_stream = &comm_stream;
  if (comm_stream.exchanged != nullptr) return;
  if (sharding.vocab_ids.defined() && sharding.vocab_ids.numel() > 0) {
    const std::vector<std::int32_t>& vocab_ids = plan.agreement->table;
    const auto table =
        std::make_shared<cuda::DeviceMemory>(vocab_ids.size() * sizeof(vocab_ids[0]));
    cuda::copy_to_device(table->data(), vocab_ids.data(), table->bytes(), call.context->stream());
    comm_stream.vocab_ids = {table, table->data()};
  }
  comm_stream.stream = cuda::make_stream(true);
  for (auto* event :
       {&comm_stream.start, &comm_stream.ready, &comm_stream.hidden_done, &comm_stream.exchanged})
    *event = cuda::make_event();
  if (comm_stream.memory != nullptr)
    comm_stream.memory_released = event_of_memory(comm_stream.memory);
}

bool is_planned(const ShardAgreement& agreed, const Sharding& sharding) {
  const Sharding& planned = agreed.sharding;
  return sharding.vocab_group == planned.vocab_group && sharding.tokens == planned.tokens &&
         sharding.exchange == planned.exchange && sharding.replicas == planned.replicas &&
         sharding.interleaved == planned.interleaved && sharding.weight == planned.weight &&
         sharding.columns == planned.columns && sharding.vocab == planned.vocab &&
         sharding.vocab_begin == planned.vocab_begin &&
         sharding.vocab_ids.defined() == planned.vocab_ids.defined() &&
         std::ranges::equal(table_of(sharding), agreed.table);
}

void require_planned(const ShardAgreement* agreed, const Sharding& sharding) {
  if (agreed == nullptr) {
    require(!is_sharded(sharding), "plan: made without a sharding, and the call has one");
    return;
  }
  require(is_planned(*agreed, sharding), "sharding: not the one that the plan was made for");
}

}  // namespace logitless
