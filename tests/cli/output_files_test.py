#!/usr/bin/env python3
"""Tests which files the commands (path of `logitless` in LOGITLESS_CLI) overwrite. They never replace a file of
another kind, an input, or another output. The old file stays where the disk refuses the new one, and --export always
leaves a complete model."""

import json
import os
import resource
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_files import read_safetensors, write_safetensors  # noqa: E402
from train_test import CLI, CommandTest, SIZES, run  # noqa: E402

QUIET = ["--sample", 0]
HEAD = {"h": ("F32", [4, 8], [0.5] * 32), "w": ("F32", [300, 8], [0.25] * 2400), "t": ("I32", [4], [1, 2, 3, 4])}
SHARDS = ["--shard-size", 4000]


def files_in(folder):
    return sorted(p.name for p in folder.iterdir())


class PairsTest(CommandTest):
    """Each case has its own folder, and names its files by letters or texts."""

    def refused(self, arguments, message, there):
        folder = self.dir / f"pair{len(list(self.dir.iterdir()))}"
        folder.mkdir()
        for name, content in there.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        full = [str(a).replace("@", f"{folder}/") for a in arguments]
        with self.subTest(arguments=arguments):
            done = run("--data", self.data, *SIZES, *QUIET, "--steps", 1, *full)
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(f"logitless train: {message.replace('@', f'{folder}/')}", done.stderr)
            self.assertNotIn("step 1", done.stdout)
            self.assertEqual({p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}, before)

    def test_two_outputs(self):
        out = {"out/x": b""}
        cases = [
            (["--save", "@a.safetensors", "--export", "@a.safetensors"], "--export: '@a.safetensors' is the file of --save, which", {}),
            (["--save", "@out/config.json", "--export", "@out"], "--export: '@out/config.json' is the file of --save, which", out),
            (["--save", "@out/model.safetensors", "--export", "@out"], "--export: '@out/model.safetensors' is the file of --save", out),
            (["--save", "@out/tokenizer.json", "--export", "@out"], "--export: '@out/tokenizer.json' is the file of --save", out),
            (["--save", "@out/model.safetensors.index.json", "--export", "@out"],
             "--export: '@out/model.safetensors.index.json' is the file of --save", out),
            (["--save", "@out/model-00001-of-00002.safetensors", "--export", "@out"],
             "--save: '@out/model-00001-of-00002.safetensors' has the name of a shard of --export", out),
            (["--log", "@out/config.json", "--export", "@out"], "--export: '@out/config.json' is the file of --log", out),
            (["--log", "@out/model-00001-of-00002.safetensors", "--export", "@out"],
             "--log: '@out/model-00001-of-00002.safetensors' has the name of a shard", out),
            (["--save", "@a", "--export", "@a"], "--save: '@a' is the folder of --export, which", {}),
            (["--log", "@a", "--export", "@a"], "--log: '@a' is the folder of --export, which", {}),
            (["--save", "@a", "--export", "@a/b"], "--save: '@a' is a file, and the folder of '@a/b' of --export", {}),
            (["--save", "@a", "--log", "@a"], "--log: '@a' is the file of --save, which", {}),
            (["--save", "@a.safetensors", "--far-field", 0.1, "--log", "@a.far.safetensors"],
             "--log: '@a.far.safetensors' is the file of --save", {}),
            (["--save", "@a.safetensors", "--far-field", 0.1, "--export", "@a.far.safetensors"],
             "--export: '@a.far.safetensors' is the file of --save", {}),
            (["--save", "@a", "--export", "@a.log.jsonl"], "--log: '@a.log.jsonl' is the folder of --export", {}),
            (["--save", "@out/../a", "--log", "@./a"], "--log: '@./a' is the file of --save, which", out),
        ]
        for arguments, message, there in cases:
            self.refused(arguments, message, there)

    def test_the_cache(self):
        text = self.dir / "pair_text"
        text.mkdir()
        (text / "a.txt").write_text("int main() { return 0; }\n" * 400)
        options = ["--text", text, *SIZES, *QUIET, "--steps", 1]
        there = self.dir / "cache_there"
        there.mkdir()
        for cache, option in ((self.dir / "new_cache", "--save"), (self.dir / "new_cache", "--log")):
            done = run(*options, "--cache", cache, option, cache)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"{option}: '{cache}' is the folder of --cache, which it would replace", done.stderr)
            self.assertFalse(cache.exists())
        done = run(*options, "--cache", self.dir / "new_file/words", "--save", self.dir / "new_file")
        self.assertIn(f"--save: '{self.dir / 'new_file'}' is a file, and the folder of '{self.dir / 'new_file/words'}' of --cache",
                      done.stderr)
        # Refused options leave no folder behind.
        done = run(*options, "--cache", self.dir / "left", "--export", self.dir / "left_too", "--save", "/proc/x")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertFalse((self.dir / "left").exists() or (self.dir / "left_too").exists())

    def test_what_is_read(self):
        self.assert_error(["--data", self.data, *SIZES, "--steps", 1, "--save", "/proc/../" + str(self.data)],
                          f"--save: '/proc/../{self.data}' is the file of --data, which it would replace")
        save = self.dir / "read.safetensors"
        model = self.dir / "read_model"
        self.train(*SIZES, *QUIET, "--steps", 1, "--save", save, "--far-field", 0.1, "--log", self.dir / "read.jsonl")
        self.train(*SIZES, *QUIET, "--steps", 1, "--export", model, *SHARDS)
        before = {p: p.read_bytes() for p in [save, *self.dir.glob("read.*"), *model.iterdir()]}
        shard = next(model.glob("*-00002-of-*"))
        for arguments, message in (
                (["--resume", save, "--log", save], f"--log: '{save}' is the file of --resume"),
                (["--resume", save, "--export", save], f"--export: '{save}' is the file of --resume"),
                (["--resume", save, "--export", self.dir / "read.far.safetensors"],
                 f"--export: '{self.dir}/read.far.safetensors' is the file of --resume"),
                (["--resume", save, "--save", self.dir / "read.far.safetensors"],
                 f"--save: '{self.dir}/read.far.safetensors' is the file of --resume"),
                (["--resume", save, "--save", self.dir / "read"], f"--save: '{self.dir}/read.far.safetensors' is the file of --resume"),
                (["--data", self.data, "--length", 8, "--init", model, "--save", shard], f"--save: '{shard}' is the file of --init"),
                (["--data", self.data, "--length", 8, "--init", model, "--log", model / "config.json"],
                 f"--log: '{model}/config.json' is the file of --init"),
                (["--data", self.data, "--length", 8, "--init", model, "--save", model / "config.json"],
                 f"--save: '{model}/config.json' is the file of --init")):
            self.assert_error([*arguments, *QUIET, "--steps", 2], message)
        self.assertEqual({p: p.read_bytes() for p in before}, before)


