// Shared by tests of files: a temporary folder for each test, and the check of errors.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "logitless/error.h"

namespace logitless::train {

class TestFolder : public testing::Test {
 protected:
  TestFolder() {
    const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::temp_directory_path() /
            (std::string("logitless_train_") + info.test_suite_name() + "_" + info.name() + "_" +
             std::to_string(::getpid()));
    std::filesystem::create_directories(root_);
  }
  ~TestFolder() override { std::filesystem::remove_all(root_); }

  std::string path(const std::string& name) const { return (root_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
  }

  std::filesystem::path root_;
};

// Expects `act` to throw an InvalidArgument whose message contains `text`.
inline void expect_message(const std::function<void()>& act, const std::string& text) {
  try {
    act();
    FAIL() << "nothing was thrown; expected: " << text;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

}  // namespace logitless::train
