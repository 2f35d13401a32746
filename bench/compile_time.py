#!/usr/bin/env python3
"""Seconds that compiling takes: training steps by the command, and a long function and a Llama by logitless.torch.autochunk.

    python bench/compile_time.py [--logitless build/src/cli/logitless] [--repeat R]

Compiles without running: GPT-2 XL with a budget and without, 12 layers with the shape of Llama 3.2 1B, and a chain of 1000 operations.
Each R times; prints the median, and of autochunk the parts of tracing and of all else.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch_models
from logitless.torch import autochunk

LLAMA = {  # Llama 3.2 1B with 12 layers
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 12, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "head_dim": 64, "hidden_act": "silu",
}
OPERATIONS = 1000


def chain(x, weight):
    """1000 operations, of which every fiftieth is a product."""
    for i in range(OPERATIONS // 2):
        x = torch.tanh(x) if i % 25 else x @ weight
        x = x * 1.01
    return x.square().mean()


def chain_text():
    """One like it as the compiler reads it, with its gradient."""
    lines, last = [], "x"
    for i in range(OPERATIONS // 2):
        made = f"tanh %{last}" if i % 25 else f"dot %{last}, %w contract(1; 0)"
        lines += [f"  %a{i} = {made}", f"  %b{i} = mul %a{i}, %a{i}"]
        last = f"b{i}"
    return "graph chain(%x: f32[4096, 512], %w: f32[512, 512]) {\n" + "\n".join(lines) + f"\n  return y: %{last}\n  differentiate y wrt %w\n}}\n"


def command(arguments, repeat):
    """Seconds of the process, its start among them, and of compiling as it says."""
    times, said = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        done = subprocess.run(arguments + ["--json"], capture_output=True, text=True)
        times.append(time.perf_counter() - start)
        if done.returncode != 0:
            return None, done.stderr.strip()
        said = json.loads(done.stdout)
    return statistics.median(times), said


def chunked(function, args, repeat, **options):
    """Seconds of the first call's plan."""
    times = []
    for _ in range(repeat):
        made = autochunk(function, **options)
        start = time.perf_counter()
        text = made.explain(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times), text


def llama(layers):
    torch.manual_seed(0)
    model = torch_models.Llama(4096, 512, layers, 256, 8, 4, 1024)

    def loss(tokens):
        return F.cross_entropy(F.linear(model(tokens)[:, :-1].flatten(0, 1), model.head), tokens[:, 1:].flatten())

    return loss, (torch.randint(4096, (2, 512)),)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logitless", default="build/src/cli/logitless")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config, program = Path(folder) / "config.json", Path(folder) / "chain.ir"
        config.write_text(json.dumps(LLAMA))
        program.write_text(chain_text())
        compile_ = [args.logitless, "compile"]
        gpt = compile_ + ["--model", "gpt2-xl", "--batch", "4", "--length", "1024"]
        lla = compile_ + ["--model", str(config), "--batch", "4", "--length", "2048"]
        for what, line in {
            "GPT-2 XL, no budget": gpt,
            "GPT-2 XL, 4 GiB": gpt + ["--budget", "4GiB"],
            "GPT-2 XL, 2500 MiB": gpt + ["--budget", "2500MiB"],
            "12 Llama layers, no budget": lla,
            "12 Llama layers, 3 GiB": lla + ["--budget", "3GiB"],
            f"chain of {OPERATIONS}": compile_ + [str(program)],
            f"chain of {OPERATIONS}, 24 MiB": compile_ + [str(program), "--budget", "24MiB"],
        }.items():
            seconds, said = command(line, args.repeat)
            print(f"{what:36} " + (f"{seconds:7.2f} s" if seconds is not None else str(said)), flush=True)
    x, weight = torch.randn(4096, 512), torch.randn(512, 512).requires_grad_()
    loss, tokens = llama(12)
    for executor in ("python", "native"):
        for what, function, given, budget in (
            (f"chain of {OPERATIONS}", chain, (x, weight), None),
            (f"chain of {OPERATIONS}, 512 MiB", chain, (x, weight), "512MiB"),
            ("12 Llama layers", loss, tokens, None),
            ("12 Llama layers, 128 MiB", loss, tokens, "128MiB"),
        ):
            seconds, text = chunked(function, given, args.repeat, memory_budget=budget, executor=executor)
            print(f"autochunk, {executor}: {what:36} {seconds:7.2f} s   {text.splitlines()[1]}", flush=True)


if __name__ == "__main__":
    main()
