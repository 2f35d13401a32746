#include "compiler/host_kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "compiler/exec/cuda/prelude.h"
#include "compiler/host_mma.h"
#include "compiler/host_wgmma.h"
#include "core/check.h"

namespace logitless::test {
namespace {

// Replaces CUDA's keywords and the machine-dependent part of the prelude.
constexpr const char* kHost = R"host(
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local

struct Index3 { unsigned x, y, z; };
static thread_local Index3 blockIdx, threadIdx;

// The threads of a block. The blocks of a cluster run beside each other.
constexpr std::size_t kStack = 1 << 17;
static thread_local ucontext_t scheduler;
static thread_local std::vector<ucontext_t> threads;
static thread_local std::unique_ptr<char[]> stacks;  // not filled: most pages stay untouched
static thread_local std::size_t stacks_count = 0;
static thread_local std::vector<char> ended;
static thread_local std::vector<std::uint64_t> slots;
static thread_local char shared_memory;  // its address tells where the block's shared memory is
static std::vector<char*> places;        // of the blocks of a cluster: their shared_memory
static std::unique_ptr<std::barrier<>> cluster;
static void (*running)(void**);
static void** given;

static void yield() { swapcontext(&threads[threadIdx.x], &scheduler); }
static void thread_main() {
  running(given);
  ended[threadIdx.x] = 1;
}
static void __syncthreads() { yield(); }
template <class R>
static R other_lane(R x, int mask) {
  const unsigned own = threadIdx.x;
  std::memcpy(&slots[own], &x, sizeof(x));
  yield();
  R other;
  std::memcpy(&other, &slots[own ^ (unsigned)mask], sizeof(x));
  yield();
  return other;
}

static void cluster_arrive() {}
static void cluster_wait() {
  yield();
  if (threadIdx.x == 0) cluster->arrive_and_wait();
}
template <class State>
static void store_to_block(State* own, unsigned block, const State& state) {
  std::memcpy(places[block] + ((char*)own - &shared_memory), &state, sizeof(state));
}

static void run_block(unsigned index, unsigned block, bool waits) {
  threads.resize(block);
  if (waits && stacks_count < block) {
    stacks.reset(new char[block * kStack]);
    stacks_count = block;
  }
  slots.resize(block);
  blockIdx.x = index;
  if (!waits) {
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) running(given);
    return;
  }
  ended.assign(block, 0);
  for (unsigned t = 0; t < block; ++t) {
    getcontext(&threads[t]);
    threads[t].uc_stack.ss_sp = stacks.get() + t * kStack;
    threads[t].uc_stack.ss_size = kStack;
    threads[t].uc_link = &scheduler;
    makecontext(&threads[t], thread_main, 0);
  }
  for (bool going = true; going;) {
    going = false;
    for (unsigned t = 0; t < block; ++t) {
      if (ended[t]) continue;
      threadIdx.x = t;
      swapcontext(&scheduler, &threads[t]);
      going = going || !ended[t];
    }
  }
}
extern "C" void run_blocks(void (*kernel)(void**), void** arguments, unsigned grid, unsigned block,
                           int waits, unsigned blocks_of_cluster) {
  running = kernel;
  given = arguments;
  if (blocks_of_cluster == 1) {
    for (unsigned b = 0; b < grid; ++b) run_block(b, block, waits);
    return;
  }
  places.resize(blocks_of_cluster);
  cluster = std::make_unique<std::barrier<>>(blocks_of_cluster);
  std::vector<std::thread> running_blocks;
  for (unsigned rank = 0; rank < blocks_of_cluster; ++rank) {
    running_blocks.emplace_back([=] {
      places[rank] = &shared_memory;
      for (unsigned b = rank; b < grid; b += blocks_of_cluster) {
        cluster->arrive_and_wait();
        run_block(b, block, true);
      }
    });
  }
  for (std::thread& t : running_blocks) t.join();
}

template <class... A, std::size_t... I>
static void apply(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
  kernel(*(A*)a[I]...);
}
template <class... A>
static void apply(void (*kernel)(A...), void** a) {
  apply(kernel, a, std::index_sequence_for<A...>());
}

static float rsqrtf(float x) { return (float)(1.0 / std::sqrt((double)x)); }
static float infinity() { return __builtin_inff(); }
static float reciprocal(float x) { return 1.0f / x; }
static float near_root(float x) { return std::sqrt(x); }
static float weight_of(float x) { return std::exp2(x * 1.44269504f); }
static float float_maximum(float a, float b) { return a > b || a != a ? a : b; }

// Returns memory that is read or written at once.
template <class P>
static P& aligned(P* at) {
  if ((std::uintptr_t)at % alignof(P) != 0) std::abort();
  return *at;
}

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
static float as_float(std::uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static std::uint32_t as_bits(float x) { std::uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
static float number(bf16 x) { return as_float((std::uint32_t)x.bits << 16); }
static bf16 to_bf16(float x) {
  const std::uint32_t bits = as_bits(x);
  if (x != x) return {0x7fff};
  return {(unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
static float number(f16 x) { _Float16 y; std::memcpy(&y, &x, 2); return (float)y; }
static f16 to_f16(float x) { const _Float16 y = (_Float16)x; f16 z; std::memcpy(&z, &y, 2); return z; }
)host";

std::string compiler() {
  const char* const given = std::getenv("CXX");
  return given != nullptr ? given : LOGITLESS_CXX;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the prelude, whose accesses of several elements abort if they are not aligned.
std::string checked_prelude() {
  std::string text(ir::prelude());
  for (const std::string access :
       {"(const Pack<kPack, T>*)(from + i)", "(Pack<kPack, T>*)(to + i)"}) {
    const std::size_t at = text.find("*" + access);
    check(at != std::string::npos, "the prelude has no access ", access);
    text.replace(at, access.size() + 1, concat("aligned(", access, ")"));
  }
  return text;
}

// A folder that is removed at the end.
struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kernels-XXXXXX").string();
    check(mkdtemp(name.data()) != nullptr, "no temporary folder");
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

unsigned blocks_of_cluster(const std::string& source) {
  constexpr std::string_view kKey = "__cluster_dims__(";
  const std::size_t at = source.find(kKey);
  return at == std::string::npos
             ? 1
             : static_cast<unsigned>(std::stoul(source.substr(at + kKey.size())));
}

}  // namespace

bool has_host_compiler() {
  return std::system((compiler() + " --version > /dev/null 2>&1").c_str()) == 0;
}

HostKernels::HostKernels(std::span<const ir::GeneratedKernel> kernels) {
  const Folder folder;
  const std::filesystem::path source = folder.path / "kernels.cpp",
                              library = folder.path / "kernels.so", log = folder.path / "log";
  {
    std::ofstream file(source);
    file << kHost << checked_prelude() << ir::prelude_cluster();
    const auto is_product = [](const ir::GeneratedKernel& k) {
      return k.product_engine.has_value();
    };
    const auto product = std::find_if(kernels.begin(), kernels.end(), is_product);
    if (product != kernels.end())
      file << (product->product_engine == ir::ProductEngine::sm80 ? host_sm80_engine()
                                                                  : host_sm90_engine());
    std::set<std::string> written;
    for (const ir::GeneratedKernel& kernel : kernels) {
      if (!written.insert(kernel.entry).second) continue;
      file << "\n"
           << kernel.source << "extern \"C\" void call_" << kernel.entry << "(void** a) { apply(&"
           << kernel.entry << ", a); }\n";
    }
  }
  const std::string command =
      concat(compiler(),
             " -std=c++20 -pthread -O1 -w -ffp-contract=off -fno-strict-aliasing -shared -fPIC ",
             source.string(), " -o ", library.string(), " > ", log.string(), " 2>&1");
  check(std::system(command.c_str()) == 0, "the host's compiler says:\n", read(log));
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  check(loaded != nullptr, dlerror());
  library_ = std::shared_ptr<void>(loaded, dlclose);
}

void HostKernels::run(const ir::GeneratedKernel& kernel, std::span<void* const> arguments) const {
  using Call = void (*)(void**);
  const auto call = reinterpret_cast<Call>(dlsym(library_.get(), ("call_" + kernel.entry).c_str()));
  const auto run_blocks =
      reinterpret_cast<void (*)(Call, void**, unsigned, unsigned, int, unsigned)>(
          dlsym(library_.get(), "run_blocks"));
  check(call != nullptr && run_blocks != nullptr, "no kernel ", kernel.entry);
  const bool waits = kernel.product_engine.has_value() ||
                     kernel.source.find("across_") != std::string::npos ||
                     kernel.source.find("__syncthreads") != std::string::npos;
  run_blocks(call, const_cast<void**>(arguments.data()), kernel.shape.grid[0], kernel.shape.block,
             waits, blocks_of_cluster(kernel.source));
}

}  // namespace logitless::test
