#!/usr/bin/env python3
"""Compares the head on PyTorch tensors with the other installed packages, forward and backward, in one process.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/head_torch.py
        [--head gemma|llama|gpt2 | --tokens N --dim D --vocab V | --real FILE --dim D] [--dtype bfloat16|float16|float32]
        [--device cuda|cpu] [--rounds R] [--only TEXT] [--json] [--kernels sm80|cublas|...]
        [--ignored 0.5,0.75 [--prompts]]

Contenders, each where its package is installed:
- PyTorch eager (cross_entropy of the fp32 logits), and torch.compile of it
- cut_cross_entropy with and without its filter
- Liger's Triton loss and its two for SM90, and quack's chunked loss
- logitless: its PyTorch call by default and with budgets, and plans through the C library

--ignored sets these parts of the targets to -100, a table for each, at random or, with --prompts, at the start of each of
8 sequences. The row "the rows that count" is logitless without the ignored rows. Rows "expecting ..." have that
expected_ignored. Ratios are to the GEMMs of all tokens.

Inputs are bf16 by default, random and fresh, or a real head (safetensors with hidden, weight, targets) rotated into D columns.
d_hidden of sampled tokens and d_weight of sampled vocabulary entries are compared with float64.

Prints one table. Its columns are:
- median ms over interleaved rounds; each contender is timed after 150 ms of itself, because a GPU's clock follows the
  power of the last run
- the ratio to the roofline, which is the time of the head's three GEMMs by torch.mm in the same rounds
- peak MiB above the inputs, gradients included (GPU)
- the two relative errors
"""
import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

HEADS = {"gemma": (8192, 2304, 256000), "llama": (8192, 4096, 128256), "gpt2": (32768, 768, 50304)}


def random_head(tokens, dim, vocab, device, dtype):
    x = torch.randn(tokens, dim, device=device).to(dtype)
    w = (torch.randn(vocab, dim, device=device) * 2 / dim**0.5).to(dtype)
    return x, w, torch.randint(0, vocab, (tokens,), device=device)


