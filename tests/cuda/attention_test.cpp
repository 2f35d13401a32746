// Attention on a GPU against float64: shapes, dtypes, strides, determinism, and no writes outside
// the outputs.
#include "kernels/device/attention.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "core/element.h"
#include "cuda/attention_reference.h"
#include "logitless/error.h"

namespace logitless::test {
namespace {

using cuda::AttentionCall;
using cuda::DeviceMemory;

// Memory layouts: [B, T, H, D]; q, k, v (and their gradients) as columns of one matrix; rows and
// heads at odd offsets, so that no address but the first is aligned.
enum class Lie { apart, columns, odd };

// A matrix of `rows` rows on the device, filled with a mark that reveals writes outside a view.
class Matrix {
 public:
  Matrix(DType dtype, std::int64_t rows, std::int64_t width)
      : dtype_(dtype),
        width_(width),
        host_((2 * kGuard + static_cast<std::size_t>(rows * width)) * size_of(dtype),
              std::byte{0xa5}),
        memory_(host_.size()) {}
  std::int64_t width() const { return width_; }
  // Address of element `column` of row 0.
  void* at(std::int64_t column) const {
    return static_cast<std::byte*>(memory_.data()) +
           (kGuard + static_cast<std::size_t>(column)) * size_of(dtype_);
  }
  double get(std::int64_t element) const {
    return load_element(host_.data(), dtype_, static_cast<std::int64_t>(kGuard) + element);
  }
  void set(std::int64_t element, double x) {
    store_element(host_.data(), dtype_, static_cast<std::int64_t>(kGuard) + element, x);
  }
  void mark_again(std::int64_t element) {
    std::memset(host_.data() + (kGuard + static_cast<std::size_t>(element)) * size_of(dtype_), 0xa5,
                size_of(dtype_));
  }
  void send() const { cuda::copy_to_device(memory_.data(), host_.data(), host_.size(), nullptr); }
  void receive() { cuda::copy_to_host(host_.data(), memory_.data(), host_.size(), nullptr); }
  const std::vector<std::byte>& bytes() const { return host_; }
  bool marked() const {
    return std::all_of(host_.begin(), host_.end(),
                       [](std::byte b) { return b == std::byte{0xa5}; });
  }

