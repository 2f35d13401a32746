#!/usr/bin/env python3
"""Measures the seconds of compiling: training steps by the command, a long function and a Llama by
logitless.torch.autochunk.

    python bench/compile_time.py [--logitless build/src/cli/logitless] [--only command autochunk] [--repeat R]
    python bench/compile_time.py --first-call [--device cpu|cuda] [--tokens N --dim D --vocab V] [--repeat R]

Compiles without running: GPT-2 XL with and without a budget, 12 layers with the shape of Llama 3.2 1B, and a chain of
1000 operations with its gradient. Each is compiled R times. Prints medians of wall-clock and of processor time, which
other load disturbs less, and the resulting memory.

--first-call measures a loss and its gradients by autochunk instead: in R fresh processes with an empty cache of cubins
(LOGITLESS_CACHE), and in R more with what those left there. It prints the median seconds of the first call, from tracing
to the gradients, and of the second one. PyTorch has run the loss once before, on other sizes. A CPU has no cubins, and its
two rows differ by noise alone.
"""
import argparse
import json
import os
import resource
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
    """Applies 1000 operations, of which every fiftieth is a matrix product."""
    for i in range(OPERATIONS // 2):
        x = torch.tanh(x) if i % 25 else x @ weight
        x = x * 1.01
    return x.square().mean()


def chain_text():
    """Returns a similar program as text for the compiler, with its gradient."""
    lines, last = [], "x"
    for i in range(OPERATIONS // 2):
        made = f"tanh %{last}" if i % 25 else f"dot %{last}, %w contract(1; 0)"
        lines += [f"  %a{i} = {made}", f"  %b{i} = mul %a{i}, %a{i}"]
        last = f"b{i}"
    return "graph chain(%x: f32[4096, 512], %w: f32[512, 512]) {\n" + "\n".join(lines) + f"\n  return y: %{last}\n  differentiate y wrt %w\n}}\n"


def timed(run, repeat, who):
    """Returns the median seconds of wall clock and processor, and the last result of run()."""
    clock, worked = [], []
    for _ in range(repeat):
        start, before = time.perf_counter(), resource.getrusage(who)
        made = run()
        after = resource.getrusage(who)
        clock.append(time.perf_counter() - start)
        worked.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(clock), statistics.median(worked), made


def command(arguments):
    """Runs the command and returns its second line: memory without and with loops."""
    done = subprocess.run(arguments, capture_output=True, text=True)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1 if done.returncode else 1]


def chunked(function, args, **options):
    """Plans the function again; returns the report's line about memory."""
    return autochunk(function, **options).explain(*args).splitlines()[1]


def show(what, clock, worked, said):
    print(f"{what:44} {clock:7.2f} s {worked:7.2f} s   {said}", flush=True)


def llama(layers):
    torch.manual_seed(0)
    model = torch_models.Llama(4096, 512, layers, 256, 8, 4, 1024)

    def loss(tokens):
        return F.cross_entropy(F.linear(model(tokens)[:, :-1].flatten(0, 1), model.head), tokens[:, 1:].flatten())

    return loss, (torch.randint(4096, (2, 512)),)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logitless", default="build/src/cli/logitless")
    parser.add_argument("--only", nargs="+", choices=["command", "autochunk"], default=["command", "autochunk"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--first-call", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)  # a process of --first-call
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(calls_of(args)))
        return
    if args.first_call:
        first_calls(args)
        return
    if "command" in args.only:
        commands(args)
    if "autochunk" in args.only:
        functions(args)


def commands(args):
    with tempfile.TemporaryDirectory() as folder:
        config, program = Path(folder) / "config.json", Path(folder) / "chain.ir"
        config.write_text(json.dumps(LLAMA))
        program.write_text(chain_text())
        compile_ = [args.logitless, "compile"]
        gpt = compile_ + ["--model", "gpt2-xl", "--batch", "4", "--length", "1024"]
        llama_ = compile_ + ["--model", str(config), "--batch", "4", "--length", "2048"]
        for what, line in {
            "GPT-2 XL": gpt,
            "GPT-2 XL, 4 GiB": gpt + ["--budget", "4GiB"],
            "12 Llama layers": llama_,
            "12 Llama layers, 3 GiB": llama_ + ["--budget", "3GiB"],
            "chain": compile_ + [str(program)],
            "chain, 24 MiB": compile_ + [str(program), "--budget", "24MiB"],
        }.items():
            show(what, *timed(lambda: command(line), args.repeat, resource.RUSAGE_CHILDREN))


def functions(args):
    x, weight = torch.randn(4096, 512), torch.randn(512, 512).requires_grad_()
    loss, tokens = llama(12)
    for executor in ("python", "native"):
        for what, function, given, budget in (
            ("chain", chain, (x, weight), None),
            ("chain, 512 MiB", chain, (x, weight), "512MiB"),
            ("12 Llama layers", loss, tokens, None),
            ("12 Llama layers, 128 MiB", loss, tokens, "128MiB"),
        ):
            found = timed(
                lambda: chunked(function, given, memory_budget=budget, executor=executor), args.repeat,
                resource.RUSAGE_SELF,
            )
            show(f"autochunk, {executor}: {what}", *found)


def softcapped(hidden, weight, targets):
    """A loss that is no head: softcap, label smoothing and a z-loss."""
    z = 30.0 * torch.tanh(F.linear(hidden, weight).float() / 30.0)
    return F.cross_entropy(z, targets, label_smoothing=0.1) + 1e-4 * z.logsumexp(-1).square().mean()


def loss_inputs(tokens, dim, vocab, device):
    """Returns hidden states and weights in bf16, which take gradients, and targets."""
    def matrix(rows):
        return torch.randn(rows, dim, device=device).mul_(dim**-0.5).bfloat16().requires_grad_()

    return matrix(tokens), matrix(vocab), torch.randint(vocab, (tokens,), device=device)


def calls_of(args):
    """Returns the seconds of the first and of the second call in this process, and the bytes of its cubins."""
    def step(function, inputs):
        start = time.perf_counter()
        torch.autograd.grad(function(*inputs), inputs[:2])
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    torch.manual_seed(0)
    step(softcapped, loss_inputs(64, 64, 128, args.device))  # PyTorch's own first call
    function, inputs = autochunk(softcapped), loss_inputs(args.tokens, args.dim, args.vocab, args.device)
    seconds = [step(function, inputs) for _ in range(2)]
    cubins = sum(f.stat().st_size for f in Path(os.environ["LOGITLESS_CACHE"]).rglob("*.cubin"))
    return {"seconds": seconds, "cubins": cubins}


def first_calls(args):
    sizes = [f"--{name}={getattr(args, name)}" for name in ("device", "tokens", "dim", "vocab")]
    line = [sys.executable, __file__, "--in-process", *sizes]
    found = {"empty": [], "full": []}
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as folder:
            for list_ in found.values():  # the second process finds what the first has left
                done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"LOGITLESS_CACHE": folder})
                if done.returncode:
                    raise SystemExit(done.stderr)
                list_.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{args.device}, {args.tokens} x {args.dim} x {args.vocab} bf16, medians of {args.repeat} processes")
    for cache, list_ in found.items():
        first, second = (statistics.median(run["seconds"][i] for run in list_) for i in range(2))
        print(f"cache {cache:6} first call {first:7.3f} s, second {second:7.3f} s, cubins {list_[-1]['cubins'] / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
