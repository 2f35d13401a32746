"""The examples run, and the models that they train improve. The first script of README.md runs as it stands."""

import re
import runpy
import sys
from pathlib import Path

import oracle
import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example with arguments as a script, in this process, and returns what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    torch.set_default_device(None)  # conftest.py's
    yield run
    if oracle.DEVICE != "cpu":
        torch.set_default_device(oracle.DEVICE)


def numbers(text, label):
    return [float(x) for x in re.findall(rf"{label} ([+-]?[0-9.]+)", text)]


def test_finetune_lazy_head(run):
    pytest.importorskip("transformers")
    lazy = run("finetune_lazy_head.py", "--steps", "11")
    losses = numbers(lazy, "loss")
    assert losses[-1] < losses[0] - 1 and "never made" in lazy
    plain = numbers(run("finetune_lazy_head.py", "--steps", "11", "--plain"), "loss")
    assert all(abs(a - b) < 1e-3 for a, b in zip(losses, plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_step(run, dtype):
    if oracle.DEVICE != "cpu" and dtype == "float32":
        pytest.skip("the ratio is exactly 1 on a GPU in 16 bits")
    text = run("grpo_step.py", "--steps", "11", "--device", oracle.DEVICE, "--dtype", dtype)
    rewards = numbers(text, "reward")
    assert rewards[-1] > rewards[0] + 0.03 and text.count("exactly 1") == 3 and "not 1" not in text


def test_topk_distillation(run):
    losses = numbers(run("topk_distillation.py", "--steps", "21"), "cross entropy")
    assert losses[-1] < losses[0] - 1


def test_the_first_script_of_the_readme_prints_a_saving(capsys):
    text = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    script = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1]
    assert script.count("\n") <= 12
    torch.set_default_device(None)
    exec(compile(script, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "are the same to" in said and float(re.search(r"([0-9.]+) MiB saved", said)[1]) > 1024 * 32000 * 4 / 2**20


@pytest.mark.parametrize("page", ["quick_start.md", "check.md"])
def test_the_pages_of_a_first_hour_print_the_same_loss(page, capsys):
    transformers = pytest.importorskip("transformers")
    torch.set_default_device(None)
    torch.manual_seed(0)
    sizes = dict(vocab_size=2000, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    ids = torch.randint(2000, (2, 16))
    names = {"model": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), "batch": {"input_ids": ids, "labels": ids}}
    text = (EXAMPLES.parents[1] / "docs/use" / page).read_text(encoding="utf-8")
    scripts = [s for s in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "jax" not in s]
    for script in scripts:
        exec(compile(script, page, "exec"), names)
    said = capsys.readouterr().out
    assert len(scripts) == 2 and "are the same to" in said
    if page == "check.md":
        assert float(re.search(r"off by (\S+)", said)[1]) < 1e-4
    else:
        ours, plain = re.search(r"^(\d+\.\d+) (\d+\.\d+)$", said, re.M).groups()
        assert float(ours) == pytest.approx(float(plain), rel=1e-5)
