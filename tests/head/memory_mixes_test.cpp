// Memory with every mix of options and every entry point: a call writes its outputs and its
// workspace, reads neither before it has written it, and allocates nothing by any way there is.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "head/engine.h"
#include "head/mixes.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
constexpr bool kCounted = false;  // malloc belongs to the sanitizer there
#else
constexpr bool kCounted = true;
#endif

namespace {
std::atomic<bool> counting = false;  // of all threads
std::atomic<int> allocations = 0;
[[maybe_unused]] void count() {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
}
}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
// operator new and the library's Buffer end in one of these.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) noexcept {
  count();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t number, std::size_t bytes) noexcept {
  count();
  return __libc_calloc(number, bytes);
}
void* realloc(void* old, std::size_t bytes) noexcept {
  count();
  return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** to, std::size_t alignment, std::size_t bytes) noexcept {
  count();
  *to = __libc_memalign(alignment, bytes);
  return *to == nullptr ? ENOMEM : 0;
}
}
#endif

namespace logitless::test {
namespace {

constexpr std::size_t kGuard = 4096;

int allocations_of(const std::function<void()>& body) {
  allocations = 0;
  counting = true;
  body();
  counting = false;
  return allocations;
}

class MixTest : public testing::TestWithParam<std::string> {
 protected:
  // Each mix that the kernel takes, with the plan of the default budget and with the least one.
  void each(int threads, const std::function<void(MixCall&, const LossPlan&)>& body) const {
    int runs = 0;
    for (const Mix& mix : mixes()) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        HeadSpec spec = mix.spec;
        spec.dtype = dtype;
        if (!accepts(GetParam(), spec)) continue;
        for (const PlanKind kind : kinds_of(mix.entry)) {
          SCOPED_TRACE(std::string(mix.name) + ", " + std::string(name_of(dtype)) + ", " +
                       std::string(name_of(kind)));
          MixCall call(mix, dtype, GetParam(), threads, kind);
          LossPlan plan;
          try {
            plan = call.plan();
          } catch (const Unsupported&) {
            EXPECT_TRUE(kind == PlanKind::dense || kind == PlanKind::stored) << "always served";
            continue;
          }
          const LossPlan least = call.least_plan();
          EXPECT_LE(least.workspace_bytes(), plan.workspace_bytes());
          body(call, plan);
          body(call, least);
          ++runs;
          if (HasFatalFailure()) return;
        }
      }
    }
    EXPECT_GE(runs, 20);
  }
};

TEST_P(MixTest, OnlyTheWorkspaceAndTheOutputsAreWritten) {
  each(2, [](MixCall& call, const LossPlan& plan) {
    const std::size_t bytes = plan.workspace_bytes();
    EXPECT_EQ(bytes, layout_workspace(find_head_kernel(plan.kernel), plan.shape, plan.features,
                                      sizes_of(plan))
                         .total);
    const std::vector<std::byte> inputs = call.inputs();
    const Buffer memory(kGuard + bytes + kGuard);
    auto* start = memory.as<unsigned char>();
    std::vector<std::byte> first;
    for (const int pattern : {0x00, 0xff, 0x5a}) {  // 0xff: NaN of every type
      std::memset(start, pattern, memory.bytes());
      call.fill_outputs(pattern);
      call.run(plan, Workspace(start + kGuard, bytes));
      for (std::size_t at = 0; at < kGuard; ++at) {
        ASSERT_EQ(start[at], pattern) << kGuard - at << " bytes before the workspace";
        ASSERT_EQ(start[kGuard + bytes + at], pattern) << at << " bytes after the workspace";
      }
      if (first.empty()) first = call.outputs();
      EXPECT_EQ(call.outputs(), first) << "after memory of " << pattern;
    }
    EXPECT_EQ(call.inputs(), inputs);
    EXPECT_EQ(call.context().memory().peak_bytes(), 0u) << "the caller brought all of it";
  });
}

TEST_P(MixTest, ACallAllocatesNothing) {
  if (!kCounted) GTEST_SKIP() << "allocations cannot be counted in this build";
  for (const int threads : {1, 2}) {
#ifndef _OPENMP
    if (threads > 1) continue;  // that pool starts its threads for each region
#endif
    each(threads, [](MixCall& call, const LossPlan& plan) {
      const Workspace workspace(call.context(), plan);
      call.run(plan, workspace);  // whatever is set up once
      EXPECT_EQ(allocations_of([&] { call.run(plan, workspace); }), 0) << plan.explain();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, MixTest, testing::ValuesIn(kernel_names()),
                         [](const auto& kernel) { return kernel.param; });

TEST(Counting, SeesEveryWayToAllocate) {
  if (!kCounted) GTEST_SKIP() << "allocations cannot be counted in this build";
  EXPECT_EQ(allocations_of([] { const std::vector<int> one(10, 1); }), 1);
  EXPECT_EQ(allocations_of([] { const Buffer one(10); }), 1);
  EXPECT_EQ(allocations_of([] { const Buffer one(3_MiB); }), 1);
  EXPECT_EQ(allocations_of([] { std::free(std::calloc(3, 5)); }), 1);
  EXPECT_EQ(allocations_of([] {}), 0);
  // The call that plans for itself has its workspace, and little else.
  const Mix mix = mixes().front();
  MixCall call(mix, DType::f32, "scalar", 1, PlanKind::forward);
  const LossPlan plan = call.plan();
  EXPECT_EQ(allocations_of([&] { const Workspace one(call.context(), plan); }), 1);
}

}  // namespace
}  // namespace logitless::test
