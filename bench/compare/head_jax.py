#!/usr/bin/env python3
"""Compares the head under JAX with full logits and with a scan with rematerialisation: loss and both gradients.

    python bench/compare/head_jax.py [--head llama|axlearn | --tokens N --dim D --vocab V] [--dtype T] [--chunk C]
                                     [--repeat R] [--budget BYTES ...]

Inputs are random and fresh. Prints median ms (on a CPU those of its cores, summed), and the compiled program's temporaries
beyond inputs and outputs. A budget of 0 is the default. "portable" is logitless in JAX's own operations.
"""
import argparse
import functools
import os
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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of the scan")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--budget", nargs="+", default=["1GiB", "2560MiB"])
    args = parser.parse_args()
    n, d, v = (own or of for own, of in zip((args.tokens, args.dim, args.vocab), HEADS[args.head]))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, d), args.dtype)
    w = (jax.random.normal(keys[1], (v, d)) * 2 / d**0.5).astype(args.dtype)
    y = jax.random.randint(keys[2], (n,), 0, v)
    runs = {"full logits": full}
    if args.dtype == "bfloat16":
        runs["full logits, rounded to bf16"] = rounded
    if n % args.chunk == 0:
        runs[f"scan of {args.chunk} tokens, rematerialised"] = scanned(args.chunk)
    for name in ("native", "portable"):
        for budget in args.budget:
            runs[f"logitless, {name}, {budget}"] = functools.partial(
                linear_cross_entropy, memory_budget=None if budget == "0" else budget
            )
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    print(f"{n} x {d} x {v}, {args.dtype}, JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    for name, function in runs.items():
        os.environ["LOGITLESS_BACKEND"] = "portable" if "portable" in name else "native"
        jax.clear_caches()
        program = jax.jit(jax.value_and_grad(function, (0, 1))).lower(x, w, y).compile()
        jax.block_until_ready(program(x, w, y))
        times = []
        for _ in range(args.repeat):
            start = clock()
            jax.block_until_ready(program(x, w, y))
            times.append(clock() - start)
        held = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:36} {statistics.median(times) * 1e3:9.1f} ms {held:9.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
