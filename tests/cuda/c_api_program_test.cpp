// Programs on a GPU over the C ABI: compiled, prepared, enqueued eagerly and in a CUDA graph.
#include <gtest/gtest.h>
#include <logitless/c_api.h>
#include <logitless/device.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/run_program.h"

namespace logitless::test {
namespace {

constexpr int kRows = 40, kColumns = 600, kInner = 24;

const char* const kText =
    "graph head(%h: f32[40, 24], %w: f32[600, 24]) {\n"
    "  %z = dot %h, %w contract(1; 1) : f32[40, 600]\n"
    "  %l = reduce_lse %z dims(1)\n"
    "  %q = mul %l, %l\n"
    "  %loss = reduce_sum %q dims(0)\n"
    "  return loss: %loss\n"
    "  differentiate loss wrt %h\n"
    "}\n";

struct Destroy {
  void operator()(logitless_context* c) const { logitless_context_destroy(c); }
  void operator()(logitless_program* p) const { logitless_program_destroy(p); }
  void operator()(logitless_prepared_program* p) const { logitless_prepared_program_destroy(p); }
};
template <typename T>
using Handle = std::unique_ptr<T, Destroy>;

class CProgram : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu()) GTEST_SKIP() << "no CUDA device";
    logitless_context_options options;
    logitless_context_options_init(&options, sizeof options);
    options.device = LOGITLESS_DEVICE_CUDA;
    logitless_context* made = nullptr;
    ASSERT_EQ(logitless_context_create(&options, &made), LOGITLESS_OK) << logitless_last_error();
    context_.reset(made);
  }

  Handle<logitless_program> compiled(logitless_device device, std::int32_t capability) const {
    logitless_program_options options;
    logitless_program_options_init(&options, sizeof options);
    options.chunks = 4;
    options.device = device;
    options.compute_capability = capability;
    logitless_program* made = nullptr;
    EXPECT_EQ(logitless_program_compile(kText, &options, &made), LOGITLESS_OK)
        << logitless_last_error();
    return Handle<logitless_program>(made);
  }

  Handle<logitless_context> context_;
};

std::vector<float> numbers(int count, int step) {
  std::vector<float> made(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i)
    made[static_cast<std::size_t>(i)] = static_cast<float>(i * step % 23 - 11) / 16.0f;
  return made;
}

void expect_refused(logitless_status status, const char* part) {
  EXPECT_EQ(status, LOGITLESS_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(logitless_last_error(), part), nullptr) << logitless_last_error();
}

TEST_F(CProgram, EnqueuedAndCapturedItGivesTheNumbersOfTheCpu) {
  const std::vector<float> h = numbers(kRows * kInner, 7), w = numbers(kColumns * kInner, 5);
  const auto cpu = compiled(LOGITLESS_DEVICE_CPU, 0);
  float loss = 0.0f;
  std::vector<float> d_h(h.size());
  {
    const std::size_t bytes = logitless_program_arena_bytes(cpu.get());
    std::vector<std::byte> block(bytes + 64);
    void* arena = block.data();
    std::size_t space = block.size();
    std::align(64, bytes, arena, space);
    const void* const in[] = {h.data(), w.data()};
    void* const out[] = {&loss, d_h.data()};
    ASSERT_EQ(logitless_program_run(cpu.get(), in, 2, out, 2, arena, bytes), LOGITLESS_OK);
  }

  const std::int32_t capability = logitless_context_compute_capability(context_.get());
  ASSERT_GE(capability, 80);
  const auto program = compiled(LOGITLESS_DEVICE_CUDA, capability);
  logitless_prepared_program* made = nullptr;
  expect_refused(logitless_program_prepare(cpu.get(), context_.get(), &made), "for the CPU");
  const auto other = compiled(LOGITLESS_DEVICE_CUDA, capability + 1);
  expect_refused(logitless_program_prepare(other.get(), context_.get(), &made), "capability");
  ASSERT_EQ(logitless_program_prepare(program.get(), context_.get(), &made), LOGITLESS_OK)
      << logitless_last_error();
  const Handle<logitless_prepared_program> prepared(made);

  const Context context({.device = DeviceKind::cuda});
  const DeviceStream stream(context);
  const std::size_t bytes = logitless_program_arena_bytes(program.get());
  const DeviceBuffer arena(context, bytes + 64),
      memory(context, (2 * h.size() + w.size() + 64) * 4);
  float* const on_h = memory.as<float>();
  float* const on_w = on_h + h.size();
  float* const on_loss = on_w + w.size();
  float* const on_d_h = on_loss + 32;
  stream.copy(on_h, h.data(), h.size() * 4);
  stream.copy(on_w, w.data(), w.size() * 4);
  const void* const in[] = {on_h, on_w};
  void* const out[] = {on_loss, on_d_h};
  const auto enqueue = [&](void* in_arena, std::size_t in_bytes) {
    return logitless_program_enqueue(prepared.get(), in, 2, out, 2, in_arena, in_bytes,
                                     stream.handle());
  };
  expect_refused(enqueue(arena.data(), bytes - 1), "arena_bytes");
  expect_refused(enqueue(arena.as<std::byte>(1), bytes), "aligned");
  void* const overlapping[] = {on_loss, on_h};
  expect_refused(logitless_program_enqueue(prepared.get(), in, 2, overlapping, 2, arena.data(),
                                           bytes, stream.handle()),
                 "shares memory");

  const auto results = [&] {
    std::vector<float> found(1 + d_h.size());
    stream.copy(found.data(), on_loss, 4);
    stream.copy(found.data() + 1, on_d_h, d_h.size() * 4);
    stream.wait();
    stream.fill(on_loss, 0xff, (32 + d_h.size()) * 4);
    return found;
  };
  stream.fill(arena.data(), 0xff, bytes);
  ASSERT_EQ(enqueue(arena.data(), bytes), LOGITLESS_OK) << logitless_last_error();
  const std::vector<float> eager = results();
  EXPECT_NEAR(eager[0], loss, 2e-5f * std::abs(loss));
  for (std::size_t i = 0; i < d_h.size(); ++i)
    EXPECT_NEAR(eager[i + 1], d_h[i], 2e-5f * (1.0f + std::abs(d_h[i]))) << i;

  const DeviceGraph graph = stream.capture(
      [&] { EXPECT_EQ(enqueue(arena.data(), bytes), LOGITLESS_OK) << logitless_last_error(); });
  for (int turn = 0; turn < 2; ++turn) {
    stream.launch(graph);
    EXPECT_EQ(results(), eager);
  }
}

}  // namespace
}  // namespace logitless::test
