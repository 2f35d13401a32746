"""bench/seeds.py: each row by models of small sizes; its variants agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/seeds.py"


@pytest.mark.parametrize("row, variants", [
    ("gpt2", ["eager", "head-1MiB", "autochunk-4"]),
    ("llama3", ["plain", "lazy", "sharded"]),
    ("gemma2", ["plain", "liger", "lazy", "far"]),
    ("jax3b", ["remat", "logitless-sharded"]),
])
def test_row(row, variants, tmp_path):
    pytest.importorskip("jax" if row == "jax3b" else "transformers")
    command = [sys.executable, str(SCRIPT), row, "--tiny", "--layers", "1", "--variant", *variants, "--json", str(tmp_path / "out")]
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quick)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out").read_text())
    measured = [r for r in results if "losses" in r]
    assert [r["variant"] for r in results] == variants and len(measured) >= len(variants) - 1
    assert f"{len(measured)} of {len(measured)} variants have the losses of {variants[0]}" in done.stdout
    for r in measured:
        assert r["tokens_per_second"] > 0 and r["peak_bytes"] > 0 and r["losses"][0] > r["losses"][-1]
    for r in results:
        assert "losses" in r or r["skipped"] == "liger_kernel is not installed"
