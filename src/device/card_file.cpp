#include "device/card_file.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>

#include "core/check.h"
#include "core/own_files.h"
#include "json/json.h"
#include "logitless/tensor_file.h"
#include "logitless/version.h"

namespace logitless {
namespace {

constexpr int kFormat = 1;
constexpr std::size_t kMostBytes = std::size_t{64} << 10;
// Differences that a second measurement makes as well.
constexpr double kNoise = 0.05;
// Only a disturbed measurement is so far from the nominal rate.
constexpr double kMostFactor = 20.0;

// Calls visit(name, rate of a, rate of b) for each sustained rate.
template <typename A, typename B, typename Visit>
void each_rate(A& a, B& b, const Visit& visit) {
  visit("gemm_flops", a.gemm_flops, b.gemm_flops);
  visit("tile_flops", a.tile_flops, b.tile_flops);
  visit("copy_bytes_per_second", a.copy_bytes_per_second, b.copy_bytes_per_second);
  visit("row_bytes_per_second", a.row_bytes_per_second, b.row_bytes_per_second);
}

// The conditions under which rates count.
Json identity_of(const cuda::CardFacts& facts) {
  return {{"format", kFormat},
          {"card", facts.name},
          {"compute_capability", facts.compute_capability},
          {"sms", facts.sms},
          {"driver", facts.driver},
          {"library", version()}};
}

std::optional<GpuRates> rates_of(const Json& json, const cuda::CardFacts& facts) {
  const Json identity = identity_of(facts);
  for (const auto& [name, value] : identity.items()) {
    const Json* const found = json.find(name);
    if (found == nullptr || !(*found == value)) return std::nullopt;
  }
  GpuRates rates;
  bool whole = true;
  each_rate(rates, rates, [&](const char* name, double& rate, double&) {
    const Json* const found = json.find(name);
    if (found == nullptr || !found->is_number()) {
      whole = false;
      return;
    }
    rate = found->get<double>();
    whole = whole && std::isfinite(rate) && rate >= 0.0;
  });
  return whole ? std::optional(rates) : std::nullopt;
}

}  // namespace

std::string rates_file(const std::string& folder, const cuda::CardFacts& facts) {
  if (folder.empty()) return {};
  std::string name = "rates-";
  for (const char c : facts.name) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    name += plain ? c : '-';
  }
  return (std::filesystem::path(folder) / (name + ".json")).string();
}

std::string rates_text(const GpuRates& rates, const cuda::CardFacts& facts) {
  Json json = identity_of(facts);
  each_rate(rates, rates, [&](const char* name, double rate, double) { json[name] = rate; });
  return json.dump(2, NotUtf8::replace) + "\n";
}

std::optional<GpuRates> parse_rates(std::string_view text, const cuda::CardFacts& facts) {
  if (text.size() > kMostBytes) return std::nullopt;
  const std::optional<Json> json = Json::try_parse(text);
  return json ? rates_of(*json, facts) : std::nullopt;
}

std::optional<GpuRates> read_rates(const std::string& folder, const cuda::CardFacts& facts) {
  if (folder.empty() || !cache_refusal(folder).empty()) return std::nullopt;
  const std::optional<std::string> text = read_own_file(rates_file(folder, facts));
  return text ? parse_rates(*text, facts) : std::nullopt;
}

std::string write_rates(const std::string& folder, const cuda::CardFacts& facts,
                        const GpuRates& rates) {
  if (folder.empty()) return "there is no folder for it (LOGITLESS_CACHE is empty)";
  const std::string reason = make_cache_folder(folder);
  if (!reason.empty()) return concat("'", folder, "': ", reason);
  try {
    write_file(rates_file(folder, facts), rates_text(rates, facts), FileUse::cache);
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

GpuCard with_rates(const GpuCard& nominal, const GpuRates& measured) {
  GpuCard card = nominal;
  each_rate(card, measured, [&](const char*, double& rate, double found) {
    const double factor = rate > 0.0 ? found / rate : 0.0;
    if (!(factor >= 1.0 / kMostFactor && factor <= kMostFactor)) return;  // NaN, too
    if (std::fabs(factor - 1.0) <= kNoise) return;
    rate = found;
    card.calibrated = true;
  });
  return card;
}

bool uses_calibration() {
  const char* const value = std::getenv("LOGITLESS_CALIBRATION");
  const std::string_view text = value == nullptr ? "on" : value;
  require(text == "on" || text == "off", "LOGITLESS_CALIBRATION: expected on or off, got '", text,
          "'");
  return text == "on";
}

GpuCalibration calibrate(const GpuCard& nominal, const cuda::CardFacts& facts,
                         const std::string& folder, bool refresh,
                         const std::function<GpuRates()>& measure) {
  GpuCalibration out;
  out.nominal = nominal;
  out.driver = facts.driver;
  out.file = rates_file(folder, facts);
  const bool used = uses_calibration();
  const std::optional<GpuRates> stored = refresh ? std::nullopt : read_rates(folder, facts);
  if (stored) {
    out.measured = *stored;
    out.from_file = true;
  } else {
    const auto start = std::chrono::steady_clock::now();
    out.measured = measure();
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out.not_stored = write_rates(folder, facts, out.measured);
  }
  out.used = used && out.not_stored.empty() ? with_rates(nominal, out.measured) : nominal;
  return out;
}

const GpuCard& planning_card(int index) {
  static std::mutex mutex;
  static auto* const cards = new std::map<int, GpuCard>;  // outlives threads
  const std::lock_guard lock(mutex);
  const auto found = cards->find(index);
  if (found != cards->end()) return found->second;
  GpuCard card = cuda::local_card(index);
  if (uses_calibration()) {
    const std::optional<GpuRates> rates = read_rates(cache_folder(), cuda::card_facts(index));
    if (rates) card = with_rates(card, *rates);
  }
  return cards->emplace(index, std::move(card)).first->second;
}

}  // namespace logitless
