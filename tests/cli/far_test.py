#!/usr/bin/env python3
"""Runs the far field on the command line: `logitless loss --plan far-backward, far-both` (the command:
LOGITLESS_CLI)."""

import json
import math
import random
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cli_test import CLI, CliTest, run  # noqa: E402
from tensor_files import read_safetensors, rounded, write_safetensors  # noqa: E402

# The vocabulary is large enough for the planner to take the far field, at a coarse tau.
TOKENS, DIM, VOCAB, TAU = 60, 6, 6400, 0.2
# A larger vocabulary, so that the tiles of the targets, all selected, are few; far-both is predicted to select more
# tiles.
BOTH_VOCAB, TAU_BOTH = 19200, 0.08


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


def norm(a):
    return math.sqrt(sum(x * x for x in a))


class FarCliTest(CliTest):
    """A head with 50 shuffled clusters of vocabulary entries, a few of which hold the mass of each token."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.large = cls.head_of(VOCAB, "large.safetensors")

    @classmethod
    def head_of(cls, vocab, name):
        numbers = random.Random(3)
        words = list(range(vocab))
        numbers.shuffle(words)
        weight = [0.0] * (vocab * DIM)
        for first in range(0, vocab, 128):
            center = [numbers.gauss(0.0, 1.5) for _ in range(DIM)]
            for word in words[first:first + 128]:
                for k in range(DIM):
                    weight[word * DIM + k] = center[k] + numbers.gauss(0.0, 0.2)
        hidden = [numbers.gauss(0.0, 1.0) for _ in range(TOKENS * DIM)]
        targets = [numbers.randrange(vocab) for _ in range(TOKENS)]
        targets[7] = -100
        file = cls.dir / name
        write_safetensors(file, {"hidden": ("F32", [TOKENS, DIM], rounded(hidden, "F32")),
                                 "weight": ("F32", [vocab, DIM], rounded(weight, "F32")),
                                 "targets": ("I32", [TOKENS], targets)})
        return file

    def far(self, *arguments):
        return self.loss("--plan", "far-backward", "--tau", TAU, *arguments, inputs=self.basics(self.large))


class FarLossTest(FarCliTest):
    def test_numbers_beside_the_dense_plan(self):
        exact_out, far_out = self.dir / "exact.safetensors", self.dir / "far.safetensors"
        exact = self.loss("--plan", "dense", "--out", exact_out, inputs=self.basics(self.large))
        got = self.far("--out", far_out, "--audit", 1000)
        self.assertEqual((got["plan"], got["tokens"], got["valid_tokens"]), ("far_backward", TOKENS, TOKENS - 1))
        self.assertAlmostEqual(got["loss"], exact["loss"], delta=2e-6 * exact["loss"])
        self.assertAlmostEqual(got["tau"], TAU, delta=1e-7)
        self.assertGreater(got["selected"], 0.0)
        self.assertLess(got["selected"], 2.0 / 3.0)
        self.assertAlmostEqual(got["passes"], 1.0 + 3.0 * got["selected"] + 2.0 / 128.0, delta=1e-9)
        self.assertFalse(got["dense_fallback"])
        self.assertEqual(got["peak_bytes"], got["workspace_bytes"])
        far, dense = read_safetensors(far_out), read_safetensors(exact_out)
        self.assertEqual(sorted(far), sorted(dense))
        self.assert_close(far["lse"][2], dense["lse"][2], 1e-6)
        error = distance(far["d_hidden"][2], dense["d_hidden"][2])
        # All valid tokens were audited, so the audit measured this very error.
        self.assertEqual(got["audited_tokens"], TOKENS - 1)
        self.assertAlmostEqual(got["audited_error"], error / norm(dense["d_hidden"][2]),
                               delta=1e-3 * got["audited_error"] + 1e-5)
        self.assertGreater(error, 1e-4 * norm(dense["d_hidden"][2]))
        self.assertLessEqual(error, got["bound"] * norm(far["d_hidden"][2]) * (1.0 + 1e-5))
        self.assertLess(distance(far["d_weight"][2], dense["d_weight"][2]), 0.5 * norm(dense["d_weight"][2]))

    def test_a_saved_order_gives_the_same_numbers(self):
        order = self.dir / "saved_order.safetensors"
        fresh_out, saved_out = self.dir / "fresh.safetensors", self.dir / "saved.safetensors"
        fresh = self.far("--order", "fresh", "--save-order", order, "--out", fresh_out)
        default = self.far()
        saved = self.far("--order", order, "--out", saved_out)
        for field in ("loss", "selected", "bound", "passes", "mean_lse"):
            self.assertEqual(saved[field], fresh[field], field)
            self.assertEqual(default[field], fresh[field], field)
        self.assertEqual(fresh_out.read_bytes(), saved_out.read_bytes())
        self.assertNotIn("audited_error", fresh)
        tensors = read_safetensors(order)
        self.assertEqual(sorted(tensors), ["average", "vocab_ids"])
        self.assertEqual(sorted(tensors["vocab_ids"][2]), list(range(VOCAB)))
        self.assertEqual(tensors["average"][:2], ("F32", [VOCAB]))
        self.assertAlmostEqual(sum(tensors["average"][2]), 1.0, delta=1e-4)
        # An order from fewer tokens is different; one that is written again is the same file.
        again = self.dir / "again.safetensors"
        self.far("--order", order, "--save-order", again)
        self.assertEqual(again.read_bytes(), order.read_bytes())
        few = self.dir / "few.safetensors"
        self.far("--order-rows", 5, "--save-order", few)
        self.assertNotEqual(few.read_bytes(), order.read_bytes())

    def test_the_fresh_order_keeps_the_budget_or_says_so(self):
        got = self.far("--budget", "1MiB")
        self.assertLessEqual(got["order_bytes"], 1 << 20)
        # Copies of the rows, averages, entries and positions, which are not part of a plan under the budget.
        self.assertGreater(got["order_bytes"], 20 * VOCAB)
        order = self.dir / "budget_order.safetensors"
        self.far("--save-order", order)
        self.assertEqual(self.far("--order", order)["order_bytes"], 0)
        done = run("loss", *self.basics(self.large), "--plan", "far-backward", "--tau", TAU, "--budget", "1MiB")
        self.assertRegex(done.stdout, "fresh order +took [0-9.]+ KiB before that; --save-order and --order spare it")

    def test_samples_average_to_the_exact_d_weight(self):
        exact_out, out = self.dir / "exact_w.safetensors", self.dir / "sampled.safetensors"
        self.loss("--plan", "dense", "--out", exact_out, inputs=self.basics(self.large))
        exact, plain = read_safetensors(exact_out), self.far("--out", out)
        mass = read_safetensors(out)
        self.assertNotIn("sampled", plain)
        total = [0.0] * len(exact["d_weight"][2])
        sampled = 0.0
        for seed in range(2):
            got = self.far("--sample-every", 2, "--sample-seed", seed, "--out", out)
            self.assertAlmostEqual(got["passes"], plain["passes"] + 2.0 * got["sampled"], delta=1e-9)
            sampled += got["sampled"]
            one = read_safetensors(out)
            self.assertEqual(one["d_hidden"], mass["d_hidden"])
            self.assertGreater(distance(one["d_weight"][2], mass["d_weight"][2]), 0.0)
            total = [a + b / 2 for a, b in zip(total, one["d_weight"][2])]
        self.assertAlmostEqual(sampled, 1.0 - plain["selected"], delta=1e-9)
        self.assert_close(total, exact["d_weight"][2], 1e-5)

    def test_text(self):
        done = run("loss", *self.basics(self.large), "--plan", "far-backward", "--tau", TAU, "--audit", 10)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
        self.assertIn("far_backward", lines["plan"])
        self.assertRegex(lines["far field"].strip(), r"^tau 0\.2, \d+\.\d\d % of the tiles selected, 1\.\d+ passes|^tau 0\.2, ")
        self.assertRegex(lines["error of d_hidden"].strip(), r"^\S+ measured on 10 tokens, at most \S+$")
        done = run("loss", *self.basics(self.large), "--plan", "far-backward", "--tau", TAU)
        lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
        self.assertRegex(lines["error of d_hidden"].strip(), r"^at most \S+$")

    def test_a_small_vocabulary_has_the_plan_it_asks_for(self):
        # 23 vocabulary entries are one tile, which every token selects. The plan is still a far-field one, audited, and
        # almost exact.
        exact_out, out = self.dir / "exact_small.safetensors", self.dir / "far_small.safetensors"
        exact = self.loss("--plan", "dense", "--out", exact_out)
        for plan, name in (("far-backward", "far_backward"), ("far-both", "far_both")):
            got = self.loss("--plan", plan, "--audit", 3, "--out", out)
            self.assertEqual((got["plan"], got["selected"], got["audited_tokens"]), (name, 1.0, 3))
            self.assertLess(got["audited_error"], 1e-5)
            self.assertAlmostEqual(got["loss"], exact["loss"], delta=1e-5 * exact["loss"])
            self.assert_close(read_safetensors(out)["d_weight"][2], read_safetensors(exact_out)["d_weight"][2], 1e-5)
        self.assertNotIn("selected", self.loss("--plan", "dense"))

    def test_what_cannot_be_fails_by_name(self):
        for plan, name in (("far-backward", "far_backward"), ("far-both", "far_both")):
            done = run("loss", *self.basics(), "--plan", plan, "--kernel", "reference")
            self.assert_error(done, 1, f"logitless loss: no plan: {name}: kernel reference has no far field")

    def test_threads_do_not_matter(self):
        out = [self.dir / f"far_threads{i}.safetensors" for i in range(2)]
        self.far("--threads", 1, "--out", out[0])
        self.far("--threads", 3, "--out", out[1])
        self.assertEqual(out[0].read_bytes(), out[1].read_bytes())


class FarBothTest(FarCliTest):
    def both(self, *arguments):
        return self.loss("--plan", "far-both", "--tau", TAU_BOTH, *arguments, inputs=self.basics(self.huge))

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.huge = cls.head_of(BOTH_VOCAB, "huge.safetensors")

    def test_numbers_beside_the_dense_plan(self):
        exact_out, far_out = self.dir / "exact_both.safetensors", self.dir / "far_both.safetensors"
        exact = self.loss("--plan", "dense", "--out", exact_out, inputs=self.basics(self.huge))
        got = self.both("--out", far_out, "--audit", 1000)
        self.assertEqual((got["plan"], got["tokens"], got["valid_tokens"]), ("far_both", TOKENS, TOKENS - 1))
        self.assertGreater(got["selected"], 0.0)
        self.assertLess(got["selected"], 2.0 / 3.0)
        # Costs of both moments, the projection of tokens onto the axes, and the skipped tiles' GEMMs in the backward.
        # The latter are 128 times smaller than the head's.
        self.assertAlmostEqual(got["passes"], 4.0 * got["selected"] + 4.0 / 128.0 + DIM / BOTH_VOCAB, delta=1e-9)
        self.assertFalse(got["dense_fallback"])
        self.assertNotIn("bound", got)
        self.assertEqual(got["peak_bytes"], got["workspace_bytes"])
        far, dense = read_safetensors(far_out), read_safetensors(exact_out)
        self.assertEqual(sorted(far), sorted(dense))
        # All valid tokens were audited. The outputs are fp32, so lse around 10 has its rounding.
        self.assertEqual(got["audited_tokens"], TOKENS - 1)
        off = [a - b for a, b in zip(far["lse"][2], dense["lse"][2])]
        self.assertAlmostEqual(got["audited_lse_error"], norm(off) / math.sqrt(TOKENS - 1), delta=1e-5)
        self.assertAlmostEqual(got["audited_lse_error_max"], max(map(abs, off)), delta=1e-5)
        self.assertGreaterEqual(got["audited_lse_error_max"], got["audited_lse_error"])
        self.assertGreater(got["audited_lse_error"], 1e-5)
        self.assertLessEqual(abs(got["loss"] - exact["loss"]), got["audited_lse_error"] + 2e-6 * exact["loss"])
        error = distance(far["d_hidden"][2], dense["d_hidden"][2]) / norm(dense["d_hidden"][2])
        self.assertAlmostEqual(got["audited_error"], error, delta=1e-3 * error + 1e-5)
        self.assertGreater(error, 1e-4)

    def test_a_saved_order_has_its_moments(self):
        order = self.dir / "moments.safetensors"
        fresh_out, saved_out = self.dir / "fresh_both.safetensors", self.dir / "saved_both.safetensors"
        fresh = self.both("--order", "fresh", "--save-order", order, "--out", fresh_out)
        saved = self.both("--order", order, "--out", saved_out)
        for field in ("loss", "selected", "passes", "mean_lse"):
            self.assertEqual(saved[field], fresh[field], field)
        self.assertEqual(fresh_out.read_bytes(), saved_out.read_bytes())
        for field in ("audited_error", "audited_lse_error", "audited_lse_error_max"):
            self.assertNotIn(field, fresh)
        tensors = read_safetensors(order)
        tiles = BOTH_VOCAB // 128
        self.assertEqual({name: tensor[:2] for name, tensor in tensors.items()},
                         {"vocab_ids": ("I64", [BOTH_VOCAB]), "average": ("F32", [BOTH_VOCAB]),
                          "axes": ("F32", [DIM, DIM]), "variance": ("F32", [tiles, DIM]),
                          "log2_caution": ("F32", [tiles])})
        self.assertGreaterEqual(min(tensors["log2_caution"][2]), 0.0)
        # far-backward takes the same order. It writes orders without moments, which far-both refuses.
        self.assertEqual(self.loss("--plan", "far-backward", "--tau", TAU, "--order", order,
                                   inputs=self.basics(self.huge))["plan"], "far_backward")
        bare = self.dir / "bare.safetensors"
        self.loss("--plan", "far-backward", "--tau", TAU, "--save-order", bare, inputs=self.basics(self.huge))
        refused = run("loss", *self.basics(self.huge), "--plan", "far-both", "--tau", TAU_BOTH, "--order", bare)
        self.assert_error(refused, 2, f"logitless loss: --order: {bare} has no moments of dim {DIM}, "
                                      "which --plan far-both needs")

    def test_text(self):
        basics = [*self.basics(self.huge), "--plan", "far-both", "--tau", TAU_BOTH]
        done = run("loss", *basics, "--audit", 10)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
        self.assertIn("far_both", lines["plan"])
        self.assertRegex(lines["error of d_hidden"].strip(), r"^\S+ measured on 10 tokens$")
        self.assertIn("error of lse", lines)
        done = run("loss", *basics)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("error of lse", done.stdout)
        self.assertNotIn("at most", done.stdout)

    def test_threads_do_not_matter(self):
        out = [self.dir / f"both_threads{i}.safetensors" for i in range(2)]
        self.both("--threads", 1, "--out", out[0])
        self.both("--threads", 3, "--out", out[1])
        self.assertEqual(out[0].read_bytes(), out[1].read_bytes())

    def test_where_it_cannot_be(self):
        done = run("loss", *self.basics(self.huge), "--plan", "far-both", "--softcap", 30)
        self.assert_error(done, 1, "logitless loss: no plan: far_both: the moments of a tile do not pass through a softcap")


class FarErrorTest(FarCliTest):
    def test_only_the_far_plan_has_them(self):
        text = "only --plan far-backward and far-both have it"
        for plan in ([], ["--plan", "dense"], ["--plan", "forward"], ["--plan", "stored:0.5"]):
            for flag, value in (("--tau", 0.01), ("--order", "fresh"), ("--order-rows", 10),
                                ("--save-order", self.dir / "unwritten"), ("--sample-every", 4), ("--sample-seed", 1), ("--audit", 3)):
                with self.subTest(plan=plan, flag=flag):
                    self.assert_error(run("loss", *self.basics(), *plan, flag, value), 2, f"logitless loss: {flag}: {text}")
        self.assertFalse((self.dir / "unwritten").exists())

    def test_bad_values(self):
        basics = ["loss", *self.basics(self.large), "--plan", "far-backward"]
        cases = [
            (["--tau", "1"], "--tau: expected a number in (0, 1), got 1"),
            (["--tau", "-0.5"], "--tau: expected a number in (0, 1), got -0.5"),
            (["--tau", "nan"], "--tau: expected a number, got 'nan'"),
            (["--tau", "coarse"], "--tau: expected a number, got 'coarse'"),
            (["--order-rows", "0"], "--order-rows: expected a whole number of at least 1, got '0'"),
            (["--sample-every", "-1"], "--sample-every: expected a whole number of at least 0, got '-1'"),
            (["--audit", "-1"], "--audit: expected a whole number of at least 0, got '-1'"),
            (["--audit", "few"], "--audit: expected a whole number of at least 0, got 'few'"),
        ]
        for arguments, text in cases:
            with self.subTest(arguments=arguments):
                self.assert_error(run(*basics, *arguments), 2, f"logitless loss: {text}")
        self.assert_error(run("loss", *self.basics(), "--plan", "far-backward:0.5"), 2, "--plan: 'far-backward:0.5'")

    def test_bad_orders(self):
        basics = ["loss", *self.basics(self.large), "--plan", "far-backward", "--tau", TAU]
        other = self.dir / "other_order.safetensors"
        write_safetensors(other, {"vocab_ids": ("I64", [3], [2, 0, 1]), "average": ("F32", [3], [1.0, 1.0, 1.0])})
        self.assert_error(run(*basics, "--order", other), 2,
                          f"logitless loss: --order: {other} is of 3 vocabulary entries, --weight has {VOCAB}")
        missing = self.dir / "no_order.safetensors"
        # Files are checked even if the planner would not use them.
        for arguments in (basics, ["loss", *self.basics(), "--plan", "far-backward"]):
            self.assert_error(run(*arguments, "--order", missing), 2,
                              f"logitless loss: --order: there is no file '{missing}'")
            self.assert_error(run(*arguments, "--save-order", "/nonexistent/order"), 2,
                              "logitless loss: --save-order: there is no folder '/nonexistent'")
        self.assert_error(run(*basics, "--order", self.large), 2, "logitless loss: ", "vocab_ids")
        twice = self.dir / "twice.safetensors"
        write_safetensors(twice, {"vocab_ids": ("I64", [VOCAB], [0] * VOCAB), "average": ("F32", [VOCAB], [1.0] * VOCAB)})
        self.assert_error(run(*basics, "--order", twice), 2, "logitless loss: ", "vocab_ids: 0 stands at position 0 and at 1")

    def test_help(self):
        done = run("loss", "--help")
        for part in ("--tau", "--order", "--order-rows", "--save-order", "--sample-every", "--sample-seed", "--audit", "far-backward"):
            self.assertIn(part, done.stdout)

    def test_json_is_one_object(self):
        done = run("loss", *self.basics(self.large), "--plan", "far-backward", "--tau", TAU, "--json")
        self.assertEqual(json.loads(done.stdout)["plan"], "far_backward")


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
