"""Runs examples/log_bilinear on a small text: it learns, resumes to the same bits, and reports errors."""

import argparse
import filecmp
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = None
SOURCES = Path(__file__).resolve().parents[2] / "src"  # the text: the project's sources, copied so that it does not change
SMALL = {"--vocab": 512, "--dim": 24, "--context": 4, "--batch": 64, "--valid-tokens": 1000, "--generate": 0, "--threads": 1,
         "--log-every": 0, "--lr": 0.01}


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.text = self.root / "text"
        shutil.copytree(SOURCES, self.text)

    def command(self, *arguments):
        cache = [] if "--cache" in arguments else ["--cache", str(self.root / "cache")]
        return [PROGRAM, *cache, *map(str, arguments)]

    def call(self, *arguments):
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=100, cwd=self.root)

    def train(self, out, *arguments):
        """Trains on the text, with checkpoints in OUT, and returns the output. The arguments, in pairs, override
        SMALL's."""
        options = {**SMALL, "--text": self.text, **dict(zip(arguments[::2], arguments[1::2]))}
        return self.finish(out, *[vocab_id for pair in options.items() for vocab_id in pair])

    def finish(self, out, *arguments):
        threads = [] if "--threads" in arguments else ["--threads", 1]
        done = self.call(*arguments, *threads, "--out", self.root / out)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def checkpoint(self, out, step):
        path = self.root / out / f"checkpoint-{step:06}.safetensors"
        self.assertTrue(path.is_file(), path)
        return path

    def assertSameFile(self, one, other):
        self.assertTrue(filecmp.cmp(one, other, shallow=False), f"{one} and {other} differ")


def small():
    return [vocab_id for pair in SMALL.items() for vocab_id in pair]


def losses(output):
    return [float(loss) for loss in re.findall(r"step +\d+/\d+ +loss ([\d.]+)", output)]


def value(output, name):
    match = re.search(rf"^ *{re.escape(name)} +([\d.,]+)", output, re.MULTILINE)
    if match is None:
        raise AssertionError(f"no '{name}' in\n{output}")
    return float(match.group(1).replace(",", ""))


