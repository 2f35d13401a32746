"""bench/seeds.py and bench/compare/recipes_torch.py at small sizes: with logitless and without, losses agree."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(path, monkeypatch):
    """Imports a script of bench."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(results, variants):
    measured = [r for r in results if "losses" in r]
    assert [r["variant"] for r in results] == variants and len(measured) >= len(variants) - 1
    for r in measured:
        assert r["agrees"] and r["tokens_per_second"] > 0 and r["peak_bytes"] > 0 and r["losses"][0] > r["losses"][-1]
    for r in results:
        assert "losses" in r or r["skipped"] == "liger_kernel is not installed"


@pytest.mark.parametrize("row, variants", [
    ("gpt2", ["eager", "head-1MiB", "autochunk-4"]), ("gemma2", ["plain", "liger", "lazy", "far"]),
])
def test_row(row, variants, monkeypatch):
    pytest.importorskip("transformers")
    seeds = script(BENCH / "seeds.py", monkeypatch)
    results = []
    importlib.import_module(f"seeds.{row}").work(seeds.parsed([row, "--tiny", "--layers", "1", "--variant", *variants]), results.append)
    seeds.agreement(results)
    check(results, variants)


@pytest.mark.parametrize("row, variants", [
    ("llama3", ["plain", "lazy", "sharded"]), ("jax3b", ["remat", "logitless-sharded"]),
])
def test_command(row, variants, tmp_path):
    pytest.importorskip("jax" if row == "jax3b" else "transformers")
    out = tmp_path / "out"
    command = [sys.executable, str(BENCH / "seeds.py"), row, "--tiny", "--layers", "1", "--variant", *variants, "--json", str(out)]
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quick)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(variants)} of {len(variants)} variants have the losses of {variants[0]}" in done.stdout
    check(json.loads(out.read_text()), variants)


def test_together(tmp_path):
    pytest.importorskip("transformers")
    out, variants = tmp_path / "out", ["eager", "head-1MiB"]
    command = [sys.executable, str(BENCH / "seeds.py"), "gpt2", "--tiny", "--layers", "1", "--together", "2", "--variant", *variants]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(out.read_text()), variants)


def test_limit(monkeypatch):
    seeds = script(BENCH / "seeds.py", monkeypatch)
    args = seeds.parsed(["gpt2", "--tiny", "--together", "2", "--limit", "0.01"])
    late = [{"variant": name, "failed": "no result within 0.01 s"} for name in ("eager", "head")]
    assert [result for made in seeds.run(args, [["eager"], ["head"]]) for result in made] == late


def test_together_is_refused(monkeypatch, capsys):
    for row, count in (("llama3", "2"), ("gpt2", "0")):
        with pytest.raises(SystemExit):
            script(BENCH / "seeds.py", monkeypatch).parsed([row, "--tiny", "--together", count])
        assert f"--together: expected 1 or more, of gpt2 or gemma2, got {count} of {row}" in capsys.readouterr().err


def test_unknown_variant(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        script(BENCH / "seeds.py", monkeypatch).parsed(["llama3", "--tiny", "--variant", "lasy"])
    assert "--variant: expected some of plain, liger, lazy, sharded, got lasy" in capsys.readouterr().err


def test_recipes(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipes_torch.py", "--tiny", "--limit", "0.01"])
    recipes = script(BENCH / "compare/recipes_torch.py", monkeypatch)
    args = recipes.parse_arguments()
    late = recipes.run("plain", args)
    assert late["before"] == late["logitless"] == {"failed": "no result within 0.01 s"}
    args.limit = 300
    plain = recipes.run("plain", args)
    assert plain["agrees"] and plain["logitless"]["ms"] > 0 and plain["package"].startswith("transformers ")
    setting = recipes.Setting(args)
    found = recipes.row("trainer", setting)
    assert found["agrees"] and found["logitless"]["ms"] > 0 and "loss 7." in recipes.text_of("trainer", found)
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert recipes.text_of("megatron", recipes.row("megatron", setting)).startswith("megatron: not installed (")
