// Tests the choice of the device of a run, and the memory statement for a GPU. Needs no GPU.
#include <gtest/gtest.h>

#include "logitless/bytes.h"
#include "train/device/choice.h"
#include "train/device/memory.h"
#include "train/run/options.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

constexpr const char* kMissing = "this machine has no CUDA device";

DeviceSizes sizes() {
  DeviceSizes s;
  s.weights = s.gradients = 1_GiB;
  s.moments = 2_GiB;
  s.arena = 3_GiB;
  s.optimizer = 1_MiB;
  s.batches = 2_MiB;
  return s;
}

TEST(DeviceMemoryTest, StatesEverythingOnce) {
  const std::vector<MemoryItem> items = memory_statement(sizes());
  EXPECT_EQ(total_bytes(items), 7_GiB + 3_MiB + kLibraryBytes);
  DeviceSizes more = sizes();
  more.constants = 5;
  more.rounded = 7;
  EXPECT_EQ(total_bytes(memory_statement(more)), total_bytes(items) + 12);
  EXPECT_EQ(memory_statement(more).size(), items.size() + 2);
}

TEST(DeviceMemoryTest, SaysWhatIsTooMuchAndWhatIsFree) {
  const std::vector<MemoryItem> items = memory_statement(sizes());
  const std::size_t total = total_bytes(items);
  EXPECT_EQ(why_no_memory(items, total), "");
  const std::string text = why_no_memory(items, total - 1);
  EXPECT_EQ(text,
            "training takes 7.3 GiB of the GPU's memory (weights 1.0 GiB, moments 2.0 GiB, "
            "gradients 1.0 GiB, arena 3.0 GiB, optimizer 1.0 MiB, batches 2.0 MiB, libraries and "
            "kernels 256.0 MiB), and 7.3 GiB are free: a --budget of 3221225471 bytes is what is "
            "left for the arena");
  const std::string hopeless = why_no_memory(items, 4_GiB);
  EXPECT_NE(hopeless.find("4.0 GiB are free: a budget of the arena cannot make up for it"),
            std::string::npos)
      << hopeless;
}

TEST(DeviceChoiceTest, TakesTheGpuThatServesAllOptions) {
  RunOptions o;
  EXPECT_EQ(choose_device(o, "").kind, DeviceKind::cuda);
  EXPECT_EQ(choose_device(o, kMissing).kind, DeviceKind::cpu);
  EXPECT_EQ(choose_device(o, kMissing).reason, "") << "there is nothing to say where no GPU is";
  o.device = DeviceWish::cpu;
  EXPECT_EQ(choose_device(o, "").kind, DeviceKind::cpu);
  EXPECT_EQ(choose_device(o, "").reason, "");
  o.device = DeviceWish::cuda;
  EXPECT_EQ(choose_device(o, "").kind, DeviceKind::cuda);
  expect_message([&] { choose_device(o, kMissing); }, std::string("--device: cuda: ") + kMissing);
}

TEST(DeviceChoiceTest, NamesWhatAGpuDoesNotServe) {
  RunOptions o;
  o.threads = 2;
  EXPECT_EQ(choose_device(o, "").kind, DeviceKind::cpu);
  EXPECT_EQ(choose_device(o, "").reason, "a GPU does not serve --threads");
  EXPECT_EQ(choose_device(o, kMissing).reason, "");
  o.far_field = 0.1;
  EXPECT_EQ(choose_device(o, "").reason,
            "a GPU does not serve --far-field without --dtype bf16, --threads");
  o.dtype = DType::bf16;
  EXPECT_EQ(choose_device(o, "").reason, "a GPU does not serve --threads");
  check_options(o);
  o.device = DeviceWish::cuda;
  expect_message([&] { check_options(o); },
                 "--device: cuda does not serve --threads; expected cpu beside it");
}

TEST(DeviceChoiceTest, KnowsItsNames) {
  EXPECT_EQ(parse_device("cpu"), DeviceWish::cpu);
  EXPECT_EQ(parse_device("cuda"), DeviceWish::cuda);
  expect_message([] { parse_device("gpu"); }, "expected cpu or cuda, got 'gpu'");
}

}  // namespace
}  // namespace logitless::train
