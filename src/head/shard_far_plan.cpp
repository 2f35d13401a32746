#include "head/shard_far_plan.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/check.h"
#include "head/far_work.h"
#include "head/plan/choose.h"

namespace logitless {
namespace {

constexpr std::string_view kKind = "far field";
constexpr std::string_view kRows = "rows";
constexpr std::string_view kAuditChunk = "audit chunk";
constexpr std::int64_t kExact = -1;

int ranks_of(const Agreement& plans) { return static_cast<int>(plans.own.size()); }

}  // namespace

void describe_far_field(const PlanRequest& request, PlanDigest& digest) {
  if (!allows_far(request)) return digest.same("far field", "not asked for");
  digest.same("far field", request.kind.has_value()
                               ? name_of(*request.kind)
                               : concat("at most ", name_of(request.accuracy)));
  digest.same("tau", concat(request.tau));
  digest.same("audit_rows", request.audit_rows);
  digest.same("sample_every", request.sample_every);
}

void describe_far_plan(const LossPlan& plan, std::int64_t rows, PlanDigest& digest) {
  digest.own(kKind, is_far(plan.kind) ? static_cast<std::int64_t>(plan.kind) : kExact);
  digest.own(kRows, rows);
  digest.own(kAuditChunk, plan.audit == nullptr ? -1 : plan.audit->chunk_tokens);
}

std::optional<PlanRequest> common_request(const PlanRequest& request, const Agreement& plans) {
  bool same = true;
  std::int64_t most = 0;
  for (int r = 0; r < ranks_of(plans); ++r) {
    same = same && plans.value_of(r, kKind) == plans.value_of(0, kKind);
    most = std::max(most, plans.value_of(r, kRows));
  }
  if (same) return {};
  std::optional<std::int64_t> wanted;
  for (int r = 0; r < ranks_of(plans); ++r) {
    if (2 * plans.value_of(r, kRows) < most) continue;
    const std::int64_t kind = plans.value_of(r, kKind);
    wanted = wanted.value_or(kind) == kind ? kind : kExact;
  }
  PlanRequest out = request;
  if (wanted != kExact) {
    out.kind = static_cast<PlanKind>(*wanted);
    return out;
  }
  out.accuracy = Accuracy::exact;
  out.tau = 0.0f;
  out.audit_rows = 0;
  out.sample_every = 0;
  return out;
}

void describe_request(const LossPlan& wanted, LossPlan& plan) {
  if (is_far(plan.kind)) return;
  for (PlanCandidate candidate : wanted.candidates) {
    if (!is_far(candidate.kind)) continue;
    if (candidate.possible)
      candidate.reason = "not the plan of every rank, whose vocabulary differs";
    plan.candidates.push_back(std::move(candidate));
  }
}

LossPlan with_common_audit(LossPlan plan, const Agreement& plans, DeviceKind device) {
  if (plan.audit == nullptr) return plan;
  std::int64_t least = plan.audit->chunk_tokens;
  for (int r = 0; r < ranks_of(plans); ++r) least = std::min(least, plans.value_of(r, kAuditChunk));
  if (plan.features.tokens_sharded) least = std::max<std::int64_t>(least, ranks_of(plans));
  if (least == plan.audit->chunk_tokens) return plan;
  plan.audit = std::make_shared<const LossPlan>(with_chunk(*plan.audit, least, device));
  return plan;
}

}  // namespace logitless
