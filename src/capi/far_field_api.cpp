// The far field over the C ABI.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"
#include "logitless/c_far_field.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

struct logitless_far_head {
  FarFieldHead head;
  // Last results of the calls that return a pointer.
  std::string explanation;
  std::vector<std::byte> state;
};

namespace logitless::capi {

template <>
inline logitless_order_options defaults() {
  logitless_order_options value{};
  value.struct_size = sizeof(value);
  value.strata = OrderOptions{}.strata;
  value.seed = OrderOptions{}.seed;
  return value;
}
template <>
inline logitless_far_field_options defaults() {
  const FarFieldOptions options;
  logitless_far_field_options value{};
  value.struct_size = sizeof(value);
  value.error = options.error;
  value.sample_every = options.sample_every;
  value.audit_rows = options.audit_rows;
  value.audit_every = options.audit_every;
  value.refresh_every = options.refresh_every;
  value.refresh_delay = options.refresh_delay;
  value.sample_rows = options.sample_rows;
  value.accuracy = static_cast<logitless_accuracy>(options.accuracy);
  return value;
}

}  // namespace logitless::capi

namespace {

FarFieldHead& head_of(logitless_far_head* handle) {
  require(handle != nullptr, "head: expected a handle, got NULL");
  return handle->head;
}
const FarFieldHead& head_of(const logitless_far_head* handle) {
  require(handle != nullptr, "head: expected a handle, got NULL");
  return handle->head;
}

template <typename T>
std::span<T> vector_of(T* data, std::int64_t size, const char* name) {
  require_pointer(data, name);
  require(size > 0, "vocab: expected more than 0 vocabulary entries, got ", size);
  return {data, static_cast<std::size_t>(size)};
}

logitless_vocab_order* handle_of(VocabOrder order) {
  return new logitless_vocab_order{std::move(order)};
}

FarFieldOptions options_from(const logitless_far_field_options* from) {
  const logitless_far_field_options c = read_optional_struct(from, "options");
  require(c.reserved == 0, "options.reserved: expected 0, got ", c.reserved);
  FarFieldOptions options;
  options.accuracy = accuracy_from(c.accuracy, "options.accuracy");
  options.error = c.error;
  options.sample_every = c.sample_every;
  options.audit_rows = c.audit_rows;
  options.audit_every = c.audit_every;
  options.refresh_every = c.refresh_every;
  options.refresh_delay = c.refresh_delay;
  options.sample_rows = c.sample_rows;
  options.memory_budget = c.memory_budget;
  if (c.replicas != nullptr) options.replicas = c.replicas->communicator;
  return options;
}

}  // namespace

void logitless_order_options_init(logitless_order_options* options, size_t struct_size) {
  init(options, struct_size);
}
void logitless_far_field_options_init(logitless_far_field_options* options, size_t struct_size) {
  init(options, struct_size);
}
void logitless_far_field_report_init(logitless_far_field_report* report, size_t struct_size) {
  init(report, struct_size);
}

// ---- Orders

logitless_status logitless_average_probability(const logitless_context* context,
                                               const logitless_tensor* hidden,
                                               const logitless_tensor* weight,
                                               const logitless_tensor* bias, float logit_scale,
                                               float softcap, uint64_t memory_budget,
                                               float* average, int64_t vocab) {
  return guarded([&] {
    const std::span<float> to = vector_of(average, vocab, "average");
    const std::vector<float> made = average_probability(
        context_of(context), view_from(hidden, "hidden"), view_from(weight, "weight"),
        view_from(bias, "bias"), logit_scale, softcap, memory_budget);
    require(made.size() == to.size(), "vocab: expected ", made.size(),
            ", the vocabulary of weight, got ", vocab);
    std::copy(made.begin(), made.end(), to.begin());
  });
}

logitless_status logitless_vocab_order_make(const logitless_context* context,
                                            const logitless_tensor* weight, const float* average,
                                            int64_t vocab, const logitless_order_options* options,
                                            logitless_vocab_order** order) {
  return guarded([&] {
    require_pointer(order, "order");
    const logitless_order_options c = read_optional_struct(options, "options");
    *order = handle_of(make_vocab_order(context_of(context), view_from(weight, "weight"),
                                        vector_of(average, vocab, "average"), {c.strata, c.seed}));
  });
}

logitless_status logitless_vocab_order_create(const int64_t* vocab_ids, const float* average,
                                              int64_t vocab, logitless_vocab_order** order) {
  return guarded([&] {
    require_pointer(order, "order");
    *order = handle_of(
        VocabOrder(vector_of(vocab_ids, vocab, "vocab_ids"), vector_of(average, vocab, "average")));
  });
}

logitless_status logitless_vocab_order_measure(const logitless_context* context,
                                               const logitless_vocab_order* order,
                                               const logitless_tensor* hidden,
                                               const logitless_tensor* weight,
                                               const logitless_tensor* bias, float logit_scale,
                                               float tau, logitless_vocab_order** measured) {
  return guarded([&] {
    require_pointer(measured, "measured");
    *measured = handle_of(measure_tiles(context_of(context), order_of(order),
                                        view_from(hidden, "hidden"), view_from(weight, "weight"),
                                        view_from(bias, "bias"), logit_scale, tau));
  });
}