class OverWhatIsThereTest(CommandTest):
    def test_files_of_another_kind_stay(self):
        run_file, folder = self.dir / "run.safetensors", self.dir / "model"
        self.train(*SIZES, *QUIET, "--steps", 1, "--save", run_file, "--export", folder)
        weights, log = folder / "model.safetensors", self.dir / "run.log.jsonl"
        text = self.dir / "notes.txt"
        text.write_text("my notes\n")
        page = self.dir / "page.html"
        self.assertEqual(subprocess.run([CLI, "report", str(run_file), "--out", str(page)], check=True).returncode, 0)
        program = self.dir / "program.ir"
        program.write_text("program p() {\n}\n")
        kinds = {run_file: "checkpoint", weights: "weights", log: "log", page: "page", text: "text", program: "program"}
        before = {path: path.read_bytes() for path in kinds}
        train = ["train", "--data", self.data, *SIZES, *QUIET, "--steps", 1]
        tensors = self.dir / "head.safetensors"
        write_safetensors(tensors, HEAD)
        head = ["loss", "--hidden", f"{tensors}:h", "--weight", f"{tensors}:w", "--targets", f"{tensors}:t"]
        for command, taken, expected in (
                ([*train, "--save"], {"checkpoint"}, "a checkpoint of logitless train"),
                ([*train, "--log"], {"log"}, "a log of logitless train"),
                ([*train, "--export"], {"weights"}, "a safetensors file of weights"),
                (["report", log, "--out"], {"page"}, "a page of HTML"),
                (["compile", "--model", "llama-tiny", "--html"], {"page"}, "a page of HTML"),
                ([*head, "--out"], {"checkpoint", "weights"}, "a safetensors file"),
                (["order", *head[1:5], "--out"], {"checkpoint", "weights"}, "a safetensors file"),
                ([*head, "--plan", "far-both", "--save-order"], {"checkpoint", "weights"}, "a safetensors file")):
            for path, kind in kinds.items():
                if kind in taken or (command[0] == "report" and path == log):
                    continue
                done = subprocess.run([CLI, *map(str, [*command, path])], capture_output=True, text=True, check=False, timeout=120)
                with self.subTest(command=command[0], option=command[-1], kind=kind):
                    self.assertEqual(done.returncode, 2, done.stderr)
                    no_target = command[-1] == "--export" and path.suffix != ".safetensors"
                    self.assertIn(f"{command[-1]}: '{path}': " + ("is a file, expected a folder or FILE.safetensors" if no_target else
                                                                  f"expected no file, or {expected}"), done.stderr)
        self.assertEqual({path: path.read_bytes() for path in kinds}, before)

    def test_names_that_are_no_targets(self):
        folder = self.dir / "sharded"
        self.train(*SIZES, *QUIET, "--steps", 1, "--export", folder, *SHARDS)
        before = {p: p.read_bytes() for p in folder.iterdir()}
        shard = next(folder.glob("*-00001-of-*"))
        base = ["--data", self.data, *SIZES, *QUIET, "--steps", 1]
        self.assert_error([*base, "--export", shard], f"--export: '{shard}': is a shard of a model, expected the model's folder")
        index = folder / "model.safetensors.index.json"
        self.assert_error([*base, "--export", index], f"--export: '{index}': is the index of a model, expected its folder")
        for option in ("--export", "--save", "--log"):
            self.assert_error([*base, option, ""], f"{option}: expected ")
        self.assertEqual({p: p.read_bytes() for p in folder.iterdir()}, before)

    def test_empty_files_and_links_are_taken(self):
        (self.dir / "empty.safetensors").touch()
        (self.dir / "real").mkdir()
        real = self.dir / "real/run.safetensors"
        real.touch()
        link = self.dir / "link.safetensors"
        link.symlink_to(real)
        self.train(*SIZES, *QUIET, "--steps", 1, "--save", link, "--export", self.dir / "empty.safetensors")
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.metadata(real)["step"], "1")
        self.assertIn("wte.weight", read_safetensors(self.dir / "empty.safetensors"))


