"""bench/far_proof.py on a model that the command trained: its losses, exact gradients, and the head that it captures."""

import gzip
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import far_proof_error  # noqa: E402
import far_proof_head  # noqa: E402
import far_proof_losses  # noqa: E402
import far_proof_text  # noqa: E402
from far_field import load  # noqa: E402

VOCAB, LENGTH = 4300, 16  # a capture can cut this vocabulary to 4096 entries


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a folder with a corpus, and a run of three steps with its model."""
    folder = tmp_path_factory.mktemp("far_proof")
    numbers = random.Random(1)
    for name, count in (("train", 4000), ("val", 40 * LENGTH + 1)):
        words = [min(int(numbers.paretovariate(0.4)) - 1, VOCAB - 1) for _ in range(count)]
        header = struct.pack("<3i", 20240520, 1, count).ljust(1024, b"\0")
        (folder / f"{name}_{VOCAB}.bin").write_bytes(header + struct.pack(f"<{count}H", *words))
    command = [sys.executable, far_proof_error.ROOT / "bench/far_proof.py", "run", "--logitless", os.environ["LOGITLESS_CLI"],
               "--words", folder, "--out", folder / "runs", "--vocab", VOCAB, "--ways", "dense", "--model", "none", "--device", "cpu",
               "--dtype", "f32", "--batch", 4, "--length", LENGTH, "--tokens", 192, "--validations", 1, "--lr", "0.01", "--export", "--save",
               "--limit", 100, "--", "--dim", 16, "--layers", 2, "--heads", 2, "--threads", 1]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folder, folder / "runs" / f"none_{VOCAB}_dense_1"


def test_losses_are_the_command_s(trained):
    words, run = trained
    with gzip.open(f"{run}.jsonl.gz", "rt") as log:
        said = [line["loss"] for line in map(json.loads, log) if line["kind"] == "validation"][-1]
    head = far_proof_head.Head(run, words, 40 * LENGTH, "cpu")
    assert head.hidden.shape == (40 * LENGTH, 16) and head.counts.sum() == 4000
    assert head.losses().mean().item() == pytest.approx(said, rel=2e-4)  # the head's numbers are rounded to bf16 here


def test_exact_gradients(trained):
    words, run = trained
    head = far_proof_head.Head(run, words, 96, "cpu")
    hidden, weight = head.hidden.double().requires_grad_(), head.weight.double().requires_grad_()
    F.cross_entropy(hidden @ weight.T, head.targets).backward()
    d_hidden, d_weight = far_proof_error.exact(head, head.hidden, head.targets)
    torch.testing.assert_close(d_hidden, hidden.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-12, atol=1e-15)
    errors = far_proof_error.Errors(head, head.hidden, head.targets)
    off = errors.d_weight.clone()
    off[errors.classes[2]] *= 1.5
    found = errors.of(d_hidden, off)
    assert found["d_hidden"] == 0 and 0 < found["d_weight"] < 0.5
    assert [round(e, 12) for e in found["by_class"]] == [0, 0, 0.5] + [0] * 7
    assert [round(e, 12) for e in found["unmet"]] == [0, 0, 0.5] + [0] * 7


def test_capture(trained, tmp_path):
    words, run = trained
    room = 4096 * 20 + 96 * 36 + 4096  # of 4096 vocabulary entries
    for most, kept, bits in ((1 << 30, VOCAB, 8), (1 << 30, VOCAB, 4), (room, 4096, 8)):
        path = tmp_path / f"{kept}_{bits}.safetensors"
        far_proof_head.capture(SimpleNamespace(folder=run, words=words, tokens=96, device="cpu", most=most, out=path, bits=bits))
        found = load(path)
        assert path.stat().st_size <= most
        assert found["weight_q"].min() >= -(2 ** (bits - 1)) and found["weight_q"].max() < 2 ** (bits - 1)
        assert far_proof_head.metadata(path)["training"] == "3 of 3 steps of 64 tokens"
        assert found["weight_q"].shape == (kept, 16) and found["weight_scale"].shape == (kept,)
        assert len(found["targets"]) == len(found["hidden"]) > 80 and found["targets"].max() < kept
        command = [os.environ["LOGITLESS_CLI"], "loss", "--hidden", f"{path}:hidden", "--weight", f"{path}:weight_q*weight_scale",
                   "--targets", f"{path}:targets", "--plan", "forward", "--json"]
        loss = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["loss"]
        if kept == VOCAB:
            head = far_proof_head.Head(run, words, 96, "cpu")
            assert loss == pytest.approx(head.losses().mean().item(), rel=1e-3 if bits == 8 else 3e-2)
    with pytest.raises(SystemExit, match="fewer --tokens"):
        far_proof_head.capture(SimpleNamespace(folder=run, words=words, tokens=96, device="cpu", most=20000, out=tmp_path / "none",
                                               bits=8))


def test_of_a_checkpoint(trained, tmp_path):
    words, run = trained
    with pytest.raises(SystemExit, match="expected config.json of --export, or run.safetensors of --save"):
        far_proof_head.Head(tmp_path, words, 96, "cpu")
    (tmp_path / "run.safetensors").symlink_to(run / "run.safetensors")
    of_export, of_checkpoint = (far_proof_head.Head(folder, words, 96, "cpu") for folder in (run, tmp_path))
    assert torch.equal(of_export.weight, of_checkpoint.weight) and torch.equal(of_export.hidden, of_checkpoint.hidden)


def test_losses_of_models(trained, tmp_path):
    words, run = trained
    args = SimpleNamespace(folder=run, others=[run], words=words, tokens=40 * LENGTH, device="cpu", out=tmp_path)
    far_proof_losses.losses(args)
    found = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    head = far_proof_head.Head(run, words, 40 * LENGTH, "cpu")
    row = found["models"][run.name]
    assert found["tokens"] == 40 * LENGTH and row["loss"] == pytest.approx(head.losses().mean().item(), rel=1e-6)
    assert row["minus_first"] == 0 and row["minus_first_standard_error"] == 0
    learnt = [band["learnt"] for band in row["bands"]]
    assert all(least <= most for least, most in learnt) and all(a[0] >= b[1] for a, b in zip(learnt, learnt[1:]))


def test_mean_and_error():
    mean, off = far_proof_losses.mean_and_error(torch.tensor([1.0, 3.0, 3.0, 5.0, 9.0], dtype=torch.float64), 2)
    assert mean == pytest.approx(4.2) and off == pytest.approx(1.0)  # windows of 2 and 4 on average


@pytest.fixture(scope="module")
def documents():
    paths = sorted((far_proof_error.ROOT / "docs").glob("far_*.md"))
    return [{"path": str(path), "bytes": path.stat().st_size, "digest": "0" * 64} for path in paths]


def test_words_are_the_tokenizer_s(documents):
    tokenizers = pytest.importorskip("tokenizers")
    large = far_proof_text.train_tokenizer(documents, 1 << 20, 900, 1e9)
    small = far_proof_text.train_tokenizer(documents, 1 << 20, 600, 1e9)
    assert far_proof_text.first_words(large, 600)["model"] == small["model"]
    words = far_proof_text.Words(json.dumps(large))
    whole = tokenizers.Tokenizer.from_str(json.dumps(large))
    text = "".join(far_proof_text.text_of(f["path"], 1 << 20) for f in documents) + "\t it's  \n\n  _x_ 12 caf\u00e9 \u4f60\u597d \u00bd!\n"
    assert words.of(text) == whole.encode(text).ids
    assert whole.decode(words.of(text)) == text
