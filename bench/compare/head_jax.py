#!/usr/bin/env python3
"""Compares the head under JAX with full logits and with a scan with rematerialisation: loss and both gradients.

    python bench/compare/head_jax.py [--head llama|axlearn | --tokens N --dim D --vocab V] [--dtype T] [--chunk C]
                                     [--repeat R] [--budget BYTES ...]
    python bench/compare/head_jax.py --far-field HEAD.safetensors [--dim D] [--tokens N] [--error E]

Inputs are random and fresh. Prints median ms (on a CPU those of its cores, summed), and the compiled program's temporaries
beyond inputs and outputs. A budget of 0 is the default. "portable" is logitless in JAX's own operations.

--far-field takes a real head (hidden, weight, targets), rotated into D columns, its tokens repeated. It times steps of
far_field_cross_entropy beside the exact loss, once there is an order. So that this is soon, an order is due every third of
--warm steps instead of every 100; medians are of steps that make none.
"""
import argparse
import functools
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from logitless.jax import far_field_cross_entropy, far_field_report, far_field_state, linear_cross_entropy

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


def far_field(args):
    """Times steps of the far field on a real head."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import far_field as heads

    head = heads.rotated(heads.load(args.far_field), args.dim)
    n = args.tokens or len(head["hidden"])
    rows = jnp.arange(n) % len(head["hidden"])
    x, y = jnp.asarray(head["hidden"])[rows].astype(args.dtype), jnp.asarray(head["targets"])[rows]
    w = jnp.asarray(head["weight"]).astype(args.dtype)
    exact = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))

    @jax.jit
    def step(x, w, y, state):
        loss_of = lambda x, w: far_field_cross_entropy(x, w, y, state)
        return jax.value_and_grad(loss_of, (0, 1), has_aux=True)(x, w)

    def timed(run):
        start = time.perf_counter()
        found = jax.block_until_ready(run())
        return found, (time.perf_counter() - start) * 1e3

    print(f"{n} x {w.shape[1]} x {w.shape[0]}, {args.dtype}, real, JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    timed(lambda: exact(x, w, y))
    for accuracy in ("far_backward", "far_both"):
        state = far_field_state(w.shape[0], w.shape[1], args.error, accuracy=accuracy, refresh_every=max(1, args.warm // 3))
        times, dense = [], []
        for k in range(args.warm + 4 * args.repeat):
            ((_, state), gradients), ms = timed(lambda: step(x, w, y, state))
            (_, wanted), ms_dense = timed(lambda: exact(x, w, y))
            if k >= args.warm:  # the first steps have no order yet
                times.append(ms)
                dense.append(ms_dense)
        report = far_field_report(state)
        errors = [float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
                  for a, b in zip(gradients, wanted)]
        ms, exact_ms = statistics.median(times), statistics.median(dense)
        print(f"{accuracy:14} {ms:8.1f} ms, exact {exact_ms:8.1f}, ratio {ms / exact_ms:.2f}; d_hidden {errors[0]:.1e}, d_weight "
              f"{errors[1]:.1e}; {report.steps - report.dense_steps} of {report.steps} steps far, {report.mean_selected:.3f} of tiles",
              flush=True)


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
    parser.add_argument("--far-field", metavar="HEAD.safetensors")
    parser.add_argument("--error", type=float, default=0.01)
    parser.add_argument("--warm", type=int, default=25, help="steps before those that are timed, of the far field")
    args = parser.parse_args()
    if args.far_field:
        return far_field(args)
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
