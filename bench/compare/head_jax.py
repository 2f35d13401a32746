#!/usr/bin/env python3
"""Compares the head under JAX with full logits and with a scan with rematerialisation: loss and both gradients.

    python bench/compare/head_jax.py [--head llama|axlearn | --tokens N --dim D --vocab V] [--repeat R] [--budget BYTES ...]

Inputs are bf16, random and fresh. Prints median ms, and the compiled program's temporaries beyond inputs and outputs.
"""
import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from logitless.jax import linear_cross_entropy

HEADS = {"llama": (8192, 4096, 128256), "axlearn": (16384, 3072, 153600)}


def full(x, w, y):
    z = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    return (jax.nn.logsumexp(z, 1) - jnp.take_along_axis(z, y[:, None], 1)[:, 0]).mean()


def rounded(x, w, y):
    """Loss of logits rounded to bf16, as in most code: 8 bits of each."""
    z = jnp.matmul(x, w.T).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()


def scanned(chunk):
    def loss(x, w, y):
        def step(total, part):
            return total + full(part[0], w, part[1]) * chunk, None

        parts = (x.reshape(-1, chunk, x.shape[1]), y.reshape(-1, chunk))
        return jax.lax.scan(jax.checkpoint(step), 0.0, parts)[0] / x.shape[0]

    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=sorted(HEADS), default="llama")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--budget", nargs="+", default=["1GiB", "2560MiB"])
    args = parser.parse_args()
    n, d, v = (own or of for own, of in zip((args.tokens, args.dim, args.vocab), HEADS[args.head]))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (v, d)) * 2 / d**0.5).astype(jnp.bfloat16)
    y = jax.random.randint(keys[2], (n,), 0, v)
    runs = {"full logits": full, "full logits, rounded to bf16": rounded}
    for chunk in (2048,):
        if n % chunk == 0:
            runs[f"scan of {chunk} tokens, rematerialised"] = scanned(chunk)
    for budget in args.budget:
        runs[f"logitless, {budget}"] = lambda x, w, y, budget=budget: linear_cross_entropy(x, w, y, memory_budget=budget)
    print(f"{n} x {d} x {v}, bf16, JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    for name, function in runs.items():
        program = jax.jit(jax.value_and_grad(function, (0, 1))).lower(x, w, y).compile()
        jax.block_until_ready(program(x, w, y))
        times = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            jax.block_until_ready(program(x, w, y))
            times.append(time.perf_counter() - start)
        held = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:36} {statistics.median(times) * 1e3:9.1f} ms {held:9.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
