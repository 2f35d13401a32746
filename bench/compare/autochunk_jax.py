#!/usr/bin/env python3
"""Compares logitless.jax.autochunk with the given function, and with a hand-written scan with rematerialisation: outputs
and gradients under jit.

    python bench/compare/autochunk_jax.py [--loss z_loss|distillation|grpo] [--tokens N --dim D --vocab V] [--dtype T]
                                          [--chunk ROWS] [--budget BYTES ...] [--executors auto python native] [--repeat R]

Inputs are random and fresh. All are run R times, interleaved. Prints median ms, the ratio to the function itself, and
the compiled program's temporaries beyond inputs and outputs. The scan takes ROWS tokens at a time. A budget of 0 is none.
"""
import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from logitless.jax import autochunk


def logits_of(hidden, weight):
    return jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)


def z_loss(arrays, weights):
    """Mean cross entropy with a z-loss."""
    logits = logits_of(arrays["hidden"], weights["weight"])
    lse = jax.nn.logsumexp(logits, -1)
    nll = lse - jnp.take_along_axis(logits, arrays["target"][:, None], 1)[:, 0]
    return (nll + 1e-4 * lse**2).mean()


def distillation(arrays, weights):
    """Mean KL divergence from a teacher with its own head."""
    student = jax.nn.log_softmax(logits_of(arrays["hidden"], weights["weight"]))
    teacher = jax.nn.log_softmax(logits_of(arrays["teacher"], jax.lax.stop_gradient(weights["teacher_weight"])))
    return (jnp.exp(teacher) * (teacher - student)).sum(-1).mean()


def grpo(arrays, weights):
    """Clipped policy ratio with an entropy bonus."""
    log_p = jax.nn.log_softmax(logits_of(arrays["hidden"], weights["weight"]))
    of_target = jnp.take_along_axis(log_p, arrays["target"][:, None], 1)[:, 0]
    ratio = jnp.exp(of_target - jax.lax.stop_gradient(arrays["before"]))
    gain = jnp.minimum(ratio * arrays["advantage"], jnp.clip(ratio, 0.8, 1.2) * arrays["advantage"])
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return -(gain + 0.01 * entropy).mean()


LOSSES = {f.__name__: f for f in (z_loss, distillation, grpo)}


def scanned(loss, rows, chunk):
    def total(arrays, weights):
        def step(sum_, part):
            return sum_ + loss(part, weights) * chunk, None

        parts = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), arrays)
        return jax.lax.scan(jax.checkpoint(step), 0.0, parts)[0] / rows

    return total


def problem(n, d, v, dtype):
    keys = jax.random.split(jax.random.key(0), 7)
    arrays = {
        "hidden": jax.random.normal(keys[0], (n, d), dtype),
        "teacher": jax.random.normal(keys[1], (n, d), dtype),
        "target": jax.random.randint(keys[2], (n,), 0, v),
        "before": jax.random.normal(keys[3], (n,)) - 10,
        "advantage": jax.random.normal(keys[4], (n,)),
    }
    weights = {
        "weight": (jax.random.normal(keys[5], (v, d)) * 2 / d**0.5).astype(dtype),
        "teacher_weight": (jax.random.normal(keys[6], (v, d)) * 2 / d**0.5).astype(dtype),
    }
    return arrays, weights


def step_of(loss):
    """Returns a function that computes the loss and its gradients of hidden and weight."""

    def step(arrays, weights):
        def of(hidden, weight):
            return loss({**arrays, "hidden": hidden}, {**weights, "weight": weight})

        return jax.value_and_grad(of, (0, 1))(arrays["hidden"], weights["weight"])

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=sorted(LOSSES), default="z_loss")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--budget", nargs="+", default=["32MiB", "64MiB"])
    parser.add_argument("--executors", nargs="+", default=["python", "native"])
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    loss = LOSSES[args.loss]
    arrays, weights = problem(args.tokens, args.dim, args.vocab, args.dtype)
    runs = {"the function": loss}
    if args.tokens % args.chunk == 0:
        runs[f"scan of {args.chunk} tokens, rematerialised"] = scanned(loss, args.tokens, args.chunk)
    for budget in args.budget:
        for executor in args.executors:
            name = f"autochunk, {executor}, {'no budget' if budget == '0' else budget}"
            runs[name] = autochunk(loss, memory_budget=None if budget == "0" else budget, executor=executor)
    programs = {name: jax.jit(step_of(f)).lower(arrays, weights).compile() for name, f in runs.items()}
    times = {name: [] for name in programs}
    for turn in range(args.repeat + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(arrays, weights))
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    kind = jax.devices()[0].device_kind
    print(f"{args.loss}, {args.tokens} x {args.dim} x {args.vocab}, {args.dtype}, JAX {jax.__version__}, {kind}")
    first = statistics.median(times["the function"])
    for name, program in programs.items():
        median = statistics.median(times[name])
        held = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:36} {median * 1e3:9.1f} ms {median / first:6.2f} {held:9.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
