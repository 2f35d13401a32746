"""Distillation from a teacher's K most likely tokens, stored as indices and weights: no logits of the student.

    python examples/python/topk_distillation.py [--steps N]
"""

import argparse

import torch
from logitless.torch import linear_cross_entropy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens, dim, vocab, k = 256, 48, 20000, 16
    states = torch.randn(tokens, dim)
    teacher = torch.randn(vocab, dim) * 4 / dim**0.5
    with torch.no_grad():  # once, and stored
        best = (states @ teacher.t()).log_softmax(-1).topk(k)
    vocab_ids, weights = best.indices, best.values.exp()
    head = torch.nn.Parameter(torch.randn(vocab, dim) * 0.02)
    optimizer = torch.optim.Adam([head], lr=0.1)
    for step in range(args.steps):
        loss = linear_cross_entropy(states, head, vocab_ids, target_weight=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: cross entropy {loss.item():.4f} of the teacher's {k} classes", flush=True)


if __name__ == "__main__":
    main()
