// Tests of the checkpoints of the log-bilinear example.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <string>
#include <vector>

#include "checkpoint.h"
#include "train/test_folder.h"

namespace log_bilinear {
namespace {

using CheckpointTest = logitless::train::TestFolder;

TEST_F(CheckpointTest, GivesBackWhatItTookAndRefusesWhatDoesNotFit) {
  const ModelShape shape{50, 8, 2, true, false};
  Model model(shape, 4, 1, nullptr);
  model.initialise(3, std::vector<float>(50, -4.0f));
  Optimizer optimizer({}, model.parameters(), 1, nullptr);
  optimizer.state()[1].data()[5] = 0.25f;
  const std::string path = (root_ / "out/checkpoint").string();
  save_checkpoint(path, model, optimizer, {7, 3, 28}, {{"dim", "8"}, {"steps", "9"}});

  Model other(shape, 4, 1, nullptr);
  Optimizer other_optimizer({}, other.parameters(), 1, nullptr);
  const Position position =
      load_checkpoint(path, other, other_optimizer, {{"dim", "8"}, {"steps", "10"}});
  EXPECT_EQ(position.step, 7);
  EXPECT_EQ(position.seed, 3u);
  EXPECT_EQ(position.examples, 28);
  for (std::size_t p = 0; p < model.parameters().size(); ++p) {
    const Parameter& parameter = model.parameters()[p];
    EXPECT_TRUE(std::equal(parameter.value(), parameter.value() + parameter.numel(),
                           other.parameters()[p].value()));
  }
  EXPECT_EQ(other_optimizer.state()[1].data()[5], 0.25f);

  EXPECT_THROW(load_checkpoint(path, other, other_optimizer, {{"dim", "16"}}), std::runtime_error);
  EXPECT_THROW(load_checkpoint(path, other, other_optimizer, {{"unheard of", "1"}}),
               std::runtime_error);
  Model wider({50, 9, 2, true, false}, 4, 1, nullptr);
  Optimizer wider_optimizer({}, wider.parameters(), 1, nullptr);
  EXPECT_THROW(load_checkpoint(path, wider, wider_optimizer, {}), std::runtime_error);
}

}  // namespace
}  // namespace log_bilinear