def real_head(path, tokens, dim, device, dtype):
    """Reads a trained head and multiplies both sides by the same orthonormal columns, which preserves logits."""
    from safetensors.torch import load_file

    head = load_file(path)
    hidden, weight, y = (head[name].to(device) for name in ("hidden", "weight", "targets"))
    basis = torch.linalg.qr(torch.randn(dim, hidden.shape[1], device=device))[0].T.contiguous()
    repeat = -(-tokens // hidden.shape[0])
    x = (hidden.float() @ basis).repeat(repeat, 1)[:tokens].to(dtype)
    return x, (weight.float() @ basis).to(dtype), y.long().repeat(repeat)[:tokens]


def exact_gradients(x, w, y, tokens, vocab_ids):
    """Returns d_hidden of `tokens` and d_weight of `vocab_ids`, in float64, for the mean loss."""
    lse = torch.empty(x.shape[0], dtype=torch.float64, device=x.device)
    step = max(1, (1 << 26) // w.shape[0])
    w64 = w.double()
    for first in range(0, x.shape[0], step):
        lse[first : first + step] = torch.logsumexp(x[first : first + step].double() @ w64.T, 1)
    share = (y >= 0).double()[:, None] / (y >= 0).sum()
    p = torch.exp(x[tokens].double() @ w64.T - lse[tokens, None])
    p[torch.arange(len(tokens)), y[tokens].clamp(min=0)] -= 1
    d_hidden = share[tokens] * p @ w64
    p = torch.exp(x.double() @ w64[vocab_ids].T - lse[:, None]) - (y[:, None] == vocab_ids[None, :]).double()
    return d_hidden, (share * p).T @ x.double()


def losses(y, ignored):
    """Returns {name: function that builds the loss from leaves x and w} for each installed package. ignored: the part
    of the targets that is."""
    F = torch.nn.functional
    from logitless.torch import linear_cross_entropy as ours

    eager = lambda a, b: F.cross_entropy(F.linear(a, b).float(), y)
    found = {
        "logitless": lambda a, b: ours(a, b, y),
        "logitless, all it can use": lambda a, b: ours(a, b, y, memory_budget=1 << 40),
        "logitless, 256 MiB": lambda a, b: ours(a, b, y, memory_budget="256MiB"),
        "PyTorch eager": eager,
        "torch.compile": torch.compile(eager),
    }

    for share in (ignored, 1.0) if ignored else ():
        found[f"logitless, expecting {share:.0%}"] = lambda a, b, s=share: ours(a, b, y, expected_ignored=s)

    def add(name, make):
        try:
            found[name] = make()
        except Exception as error:  # not installed, or not supported on this machine
            print(f"{name}: not here ({type(error).__name__}: {str(error)[:200]})")

    def cut(**options):
        from cut_cross_entropy import linear_cross_entropy

        return lambda a, b: linear_cross_entropy(a, b, y, **options)

    def liger():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

        return lambda a, b: (lambda out: out[0] if isinstance(out, tuple) else out)(function.apply(a, b, y))

    def liger_dense_sm90():  # saves all logits
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

        return lambda a, b: liger_fused_linear_cross_entropy_sm90(a, b, y)

    def liger_scaled_sm90():  # of each token; recomputes the logits
        from liger_kernel.ops.cutedsl.ops import LigerFusedScaledCrossEntropySM90Function as function

        return lambda a, b: (lambda out: out[0] if isinstance(out, tuple) else out)(function.apply(a, b, y)).mean()

    def quack(chunk):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda a, b: chunked_linear_cross_entropy(a, b, y, chunk_size=chunk)

    add("cut_cross_entropy", cut)
    add("cut_cross_entropy, no filter", lambda: cut(filter_eps=None))
    add("Liger", liger)
    add("Liger flce SM90", liger_dense_sm90)
    add("Liger scaled SM90", liger_scaled_sm90)
    add("quack, chunks of 2048", lambda: quack(2048))
    add("quack, one chunk", lambda: quack(y.shape[0]))
    return found


def ignore(y, part, prompts):
    """Returns the targets with a part of them ignored."""
    y = y.clone()
    if prompts:
        for sequence in y.chunk(8):
            sequence[: int(part * len(sequence))] = -100
    else:
        y[torch.rand(len(y), device=y.device) < part] = -100
    return y


def counting_rows(x, w, y):
    """Returns a function that runs the loss of the rows that count, picked beforehand."""
    from logitless.torch import linear_cross_entropy

    counts = y >= 0
    a, b, targets = x[counts].requires_grad_(), w.detach().requires_grad_(), y[counts]

    def run():
        a.grad = b.grad = None
        linear_cross_entropy(a, b, targets).backward()
        d_hidden = torch.zeros_like(x)
        d_hidden[counts] = a.grad
        return d_hidden, b.grad

    return run


def through_c(x, w, y, kind, weight_dtype, budget):
    """Returns a function that runs one plan of the C library, with its gradients."""
    import ctypes

    from logitless import _library as c
    from logitless._options import LossOptions, struct_of
    from logitless.torch import _engine

    made = dict(
        loss=torch.zeros((), device=x.device),
        d_hidden=torch.empty_like(x),
        d_weight=torch.empty(w.shape, dtype=weight_dtype, device=w.device),
    )
    ins, _ = _engine.fill(c.CrossEntropyInputs, dict(hidden=x, weight=w, targets=y))
    outs, _ = _engine.fill(c.CrossEntropyOutputs, made)
    ins.grad_loss = 1.0
    options = struct_of(LossOptions())
    request = c.new(c.PlanRequest)
    request.kind, request.memory_budget = c.PLAN_KINDS[kind], budget
    context, plan = _engine._context(x.device), ctypes.c_void_p()
    head = (context.handle, ctypes.byref(options), ctypes.byref(ins), ctypes.byref(outs))
    c.check(c.lib.logitless_plan_cross_entropy(*head, ctypes.byref(request), ctypes.byref(plan)))
    text = c.lib.logitless_plan_explain(plan).decode()
    size = c.lib.logitless_plan_workspace_bytes(plan)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)

    def run():
        c.check(
            c.lib.logitless_cross_entropy(
                context.handle, plan, ctypes.byref(options), ctypes.byref(ins), ctypes.byref(outs), workspace.data_ptr(),
                size, None,
            )
        )
        return made["d_hidden"], made["d_weight"]

    run.keep = (ins, outs, workspace, context, made)
    run.plan_text = text
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=sorted(HEADS))
    parser.add_argument("--real", help="a head in safetensors: hidden, weight, targets")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="contenders whose names have this in them, separated by |")
    parser.add_argument("--kernels", help="logitless's GPU kernels, as LOGITLESS_GPU_KERNELS: sm80, or hopper,cublas")
    parser.add_argument("--ignored", default="0", help="parts of the targets, separated by commas")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.kernels:
        os.environ["LOGITLESS_GPU_KERNELS"] = args.kernels  # before the library is loaded
    if args.real and not Path(args.real).is_file():
        raise SystemExit(f"{args.real} is not there; bench/heads/README.md says how a head is made")

    for part in args.ignored.split(","):
        measure(args, float(part))


