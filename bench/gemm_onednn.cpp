#include "gemm_onednn.h"

#ifdef BENCH_HAS_ONEDNN
#include <omp.h>

#include <dnnl.hpp>
#include <iostream>
#include <memory>
#include <unordered_map>

namespace bench {

std::function<void()> onednn_gemm(const void* hidden, const void* weight, std::int64_t tokens,
                                  std::int64_t dim, std::int64_t vocab, int threads) try {
  using dnnl::memory;
  using tag = memory::format_tag;
  omp_set_num_threads(threads);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  auto stream = std::make_shared<dnnl::stream>(engine);
  const memory::desc a({tokens, dim}, memory::data_type::bf16, tag::ab);
  const memory::desc b_any({dim, vocab}, memory::data_type::bf16, tag::any);
  const memory::desc b_plain({dim, vocab}, memory::data_type::bf16, tag::ba);
  const memory::desc c({tokens, vocab}, memory::data_type::bf16, tag::ab);
  const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b_any, c), engine);
  memory plain(b_plain, engine, const_cast<void*>(weight));
  memory packed(description.weights_desc(), engine);
  dnnl::reorder(plain, packed).execute(*stream, plain, packed);
  stream->wait();
  const dnnl::matmul product(description);
  const std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SRC, memory(a, engine, const_cast<void*>(hidden))},
      {DNNL_ARG_WEIGHTS, packed},
      {DNNL_ARG_DST, memory(c, engine)}};
  return [=] {
    product.execute(*stream, arguments);
    stream->wait();
  };
} catch (const dnnl::error& error) {
  std::cerr << "oneDNN: " << error.what() << "; left out\n";  // this processor has no bf16
  return {};
}

}  // namespace bench

#else
namespace bench {

std::function<void()> onednn_gemm(const void*, const void*, std::int64_t, std::int64_t,
                                  std::int64_t, int) {
  return {};
}

}  // namespace bench
#endif
