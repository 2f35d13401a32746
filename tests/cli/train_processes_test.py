#!/usr/bin/env python3
"""Runs `logitless train` (path of the command in LOGITLESS_CLI) as the ranks of a launched run: processes with the
variables of torchrun and mpirun, each with its own threads or GPU."""

import json
import os
import signal
import socket
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_safety_test import QUIET  # noqa: E402
from train_test import CLI, SIZES, CommandTest, run, shard  # noqa: E402


def torchrun(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def mpirun(rank, size, port):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": size, "MASTER_PORT": port}


def hydra(rank, size, port):
    return {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size, "MASTER_PORT": port}


def srun(rank, size, port):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": rank, "SLURM_NNODES": 1, "SLURM_STEP_ID": 0,
            "MASTER_PORT": port}


class LaunchTest(CommandTest):
    def port(self):
        """Returns a port at which rank 0 may listen. Until the test ends the system gives it to nobody else."""
        held = socket.socket()  # bound, and not listening: one that names the port and reuses addresses may listen
        self.addCleanup(held.close)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]

    def launch(self, size, *arguments, launcher=torchrun, own=None, sizes=None, model=(*SIZES, *QUIET)):
        """Starts the processes of the ranks. `own`: further arguments by rank; `sizes`: the size in a rank's
        environment."""
        port = self.port()
        processes = []
        for rank in range(size):
            variables = launcher(rank, (sizes or {}).get(rank, size), port)
            environment = {**self.environment(), **{name: str(value) for name, value in variables.items()}}
            command = [CLI, "train", "--data", self.data, *model, *arguments, *(own or {}).get(rank, [])]
            # pylint: disable-next=subprocess-popen-preexec-fn
            process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env=environment, preexec_fn=self.fresh)
            processes.append(process)
            self.addCleanup(self.end, process)
        return processes

    @staticmethod
    def environment():
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    @staticmethod
    def fresh():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # a background runner may ignore it

    @staticmethod
    def end(process):
        process.kill()
        process.communicate()

    @staticmethod
    def ends(processes):
        """Returns (exit status, standard output, standard error) of each process."""
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=120)
            ended.append((process.returncode, out, err))
        return ended

    def trained(self, size, *arguments, launcher=torchrun, **more):
        """Returns rank 0's report, and asserts that the others print nothing."""
        ended = self.ends(self.launch(size, "--json", *arguments, launcher=launcher, **more))
        self.assertEqual([code for code, _, _ in ended], [0] * size, ended)
        for _, out, err in ended[1:]:
            self.assertEqual((out, err), ("", ""))
        return json.loads(ended[0][1])

    def stepping(self, size, *arguments):
        """Starts processes and waits for their first step."""
        processes = self.launch(size, "--steps", 1000000, *arguments)
        for line in processes[0].stdout:
            if line.startswith("step "):
                return processes
        self.fail(self.ends(processes))