def measure(args, ignored):
    """Prints the table of one part of ignored targets."""
    tokens, dim, vocab = HEADS[args.head] if args.head else (args.tokens, args.dim, args.vocab)
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    element = getattr(torch, args.dtype)
    if args.real:
        x, w, y = real_head(args.real, tokens, dim, args.device, element)
    else:
        x, w, y = random_head(tokens, dim, vocab, args.device, element)
    vocab = w.shape[0]
    if ignored:
        y = ignore(y, ignored, args.prompts)
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)

    def with_autograd(loss):
        def make():
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()

            def run():
                a.grad = b.grad = None
                loss(a, b).backward()
                return a.grad, b.grad

            return run

        return make

    ways = {name: with_autograd(loss) for name, loss in losses(y, ignored).items()}
    for name, kind, dtype, budget in (
        ("C: dense, fp32 d_weight, 512 MiB", "dense", torch.float32, 512 << 20),
        ("C: dense, bf16 d_weight, any", "dense", torch.bfloat16, 1 << 40),
        ("C: recompute, bf16 d_weight, 256 MiB", "recompute", torch.bfloat16, 256 << 20),
    ):
        ways[name] = lambda kind=kind, dtype=dtype, budget=budget: through_c(x, w, y, kind, dtype, budget)
    if ignored:
        ways["the rows that count"] = lambda: counting_rows(x, w, y)
    if args.only:
        ways = {name: way for name, way in ways.items() if any(part in name for part in args.only.split("|"))}

    sampled = torch.linspace(0, tokens - 1, min(64, tokens)).long().to(args.device)
    vocab_ids = torch.cat([y[y >= 0][:32], torch.linspace(0, vocab - 1, min(32, vocab)).long().to(args.device)])
    exact_hidden, exact_weight = exact_gradients(x, w, y, sampled, vocab_ids)
    error = lambda got, exact: ((got.double() - exact).norm() / exact.norm()).item()
    rows = {}
    for name, way in ways.items():
        try:
            if on_gpu:
                synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                run = way()
                run()  # compiles
                run = None
                run = way()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = min(before, torch.cuda.memory_allocated())
            else:
                run = way()
            d_hidden, d_weight = run()
            synchronize()
            peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
            rows[name] = {"name": name, "peak": peak, "times": [],
                          "d_hidden_error": error(d_hidden[sampled], exact_hidden),
                          "d_weight_error": error(d_weight[vocab_ids], exact_weight)}
        except Exception as failure:  # a peer fails on this shape; the others are still measured
            print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
        run = d_hidden = d_weight = None

    block = torch.empty(tokens, vocab, dtype=element, device=args.device).normal_()
    floors = [lambda: torch.mm(x, w.T), lambda: torch.mm(block, w), lambda: torch.mm(block.T, x)]

    def timed(run, repeat=3):
        end = time.perf_counter() + (0.15 if on_gpu else 0.0)
        while True:
            run()
            synchronize()
            if time.perf_counter() >= end:
                break
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            run()
            synchronize()
            times.append(time.perf_counter() - start)
        return times

    floor = []
    for _ in range(args.rounds):
        floor.append(sum(statistics.median(timed(f)) for f in floors))
        for name, row in rows.items():
            run = ways[name]()
            row["times"] += timed(run)
            run = None
    block = None
    floor = statistics.median(floor)
    for row in rows.values():
        row["ms"] = statistics.median(row.pop("times")) * 1e3
        row["ratio"] = row["ms"] / floor / 1e3
    if args.json:
        print(json.dumps({"tokens": tokens, "dim": dim, "vocab": vocab, "torch": torch.__version__, "roofline_ms": floor * 1e3,
                          "rows": list(rows.values())}, indent=2))
        return
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"N {tokens}, D {dim}, V {vocab}, {args.dtype}{', real' if args.real else ''}"
          f"{', kernels ' + args.kernels if args.kernels else ''}"
          f"{f', {ignored:.0%} ignored' if ignored else ''}{', prompts' if ignored and args.prompts else ''}, "
          f"PyTorch {torch.__version__}, {where}; floor "
          f"{floor * 1e3:.2f} ms, gradients {(x.nbytes + w.nbytes) / 2**20:.0f} MiB")
    for row in rows.values():
        memory = "-" if row["peak"] is None else f"{row['peak'] / 2**20:.0f}"
        print(f"{row['name']:38} {row['ms']:9.2f} ms  {row['ratio']:6.3f}  {memory:>7} MiB  d_hidden "
              f"{row['d_hidden_error']:.2e}  d_weight {row['d_weight_error']:.2e}")


if __name__ == "__main__":
    main()
