// Stubs of the device kernels of compiled programs for a build without CUDA.
#include "core/check.h"
#include "kernels/device/gemm.h"
#include "kernels/device/index.h"
#include "kernels/device/sort.h"

namespace logitless::cuda {
namespace {

[[noreturn]] void refuse() { throw Unsupported("this build has no CUDA"); }

}  // namespace

struct Product::State {};
struct Product::Part {};
Product::~Product() = default;
Product::Product(const GemmShape&, int) { refuse(); }
void Product::run(const GemmCall&) const { refuse(); }
bool Product::fused() const { refuse(); }
std::string Product::algorithm() const { refuse(); }
const char* Product::kernel() const { refuse(); }

void take_rows(const TakeCall&) { refuse(); }
void scatter_add_rows(const ScatterCall&) { refuse(); }
void pick_elements(const PickCall&) { refuse(); }
void put_elements(const PutCall&) { refuse(); }
void find_largest(const ArgMaxCall&) { refuse(); }
void fill_elements(const FillCall&) { refuse(); }
void head_targets(const HeadTargetsCall&) { refuse(); }
void clear_missing_logits(const HeadTargetsCall&, float*) { refuse(); }
void sort_rows(const SortRowsCall&) { refuse(); }
void scan_rows(const ScanRowsCall&) { refuse(); }

}  // namespace logitless::cuda