 private:
  static constexpr std::size_t kGuard = 512;
  DType dtype_;
  std::int64_t width_;
  std::vector<std::byte> host_;
  DeviceMemory memory_;
};

// One of q, k, v, out and their gradients: a view of a matrix.
struct Tensor4 {
  Matrix* matrix;
  std::int64_t batch, heads, rows, dim, column, stride_b, stride_h, stride_t;
  template <typename View>
  View view() const {
    return {matrix->at(column), stride_b, stride_h, stride_t};
  }
  template <typename F>
  void each(F f) const {
    std::int64_t i = 0;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t t = 0; t < rows; ++t)
          for (std::int64_t d = 0; d < dim; ++d)
            f(i++, column + b * stride_b + h * stride_h + t * stride_t + d);
  }
};

struct DeviceAttention {
  DeviceAttention(const AttentionSizes& s, Lie lie) : sizes(s) {
    const bool together = lie == Lie::columns;  // T == S
    const std::int64_t d = s.dim, q_width = s.heads * d, kv_width = s.kv_heads * d;
    const std::int64_t gap = lie == Lie::odd ? 3 : 0;
    if (together) {
      const std::int64_t width = q_width + 2 * kv_width;
      in_[0] = std::make_unique<Matrix>(s.dtype, s.batch * s.queries, width);
      to_[0] = std::make_unique<Matrix>(s.dtype, s.batch * s.queries, width);
      for (auto* m : {&in_, &to_}) {
        const auto [q_of, k_of, v_of] = of_products(m == &in_);
        *q_of = tensor((*m)[0].get(), s.heads, s.queries, 0, gap);
        *k_of = tensor((*m)[0].get(), s.kv_heads, s.keys, q_width, gap);
        *v_of = tensor((*m)[0].get(), s.kv_heads, s.keys, q_width + kv_width, gap);
      }
    } else {
      for (auto* m : {&in_, &to_}) {
        const auto t = of_products(m == &in_);
        for (std::size_t i = 0; i < 3; ++i) {
          const std::int64_t heads = i == 0 ? s.heads : s.kv_heads;
          const std::int64_t rows = i == 0 ? s.queries : s.keys;
          (*m)[i] = std::make_unique<Matrix>(s.dtype, s.batch * rows, heads * (d + gap) + gap);
          *t[i] = tensor((*m)[i].get(), heads, rows, 0, gap);
        }
      }
    }
    in_[3] = std::make_unique<Matrix>(s.dtype, s.batch * s.queries, s.heads * (d + gap) + gap);
    to_[3] = std::make_unique<Matrix>(s.dtype, s.batch * s.queries, s.heads * (d + gap) + gap);
    d_out = tensor(in_[3].get(), s.heads, s.queries, 0, gap);
    out = tensor(to_[3].get(), s.heads, s.queries, 0, gap);
    lse = std::make_unique<Matrix>(DType::f32, s.batch * s.heads, s.queries);

    std::mt19937_64 generator(static_cast<std::uint64_t>(s.queries * 31 + s.keys * 7 + d));
    std::uniform_real_distribution<double> uniform(-1.0, 1.0);
    const Tensor4* const operands[] = {&q, &k, &v, &d_out};
    for (int i = 0; i < 4; ++i) {
      operands[i]->each([&](std::int64_t, std::int64_t at) {
        operands[i]->matrix->set(at, uniform(generator));
        values[i].push_back(operands[i]->matrix->get(at));
      });
    }
    for (auto& m : in_)
      if (m) m->send();
    AttentionCall& c = call;
    c.batch = s.batch;
    c.heads = s.heads;
    c.kv_heads = s.kv_heads;
    c.queries = s.queries;
    c.keys = s.keys;
    c.dim = d;
    c.dtype = s.dtype;
    c.causal = s.causal;
    c.scale = static_cast<float>(s.scale);
    c.q = q.view<AttentionCall::Operand>();
    c.k = k.view<AttentionCall::Operand>();
    c.v = v.view<AttentionCall::Operand>();
    c.lse = static_cast<float*>(lse->at(0));
    c.result = out.view<AttentionCall::Output>();
    c.out = out.view<AttentionCall::Operand>();
    c.d_out = d_out.view<AttentionCall::Operand>();
    c.d_q = d_q.view<AttentionCall::Output>();
    c.d_k = d_k.view<AttentionCall::Output>();
    c.d_v = d_v.view<AttentionCall::Output>();
    const int capability = cuda::compute_capability(0);
    EXPECT_EQ(cuda::attention_unsupported(c, capability), "");
    for (const bool backward : {false, true}) {
      // Counts 4-byte elements, as the guards do.
      scratch[backward] = std::make_unique<Matrix>(
          DType::f32, 1,
          static_cast<std::int64_t>(cuda::attention_scratch_bytes(c, backward, capability) + 3) /
              4);
    }
  }
  DeviceAttention(const DeviceAttention&) = delete;

  void run() {
    for (auto& m : to_)
      if (m) m->send();
    lse->send();
    for (auto& m : scratch) m->send();
    call.scratch = scratch[0]->at(0);
    cuda::attention_forward(call);
    call.scratch = scratch[1]->at(0);
    cuda::attention_backward(call);
    cuda::synchronize(call.stream);
  }
  void receive() {
    for (auto& m : to_)
      if (m) m->receive();
    lse->receive();
  }
  // Returns the matrices of the outputs, marks included.
  std::vector<std::byte> bytes() {
    receive();
    std::vector<std::byte> all = lse->bytes();
    for (auto& m : to_)
      if (m) all.insert(all.end(), m->bytes().begin(), m->bytes().end());
    return all;
  }
  // Overwrites the outputs' own elements with the mark and expects the mark everywhere.
  void expect_guards() {
    for (const Tensor4* t : {&out, &d_q, &d_k, &d_v})
      t->each([&](std::int64_t, std::int64_t at) { t->matrix->mark_again(at); });
    for (auto& m : to_) EXPECT_TRUE(!m || m->marked()) << "written beside an output";
    for (std::int64_t i = 0; i < sizes.batch * sizes.heads * sizes.queries; ++i) lse->mark_again(i);
    EXPECT_TRUE(lse->marked()) << "written beside lse";
    for (auto& m : scratch) {
      m->receive();
      for (std::int64_t i = 0; i < m->width(); ++i) m->mark_again(i);
      EXPECT_TRUE(m->marked()) << "written beside the scratch";
    }
  }

