#!/usr/bin/env python3
"""Compares the ready-made losses on PyTorch tensors with their plain formulas on full logits, and with Liger's where it is
installed: loss and gradients of hidden and weight, time and memory.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/losses.py
        [--loss dpo grpo jsd forward_kl] [--sequences B --length T --dim D --vocab V] [--dtype bfloat16|float32]
        [--device cuda|cpu] [--budget 1GiB 256MiB ...] [--repeat R]

Times are medians of R interleaved rounds; first calls are listed separately. The peak is that of PyTorch's allocator
beyond the inputs, gradients included. On the CPU the profiler measures it, with the kernels' temporaries. The last
column is the relative difference of gradients to the plain formula, in the 2-norm. Each budget has a row, which reports
a refusal of the library, or a peak without gradients above the budget. Reference and teacher have their own hidden
states and share one head.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/torch"))


from logitless._library import parse_bytes  # noqa: E402
from logitless.torch._peak import peak_of  # noqa: E402
from logitless.torch import losses  # noqa: E402


class Batch:
    def __init__(self, args):
        device, dtype = args.device, getattr(torch, args.dtype)
        rows, (dim, vocab) = (args.sequences, args.length), (args.dim, args.vocab)
        normal = lambda *shape, scale=1.0: (torch.randn(shape, device=device) * scale).to(dtype)
        self.hidden, self.other = normal(*rows, dim).requires_grad_(), normal(*rows, dim)
        self.weight, self.other_weight = (normal(vocab, dim, scale=dim**-0.5) for _ in range(2))
        self.weight.requires_grad_()
        self.vocab_ids = torch.randint(0, vocab, rows, device=device)
        self.advantages = torch.randn(args.sequences, device=device)
        self.old = torch.full(rows, -torch.log(torch.tensor(float(vocab))).item(), device=device)
        self.reference = dict(ref_hidden=self.other, ref_weight=self.other_weight)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.hidden, self.weight))


def log_p(hidden, weight):
    return F.linear(hidden, weight).float().log_softmax(-1)


def chosen(b, hidden, weight):
    return log_p(hidden, weight).gather(-1, b.vocab_ids[..., None])[..., 0]


def plain_dpo(b):
    with torch.no_grad():
        reference = chosen(b, b.other, b.other_weight).sum(-1)
    good, bad = (chosen(b, b.hidden, b.weight).sum(-1) - reference).chunk(2)
    return -F.logsigmoid(0.1 * (good - bad)).mean()


def plain_grpo(b):
    with torch.no_grad():
        reference = chosen(b, b.other, b.other_weight)
    logps = chosen(b, b.hidden, b.weight)
    ratio, advantages = torch.exp(logps - b.old), b.advantages[:, None]
    apart = reference - logps
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-gain + 0.04 * (apart.exp() - apart - 1)).mean(-1).mean()


def plain_divergence(b, beta):
    with torch.no_grad():
        q = log_p(b.other, b.other_weight)
    p = log_p(b.hidden, b.weight)
    if beta == 0.0:
        return (q.exp() * (q - p)).sum(-1).mean()
    m = torch.logaddexp(p + torch.log(torch.tensor(1 - beta)), q + torch.log(torch.tensor(beta)))
    return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1).mean()


def liger(name):
    """Returns Liger's loss of this name as a function of a batch. Raises ImportError where Liger has none."""
    from liger_kernel import chunked_loss

    flat = lambda t: t.reshape(-1, t.shape[-1])
    if name == "dpo":
        loss = chunked_loss.LigerFusedLinearDPOLoss(beta=0.1)
        return lambda b: loss(b.weight, b.hidden, b.vocab_ids, None, b.other, b.other_weight)[0]
    if name == "grpo":
        loss = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.04, loss_type="grpo")
        mask = lambda b: torch.ones_like(b.vocab_ids)
        return lambda b: loss(
            b.hidden, b.weight, b.vocab_ids, mask(b), b.advantages, old_per_token_logps=b.old, ref_input=b.other,
            ref_weight=b.other_weight,
        )[0]
    if name == "jsd":
        loss = chunked_loss.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5)
        return lambda b: loss(flat(b.hidden), b.weight, flat(b.other), b.other_weight, b.vocab_ids.flatten())
    raise ImportError(f"Liger has no {name}")


