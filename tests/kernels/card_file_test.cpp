// Stored rates of a GPU: their file, which rates plans take from it, and calibration with a
// measurement of the test's.
#include "device/card_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "logitless/error.h"
#include "logitless/plan.h"
#include "support/temp_dir.h"

namespace logitless {
namespace {

const cuda::CardFacts kFacts{.name = "NVIDIA A100-SXM4-80GB",
                             .compute_capability = 80,
                             .sms = 108,
                             .clock_hz = 1.4e9,
                             .bytes_per_second = 2e12,
                             .l2_bytes = 40 << 20,
                             .shared_bytes = 164 << 10,
                             .driver = "13.0"};
constexpr GpuRates kRates{.gemm_flops = 1.0 / 3.0 * 1e15,
                          .tile_flops = 212.25e12,
                          .copy_bytes_per_second = 1.5e12,
                          .row_bytes_per_second = 1.1e12};

// Sets LOGITLESS_CALIBRATION, or unsets it with null, until the end of the scope.
class Switch {
 public:
  explicit Switch(const char* value) {
    if (const char* const old = std::getenv(kName)) old_ = old;
    set(value);
  }
  ~Switch() { set(old_ ? old_->c_str() : nullptr); }
  Switch(const Switch&) = delete;
  Switch& operator=(const Switch&) = delete;