  AttentionSizes sizes;
  AttentionCall call;
  Tensor4 q, k, v, d_out, d_q, d_k, d_v, out;
  std::unique_ptr<Matrix> lse, scratch[2];
  std::vector<double> values[4];  // of q, k, v, d_out

 private:
  Tensor4 tensor(Matrix* m, std::int64_t heads, std::int64_t rows, std::int64_t column,
                 std::int64_t gap) const {
    return {m,      sizes.batch,       heads,           rows,      sizes.dim,
            column, rows * m->width(), sizes.dim + gap, m->width()};
  }
  std::array<Tensor4*, 3> of_products(bool operands) {
    if (operands) return {&q, &k, &v};
    return {&d_q, &d_k, &d_v};
  }
  std::unique_ptr<Matrix> in_[4], to_[4];
};

void expect_close(const char* name, const Tensor4& got, const Bounded& exact) {
  double worst = 0.0;
  std::int64_t at_worst = 0;
  got.each([&](std::int64_t i, std::int64_t at) {
    const auto e = static_cast<std::size_t>(i);
    const double error = std::abs(got.matrix->get(at) - exact.value[e]);
    const double part = error <= exact.bound[e] ? error / std::max(exact.bound[e], 1e-300)
                                                : std::max(1.0001, error / exact.bound[e]);
    if (!(part <= worst)) {
      worst = std::isnan(part) ? HUGE_VAL : part;
      at_worst = i;
    }
  });
  EXPECT_LE(worst, 1.0) << name << " [" << at_worst / got.dim / got.rows << ", "
                        << at_worst / got.dim % got.rows << ", " << at_worst % got.dim << "]";
}

void check(const AttentionSizes& s, Lie lie = Lie::apart) {
  SCOPED_TRACE(testing::Message() << name_of(s.dtype) << " B " << s.batch << " H " << s.heads << "/"
                                  << s.kv_heads << " T " << s.queries << " S " << s.keys << " D "
                                  << s.dim << " causal " << s.causal << " scale " << s.scale
                                  << " lie " << static_cast<int>(lie));
  DeviceAttention device(s, lie);
  device.run();
  device.receive();
  const AttentionExact exact =
      exact_attention(s, device.values[0], device.values[1], device.values[2], device.values[3]);
  for (std::size_t i = 0; i < exact.lse.value.size(); ++i) {
    const double lse = device.lse->get(static_cast<std::int64_t>(i));
    if (std::isinf(exact.lse.value[i])) {
      ASSERT_EQ(lse, exact.lse.value[i]) << i;
    } else {
      ASSERT_NEAR(lse, exact.lse.value[i], exact.lse.bound[i]) << i;
    }
  }
  expect_close("out", device.out, exact.out);
  expect_close("d_q", device.d_q, exact.d_q);
  expect_close("d_k", device.d_k, exact.d_k);
  expect_close("d_v", device.d_v, exact.d_v);
  device.expect_guards();
}

double usual_scale(std::int64_t dim) { return 2.0 / std::sqrt(static_cast<double>(dim)); }

class CudaAttention : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda::device_missing(0);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(CudaAttention, DimsAndDtypes) {
  for (const std::int64_t dim : {1, 8, 16, 37, 40, 64, 80, 96, 128, 160, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const bool causal : {false, true})
        check({2, 2, 1, 129, 129, dim, dtype, causal, usual_scale(dim)});
    }
  }
}