PLAIN = {
    "dpo": plain_dpo, "grpo": plain_grpo, "jsd": lambda b: plain_divergence(b, 0.5),
    "forward_kl": lambda b: plain_divergence(b, 0.0),
}
OURS = {
    "dpo": lambda b, **o: losses.dpo_loss(b.hidden, b.weight, b.vocab_ids, **b.reference, **o).loss,
    "grpo": lambda b, **o: losses.grpo_loss(
        b.hidden, b.weight, b.vocab_ids, b.advantages, old_per_token_logps=b.old, beta=0.04, **b.reference, **o).loss,
    "jsd": lambda b, **o: losses.jsd_loss(b.hidden, b.weight, b.other, b.other_weight, **o),
    "forward_kl": lambda b, **o: losses.forward_kl_loss(b.hidden, b.weight, b.other, b.other_weight, **o),
}


def contenders(name, budgets):
    found = {"plain": PLAIN[name], "logitless": OURS[name]}
    for budget in budgets:
        found[f"logitless, {budget}"] = lambda b, budget=budget: OURS[name](b, memory_budget=budget)
    try:
        found["Liger"] = liger(name)
    except ImportError as error:
        print(f"  Liger: not here ({error})")
    return found


def peak(run, device):
    if device == "cpu":
        return peak_of(run, results_count=True)[0]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def refused(run):
    """Returns why the library refuses the budget; None where it does not."""
    try:
        run()
    except ValueError as error:
        return str(error)


def beyond(peak_bytes, label, batch):
    """Returns a row's remark on its budget."""
    budget = parse_bytes(label.partition(", ")[2] or None)
    over = peak_bytes - sum(t.numel() * t.element_size() for t in (batch.hidden, batch.weight)) - budget
    # A loss has a few more numbers per token.
    return f"  {over / 2**20:.1f} MiB beyond its budget" if budget and over > 256 * batch.vocab_ids.numel() else ""


def timed(run, device):
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", nargs="+", choices=PLAIN, default=list(PLAIN))
    for name, value in (("sequences", 8), ("length", 128), ("dim", 256), ("vocab", 32000), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", nargs="*", default=["32MiB"])
    args = parser.parse_args()
    torch.manual_seed(0)
    batch = Batch(args)
    logits = 4 * args.sequences * args.length * args.vocab
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {args.device}, {threads} threads; fp32 logits {logits / 2**20:.0f} MiB")
    for name in args.loss:
        print(name)
        found = contenders(name, args.budget)
        runs = {label: (lambda loss=loss: batch.gradients(loss(batch))) for label, loss in found.items()}
        for label in [label for label in runs if label.startswith("logitless, ")]:
            if why := refused(runs[label]):
                print(f"  {label:24} refused: {why}")
                del runs[label]
        first = {label: timed(run, args.device) for label, run in runs.items()}
        times = {label: [] for label in runs}
        for _ in range(args.repeat):
            for label, run in runs.items():
                times[label].append(timed(run, args.device))
        floor = statistics.median(times["plain"])
        exact = runs["plain"]()
        for label, run in runs.items():
            took = statistics.median(times[label])
            most = peak(run, args.device)
            apart = max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(run(), exact))
            print(
                f"  {label:24} {took * 1e3:9.1f} ms  {took / floor:5.2f} of plain  peak {most / 2**20:8.1f} MiB"
                f"  first call {first[label]:.2f} s  gradients {apart:.1e} from plain{beyond(most, label, batch)}"
            )


if __name__ == "__main__":
    main()
