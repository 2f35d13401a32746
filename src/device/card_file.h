// Stored rates of GPUs: one small JSON file for each card, in the folder of the kernel cache.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/device/cards.h"
#include "logitless/calibration.h"

namespace logitless {

// Returns the path of a card's file. Empty: there is no folder.
std::string rates_file(const std::string& folder, const cuda::CardFacts& facts);

std::string rates_text(const GpuRates& rates, const cuda::CardFacts& facts);
// Returns nothing unless `text` is the whole text of rates of this card, driver and library
// version.
std::optional<GpuRates> parse_rates(std::string_view text, const cuda::CardFacts& facts);

// Returns nothing where there is no such file, another user may write it, or its text is not this
// card's.
std::optional<GpuRates> read_rates(const std::string& folder, const cuda::CardFacts& facts);
// Writes the file atomically. Returns why it could not be, or empty.
std::string write_rates(const std::string& folder, const cuda::CardFacts& facts,
                        const GpuRates& rates);

// Returns the card with the measured rates that differ enough (GpuCalibration::used).
GpuCard with_rates(const GpuCard& nominal, const GpuRates& measured);

// Returns false with LOGITLESS_CALIBRATION=off, true with "on" or unset. Throws InvalidArgument on
// anything else.
bool uses_calibration();

// Returns the stored rates, or those of `measure`, stored.
GpuCalibration calibrate(const GpuCard& nominal, const cuda::CardFacts& facts,
                         const std::string& folder, bool refresh,
                         const std::function<GpuRates()>& measure);

// Returns the card with which this process plans for a local GPU. It is read once.
const GpuCard& planning_card(int index);

}  // namespace logitless