TEST_F(CudaAttention, Lengths) {
  for (const std::int64_t t : {1, 7, 64, 127, 128, 129, 255, 256, 257, 640, 1000, 1024}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const bool causal : {false, true})
        check({1, 3, 1, t, t, dim, DType::bf16, causal, usual_scale(dim)});
    }
  }
  for (const std::int64_t t : {1, 127, 1000}) {
    for (const DType dtype : {DType::f16, DType::f32})
      check({1, 2, 2, t, t, 64, dtype, true, usual_scale(64)});
  }
}

TEST_F(CudaAttention, Long) {
  for (const std::int64_t dim : {64, 128})
    check({1, 2, 1, 4097, 4097, dim, DType::bf16, true, usual_scale(dim)});
}

TEST_F(CudaAttention, QueriesAndKeysOfOtherLengths) {
  constexpr std::int64_t kLengths[][2] = {{1, 300},   {300, 1},   {5, 128},   {128, 5},
                                          {70, 33},   {33, 70},   {129, 640}, {640, 129},
                                          {128, 256}, {256, 128}, {500, 257}, {257, 500}};
  for (const auto& n : kLengths) {
    for (const std::int64_t dim : {64, 128}) {
      for (const bool causal : {false, true})
        check({2, 4, 2, n[0], n[1], dim, DType::bf16, causal, usual_scale(dim)});
    }
    check({1, 2, 1, n[0], n[1], 64, DType::f16, true, usual_scale(64)});
    check({1, 2, 1, n[0], n[1], 40, DType::f32, true, usual_scale(40)});
  }
}

TEST_F(CudaAttention, GroupsOfHeads) {
  constexpr std::int64_t kHeads[][2] = {{1, 1}, {12, 12}, {8, 1}, {8, 2}, {6, 3}};
  for (const auto& n : kHeads) {
    for (const std::int64_t dim : {64, 128})
      check({3, n[0], n[1], 200, 200, dim, DType::bf16, true, usual_scale(dim)});
  }
}

TEST_F(CudaAttention, ColumnsOfOneMatrixAndOddStrides) {
  for (const Lie lie : {Lie::columns, Lie::odd}) {
    for (const std::int64_t dim : {8, 64, 128, 256}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        if (dtype != DType::bf16 && dim > 64) continue;
        check({2, 4, 2, 150, 150, dim, dtype, true, usual_scale(dim)}, lie);
      }
    }
    check({2, 4, 4, 384, 384, 64, DType::bf16, true, usual_scale(64)}, lie);
  }
}

// Large scores: the running maximum moves, most probabilities are nearly 0.
TEST_F(CudaAttention, LargeScores) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const double scale : {5.0, -5.0, 0.0}) check({1, 2, 1, 300, 300, 64, dtype, true, scale});
  }
  check({1, 2, 1, 300, 300, 128, DType::bf16, false, 5.0});
}

TEST_F(CudaAttention, NothingToDo) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({1, 2, 1, 0, 40, 64, dtype, true, 1.0});
    check({1, 2, 1, 40, 0, 64, dtype, false, 1.0});
    check({1, 2, 1, 0, 0, 64, dtype, false, 1.0});
    check({0, 2, 1, 40, 40, 64, dtype, false, 1.0});
  }
}

// A query with a NaN affects only its own rows, and the gradients of the keys that it sees.
TEST_F(CudaAttention, NanStaysInItsRow) {
  DeviceAttention device({1, 1, 1, 200, 200, 64, DType::bf16, true, 0.125}, Lie::apart);
  device.q.matrix->set(70 * 64 + 3, NAN);
  device.q.matrix->send();
  device.run();
  device.receive();
  for (std::int64_t t = 0; t < 200; ++t) {
    EXPECT_EQ(std::isnan(device.out.matrix->get(t * 64)), t == 70);
    EXPECT_EQ(std::isnan(device.lse->get(t)), t == 70);
    EXPECT_EQ(std::isnan(device.d_q.matrix->get(t * 64)), t == 70);
    if (t <= 70) {
      EXPECT_TRUE(std::isnan(device.d_k.matrix->get(t * 64)));
      EXPECT_TRUE(std::isnan(device.d_v.matrix->get(t * 64)));
    }
  }
}

