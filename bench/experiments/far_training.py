#!/usr/bin/env python3
"""Measures the loss that the far field costs a training run, and which gradient causes it, on a log-bilinear
model in PyTorch.

    python3 bench/experiments/far_training.py --words ~/.cache/logitless/HASH.safetensors [--seeds 1 2 3]
                                  [--variants dense far far-hidden far-weight sample:16]

The token ids are those that `logitless train --text` has cached. GEMMs are exact. Tiles and blocks are selected as in
docs/use/far_field.md, with a fixed tau and a new order every --every steps. Variants differ only in the gradients that use
skipped tiles: both (far), d_hidden or d_weight alone, or both with a sample in d_weight (sample:M). Holds the
probabilities of a batch in full, several times; a run takes seconds on a GPU. Prints validation losses at each quarter,
in nats.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from far_field import load  # noqa: E402

TILE, BLOCK, STRATA, CONTEXT = 128, 128, 16, 8


def make_order(weight, average, seed=0):
    """Makes a vocabulary order: strata by probability, each split by principal directions
    (include/logitless/vocab_order.h)."""
    random = torch.Generator().manual_seed(seed)
    vocab_ids = torch.sort(average, descending=True, stable=True).indices.view(STRATA, -1)
    while vocab_ids.shape[1] > TILE:
        rows = weight[vocab_ids]
        rows = rows - rows.mean(1, keepdim=True)
        moment = torch.bmm(rows.transpose(1, 2), rows)
        axis = torch.randn(weight.shape[1], generator=random).to(weight.device).expand(len(vocab_ids), -1)[..., None]
        for _ in range(12):
            axis = torch.bmm(moment, axis)
            axis = axis / axis.norm(dim=1, keepdim=True).clamp_min(1e-30)
        side = torch.sort(torch.bmm(rows, axis)[..., 0], dim=1, stable=True).indices
        vocab_ids = torch.gather(vocab_ids, 1, side).view(len(vocab_ids) * 2, -1)
    return vocab_ids.reshape(-1)


def far(p, average, tau, every=0, step=0):
    """Approximates p [N, V], by position, with targets 0: skipped tiles are replaced by their mass, and sampled if
    every > 0."""
    tokens, vocab = p.shape
    tiles, blocks = vocab // TILE, tokens // BLOCK
    exact = p.view(tokens, tiles, TILE)
    mass = exact.sum(-1)
    kept = mass.view(blocks, BLOCK, tiles).amax(1) > tau
    share = average.view(tiles, TILE)
    share = torch.where(share.sum(1, keepdim=True) > 0, share / share.sum(1, keepdim=True), 1 / TILE)
    out = mass[..., None] * share
    if every > 0:
        random = torch.Generator(p.device).manual_seed(1000 + step // every)
        first = torch.randint(0, every, (1, tiles), generator=random, device=p.device)
        taken = (first + step - torch.arange(blocks, device=p.device)[:, None]) % every == 0
        out = torch.where(taken.repeat_interleave(BLOCK, 0)[..., None], out + (exact - out) * every, out)
    return torch.where(kept.repeat_interleave(BLOCK, 0)[..., None], exact, out).view(tokens, vocab)


def head_gradients(variant, hidden, weight, bias, targets, order, average, tau, step):
    """Returns d_hidden, d_weight and d_bias of the mean loss."""
    tokens = len(hidden)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    sort = torch.sort(place[targets], stable=True).indices
    x, y, w = hidden[sort], place[targets][sort], weight[order]
    p = torch.softmax(x @ w.T + bias[order], 1)
    rows = torch.arange(tokens, device=p.device)
    coefficient = (p[rows, y] - 1) / tokens
    p[rows, y] = 0
    every = int(variant.partition(":")[2] or 0)
    approximate = far(p, average[order], tau) if variant != "far-weight" else p
    d_hidden = approximate @ w / tokens + w[y] * coefficient[:, None]
    if variant == "far-hidden":
        approximate = p
    elif variant == "far-weight" or every > 0:
        approximate = far(p, average[order], tau, every, step)
    d_weight = (approximate.T @ x / tokens).index_add_(0, y, x * coefficient[:, None])
    d_bias = (approximate.sum(0) / tokens).index_add_(0, y, coefficient)
    out = torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)
    out[0][sort], out[1][order], out[2][order] = d_hidden, d_weight, d_bias
    return out


class Run:
    def __init__(self, args, tokens, seed):
        self.args, device = args, args.device
        self.train, self.held_out = (tokens[name].to(device) for name in ("train", "held_out"))
        random = torch.Generator(device).manual_seed(seed)
        counts = torch.bincount(self.train, minlength=args.vocab) + 1
        weight = torch.randn(args.vocab, args.dim, generator=random, device=device) * 0.1
        matrices = torch.cat([torch.eye(args.dim, device=device) / (1 + k) for k in range(CONTEXT)])
        self.parameters = [weight, (counts / counts.sum()).log(), matrices]
        self.mean = [torch.zeros_like(a) for a in self.parameters]
        self.square = [torch.zeros_like(a) for a in self.parameters]
        self.drawn = torch.randperm(len(self.train) - CONTEXT, generator=torch.Generator().manual_seed(seed)).to(device)
        self.back = torch.arange(1, CONTEXT + 1, device=device)
        self.order = self.average = self.pending = None

    def hidden(self, text, at):
        context = text[at[:, None] - self.back]
        vectors = self.parameters[0][context].view(len(at), -1)
        return context, vectors, vectors @ self.parameters[2]

    def refresh(self, step, hidden, weight):
        args = self.args
        if step >= args.first and (step - args.first) % args.every == 0:
            self.pending = step + 4, hidden[:1024].clone(), weight.clone(), self.parameters[1].clone()
        if self.pending and step >= self.pending[0]:
            _, x, w, b = self.pending
            average = torch.softmax(x @ w.T + b, 1).mean(0)
            self.average = average if self.average is None else 0.5 * (average + self.average)
            self.order, self.pending = make_order(w, self.average), None

    def step(self, step, variant):
        args, (weight, bias, matrices) = self.args, self.parameters
        at = self.drawn[torch.arange((step - 1) * args.batch, step * args.batch) % len(self.drawn)] + CONTEXT
        context, vectors, h = self.hidden(self.train, at)
        targets, x, w = self.train[at], h.bfloat16().float(), weight.bfloat16().float()
        if variant != "dense":
            self.refresh(step, x, w)
        if self.order is not None:
            dh, dw, db = head_gradients(variant, x, w, bias, targets, self.order, self.average, args.tau, step)
        else:
            p = torch.softmax(x @ w.T + bias, 1)
            p[torch.arange(len(x)), targets] -= 1
            p /= len(x)
            dh, dw, db = p @ w, p.T @ x, p.sum(0)
        dw.index_add_(0, context.reshape(-1), (dh @ matrices.T).view(-1, args.dim))
        warm = max(1, args.steps // 20)
        fall = 0.5 * (1 + math.cos(math.pi * max(0, step - 1 - warm) / (args.steps - warm)))
        rate = args.lr * (step / warm if step <= warm else fall)
        for value, gradient, m, v in zip(self.parameters, (dw, db, vectors.T @ dh), self.mean, self.square):
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            scale = (v.sqrt() / math.sqrt(1 - 0.99**step)).add_(1e-8)
            value.addcdiv_(m, scale, value=-rate / (1 - 0.9**step))

    def validate(self):
        count = min(16384, len(self.held_out) - CONTEXT)
        places = (torch.arange(count, device=self.args.device) * ((len(self.held_out) - CONTEXT) / count)).long() + CONTEXT
        weight, total = self.parameters[0].bfloat16().float(), 0.0
        for at in places.split(1024):
            z = self.hidden(self.held_out, at)[2].bfloat16().float() @ weight.T + self.parameters[1]
            total += (torch.logsumexp(z, 1) - z[torch.arange(len(at)), self.held_out[at]]).sum().item()
        return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=["dense", "far", "far-hidden", "far-weight", "sample:16"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--vocab", type=int, default=65536, help="16 * 128 times a power of two")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--batch", type=int, default=1536, help="a multiple of 128")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--tau", type=float, default=0.003)
    parser.add_argument("--first", type=int, default=100, help="step of the first order")
    parser.add_argument("--every", type=int, default=150, help="steps between orders")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens = {name: torch.tensor(values).long() for name, values in load(args.words).items() if name != "tokenizer"}
    for seed in args.seeds:
        for variant in args.variants:
            run, losses = Run(args, tokens, seed), []
            for step in range(1, args.steps + 1):
                run.step(step, variant)
                if step % max(1, args.steps // 4) == 0:
                    losses.append(run.validate())
            print(f"seed {seed} {variant:12s} " + " ".join(f"{loss:.4f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()
