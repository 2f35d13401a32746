#!/usr/bin/env python3
"""Measures the error of the entropy's gradient from saved exponentials, in float64 but for the roundings of a block.

    python3 bench/experiments/saved_entropy.py [--tokens N --dim D --vocab V] [--scales S ...]

Heads are random, with logits of a standard deviation S, and hidden and weight are bf16. Each line has one way to the
block of logit gradients. Its numbers are the relative errors of d_hidden and d_weight in the 2-norm, and of the worst
token's d_hidden:
- recomputed: fp32 logits, the gradient rounded to bf16
- by log2: the logit of each bf16 exponential, the gradient rounded to bf16
- leaders: the same, with exact logits of entries with more than a fifteenth of a token's probability
- logits: logits saved in bf16
"""
import argparse

import torch

LOG2E = 1.4426950408889634


def rounded(t):
    return t.to(torch.bfloat16).double()


def errors(hidden, weight, target):
    z = hidden @ weight.T
    lse = torch.logsumexp(z, 1, keepdim=True)
    log_p = z - lse
    entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
    exact = -log_p.exp() * (entropy + log_p)
    reference = torch.ceil(z.gather(1, target[:, None]) * LOG2E)
    shift = reference - lse * LOG2E  # log2 p less the saved exponent
    saved = rounded(torch.exp2(z * LOG2E - reference))
    found_log_p = (torch.log2(saved.clamp(min=1e-300)) + shift) / LOG2E

    def gradient(p, log_p):
        return rounded(-p * (entropy + log_p))

    p = saved * torch.exp2(shift)
    leaders = p > 1 / 15
    of_logits = (rounded(z * LOG2E - reference) + shift) / LOG2E
    ways = {
        "recomputed": gradient(log_p.exp(), log_p),
        "by log2": gradient(p, found_log_p),
        "leaders": gradient(torch.where(leaders, log_p.exp(), p), torch.where(leaders, log_p, found_log_p)),
        "logits": gradient(of_logits.exp(), of_logits),
    }
    right = exact @ weight, exact.T @ hidden
    for name, dz in ways.items():
        dz = dz.scatter(1, target[:, None], exact.gather(1, target[:, None]))  # targets have fp32 coefficients
        d_hidden, d_weight = dz @ weight, dz.T @ hidden
        each = (d_hidden - right[0]).norm(dim=1) / right[0].norm(dim=1)
        whole = [((a - b).norm() / b.norm()).item() for a, b in zip((d_hidden, d_weight), right)]
        yield name, *whole, each.max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 200), ("dim", 64), ("vocab", 2000)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args()
    torch.manual_seed(0)
    for scale in args.scales:
        hidden = rounded(torch.randn(args.tokens, args.dim))
        weight = rounded(torch.randn(args.vocab, args.dim) * scale / args.dim**0.5)
        target = torch.randint(args.vocab, (args.tokens,))
        for name, d_hidden, d_weight, worst in errors(hidden, weight, target):
            print(f"{scale:5g} {name:12s} d_hidden {d_hidden:.1e} d_weight {d_weight:.1e} worst token {worst:.1e}")


if __name__ == "__main__":
    main()
