"""Trains a tiny language model with JAX on a made-up language, and prints the memory of its loss.

    python examples/python/jax_training_step.py

The model predicts the next token from the last four: embeddings, one hidden layer, and a head of 16384 entries whose
weight is the embedding. All steps are one compiled program: lax.scan over steps, and within a step over microbatches,
whose gradients are summed. Runs in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp

from logitless.jax import linear_cross_entropy

VOCAB, DIM, CONTEXT = 16384, 64, 4


def initial_parameters(key):
    keys = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(keys[0], (VOCAB, DIM)) * 0.1,
        "mix": jax.random.normal(keys[1], (CONTEXT * DIM, 2 * DIM)) * (CONTEXT * DIM) ** -0.5,
        "out": jax.random.normal(keys[2], (2 * DIM, DIM)) * (2 * DIM) ** -0.5,
    }


def hidden_states(parameters, tokens):
    """Maps tokens [B, T + CONTEXT] to hidden [B, T, DIM], from the CONTEXT tokens before each position."""
    embedded = parameters["embedding"][tokens]
    length = tokens.shape[1] - CONTEXT
    windows = jnp.concatenate([embedded[:, i : i + length] for i in range(CONTEXT)], -1)
    return jax.nn.gelu(windows @ parameters["mix"]) @ parameters["out"]


def loss_without_logits(parameters, tokens):
    hidden = hidden_states(parameters, tokens)
    targets = tokens[:, CONTEXT:]
    budget = "16MiB" if jax.default_backend() == "cpu" else "80MiB"  # a GPU's least plan takes more
    return linear_cross_entropy(hidden, parameters["embedding"], targets, logit_scale=4.0, memory_budget=budget)


def loss_with_logits(parameters, tokens):
    logits = 4.0 * hidden_states(parameters, tokens) @ parameters["embedding"].T
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, tokens[:, CONTEXT:, None], -1).mean()


def microbatches(key, count, batch, length):
    """Returns [count, batch, length + CONTEXT]: each token follows from the one before by a rule, or sometimes at
    random."""

    def follow(token, key):
        random, noise = jax.random.split(key)
        drawn = jax.random.randint(random, token.shape, 0, 64)
        token = jnp.where(jax.random.bernoulli(noise, 0.1, token.shape), drawn, (5 * token + 17) % 64)
        return token, token

    first = jnp.zeros((count, batch), jnp.int32)
    tokens = jax.lax.scan(follow, first, jax.random.split(key, length + CONTEXT))[1]
    return 251 * jnp.moveaxis(tokens, 0, -1)  # ids from all over the vocabulary


def training_step(state, key, *, accumulated, batch, length, rate):
    """One step of Adam on `accumulated` microbatches."""
    parameters, mean, square, step = state

    def accumulate(total, tokens):
        one = jax.value_and_grad(loss_without_logits)(parameters, tokens)
        return jax.tree.map(jnp.add, total, one), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters))
    total, _ = jax.lax.scan(accumulate, nothing, microbatches(key, accumulated, batch, length))
    loss, gradient = jax.tree.map(lambda t: t / accumulated, total)
    step = step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)

    def moved(p, m, s):
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return (jax.tree.map(moved, parameters, mean, square), mean, square, step), loss


def temporary_bytes(loss, batch, length):
    """Returns the bytes that a compiled value_and_grad of the loss holds beyond parameters, tokens and gradients."""
    parameters = jax.eval_shape(initial_parameters, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, length + CONTEXT), jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).lower(parameters, tokens).compile().memory_analysis().temp_size_in_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulated", type=int, default=2, help="microbatches of a step")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=3e-3)
    arguments = parser.parse_args()

    parameters = initial_parameters(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    step = functools.partial(
        training_step,
        accumulated=arguments.accumulated, batch=arguments.batch, length=arguments.length, rate=arguments.rate,
    )
    train = jax.jit(functools.partial(jax.lax.scan, step))
    begin = time.perf_counter()
    state = (parameters, zeros, zeros, jnp.zeros((), jnp.int32))
    _, losses = train(state, jax.random.split(jax.random.key(1), arguments.steps))
    losses = jax.device_get(losses)
    seconds = time.perf_counter() - begin
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {arguments.steps} steps ({seconds:.1f} s)")

    batch, length = 16, 128
    with_logits, without = (temporary_bytes(f, batch, length) for f in (loss_with_logits, loss_without_logits))
    print(f"memory of the loss and its gradients, {batch * length} tokens and a vocabulary of {VOCAB}, beyond both:")
    print(f"  with logits     {with_logits / 2**20:7.1f} MiB")
    print(f"  without logits  {without / 2**20:7.1f} MiB")
    if not losses[-1] < losses[0] - 1.0:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
