// Stubs of the device kernels and streams of training for a build without CUDA.
#include "core/check.h"
#include "kernels/device/adamw.h"
#include "kernels/device/stream.h"

namespace logitless::cuda {
namespace {

[[noreturn]] void refuse() { throw Unsupported("this build has no CUDA"); }

}  // namespace

std::string device_name(int) { refuse(); }
void set_current_device(int) { refuse(); }
MemorySizes memory_sizes() { refuse(); }
std::shared_ptr<void> make_stream(bool) { refuse(); }
std::shared_ptr<void> make_event() { refuse(); }
std::shared_ptr<void> make_timed_event() { refuse(); }
void record_event_of_graph(void*, Stream) { refuse(); }
double seconds_between(void*, void*) { refuse(); }
std::shared_ptr<void> make_pinned(std::size_t) { refuse(); }
BesideCapture::BesideCapture() = default;
BesideCapture::~BesideCapture() = default;
bool stream_ready(Stream) { refuse(); }
void record_event(void*, Stream) { refuse(); }
void stream_wait(Stream, void*) { refuse(); }
void record_event_if_running(void*, Stream) { refuse(); }
void stream_wait_if_running(Stream, void*) { refuse(); }
void wait_event(void*) { refuse(); }
bool event_passed(void*) { refuse(); }
void copy_async(void*, const void*, std::size_t, Stream) { refuse(); }
void put_values(void*, const void*, Stream) { refuse(); }
void copy_rows_async(const RowsTo&, const RowsFrom&, std::size_t, std::size_t, Stream) { refuse(); }
void begin_capture(Stream) { refuse(); }
std::shared_ptr<void> end_capture(Stream) { refuse(); }
void abandon_capture(Stream) noexcept {}
bool is_captured(Stream) { refuse(); }
void launch_graph(void*, Stream) { refuse(); }

void adamw_reset(const AdamWCall&) { refuse(); }
void adamw_loss(const AdamWCall&, const float*, bool) { refuse(); }
void adamw_step(const AdamWCall&, const AdamWRates*, AdamWReport*) { refuse(); }
void adamw_totals(const AdamWCall&, const AdamWRates*, AdamWTotals*) { refuse(); }
void adamw_step_of_ranks(const AdamWCall&, const AdamWRates*, const AdamWTotals*, int,
                         AdamWReport*) {
  refuse();
}
void adamw_round(const AdamWCall&) { refuse(); }

}  // namespace logitless::cuda
