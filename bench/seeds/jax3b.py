"""A decoder of 3.3 billion parameters in plain JAX: a scan over checkpointed layers, bf16 over fp32 parameters, Adam, and
FSDP over a mesh. The loss is beside its token ids (argmax) and accuracy, which come from the same pass over the head."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.jax import Sharding, linear_cross_entropy


class Sizes(NamedTuple):
    layers: int = 24
    dim: int = 3072
    inner: int = 8192
    heads: int = 24
    kv_heads: int = 8
    vocab: int = 153600


TINY = Sizes(layers=2, dim=64, inner=96, heads=4, kv_heads=2, vocab=3072)


def parameters(sizes: Sizes, mesh):
    """Returns random fp32 parameters, each sharded along its first dimension that is not the layers'."""
    width = sizes.dim // sizes.heads
    kv = sizes.kv_heads * width
    shapes = {"norm_1": (sizes.dim,), "q": (sizes.dim, sizes.dim), "k": (sizes.dim, kv), "v": (sizes.dim, kv),
              "o": (sizes.dim, sizes.dim), "norm_2": (sizes.dim,), "gate": (sizes.dim, sizes.inner), "up": (sizes.dim, sizes.inner),
              "down": (sizes.inner, sizes.dim)}
    shapes = {name: (sizes.layers, *shape) for name, shape in shapes.items()}
    shapes |= {"embed": (sizes.vocab, sizes.dim), "norm": (sizes.dim,), "head": (sizes.vocab, sizes.dim)}
    stacked = {name for name, shape in shapes.items() if len(shape) > 1} - {"embed", "head"}
    where = {name: NamedSharding(mesh, P(*[None] * (name in stacked), "data")) for name in shapes}

    @partial(jax.jit, out_shardings=where)
    def made():
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes))))
        return {name: jnp.ones(shape) if "norm" in name else jax.random.uniform(keys[name], shape, minval=-0.035, maxval=0.035)
                for name, shape in shapes.items()}

    return made()


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotate(x):
    """Rotates [B, T, H, D] by position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def decoder(sizes: Sizes, dtype, mesh, parameters, ids):
    """Returns the hidden states [B, T, D] before the head."""
    whole = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))  # all-gathers a weight in 16 bits
    attention = partial(jax.nn.dot_product_attention, is_causal=True,
                        implementation="cudnn" if dtype == jnp.bfloat16 and jax.default_backend() == "gpu" else "xla")

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, p):
        p = {name: whole(value.astype(dtype)) for name, value in p.items()}
        y = norm(x, p["norm_1"])
        q, k, v = (jnp.reshape(y @ p[n], (*y.shape[:2], -1, sizes.dim // sizes.heads)) for n in "qkv")
        x = x + attention(rotate(q), rotate(k), v).reshape(x.shape) @ p["o"]
        y = norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    stacked = {name: value for name, value in parameters.items() if name not in ("embed", "norm", "head")}
    x = whole(parameters["embed"].astype(dtype))[ids]
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
    x, _ = jax.lax.scan(layer, x, stacked)
    return norm(x, parameters["norm"])


# --- Heads: (hidden [B, T, D], weight [V, D], targets [B, T]) -> (mean loss, token ids [B, T], accuracy).


def plain(hidden, weight, targets):
    logits = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    ids = jnp.argmax(jax.lax.stop_gradient(logits), -1).astype(jnp.int32)
    return losses.mean(), ids, (ids == targets).mean()


def remat(chunk, hidden, weight, targets):
    """``plain`` by a scan over chunks of each sequence, which the backward recomputes."""
    parts = hidden.shape[1] // chunk

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], parts, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(total, part):
        loss, ids, _ = plain(part[0], weight, part[1])
        return total + loss / parts, ids

    loss, ids = jax.lax.scan(step, jnp.float32(0), (split(hidden), split(targets)))
    ids = jnp.moveaxis(ids, 0, 1).reshape(targets.shape)
    return loss, ids, (ids == targets).mean()


def logitless(sharding, hidden, weight, targets):
    loss, accuracy, ids = linear_cross_entropy(hidden, weight, targets, sharding=sharding, accuracy=True, return_argmax=True)
    return loss, ids, accuracy


def head_of(variant, mesh, chunk):
    whole = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))
    if variant == "logitless-sharded":
        return partial(logitless, Sharding(mesh, tokens="data", vocab="data"))
    of_whole = {"plain": plain, "remat": partial(remat, chunk), "logitless": partial(logitless, Sharding(mesh, tokens="data"))}[variant]
    return lambda hidden, weight, targets: of_whole(hidden, whole(weight), targets)


def step_of(head, sizes, dtype, mesh):
    """Returns a training step by Adam of (state, ids): (state, loss, token ids, accuracy)."""

    def objective(parameters, ids):
        hidden = decoder(sizes, dtype, mesh, parameters, ids)
        loss, found, accuracy = head(hidden, parameters["head"].astype(dtype), jnp.roll(ids, -1, 1))
        return loss, (found, accuracy)

    @partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        parameters, mean, square, count = state
        (loss, more), gradients = jax.value_and_grad(objective, has_aux=True)(parameters, ids)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, gradients)
        count = count + 1
        rates = 1e-4 / (1 - 0.9**count), 1 / (1 - 0.95**count)
        moved = jax.tree.map(lambda p, m, s: p - rates[0] * m / (jnp.sqrt(rates[1] * s) + 1e-8), parameters, mean, square)
        return (moved, mean, square, count), loss, *more

    return step


def measure(args, variant):
    """Returns a result, with the ids of the first 256 tokens of the first step."""
    sizes = TINY if args.tiny else Sizes()
    sizes = sizes._replace(layers=args.layers or sizes.layers)
    dtype = jnp.float32 if args.tiny else jnp.bfloat16
    mesh = jax.make_mesh((args.ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[: args.ranks])
    made = parameters(sizes, mesh)
    zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=jax.tree.map(lambda p: p.sharding, made))
    state = (made, zeros(made), zeros(made), jnp.float32(0))
    ids = jax.random.randint(jax.random.key(99), (args.sequences * args.ranks, args.length), 0, sizes.vocab)
    ids = jax.device_put(ids, NamedSharding(mesh, P("data")))
    step = step_of(head_of(variant, mesh, args.chunk or (32 if args.tiny else 1024)), sizes, dtype, mesh)
    step = step.lower(state, ids).compile()
    state, loss, first_ids, accuracy = step(state, ids)
    losses = [float(loss)]
    for _ in range(2 if args.tiny else 4):
        state, loss, *_ = step(state, ids)
        losses.append(float(loss))
    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        state, loss, *_ = step(state, ids)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - begin)
    memory = step.memory_analysis()
    planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use", planned) for device in mesh.devices.flat]
    device = mesh.devices.flat[0].device_kind if args.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    median = statistics.median(seconds)
    result = {"variant": variant, "dtype": str(jnp.dtype(dtype)), "losses": losses[:3], "milliseconds": 1e3 * median,
              "tokens_per_second": args.sequences * args.ranks * args.length / median, "peak_bytes": max(used),
              "temporary_bytes": memory.temp_size_in_bytes, "accuracy": float(accuracy), "ids": first_ids.reshape(-1)[:256].tolist()}
    result["setting"] = (f"{args.ranks} x {device}, jax {jax.__version__}; {sizes}, {args.sequences} x {args.length} tokens a device"
                         + ", --tiny" * args.tiny)
    result["note"] = f"{args.layers} of 24 layers" if args.layers else ""
    return result


def work(args, report):
    args.sequences, args.length = args.sequences or 1, args.length or (64 if args.tiny else 8192)
    for variant in args.variant:
        report(measure(args, variant))