void logitless_vocab_order_destroy(logitless_vocab_order* order) { delete order; }

int64_t logitless_vocab_order_vocab(const logitless_vocab_order* order) {
  return order == nullptr ? 0 : order->order.vocab();
}

int64_t logitless_vocab_order_dim(const logitless_vocab_order* order) {
  return order == nullptr ? 0 : order->order.dim();
}

const int64_t* logitless_vocab_order_ids(const logitless_vocab_order* order) {
  return order == nullptr ? nullptr : order->order.vocab_ids().data();
}

const float* logitless_vocab_order_average(const logitless_vocab_order* order) {
  return order == nullptr ? nullptr : order->order.average().data();
}

logitless_status logitless_vocab_order_save(const logitless_vocab_order* order, const char* path) {
  return guarded([&] {
    require_pointer(path, "path");
    order_of(order).save(path);
  });
}

logitless_status logitless_vocab_order_load(const char* path, logitless_vocab_order** order) {
  return guarded([&] {
    require_pointer(path, "path");
    require_pointer(order, "order");
    *order = handle_of(VocabOrder::load(path));
  });
}

// ---- The head

logitless_status logitless_far_head_create(const logitless_context* context,
                                           const logitless_far_field_options* options,
                                           logitless_far_head** head) {
  return guarded([&] {
    require_pointer(head, "head");
    *head =
        new logitless_far_head{FarFieldHead(context_of(context), options_from(options)), {}, {}};
  });
}

void logitless_far_head_destroy(logitless_far_head* head) { delete head; }

logitless_status logitless_far_head_step(logitless_far_head* head,
                                         const logitless_cross_entropy_options* options,
                                         const logitless_cross_entropy_inputs* inputs,
                                         const logitless_cross_entropy_outputs* outputs,
                                         logitless_loss_statistics* statistics) {
  return guarded([&] {
    if (statistics != nullptr)
      check_struct_size(statistics, "statistics");  // before any output is written
    const LossStatistics made =
        head_of(head).step(options_from(options), inputs_from(inputs), outputs_from(outputs));
    if (statistics != nullptr) write_statistics(made, statistics);
  });
}

logitless_status logitless_far_head_statistics(const logitless_far_head* head,
                                               logitless_loss_statistics* statistics) {
  return guarded([&] {
    require_pointer(statistics, "statistics");
    check_struct_size(statistics, "statistics");
    write_statistics(head_of(head).statistics(), statistics);
  });
}

logitless_status logitless_far_head_report(const logitless_far_head* head,
                                           logitless_far_field_report* report) {
  return guarded([&] {
    const FarFieldReport& r = head_of(head).report();
    auto c = defaults<logitless_far_field_report>();
    c.steps = r.steps;
    c.dense_steps = r.dense_steps;
    c.repeated_steps = r.repeated_steps;
    c.audits = r.audits;
    c.refreshes = r.refreshes;
    c.last_error = r.last_error;
    c.worst_accepted_error = r.worst_accepted_error;
    c.tau = r.tau;
    c.mean_selected = r.mean_selected;
    c.vocab = head_of(head).order().vocab();
    c.far = r.far ? 1 : 0;
    write_struct(c, report, "report");
  });
}

const char* logitless_far_head_explain(logitless_far_head* head) {
  if (head == nullptr) return "";
  const logitless_status status = guarded([&] { head->explanation = head->head.explain(); });
  return status == LOGITLESS_OK ? head->explanation.c_str() : "";
}

logitless_status logitless_far_head_order(const logitless_far_head* head,
                                          logitless_vocab_order** order) {
  return guarded([&] {
    require_pointer(order, "order");
    const VocabOrder& found = head_of(head).order();
    *order = found.empty() ? nullptr : handle_of(found);
  });
}

logitless_status logitless_far_head_save(const logitless_far_head* head, const char* path) {
  return guarded([&] {
    require_pointer(path, "path");
    head_of(head).save(path);
  });
}

logitless_status logitless_far_head_load(logitless_far_head* head, const char* path) {
  return guarded([&] {
    require_pointer(path, "path");
    head_of(head).load(path);
  });
}

logitless_status logitless_far_head_state(logitless_far_head* head, const void** state,
                                          size_t* bytes) {
  return guarded([&] {
    require_pointer(state, "state");
    require_pointer(bytes, "bytes");
    std::vector<std::byte> made = head_of(head).state();
    head->state = std::move(made);
    *state = head->state.data();
    *bytes = head->state.size();
  });
}

logitless_status logitless_far_head_set_state(logitless_far_head* head, const void* state,
                                              size_t bytes) {
  return guarded([&] {
    require_pointer(state, "state");
    head_of(head).set_state({static_cast<const std::byte*>(state), bytes});
  });
}