class Cases(Runs):
    def learns(self):
        output = self.train("a", "--steps", 300, "--generate", 20, "--evaluate-every", 100)
        steps = losses(output)
        self.assertEqual(len(steps), 300)
        self.assertLess(sum(steps[-10:]) / 10, 0.9 * sum(steps[:10]) / 10)
        unigram = value(output, "validation perplexity of the unigram model")
        self.assertLess(value(output, "validation perplexity"), 0.6 * unigram)
        self.assertEqual(len(re.findall(r"validation perplexity [\d.]+$", output, re.MULTILINE)), 3)  # unigram, 100, 200
        self.assertIn("Sample\n#include <", output)
        self.assertIn("plan dense", output)
        self.assertIn("tokenizer of 512 tokens trained", output)
        again = self.train("b", "--steps", 300, "--evaluate-every", 100)
        self.assertNotIn("trained in", again)
        self.assertIn("tokenizer and tokens from", again)
        self.assertEqual(losses(again), steps)
        self.assertSameFile(self.checkpoint("a", 300), self.checkpoint("b", 300))

    def variants(self):
        for arguments in (["--dtype", "f32"], ["--context-matrix", "diagonal", "--lr", "0.03"],
                          ["--word-vectors", "separate"], ["--optimizer", "adagrad", "--lr", "0.1"],
                          ["--weight-decay", "0.1"], ["--memory-budget", "300KiB"], ["--seed", "9"]):
            with self.subTest(arguments):
                output = self.train("out", "--steps", 120, *arguments)
                unigram = value(output, "validation perplexity of the unigram model")
                self.assertLess(value(output, "validation perplexity"), 0.8 * unigram)

    def resume(self):
        for arguments in ([], ["--optimizer", "adagrad", "--word-vectors", "separate", "--context-matrix", "diagonal"],
                          ["--word-vectors", "separate", "--dtype", "f32", "--weight-decay", "0.1"]):
            with self.subTest(arguments):
                self.train("whole", "--steps", 20, "--save-every", 10, *arguments)
                self.finish("rest", "--resume", self.checkpoint("whole", 10))
                self.assertSameFile(self.checkpoint("whole", 20), self.checkpoint("rest", 20))
                self.train("first", "--steps", 20, "--stop-after", 7, *arguments)
                output = self.finish("second", "--resume", self.checkpoint("first", 7), "--log-every", 0)
                self.assertIn("going on from step 7 of 20", output)
                self.assertEqual(len(losses(output)), 13)
                self.assertSameFile(self.checkpoint("whole", 20), self.checkpoint("second", 20))

    def threads(self):
        self.train("two", "--steps", 12, "--threads", 2)
        self.train("one", "--steps", 12)
        self.train("three", "--steps", 12, "--threads", 3)
        self.assertSameFile(self.checkpoint("one", 12), self.checkpoint("two", 12))
        self.assertSameFile(self.checkpoint("three", 12), self.checkpoint("two", 12))

    def interrupt(self):
        self.train("whole", "--steps", 400)
        command = self.command("--text", self.text, *small(), "--steps", 400, "--out", self.root / "part")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                if " step " in line:
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stdout.read()
        self.assertEqual(process.returncode, 130, rest)
        path = re.search(r"interrupted; go on with --resume (\S+)", rest).group(1)
        self.assertLess(int(re.search(r"-(\d+)\.safetensors", path).group(1)), 400)
        self.finish("rest", "--resume", path)
        self.assertSameFile(self.checkpoint("whole", 400), self.checkpoint("rest", 400))

    def errors(self):
        self.train("a", "--steps", 2)
        kept = self.checkpoint("a", 2)
        text = ["--text", self.text]
        (self.root / "empty").mkdir()
        (self.root / "word").write_text("one two\n" * 300)
        (self.root / "not a folder").write_text("")
        for arguments, expected in (
                (["--steps", "0"], "--steps"),
                (["--steps", "many"], "--steps"),
                (["--dim", "-3"], "--dim"),
                (["--dtype", "f16"], "--dtype"),
                (["--context", "0"], "--context"),
                (["--optimizer", "sgd"], "adamw"),
                (["--context-matrix", "square"], "diagonal"),
                (["--lr", "-1"], "--lr"),
                (["--temperature", "0"], "--temperature"),
                (["--threads", "0"], "--threads"),
                (["--unheard-of"], "unheard-of"),
                (["--memory-budget", "lots"], "lots"),
                (["--text", "/no/such/folder"], "/no/such/folder"),
                (["--text", self.root / "empty"], "no text to train on"),
                (["--text", self.root / "word", "--context", "200", "--steps", "1"], "--context 200"),
                ([*text, "--steps", "5", "--warmup", "5"], "--warmup"),
                ([*text, *small(), "--steps", "1", "--memory-budget", "64"], "budget"),
                ([*text, *small(), "--steps", "1", "--out", self.root / "not a folder"], "not a folder"),
                (["--resume", self.root / "nothing"], "nothing"),
                (["--resume", self.root / "word"], "word"),
                (["--resume", kept, "--dim", "48"], "--dim: '48' was given, but the checkpoint was trained with '24'"),
                (["--resume", kept], "has done 2 steps of 2"),
                (["--resume", kept, "--text", self.text / "core"], "--text")):
            with self.subTest(arguments):
                done = self.call(*arguments)
                self.assertNotEqual(done.returncode, 0, done.stdout)
                self.assertGreater(done.returncode, 0, "ended by a signal")
                self.assertIn(expected, done.stderr)
        longer = self.finish("b", "--resume", kept, "--steps", 4)
        self.assertIn("going on from step 2 of 4", longer)

    def damaged_files(self):
        self.train("a", "--steps", 2)
        (cache,) = (self.root / "cache").iterdir()
        whole = cache.read_bytes()
        for damage in (whole[:len(whole) // 2], b"", b"\xff" * 64):
            cache.write_bytes(damage)
            output = self.train("b", "--steps", 2)
            self.assertIn("the cache is of no use and will be made again", output)
            self.assertSameFile(self.checkpoint("a", 2), self.checkpoint("b", 2))
            self.assertEqual(cache.read_bytes(), whole)
        kept = self.checkpoint("a", 2)
        content = kept.read_bytes()
        kept.write_bytes(content[:-100])
        done = self.call("--resume", kept, "--steps", 4)
        self.assertEqual(done.returncode, 1)
        self.assertIn(str(kept), done.stderr)
        (self.root / "blocked").write_text("a file where the cache's folder should be")
        output = self.train("c", "--steps", 2, "--cache", self.root / "blocked")
        self.assertRegex(output, "the cache '.*blocked' is not used: it is no folder")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--case", required=True)
    given = parser.parse_args()
    PROGRAM = os.path.abspath(given.program)
    result = unittest.TextTestRunner(verbosity=2).run(Cases(given.case))
    sys.exit(0 if result.wasSuccessful() else 1)
