"""Lowers random numbers of ATen to a tensor program. They are drawn from a counter, so that each element is the same
however it is chunked or recomputed. The key is an input, drawn from the framework's generator at each call."""

from __future__ import annotations

import math

import torch

from logitless._autochunk import noise
from logitless._autochunk.lower import Value
from logitless.torch._autochunk.aten import handles, value_of
from logitless.torch._autochunk.dtypes import DTYPES

_STREAMS = 4  # streams of counters per operation
_MOST = 1 << 32  # the most elements of an operation: the low half of a counter

# Operations that draw random numbers.
DRAWING = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "multinomial", "poisson"),
    *("bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_", "exponential", "exponential_"),
    *("normal_functional", "native_dropout", "rrelu_with_noise", "rrelu_with_noise_functional", "log_normal_"),
    *("geometric_", "cauchy_", "random_", "binomial", "_standard_gamma", "_sample_dirichlet", "log_normal"),
    *("geometric", "cauchy", "random", "_fused_dropout"),
}


def _uniform(w, shape, stream=0) -> Value:
    """Returns f32 numbers in [0, 1), multiples of 2^-23."""
    if math.prod(shape) > _MOST:
        raise w.refuse(f"random numbers of {list(shape)} are more than the {_MOST} that a counter tells apart")
    counter = w.number((_STREAMS * w.drawn + stream) * _MOST, torch.int64)
    step = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            index = w.iota([s if d == axis else 1 for d, s in enumerate(shape)], axis)
            counter = w.add(w.scaled(index, step), counter)
        step *= shape[axis]
    counter = w.broadcast(counter, shape)
    return w.map("random", [*w.random_keys(), counter], torch.float32)


def _between(w, shape, dtype, stream=0) -> Value:
    """Returns numbers in [0, 1) with as many bits as the dtype has there, so that rounding never gives 1."""
    first = _uniform(w, shape, stream)
    if dtype == torch.float64:
        more = w.cast(_uniform(w, shape, stream + 1), dtype)
        return w.add(w.cast(first, dtype), w.scaled(more, 2.0**-23))
    if dtype in DTYPES.narrow:
        steps = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
        return w.cast(w.scaled(w.map("floor", [w.scaled(first, steps)], torch.float32), 1 / steps), dtype)
    return first


def _inside(w, shape, dtype, stream=0) -> Value:
    """Returns numbers in (0, 1), in the dtype of accumulation."""
    made = _between(w, shape, DTYPES.wide(dtype), stream)
    return w.add(made, w.number(2.0 ** (-47 if dtype == torch.float64 else -24), made.dtype))


def _log(w, x):
    return w.map("log", [x], x.dtype)


def _normal(w, shape, dtype) -> Value:
    """Returns normal numbers by the Box-Muller transform, from two uniform numbers each."""
    radius = w.map("sqrt", [w.scaled(_log(w, _inside(w, shape, dtype)), -2)], DTYPES.wide(dtype))
    angle = w.scaled(_inside(w, shape, dtype, 2), 2 * math.pi)
    return w.mul(radius, w.map("cos", [angle], angle.dtype))


def _exponential(w, shape, dtype) -> Value:
    made = _log(w, _inside(w, shape, dtype))
    return w.map("neg", [made], made.dtype)


def _floating(w, out):
    if not out.dtype.is_floating_point:
        raise w.refuse(f"random numbers of {out.dtype} have no form in a tensor program; expected floats")


@handles("rand", "rand_like")
def _rand(w, out, *ignored, **also_ignored):
    _floating(w, out)
    return _between(w, out.shape, out.dtype)


@handles("randn", "randn_like")
def _randn(w, out, *ignored, **also_ignored):
    _floating(w, out)
    return w.cast(_normal(w, out.shape, out.dtype), out.dtype)


@handles("uniform", "uniform_")
def _uniform_between(w, out, x, low=0.0, high=1.0, generator=None):
    _floating(w, out)
    made = _between(w, out.shape, out.dtype)
    return w.add(w.scaled(made, high - low), w.number(low, made.dtype))


@handles("normal_", "normal_functional")
def _normal_into(w, out, x, mean=0.0, std=1.0, generator=None):
    return _normal_around(w, out, mean, std)


@handles("normal")
def _normal_around(w, out, mean, std=1.0, size=None, **ignored):
    _floating(w, out)
    wide = DTYPES.wide(out.dtype)
    made = w.mul(_normal(w, out.shape, out.dtype), value_of(w, std, wide))
    return w.cast(w.broadcast(w.add(made, value_of(w, mean, wide)), out.shape), out.dtype)


@handles("exponential", "exponential_")
def _exponential_of(w, out, x, rate=1.0, generator=None):
    return w.cast(w.scaled(_exponential(w, out.shape, out.dtype), 1 / rate), out.dtype)


@handles("bernoulli", "bernoulli_")
def _bernoulli(w, out, x, p=None, generator=None):
    """Returns 1 where a random number is below the probability: p, or x itself."""
    if p is None:  # p is omitted if it equals the overload's default
        p = 0.5 if w.op.endswith(".float") else x
    wide = torch.float64 if isinstance(p, Value) and p.dtype == torch.float64 else torch.float32
    drawn = _between(w, out.shape, wide)
    return w.cast(w.map("lt", [drawn, w.broadcast(value_of(w, p, wide), out.shape)], torch.bool), out.dtype)


@handles("randint", "randint_like")
def _randint(w, out, *bounds, **ignored):
    sizes = [b for b in bounds if isinstance(b, int)]
    low, high = sizes[-2:] if len(sizes) > 1 else (0, sizes[0])
    if high - low > 1 << 32:
        raise w.refuse(f"whole numbers of [{low}, {high}) have no form in a tensor program; expected at most 2^32")
    drawn = w.scaled(_between(w, out.shape, torch.float64), high - low)
    return w.cast(w.add(w.map("floor", [drawn], drawn.dtype), w.number(low, drawn.dtype)), out.dtype)


@handles("randperm")
def _randperm(w, out, count, **ignored):
    return w.cast(w.sort(_between(w, out.shape, torch.float64), 0, count, False)[1], out.dtype)


@handles("multinomial")
def _multinomial(w, out, p, samples, replacement=False, generator=None):
    """Samples by an exponential race: e / p is least at i with probability p[i] / sum p."""
    if replacement and samples > 1:
        raise w.refuse("several draws with replacement have no form in a tensor program; expected replacement=False")
    if p.dtype in DTYPES.narrow:
        p = w.cast(p, torch.float32)
    race = w.div(p, _exponential(w, p.shape, p.dtype))
    return w.sort(race, p.rank - 1, samples, True)[1]


@handles("gumbel")
def _gumbel(w, out, key, counter, vocab):
    return noise.gumbel(w, key, counter, vocab)


def _refused(w, *ignored, **also_ignored):
    raise w.refuse("its random numbers have no form in a tensor program; expected those of rand, randn or bernoulli")


handles("poisson", "binomial", "log_normal_", "geometric_", "cauchy_", "random_", "_standard_gamma")(_refused)
handles("_sample_dirichlet", "rrelu_with_noise", "rrelu_with_noise_functional", "native_dropout")(_refused)