class ExportTest(CommandTest):
    def loads(self, folder, like):
        """Trains from the model with a rate of 0, and asserts that it is exported unchanged as one file."""
        whole = self.dir / "again.safetensors"
        self.train("--length", 8, "--batch", 2, "--steps", 1, "--lr", 0, *QUIET, "--init", folder, "--export", whole)
        self.assertEqual(whole.read_bytes(), like)

    def test_over_a_model(self):
        """Replaces shards by shards of the same and of another number, shards by one file, and one file by shards."""
        plain = self.dir / "plain.safetensors"
        base = [*SIZES, *QUIET, "--steps"]
        self.train(*base, 1, "--export", plain)
        one = plain.read_bytes()
        self.train(*base, 2, "--export", plain)
        two = plain.read_bytes()
        self.assertNotEqual(one, two)
        whole, index = "model.safetensors", "model.safetensors.index.json"
        for first, second in ((SHARDS, SHARDS), (SHARDS, ["--shard-size", 9000]), (SHARDS, []), ([], SHARDS), ([], [])):
            with self.subTest(first=first, second=second):
                folder = self.dir / f"model{len(list(self.dir.iterdir()))}"
                self.train(*base, 1, "--export", folder, *first)
                (folder / "mine.txt").write_text("kept")
                shards = set(folder.glob("model-*"))
                self.assertEqual(index in files_in(folder), bool(first))
                self.assertEqual(bool(shards), bool(first))
                self.loads(folder, one)
                self.train(*base, 2, "--export", folder, *second)
                self.assertEqual((whole in files_in(folder), index in files_in(folder)), (not second, bool(second)))
                self.loads(folder, two)
                listed = set(json.loads((folder / index).read_text())["weight_map"].values()) if second else {whole}
                self.assertEqual(set(files_in(folder)), listed | {"config.json", "mine.txt"} | ({index} if second else set()))

    def test_over_the_model_it_began_from(self):
        folder = self.dir / "own"
        self.train(*SIZES, *QUIET, "--steps", 1, "--export", folder, *SHARDS)
        plain = self.dir / "own.safetensors"
        for size in (SHARDS, [], SHARDS):
            got = self.train("--length", 8, "--batch", 2, "--steps", 1, *QUIET, "--init", folder, "--export", folder, *size)
            self.assertEqual(len(got["steps"]), 1)
            self.assertEqual((folder / "model.safetensors").exists(), not size)
            self.train("--length", 8, "--steps", 1, "--lr", 0, *QUIET, "--init", folder, "--export", plain)

    def test_a_folder_is_made(self):
        done = subprocess.run([CLI, "train", "--data", self.data, *SIZES, "--sample", "0", "--steps", "1", "--export", "out/deep-1.5b"],
                              cwd=self.dir, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(files_in(self.dir / "out/deep-1.5b"), ["config.json", "model.safetensors"])
        self.assertFalse((self.dir / "config.json").exists())
        self.assert_error(["--data", self.data, *SIZES, "--steps", 1, "--export", self.val / "out"],
                          f"--export: cannot make the folder '{self.val}/out': '{self.val}' is no folder")

    def test_what_fails_leaves_the_old_model(self):
        folder = self.dir / "whole"
        self.train(*SIZES, *QUIET, "--steps", 1, "--export", folder, *SHARDS)
        before = {p: p.read_bytes() for p in folder.iterdir()}
        for size in (SHARDS, []):
            done = limited(20_000 if size == [] else 3000, "train", "--data", self.data, *SIZES, *QUIET, "--steps", 2, "--export",
                           folder, *size)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("cannot write: File too large", done.stderr)
            self.assertEqual({p: p.read_bytes() for p in folder.iterdir()}, before)
        # The next export removes the leftovers of a killed one, but not a link of that name.
        (folder / ".export-abcdef").mkdir()
        (folder / ".export-abcdef/model.safetensors").write_text("half")
        (folder / ".export-link").symlink_to(self.dir)
        self.train(*SIZES, *QUIET, "--steps", 1, "--export", folder, *SHARDS)
        self.assertEqual([n for n in files_in(folder) if n.startswith(".")], [".export-link"])
        self.assertTrue(self.data.exists())


def limited(most_bytes, *arguments):
    """Runs the command with a limit of `most_bytes` for files, which acts as a full disk."""
    command = [CLI, *map(str, arguments)]
    # pylint: disable-next=subprocess-popen-preexec-fn
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY)))