 private:
  static constexpr const char* kName = "LOGITLESS_CALIBRATION";
  static void set(const char* value) {
    if (value != nullptr) {
      setenv(kName, value, 1);
    } else {
      unsetenv(kName);
    }
  }
  std::optional<std::string> old_;
};

class CardFile : public testing::Test {
 protected:
  std::string path() const { return rates_file(folder_, kFacts); }
  void write(const std::string& text) const {
    std::ofstream(path(), std::ios::binary) << text;
    ASSERT_EQ(::chmod(path().c_str(), 0600), 0);
  }
  std::string text() const {
    std::ifstream file(path(), std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
  }
  GpuCalibration calibrated(bool refresh = false, const GpuRates& rates = kRates) {
    return calibrate(cuda::card_from(kFacts), kFacts, folder_, refresh, [&] {
      ++measured_;
      return rates;
    });
  }

  const Switch on_{nullptr};
  const TempDir directory_;
  const std::string folder_ = directory_.file("cache");
  int measured_ = 0;
};

TEST_F(CardFile, HasOneReadableNameForEachCard) {
  EXPECT_EQ(path(), folder_ + "/rates-NVIDIA-A100-SXM4-80GB.json");
  cuda::CardFacts odd = kFacts;
  odd.name = "../A 100\n\xff";
  EXPECT_EQ(rates_file(folder_, odd), folder_ + "/rates----A-100--.json");
  EXPECT_EQ(rates_file("", kFacts), "");
}

TEST_F(CardFile, KeepsEveryBit) {
  EXPECT_EQ(write_rates(folder_, kFacts, kRates), "");
  EXPECT_EQ(read_rates(folder_, kFacts), kRates);
  EXPECT_EQ(parse_rates(text(), kFacts), kRates);
  struct stat status {};
  ASSERT_EQ(::stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(CardFile, IgnoresDamagedTexts) {
  const std::string whole = rates_text(kRates, kFacts);
  ASSERT_TRUE(parse_rates(whole, kFacts));
  // All but the newline at the end.
  for (std::size_t size = 0; size + 1 < whole.size(); ++size)
    EXPECT_FALSE(parse_rates(whole.substr(0, size), kFacts)) << size;
  for (const char* text : {"null", "[]", "{}", "3", "\"x\"", "\xff", "{\"format\": 1}"})
    EXPECT_FALSE(parse_rates(text, kFacts)) << text;
  EXPECT_FALSE(parse_rates(std::string(100000, '['), kFacts));
  EXPECT_FALSE(parse_rates(whole + std::string(100000, ' '), kFacts));
  const auto with = [&](const std::string& name, const std::string& value) {
    std::string changed = whole;
    const std::size_t begin = changed.find("\"" + name + "\": ") + name.size() + 4;
    changed.replace(begin, changed.find_first_of(",\n", begin) - begin, value);
    return parse_rates(changed, kFacts);
  };
  EXPECT_TRUE(with("tile_flops", "0"));  // no such kernel
  for (const char* value : {"-1e12", "\"1e12\"", "null", "1e999", "true", "[1]"}) {
    EXPECT_FALSE(with("tile_flops", value)) << value;
    EXPECT_FALSE(with("gemm_flops", value)) << value;
  }
  EXPECT_FALSE(with("format", "2"));
  EXPECT_FALSE(with("sms", "\"108\""));
  EXPECT_FALSE(with("library", "\"0.0.1\""));
}

TEST_F(CardFile, IgnoresRatesOfOthers) {
  const std::string text = rates_text(kRates, kFacts);
  const auto parsed = [&](auto&& change) {
    cuda::CardFacts other = kFacts;
    change(other);
    return parse_rates(text, other).has_value();
  };
  EXPECT_TRUE(parsed([](cuda::CardFacts&) {}));
  EXPECT_FALSE(parsed([](cuda::CardFacts& c) { c.name = "NVIDIA A100-SXM4-40GB"; }));
  EXPECT_FALSE(parsed([](cuda::CardFacts& c) { c.sms = 42; }));  // a MIG slice
  EXPECT_FALSE(parsed([](cuda::CardFacts& c) { c.compute_capability = 90; }));
  EXPECT_FALSE(parsed([](cuda::CardFacts& c) { c.driver = "12.8"; }));
}

TEST_F(CardFile, IsNotReadWhereOthersMayWrite) {
  ASSERT_EQ(write_rates(folder_, kFacts, kRates), "");
  ASSERT_EQ(::chmod(path().c_str(), 0622), 0);
  EXPECT_FALSE(read_rates(folder_, kFacts));
  ASSERT_EQ(::chmod(path().c_str(), 0600), 0);
  ASSERT_TRUE(read_rates(folder_, kFacts));
  ASSERT_EQ(::chmod(folder_.c_str(), 0722), 0);
  EXPECT_FALSE(read_rates(folder_, kFacts));
  EXPECT_NE(write_rates(folder_, kFacts, kRates).find("other users may write it"),
            std::string::npos);
  ASSERT_EQ(::chmod(folder_.c_str(), 0700), 0);
  std::filesystem::rename(path(), directory_.file("elsewhere"));
  std::filesystem::create_symlink(directory_.file("elsewhere"), path());
  EXPECT_FALSE(read_rates(folder_, kFacts));
}

TEST(CardRates, TakeMeasurementsThatDiffer) {
  const GpuCard nominal = cuda::card_from(kFacts);
  const auto rates = [&](double factor) {
    return GpuRates{nominal.gemm_flops * factor, nominal.tile_flops * factor,
                    nominal.copy_bytes_per_second * factor, nominal.row_bytes_per_second * factor};
  };
  for (const double factor :
       {1.0, 0.951, 1.049, 0.0, 0.04, 21.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
        std::numeric_limits<double>::infinity()})
    EXPECT_EQ(with_rates(nominal, rates(factor)), nominal) << factor;
  for (const double factor : {0.06, 0.94, 1.06, 19.0}) {
    GpuCard expected = nominal;
    expected.gemm_flops *= factor;
    expected.tile_flops *= factor;
    expected.copy_bytes_per_second *= factor;
    expected.row_bytes_per_second *= factor;
    expected.calibrated = true;
    EXPECT_EQ(with_rates(nominal, rates(factor)), expected) << factor;
  }
  // Each rate for itself.
  GpuRates one = rates(1.0);
  one.copy_bytes_per_second *= 0.5;
  GpuCard expected = nominal;
  expected.copy_bytes_per_second *= 0.5;
  expected.calibrated = true;
  EXPECT_EQ(with_rates(nominal, one), expected);
}

TEST(CardRates, AreThoseOfPredictedTimes) {
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  features.d_hidden_dtype = features.d_weight_dtype = DType::bf16;
  PlanRequest request;
  request.kind = PlanKind::dense;
  request.memory_budget = std::size_t{1} << 40;  // one plan, whatever the rates
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = 80;
  const auto plan = [&](const char* kernel, const GpuCard& card) {
    request.device.kernel = kernel;
    request.device.card = card;
    return plan_head({.tokens = 8192, .dim = 4096, .vocab = 128256, .dtype = DType::bf16}, features,
                     request);
  };
  const GpuCard nominal = cuda::card_from(kFacts);
  GpuRates rates{nominal.gemm_flops, nominal.tile_flops / 2, nominal.copy_bytes_per_second,
                 nominal.row_bytes_per_second};
  const GpuCard slow_tiles = with_rates(nominal, rates);
  // The forward alone takes twice its time.
  const double logits = 8192.0 * 128256;
  const double forward = (2.0 * 4096 * logits / 450e12 + logits * 0.8e-12) *
                         cuda::usual_card(90).tile_flops / nominal.tile_flops;
  EXPECT_NEAR(plan("sm80", slow_tiles).predicted_seconds - plan("sm80", nominal).predicted_seconds,
              forward, 0.02 * forward);
  EXPECT_EQ(plan("cublas", slow_tiles).predicted_seconds,
            plan("cublas", nominal).predicted_seconds);
  rates = {nominal.gemm_flops, nominal.tile_flops, nominal.copy_bytes_per_second,
           nominal.row_bytes_per_second / 2};
  const GpuCard slow_rows = with_rates(nominal, rates);
  EXPECT_EQ(plan("sm80", slow_rows).predicted_seconds, plan("sm80", nominal).predicted_seconds);
  EXPECT_GT(plan("cublas", slow_rows).predicted_seconds,
            1.02 * plan("cublas", nominal).predicted_seconds);
  EXPECT_NE(plan("sm80", slow_tiles).explain().find("at rates measured on this card"),
            std::string::npos);
  EXPECT_NE(plan("sm80", nominal).explain().find("at the kernel's nominal rate"),
            std::string::npos);
}

TEST_F(CardFile, IsMeasuredOnce) {
  const GpuCalibration first = calibrated();
  EXPECT_EQ(measured_, 1);
  EXPECT_FALSE(first.from_file);
  EXPECT_EQ(first.not_stored, "");
  EXPECT_EQ(first.file, path());
  EXPECT_EQ(first.driver, "13.0");
  EXPECT_EQ(first.nominal, cuda::card_from(kFacts));
  EXPECT_EQ(first.measured, kRates);
  EXPECT_EQ(first.used, with_rates(first.nominal, kRates));
  EXPECT_NE(first.used, first.nominal);

  const GpuCalibration second = calibrated(false, {});
  EXPECT_EQ(measured_, 1);
  EXPECT_TRUE(second.from_file);
  EXPECT_EQ(second.seconds, 0.0);
  EXPECT_EQ(second.measured, kRates);
  EXPECT_EQ(second.used, first.used);

  GpuRates other = kRates;
  other.gemm_flops /= 2;
  EXPECT_FALSE(calibrated(true, other).from_file);
  EXPECT_EQ(measured_, 2);
  EXPECT_EQ(read_rates(folder_, kFacts), other);
}

TEST_F(CardFile, IsWrittenAgainWhereItIsDamagedOrAnothers) {
  calibrated();
  const std::string whole = text();
  cuda::CardFacts old = kFacts;
  old.driver = "12.4";
  for (const std::string& bad : {std::string(), whole.substr(0, whole.size() / 2),
                                 std::string("\0\xff{", 3), rates_text(kRates, old)}) {
    write(bad);
    measured_ = 0;
    EXPECT_FALSE(calibrated().from_file);
    EXPECT_EQ(measured_, 1);
    EXPECT_EQ(text(), whole);
  }
}

TEST_F(CardFile, IsNotUsedWhereItCannotBeStored) {
  std::ofstream(folder_) << "a file in place of the folder";
  const GpuCalibration here = calibrated();
  EXPECT_NE(here.not_stored, "");
  EXPECT_EQ(here.measured, kRates);
  EXPECT_EQ(here.used, here.nominal);
  const GpuCalibration nowhere =
      calibrate(cuda::card_from(kFacts), kFacts, "", false, [] { return kRates; });
  EXPECT_NE(nowhere.not_stored.find("LOGITLESS_CACHE"), std::string::npos);
  EXPECT_EQ(nowhere.file, "");
  EXPECT_EQ(nowhere.used, nowhere.nominal);
}

TEST_F(CardFile, IsIgnoredByASwitch) {
  calibrated();
  for (const char* value : {"on", "off"}) {
    const Switch set(value);
    const bool on = std::string(value) == "on";
    EXPECT_EQ(uses_calibration(), on);
    const GpuCalibration found = calibrated();
    EXPECT_EQ(found.measured, kRates);
    EXPECT_EQ(found.used.calibrated, on);
  }
  for (const char* value : {"", "0", "OFF"}) {
    const Switch set(value);
    EXPECT_THROW(uses_calibration(), InvalidArgument) << value;
    EXPECT_THROW(calibrated(true), InvalidArgument) << value;
  }
  EXPECT_EQ(measured_, 1) << "a wrong value is found before the measurement";
}

// Readers see one of the writers' files, whole.
TEST_F(CardFile, IsWrittenByTwoProcessesAtOnce) {
  ASSERT_EQ(write_rates(folder_, kFacts, kRates), "");
  constexpr int kWriters = 2, kTimes = 100;
  const auto rates_of = [](int writer) {
    GpuRates rates = kRates;
    rates.gemm_flops = 1e14 * (writer + 1);
    rates.row_bytes_per_second = 1e12 * (writer + 1);
    return rates;
  };
  pid_t children[kWriters];
  for (int writer = 0; writer < kWriters; ++writer) {
    children[writer] = fork();
    if (children[writer] == 0) {
      bool stored = true;
      for (int i = 0; i < kTimes; ++i)
        stored = write_rates(folder_, kFacts, rates_of(writer)).empty() && stored;
      _exit(stored ? 0 : 1);
    }
  }
  int running = kWriters;
  while (running > 0) {
    const std::optional<GpuRates> found = read_rates(folder_, kFacts);
    ASSERT_TRUE(found);
    EXPECT_TRUE(*found == kRates || *found == rates_of(0) || *found == rates_of(1));
    int status = 0;
    if (waitpid(-1, &status, WNOHANG) > 0) {
      --running;
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 1u) << "and no temporaries";
}

TEST(Calibration, NeedsAGpu) {
  const Context cpu;
  EXPECT_THROW(measure_gpu(cpu), InvalidArgument);
  EXPECT_THROW(calibrate_gpu(cpu), InvalidArgument);
}

}  // namespace
}  // namespace logitless