// Keeps the SMs busy on another stream, with work of changing size.
class Load {
 public:
  Load() : thread_([this] { run(); }) {}
  ~Load() {
    done_ = true;
    thread_.join();
  }

 private:
  void run() {
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    DeviceAttention busy({3, 5, 5, 700, 700, 64, DType::f16, true, 0.125}, Lie::apart);
    busy.call.stream = stream;
    busy.call.scratch = busy.scratch[1]->at(0);
    for (int i = 0; !done_; ++i) {
      busy.call.batch = 1 + i % 3;
      for (int j = 0; j < 8; ++j) {
        cuda::attention_forward(busy.call);
        cuda::attention_backward(busy.call);
      }
      cuda::synchronize(stream);
    }
    cudaStreamDestroy(stream);
  }
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

TEST_F(CudaAttention, SameBitsEveryTime) {
  const Load load;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (const AttentionSizes& s :
       {AttentionSizes{4, 12, 12, 1024, 1024, 64, DType::bf16, true, 0.125},
        AttentionSizes{2, 8, 2, 700, 1100, 128, DType::bf16, true, 0.1},
        AttentionSizes{1, 2, 2, 2048, 2048, 64, DType::bf16, true, 0.1},
        AttentionSizes{2, 4, 4, 500, 500, 64, DType::f16, false, 0.125},
        AttentionSizes{1, 2, 2, 300, 300, 64, DType::f32, true, 0.125}}) {
    DeviceAttention device(s, Lie::apart);
    device.call.stream = stream;
    std::vector<std::byte> first;
    for (int run = 0; run < 20; ++run) {
      device.run();
      if (run == 0) {
        first = device.bytes();
      } else {
        EXPECT_EQ(device.bytes() == first, true) << "run " << run;
      }
    }
  }
  cudaStreamDestroy(stream);
}

// Captures the calls into one CUDA graph and replays it.
TEST_F(CudaAttention, IsCaptured) {
  for (const std::int64_t dim : {64, 40}) {
    DeviceAttention device({2, 4, 2, 500, 500, dim, DType::bf16, true, 0.1}, Lie::apart);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    device.call.stream = stream;
    device.run();
    const std::vector<std::byte> eager = device.bytes();
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    device.call.scratch = device.scratch[1]->at(0);
    cuda::attention_forward(device.call);
    cuda::attention_backward(device.call);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 2; ++i) {
      for (const Tensor4* t : {&device.out, &device.d_q, &device.d_k, &device.d_v}) {
        t->each([&](std::int64_t, std::int64_t at) { t->matrix->mark_again(at); });
        t->matrix->send();
      }
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      cuda::synchronize(stream);
      EXPECT_TRUE(device.bytes() == eager);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST(CudaAttentionCall, RefusesWhatNoKernelTakes) {
  AttentionCall call;
  call.heads = 4;
  call.kv_heads = 2;
  call.queries = call.keys = 10;
  call.dim = 64;
  EXPECT_EQ(cuda::attention_unsupported(call, 80), "");
  EXPECT_EQ(cuda::attention_unsupported(call, 75),
            "attention: the device has compute capability 7.5, expected 8.0 or more");
  call.dim = 257;
  EXPECT_EQ(cuda::attention_unsupported(call, 90), "attention: dim: expected 1 to 256, got 257");
  call.dim = 64;
  call.kv_heads = 3;
  EXPECT_EQ(cuda::attention_unsupported(call, 90),
            "attention: heads: expected a multiple of the 3 heads of keys, got 4");
  call.kv_heads = 4;
  call.dtype = DType::f64;
  EXPECT_EQ(cuda::attention_unsupported(call, 90), "attention: expected bf16, f16 or f32, got f64");
  call.dtype = DType::f32;
  call.queries = std::int64_t{1} << 33;
  EXPECT_NE(cuda::attention_unsupported(call, 90), "");
}

}  // namespace
}  // namespace logitless::test