class FullDiskTest(CommandTest):
    def test_a_checkpoint_that_cannot_be_written(self):
        save, other = self.dir / "full.safetensors", self.dir / "fresh.safetensors"
        base = ["train", "--data", self.data, *SIZES, *QUIET]
        self.train(*SIZES, *QUIET, "--steps", 2, "--save", save)
        good = save.read_bytes()
        done = limited(20_000, *base, "--steps", 8, "--eval-every", 2, "--save", save, "--log", self.dir / "x.jsonl", "--json")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(save.read_bytes(), good)
        for step in (2, 4, 6, 8):
            self.assertIn(f"the checkpoint of step {step} cannot be written: '{save}': cannot write: File too large; '{save}' was not "
                          "written; the run goes on", done.stderr)
        self.assertIn('"step": 8', done.stdout)
        self.assertIn(f"--save: the checkpoint of step 8 cannot be written: '{save}'", done.stderr)
        self.assertFalse(list(self.dir.glob("*.tmp")))
        # No file remains where neither the checkpoint nor the far field's state fits.
        done = limited(20_000, *base, "--steps", 2, "--far-field", 0.1, "--save", other)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertFalse(other.exists())
        self.assertFalse(list(self.dir.glob("fresh*")) and list(self.dir.glob("*.tmp")))

    def test_pages(self):
        save, page = self.dir / "page.safetensors", self.dir / "page.html"
        self.train(*SIZES, *QUIET, "--steps", 2, "--save", save)
        for command in (["report", save, "--out", page], ["compile", "--model", "llama-tiny", "--batch", 1, "--length", 8, "--html", page]):
            done = limited(10 ** 9, *command)
            self.assertEqual(done.returncode, 0, done.stderr)
            good = page.read_bytes()
            done = limited(1000, *command)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(f"'{page}': cannot write: File too large", done.stderr)
            self.assertEqual(page.read_bytes(), good)

    def test_tensors(self):
        head, out = self.dir / "head.safetensors", self.dir / "out.safetensors"
        write_safetensors(head, HEAD)
        command = ["loss", "--hidden", f"{head}:h", "--weight", f"{head}:w", "--targets", f"{head}:t", "--out", out]
        self.assertEqual(limited(10 ** 9, *command).returncode, 0)
        good = out.read_bytes()
        done = limited(1000, *command)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(out.read_bytes(), good)


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
