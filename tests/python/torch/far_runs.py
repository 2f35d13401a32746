"""Shared code of the FarFieldHead tests: a run of steps with a small optimizer, and a comparison of two runs bit for
bit."""

import torch


def run(loss_of, steps, start):
    """Runs steps of loss_of(hidden, weight). Returns (loss, d_hidden, d_weight) of each, and the final hidden and
    weight."""
    hidden, weight = (t.clone().requires_grad_() for t in start)
    results = []
    for _ in range(steps):
        loss = loss_of(hidden, weight)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
        with torch.no_grad():
            for t in (hidden, weight):
                t -= 0.5 * t.grad
                t.grad = None
    return results, (hidden.detach(), weight.detach())


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for s, t in zip(a, b) for x, y in zip(s, t))
