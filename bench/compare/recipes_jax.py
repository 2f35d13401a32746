#!/usr/bin/env python3
"""Measures the memory that docs/use/recipes save in JAX: temporaries of the compiled loss and its gradients beyond inputs and
gradients, with each library's own loss and with logitless's.

    LOGITLESS_LIBRARY=... PYTHONPATH=python python3 bench/compare/recipes_jax.py
        [--recipe flax levanter maxtext] [--sequences B --length T --dim D --vocab V] [--budget 8MiB]
"""
import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from logitless.jax import linear_cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/jax"))


def temporaries(function, *arguments):
    """Returns the MiB of temporaries of the compiled function and its gradients."""
    program = jax.jit(jax.value_and_grad(function, tuple(range(len(arguments))))).lower(*arguments).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


def arrays(args, stored):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (args.sequences, args.length, args.dim))
    shape = (args.vocab, args.dim) if stored == "[V, D]" else (args.dim, args.vocab)
    return hidden, 0.02 * jax.random.normal(keys[1], shape), jax.random.randint(keys[2], hidden.shape[:2], 0, args.vocab)


def flax(args, stored):
    """Measures nnx.Embed's attend, and nnx.Linear."""
    import optax

    hidden, weight, targets = arrays(args, stored)
    rows = (lambda w: w) if stored == "[V, D]" else (lambda w: w.T)

    def plain(hidden, weight):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ rows(weight).T, targets).mean()

    def ours(hidden, weight):
        return linear_cross_entropy(hidden, rows(weight), targets, memory_budget=args.budget)

    return [temporaries(f, hidden, weight) for f in (plain, ours)]


def levanter(args, stored):
    import haliax
    import levanter.models.loss as losses

    from logitless.jax.integrations import levanter as integration

    hidden, weight, targets = arrays(args, stored)
    Batch, Pos, Embed, Vocab = haliax.make_axes(
        batch=args.sequences, position=args.length, embed=args.dim, vocab=args.vocab)
    axes = (Vocab, Embed) if stored == "[V, D]" else (Embed, Vocab)

    def loss(hidden, weight):
        named = haliax.named(hidden, (Batch, Pos, Embed)), haliax.named(weight, axes)
        return losses.maybe_fused_next_token_loss(
            Pos, Embed, Vocab, *named, haliax.named(targets, (Batch, Pos))).array

    before = temporaries(loss, hidden, weight)
    integration.patch(memory_budget=args.budget)
    # A new function object avoids jax.jit's cache.
    after = temporaries(lambda *a: loss(*a), hidden, weight)
    integration.unpatch()
    return [before, after]


def maxtext(args, stored):
    """Measures a model with MaxText's names: its loss on full logits, and the library's loss instead."""
    import test_recipes_maxtext as names

    from logitless.jax.integrations import maxtext as integration

    hidden, weight, targets = arrays(args, stored)
    tied = stored == "[V, D]"
    gain, config = jnp.ones(args.dim), names.settings(tied)
    data = {"targets": targets, "targets_segmentation": jnp.ones_like(targets)}
    table = (lambda w: w) if tied else (lambda w: w.T)

    def plain(hidden, weight):
        return names.on_logits(tied, hidden, table(weight), gain, data, config)[0]

    def ours(hidden, weight):
        model = names.standing_in(tied, table(weight), gain)
        return integration.vocab_tiling_nnx_loss(
            model, hidden, data, config, True, memory_budget=args.budget)[0]

    before = temporaries(plain, hidden, weight)
    return [before, temporaries(ours, hidden, weight)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipes = dict(flax=flax, levanter=levanter, maxtext=maxtext)
    parser.add_argument("--recipe", nargs="+", choices=recipes, default=list(recipes))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--budget", default=None)
    args = parser.parse_args()
    logits = args.sequences * args.length * args.vocab * jnp.dtype(jnp.float32).itemsize
    print(f"fp32 logits: {logits / 2**20:.0f} MiB; the head: {args.vocab * args.dim * 4 / 2**20:.0f} MiB")
    for name in args.recipe:
        for stored in ("[V, D]", "[D, V]"):
            try:
                before, after = recipes[name](args, stored)
            except ImportError as error:
                print(f"{name}: not here ({error})")
                break
            print(f"{name}, head {stored}: {before:.1f} MiB before, {after:.1f} MiB with logitless", flush=True)


if __name__ == "__main__":
    main()
