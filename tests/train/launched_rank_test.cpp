// Tests the variables of torchrun, Open MPI, MPICH and Slurm.
#include "train/ranks/launched_rank.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "logitless/error.h"

namespace logitless::train {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<LaunchedRank> find(const Variables& variables) {
  return find_launched_rank([&](const char* name) {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    find(variables);
    return "none";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

Variables torchrun() {
  return {{"RANK", "3"},
          {"WORLD_SIZE", "8"},
          {"LOCAL_RANK", "1"},
          {"MASTER_ADDR", "node7"},
          {"MASTER_PORT", "29500"}};
}

void expect(const Variables& variables, const LaunchedRank& expected) {
  const auto found = find(variables);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, expected.rank);
  EXPECT_EQ(found->size, expected.size);
  EXPECT_EQ(found->on_host, expected.on_host);
  EXPECT_EQ(found->host, expected.host);
  EXPECT_EQ(found->port, expected.port);
  EXPECT_EQ(found->output_of, expected.output_of);
}

TEST(LaunchedRank, OfTorchrun) {
  expect(torchrun(), {3, 8, 1, "node7", 29500, "WORLD_SIZE"});
  Variables own_store = torchrun();
  own_store["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  expect(own_store, {3, 8, 1, "node7", 30500, "WORLD_SIZE"});
  own_store["MASTER_PORT"] = "65000";
  expect(own_store, {3, 8, 1, "node7", 64000, "WORLD_SIZE"});
  own_store["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  expect(own_store, {3, 8, 1, "node7", 65000, "WORLD_SIZE"});
}

TEST(LaunchedRank, OfMpi) {
  Variables open = {{"OMPI_COMM_WORLD_RANK", "1"},
                    {"OMPI_COMM_WORLD_SIZE", "4"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                    {"MASTER_PORT", "29500"}};
  expect(open, {1, 4, 1, "127.0.0.1", 29500, "OMPI_COMM_WORLD_SIZE"});
  open["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_EQ(refusal(open),
            "MASTER_ADDR: expected the host of rank 0, since OMPI_COMM_WORLD_SIZE is 4, got "
            "nothing");
  open["MASTER_ADDR"] = "10.0.0.1";
  expect(open, {1, 4, 1, "10.0.0.1", 29500, "OMPI_COMM_WORLD_SIZE"});
  open.erase("MASTER_PORT");
  EXPECT_EQ(refusal(open),
            "MASTER_PORT: expected a port of rank 0's host that is free, since "
            "OMPI_COMM_WORLD_SIZE is 4, got nothing");

  Variables intel = {{"PMI_RANK", "0"},
                     {"PMI_SIZE", "2"},
                     {"MPI_LOCALRANKID", "0"},
                     {"MPI_LOCALNRANKS", "2"},
                     {"MASTER_PORT", "1"}};
  expect(intel, {0, 2, 0, "127.0.0.1", 1, "PMI_SIZE"});
  // Old versions give no variables of the host.
  intel.erase("MPI_LOCALRANKID");
  intel.erase("MPI_LOCALNRANKS");
  intel["MASTER_ADDR"] = "a";
  expect(intel, {0, 2, -1, "a", 1, "PMI_SIZE"});
}

TEST(LaunchedRank, OfSlurm) {
  Variables srun = {{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "3"},    {"SLURM_LOCALID", "2"},
                    {"SLURM_NNODES", "1"}, {"MASTER_PORT", "29500"}, {"SLURM_STEP_ID", "0"}};
  expect(srun, {2, 3, 2, "127.0.0.1", 29500, "SLURM_NTASKS"});
  srun["SLURM_NNODES"] = "2";
  EXPECT_EQ(refusal(srun),
            "MASTER_ADDR: expected the host of rank 0, since SLURM_NTASKS is 3, got nothing");
  // A batch script is one process, whatever the size of the job.
  srun.erase("SLURM_STEP_ID");
  EXPECT_FALSE(find(srun));
}

TEST(LaunchedRank, NamesOfJobs) {
  const auto job = [](Variables variables, const Variables& more) {
    variables.insert(more.begin(), more.end());
    return find(variables)->job;
  };
  EXPECT_EQ(job(torchrun(), {}), "");
  EXPECT_EQ(job(torchrun(), {{"TORCHELASTIC_RUN_ID", "none"}}),
            "");  // torchrun's value for no name
  EXPECT_EQ(job(torchrun(), {{"TORCHELASTIC_RUN_ID", "7f"}}), "7f");
  EXPECT_EQ(job(torchrun(), {{"TORCHELASTIC_RUN_ID", std::string(99, 'x')}}), std::string(63, 'x'));
  EXPECT_EQ(job(torchrun(), {{"TORCHELASTIC_RUN_ID", "7f"}, {"LOGITLESS_JOB", "a"}}), "a");
  const Variables srun = {{"SLURM_PROCID", "2"},
                          {"SLURM_NTASKS", "3"},
                          {"SLURM_NNODES", "1"},
                          {"SLURM_STEP_ID", "4"},
                          {"MASTER_PORT", "29500"}};
  EXPECT_EQ(job(srun, {{"SLURM_JOB_ID", "99"}}), "99.4");
  const Variables open = {{"OMPI_COMM_WORLD_RANK", "1"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                          {"MASTER_PORT", "29500"}};
  EXPECT_EQ(job(open, {{"PMIX_NAMESPACE", "prterun-1"}}), "prterun-1");
  Variables variables = torchrun();
  variables["LOGITLESS_JOB"] = std::string(64, 'x');
  EXPECT_EQ(refusal(variables), "LOGITLESS_JOB: expected 63 bytes at most, got 64");
}

// Clusters start torchrun under srun or mpirun.
TEST(LaunchedRank, TheInnermostLauncherCounts) {
  Variables both = torchrun();
  both["SLURM_PROCID"] = "0";
  both["SLURM_NTASKS"] = "2";
  both["SLURM_STEP_ID"] = "0";
  both["PMI_RANK"] = "0";
  both["PMI_SIZE"] = "2";
  expect(both, {3, 8, 1, "node7", 29500, "WORLD_SIZE"});
}

TEST(LaunchedRank, OneProcessIsNone) {
  EXPECT_FALSE(find({}));
  EXPECT_FALSE(find({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(find({{"WORLD_SIZE", "4"}}));
  EXPECT_FALSE(find({{"RANK", "3"}}));
  EXPECT_FALSE(find({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
}

TEST(LaunchedRank, RefusesWhatIsNoNumber) {
  const auto with = [](const char* name, const char* value) {
    Variables variables = torchrun();
    variables[name] = value;
    return refusal(variables);
  };
  EXPECT_EQ(with("WORLD_SIZE", "two"),
            "WORLD_SIZE: expected a whole number from 1 to 1024, got 'two'");
  EXPECT_EQ(with("WORLD_SIZE", "0"), "WORLD_SIZE: expected a whole number from 1 to 1024, got '0'");
  EXPECT_EQ(with("RANK", "8"), "RANK: expected a whole number from 0 to 7, got '8'");
  EXPECT_EQ(with("RANK", ""), "RANK: expected a whole number from 0 to 7, got ''");
  EXPECT_EQ(with("LOCAL_RANK", "-1"),
            "LOCAL_RANK: expected a whole number from 0 to 1024, got '-1'");
  EXPECT_EQ(with("MASTER_PORT", "1x"),
            "MASTER_PORT: expected a whole number from 1 to 65535, got '1x'");
}

}  // namespace
}  // namespace logitless::train
