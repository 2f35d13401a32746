// Stubs of the CUDA kernels for a build without CUDA.
#include "core/check.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/attention.h"
#include "kernels/device/cards.h"
#include "kernels/device/entropy_block.h"
#include "kernels/device/far.h"
#include "kernels/device/loss.h"
#include "kernels/device/module.h"
#include "kernels/device/order.h"
#include "kernels/device/sample.h"
#include "kernels/device/shard.h"
#include "kernels/device/shard_far.h"
#include "kernels/device/token_list.h"

namespace logitless::cuda {
namespace {

constexpr const char* kReason = "this build has no CUDA";

[[noreturn]] void refuse() { throw Unsupported(kReason); }

}  // namespace

int device_count() { return 0; }
std::string device_missing(int) { return kReason; }
int compute_capability(int) { refuse(); }
int current_device() { refuse(); }
CardFacts card_facts(int) { refuse(); }

DeviceMemory::DeviceMemory(std::size_t) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

void copy_to_device(void*, const void*, std::size_t, Stream) { refuse(); }
void copy_to_host(void*, const void*, std::size_t, Stream) { refuse(); }
void fill_device(void*, int, std::size_t, Stream) { refuse(); }
std::size_t memory_in_use() { refuse(); }
void synchronize(Stream) { refuse(); }

Timer::Timer() { refuse(); }
Timer::~Timer() = default;
void Timer::start(Stream) { refuse(); }
float Timer::stop(Stream) { refuse(); }

void sample_tokens(const SampleCall&) { refuse(); }
void best_entries(const BestCall&) { refuse(); }
void scale_block(const BlockCall&) { refuse(); }
void scale_by_logits(const BlockCall&) { refuse(); }
void prepare_block(const BlockCall&) { refuse(); }
void list_tokens(const ForwardCall&, const TokenList&) { refuse(); }
void gather_listed(const ForwardCall&, const std::int32_t*, void*) { refuse(); }
void spread_rows(const TokenList&, std::int64_t, std::int64_t, const GradientOutput&, Stream) {
  refuse();
}
void order_targets(const ForwardCall&, const TargetOrder&) { refuse(); }
void list_targets(const BlockCall&, const TargetOrder&, const TargetEntries&) { refuse(); }
const void* gather_block(const ForwardCall&, const FarVocabBlock&, GatherPart, const int*) {
  refuse();
}
void gather_vectors(const ForwardCall&) { refuse(); }
void select_tiles(const ForwardCall&, const RowCoefficients*) { refuse(); }
void sample_tiles(const ForwardCall&) { refuse(); }
void far_block(const BlockCall&, const LogitBlock&, FarBlockFor) { refuse(); }
void far_bounds(const BlockCall&, const LogitBlock&, float*) { refuse(); }
void clear_targets(const BlockCall&) { refuse(); }
void put_far_vocab(const GradientGemmsCall&) { refuse(); }
void far_bias(const BlockCall&, const float*, bool, float*) { refuse(); }
void finish_far(const ForwardCall&, const GradientOutput&, const float*, float*, double*) {
  refuse();
}
std::string estimates_unsupported() { return kReason; }
void prepare_estimates() { refuse(); }
void prepare_means(const ForwardCall&) { refuse(); }
void estimate_masses(const ForwardCall&) { refuse(); }
void select_estimated(const ForwardCall&, const float*) { refuse(); }
void sum_far_masses(const ForwardCall&) { refuse(); }
void measure_sample(const ForwardCall&, const RowCoefficients*, double*) { refuse(); }
void estimate_weighted_sums(const ForwardCall&, const float*) { refuse(); }
void order_keys(const TargetOrder&, std::int64_t, std::int64_t, Stream) { refuse(); }
void order_tokens(const ForwardCall&, const DeviceOrder&, const TargetOrder&) { refuse(); }
void order_chunk_tokens(const ForwardCall&, const DeviceOrder&, const TargetOrder&) { refuse(); }
void gather_tokens(const ForwardCall&, const void*, std::int64_t, void*) { refuse(); }
void scatter_outputs(const ForwardCall&, const ForwardCall&) { refuse(); }
void count_audited(const ForwardCall&, const FarAudit&) { refuse(); }
void list_audited(const FarAudit&, Stream) { refuse(); }
void sort_tokens(const ForwardCall&, const RowCoefficients*, std::span<const TokenValues>) {
  refuse();
}
void keep_audited(const ForwardCall&, const FarAudit&, const GradientOutput&) { refuse(); }
void compare_audited(const ForwardCall&, const FarAudit&, const float*, FarSums*) { refuse(); }
void add_weight_targets(const GradientGemmsCall&) { refuse(); }
void sum_many_entries(const GradientGemmsCall&) { refuse(); }
void add_bias_targets(const TargetEntries&, std::int64_t, float*, Stream) { refuse(); }
void sum_columns(const ColumnSumCall&) { refuse(); }
void add_bias_smoothing(const RowCoefficients*, std::int64_t, const float*, std::int64_t, float*,
                        Stream) {
  refuse();
}
void zero_gradient(const GradientOutput&, std::int64_t, std::int64_t, Stream) { refuse(); }
void scale_gradients(const ScaleCall&) { refuse(); }
void widen_rows(const void*, DType, std::int64_t, std::int64_t, std::int64_t, float*, Stream) {
  refuse();
}
void round_sums(const float*, std::int64_t, std::int64_t, const GradientOutput&, Stream,
                const std::int32_t*) {
  refuse();
}

std::size_t order_workspace_bytes(std::int64_t, std::int64_t) { refuse(); }
void order_vocab(const OrderCall&) { refuse(); }
std::string moments_unsupported() { return kReason; }
std::size_t moments_workspace_bytes(const DeviceKernel&, const ForwardShape&) { refuse(); }
MomentTotals measure_moments(const MomentsCall&) { refuse(); }
void find_cautions(const MomentsCall&) { refuse(); }

void attention_forward(const AttentionCall&) { refuse(); }
void attention_backward(const AttentionCall&) { refuse(); }

void begin_loss(const LossCall&, const ForwardCall&) { refuse(); }
void sum_shares(const LossCall&, const ForwardCall&, double*) { refuse(); }
void sum_losses(const LossCall&, const ForwardCall&, RankLoss*) { refuse(); }
void finish_loss(const LossCall&, const ForwardCall&, const RankLoss*, int) { refuse(); }

void merge_logits(const float*, int, std::int64_t, float*, Stream) { refuse(); }
void merge_records(const ForwardCall&, const TokenRecord*, int) { refuse(); }
void absorb_records(const ForwardCall&, const float*, bool, TokenRecord*, float*) { refuse(); }
void write_neutral_records(const ForwardCall&) { refuse(); }
void copy_local_tokens(const ForwardCall&, const LocalTokens&) { refuse(); }
void take_vocab(const float*, const std::int32_t*, std::int64_t, float*, Stream) { refuse(); }
void fill_vocab_ids(const VocabBegins&, std::int64_t, std::int32_t*, Stream) { refuse(); }
void round_slices(const float*, int, std::int64_t, std::int64_t, std::int64_t,
                  const GradientOutput&, Stream) {
  refuse();
}
void add_slices(const float*, int, std::int64_t, float*, Stream) { refuse(); }
void add_slices(const double*, int, std::int64_t, double*, Stream) { refuse(); }
void no_totals(float*, std::int64_t, Stream) { refuse(); }
void merge_totals(const float*, int, std::int64_t, float*, Stream) { refuse(); }
void take_rows(const ForwardCall&, const float*, int, float*) { refuse(); }
void put_rows(const ForwardCall&, const float*, int, float*) { refuse(); }
void put_records(const ForwardCall&, const TokenRecord*, const float*, TokenRecord*) { refuse(); }
void merge_bounds(const float*, int, std::int64_t, float*, FarSums*, Stream) { refuse(); }
void give_bounds(const ForwardCall&, const float*, float*) { refuse(); }

void token_losses(const LossCall&, const ForwardCall&, RowCoefficients*, float*) { refuse(); }
void finish_loss(const LossCall&, const ForwardCall&) { refuse(); }
void token_cotangents(const CotangentCall&, const ForwardCall&, RowCoefficients*, float*) {
  refuse();
}

Module::Module(std::string_view) { refuse(); }
void load_kernels() { refuse(); }
void* Module::kernel(const std::string&, unsigned) const { refuse(); }
MatrixMap map_of(const void*, const MatrixShape&) { refuse(); }
void launch(void*, const LaunchShape&, std::span<void* const>, Stream) { refuse(); }

}  // namespace logitless::cuda