class ProcessesTest(LaunchTest):
    def test_learn_the_same_bits_as_threads(self):
        options = ["--steps", 8, "--accumulate", 2, "--lr", 1e-3, "--warmup", 0]
        for size, launcher in ((2, torchrun), (3, mpirun), (2, hydra), (2, srun)):
            save, other = self.dir / "processes.safetensors", self.dir / "threads.safetensors"
            threads = self.train(*SIZES, *QUIET, *options, "--ranks", size, "--save", other)
            processes = self.trained(size, *options, "--save", save, launcher=launcher)
            for key in ("ranks", "steps", "validations"):
                self.assertEqual(threads[key], processes[key])
            self.assertEqual(save.read_bytes(), other.read_bytes())
        log = [json.loads(line) for line in (self.dir / "processes.log.jsonl").read_text().splitlines()]
        self.assertEqual(log[0]["ranks"], 2)
        self.assertEqual([line["step"] for line in log if line["kind"] == "step"], list(range(1, 9)))

    def test_share_the_words_of_a_head(self):
        words = ["--vocab", 20001, *SIZES[2:], "--untied", "--shard-head", "--steps", 4, "--sample", 3]
        threads = self.train(*words, "--ranks", 2)
        processes = self.trained(2, model=words)
        for key in ("ranks", "steps", "validations", "sample"):
            self.assertEqual(threads[key], processes[key])

    def test_go_on_with_another_number_of_ranks(self):
        save, out = self.dir / "on.safetensors", self.dir / "model.safetensors"
        rates = ["--lr", 1e-3, "--warmup", 0, "--min-lr", 1e-3]
        whole = self.train(*SIZES, *QUIET, *rates, "--steps", 8, "--accumulate", 4)
        first = self.trained(2, *rates, "--steps", 4, "--accumulate", 2, "--save", save)
        rest = self.trained(4, "--resume", save, "--steps", 8, "--accumulate", 1, "--export", out)
        self.assertEqual((first["ranks"], rest["ranks"], len(rest["steps"])), (2, 4, 4))
        self.assertTrue(out.exists())
        for a, b in zip(whole["steps"], first["steps"] + rest["steps"]):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=2e-5)
        done = run("--resume", save, "--steps", 6, "--json", *QUIET)  # no launcher: threads
        self.assertEqual(json.loads(done.stdout)["ranks"], 2)

    def test_words_of_a_text(self):
        text = self.dir / "text"
        text.mkdir(exist_ok=True)
        for i in range(20):
            (text / f"{i}.txt").write_text("".join(f"int v{(i * 7 + k) % 31} = f({k % 5});\n" for k in range(60)))
        command = ["--text", text, "--cache", self.dir / "cache", "--vocab", 300, *SIZES[2:], "--steps", 2, "--json",
                   "--sample", 4]
        port = self.port()
        processes = [subprocess.Popen([CLI, "train", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      env={**os.environ, **{k: str(v) for k, v in torchrun(rank, 2, port).items()}})
                     for rank in range(2)]
        for process in processes:
            self.addCleanup(self.end, process)
        ended = self.ends(processes)
        self.assertEqual([code for code, _, _ in ended], [0, 0], ended)
        self.assertNotEqual(json.loads(ended[0][1])["sample"], "")
        self.assertEqual(ended[1][1:], ("", ""))

    def test_torchrun_keeps_its_port(self):
        for _ in range(100):
            with socket.socket() as agent, socket.socket() as behind:
                agent.bind(("127.0.0.1", 0))
                agent.listen()
                port = agent.getsockname()[1]
                try:
                    behind.bind(("127.0.0.1", port + (1000 if port <= 64535 else -1000)))
                except OSError:
                    continue  # the other port is in use
                behind.close()
                report = self.trained(2, "--steps", 2, launcher=lambda rank, size, _: {
                    **torchrun(rank, size, port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
                self.assertEqual(report["ranks"], 2)
                return
        self.fail("no two ports are free")

    def test_a_signal_to_any_of_them_stops_all_at_one_step(self):
        for number, rank in ((signal.SIGTERM, 1), (signal.SIGINT, 0)):
            save = self.dir / "stopped.safetensors"
            processes = self.stepping(3, "--save", save)
            processes[rank].send_signal(number)
            ended = self.ends(processes)
            self.assertEqual([code for code, _, _ in ended], [128 + number] * 3, ended)
            step = int(self.metadata(save)["step"])
            self.assertIn(f"stopped by {signal.Signals(number).name} after step {step} of 1000000", ended[0][1])
            self.assertEqual([out for _, out, _ in ended[1:]], ["", ""])
            self.assertIn("stopping after this step", ended[rank][2])
        # torchrun sends SIGTERM.
        processes = self.stepping(2)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        self.assertEqual([code for code, _, _ in self.ends(processes)], [143, 143])

    def test_diverge_together(self):
        ended = self.ends(self.launch(2, "--steps", 50, "--lr", "1e30", "--warmup", 0))
        self.assertEqual([code for code, _, _ in ended], [1, 1], ended)
        for _, _, err in ended:
            self.assertRegex(err, "the (validation )?loss of step [0-9]+ is ")

    def test_one_process_is_none(self):
        (ended,) = self.ends(self.launch(1, "--steps", 2, "--ranks", 2, "--json"))
        self.assertEqual(ended[0], 0, ended)
        self.assertEqual(json.loads(ended[1])["ranks"], 2)


class ProcessesFailTest(LaunchTest):
    def assert_all_name(self, ended, text, codes):
        """Asserts that each rank, in order, reports the reason in a line that contains the text."""
        self.assertEqual([code for code, _, _ in ended], codes, ended)
        for _, out, err in ended:
            self.assertRegex(err.strip().splitlines()[-1], f"^logitless train: .*{text}")

    def test_one_is_killed(self):
        for killed in (0, 2):
            processes = self.stepping(3, "--save", self.dir / "killed.safetensors")
            processes[killed].kill()
            ended = self.ends(processes)
            self.assertEqual(ended.pop(killed)[0], -signal.SIGKILL)
            self.assert_all_name(ended, f"rank {killed} of 3 has left: the process has ended", [1, 1])

    def test_options_that_differ(self):
        ended = self.ends(self.launch(3, "--steps", 4, own={2: ["--lr", 0.5]}))
        self.assert_all_name(ended, "rank 2: --lr 0.5, rank 0: 0.001$", [2, 2, 2])
        ended = self.ends(self.launch(2, "--steps", 4, own={0: ["--save", self.dir / "saved"]}))
        self.assert_all_name(ended, f'rank 1: --save "", rank 0: "{self.dir}/saved"$', [2, 2])
        self.assertFalse((self.dir / "saved").exists())

    def test_an_option_that_is_wrong(self):
        ended = self.ends(self.launch(3, "--json", own={1: ["--clip", "x"], 0: ["--clip", 1], 2: ["--clip", 1]}))
        self.assert_all_name([ended[1]], "--clip: expected a number, got 'x'$", [2])
        self.assertEqual(ended[1][1], "")
        self.assert_all_name([ended[0], ended[2]], "rank 1 gave up: --clip: expected a number, got 'x'$", [1, 1])
        self.assertIn("rank 1 gave up: --clip", json.loads(ended[0][1])["error"])
        self.assertEqual(ended[2][1], "")

    def test_a_file_that_is_missing(self):
        ended = self.ends(self.launch(2, "--steps", 4, own={1: ["--val", self.dir / "none.bin"], 0: ["--val", self.val]}))
        self.assert_all_name(ended[1:], "--val: there is no file '.*none.bin'$", [2])
        self.assert_all_name(ended[:1], "rank 1 gave up: --val: there is no file '.*none.bin'$", [1])

    def test_data_that_differ(self):
        places = [self.dir / "a", self.dir / "b"]
        for place, tokens in zip(places, ([7] * 500, [8] * 500)):
            place.mkdir()
            shard(place / "data.bin", tokens)
        port = self.port()
        processes = []
        for rank, place in enumerate(places):
            environment = {**os.environ, **{name: str(value) for name, value in torchrun(rank, 2, port).items()}}
            processes.append(subprocess.Popen([CLI, "train", "--data", "data.bin", *SIZES, "--sample", "0"], cwd=place, env=environment,
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            self.addCleanup(self.end, processes[-1])
        self.assert_all_name(self.ends(processes), "rank 1: training data [0-9a-f]{16}, rank 0: [0-9a-f]{16}$", [2, 2])

    def test_one_that_cannot_write(self):
        ended = self.ends(self.launch(2, "--steps", 4, "--save", "/proc/x.safetensors"))
        self.assert_all_name(ended[:1], "--save: '/proc/x.safetensors': cannot create", [2])
        self.assert_all_name(ended[1:], "rank 0 gave up: --save: '/proc/x.safetensors': cannot create", [1])

    def test_sizes_that_differ(self):
        for other in (2, 4):
            def named(*launched):
                return {**torchrun(*launched), "TORCHELASTIC_RUN_ID": "run"}

            ended = self.ends(self.launch(2, "--steps", 4, sizes={0: 3, 1: other}, launcher=named))
            self.assert_all_name(ended, f"make_tcp: size: rank 1 has {other}, rank 0: 3$", [2, 2])

    def test_one_that_waits_says_for_whom(self):
        """A rank of another run connects, and gets an error that it does not belong to this one."""
        first, other = self.launch(2, "--steps", 4, sizes={0: 3, 1: 2})
        _, _, err = self.ends([other])[0]
        self.assertRegex(err, "make_tcp: size: rank 1 has 2, rank 0: 3\n$")
        line = first.stderr.readline()
        self.assertRegex(line, r"^logitless train: rank 0 of 3 waits for ranks 1 and 2 at port \d+; connections turned away: \d")

    def test_ranks_that_are_not_the_launchers(self):
        ended = self.ends(self.launch(2, "--steps", 4, "--ranks", 3))
        self.assert_all_name(ended, "--ranks: expected 2, as WORLD_SIZE has it, or none, got 3$", [2, 2])
        ended = self.ends(self.launch(2, "--steps", 2, "--ranks", 2))
        self.assertEqual([code for code, _, _ in ended], [0, 0], ended)

    def test_variables_that_are_missing(self):
        def without(name):
            def launcher(rank, size, port):
                variables = mpirun(rank, size, port)
                del variables[name]
                return variables
            return launcher

        for name, what in (("MASTER_PORT", "a port of rank 0's host that is free"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "the host of rank 0")):
            ended = self.ends(self.launch(2, "--steps", 4, launcher=without(name)))
            missing = name if name == "MASTER_PORT" else "MASTER_ADDR"
            self.assert_all_name(ended, f"{missing}: expected {what}, since OMPI_COMM_WORLD_SIZE is 2, got nothing$", [2, 2])

    def test_a_port_that_is_taken(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            (ended,) = self.ends(self.launch(1, "--steps", 4, sizes={0: 2}, launcher=lambda rank, size, _: torchrun(rank, size, port)))
        self.assert_all_name([ended], f"make_tcp: cannot listen at port {port}: Address already in use$", [1])


class GpuProcessesTest(LaunchTest):
    GPU = ["--device", "cuda", "--dtype", "bf16"]

    @staticmethod
    def environment():
        return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def threads(self, *arguments):
        command = [CLI, "train", "--data", self.data, *SIZES, *self.GPU, *QUIET, *arguments, "--ranks", 2, "--json"]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False,
                              env=self.environment())

    def setUp(self):
        done = self.threads("--steps", 1)
        if done.returncode == 2 and "--device: cuda: " in done.stderr:
            self.skipTest(done.stderr.strip())

    def test_learn_the_same_bits_as_threads(self):
        done = self.threads("--steps", 8)
        self.assertEqual(done.returncode, 0, done.stderr)
        processes = self.trained(2, *self.GPU, "--steps", 8)
        for key in ("ranks", "device", "steps", "validations"):
            self.assertEqual(json.loads(done.stdout)[key], processes[key])

    def test_a_signal_stops_all_at_one_step(self):
        processes = self.stepping(2, *self.GPU, "--save", self.dir / "gpu.safetensors")
        processes[1].send_signal(signal.SIGTERM)
        self.assertEqual([code for code, _, _ in self.ends(processes)], [143, 143])

    def test_one_is_killed(self):
        processes = self.stepping(2, *self.GPU)
        processes[1].kill()
        (code, _, err), _ = self.ends(processes)
        self.assertEqual(code, 1)
        self.assertIn("rank 1 of 2 has left: the process has ended", err)

    def test_the_gpu_of_each_must_be_known(self):
        def unnumbered(rank, size, port):
            return {name: value for name, value in torchrun(rank, size, port).items() if name != "LOCAL_RANK"}

        for code, _, err in self.ends(self.launch(2, *self.GPU, launcher=unnumbered)):
            self.assertIn(code, (1, 2))
            self.assertIn("expected LOCAL_RANK, which GPU is this process's, since WORLD_SIZE is 2", err)


del LaunchTest, CommandTest

if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
