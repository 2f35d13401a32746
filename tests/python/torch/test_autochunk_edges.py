"""Edge cases of the operations that autochunk lowers: every executor gives PyTorch's result."""

import functools
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F

from losses_battery.step import plan_peaks

from logitless._autochunk.checks import unpacked
from logitless._autochunk.parse import parse
from logitless._autochunk.text import load
from logitless._compiler import Program
from logitless.torch import Unsupported, autochunk
from logitless.torch._autochunk import program
from logitless.torch._autochunk.dtypes import DTYPES
from logitless.torch._autochunk.source import to_source
from logitless.torch._autochunk.trace import alone, trace
from logitless.torch._peak import peak_of

ON_CPU = oracle.DEVICE == "cpu"
cpu = pytest.mark.skipif(not ON_CPU, reason="errors of indices are a CPU's; a bad one ends PyTorch's use of a GPU")
gpu = pytest.mark.skipif(ON_CPU, reason="no GPU under test (LOGITLESS_TEST_DEVICE=cuda)")
EXECUTORS = ("native", "python")
NAN, INF = float("nan"), float("inf")


def f(*x):
    return torch.tensor(x, dtype=torch.float32)


def i(*x, dtype=torch.int64):
    return torch.tensor(x, dtype=dtype)


def leaf(*x):
    return torch.tensor(x, requires_grad=True)


SPECIAL = f(NAN, -0.0, 0.0, INF, -INF, -1.5, 1.5, -0.5, 2.0, 100.0, -100.0)
WHOLE = i(7, -7, 6, -6, 0, 1, -1, 2**52 + 1)
TOP, BOTTOM = f(7, -7, 1, -1, 0, -0.0, INF, -INF, NAN, 5, -5, 1, 1), f(2, 2, 0, 0, 0, 3, 2, 2, 1, INF, INF, -INF, 0.1)
ROWS = f([1, NAN, 3], [NAN, NAN, 0], [-INF, 1, 2], [-INF, -INF, -INF], [0, -0.0, 0], [2, 2, -1])
EMPTY = torch.empty(3, 0)
Z, W = torch.arange(20.0).reshape(4, 5), torch.arange(18.0).reshape(6, 3)
TOPS = f([INF, 1, 2], [INF, INF, 0], [-INF, -INF, -INF], [INF, -INF, 0], [INF, NAN, 1], [1, 2, 3])  # rows with inf
ZEROS = f(*(-0.0, 0.0) * 9)
FRACTIONS = f(-0.3, -0.5, -0.7, -1.5, -2.5, 0.3, 0.5, 1.5, 2.5, 0.49999997, -0.49999997, 8388609, -8388609)
LONG = i(2**53 + 1, -(2**53) - 1, 2**62 + 1, 2**63 - 1, -(2**63), 2**63 - 2, 7, -7, 2**24 + 1, 0)
INTS = i(2**31 - 1, -(2**31), 2**24 + 1, -7, dtype=torch.int32)
NEAR = i(2**24 + 1, 2**24, 2**24 + 3, 2**24 + 2)  # numbers that f32 does not distinguish

# name -> (function, its arguments)
VALUES = {
    "quotients of whole numbers": (lambda a: (a // 2, a // -3, a.div(2, rounding_mode="trunc"), a % 3, a % -3), WHOLE),
    "quotients of i32": (lambda a: (a // 2, a % 3, a.div(-2, rounding_mode="trunc"), torch.fmod(a, 4)), WHOLE[:7].int()),
    "quotients by tensors": (lambda a, b: (a // b, a % b, torch.fmod(a, b)), i(7, -7, 7, -7), i(2, 2, -2, -2)),
    "quotients past 2^53": (lambda a, b: (a // b, a % b), i(2**62 + 1, -(2**63)), i(3, 3)),
    "quotients of floats": (lambda a, b: tuple(a.div(b, rounding_mode=m) for m in ("floor", "trunc", None)), TOP, BOTTOM),
    "remainders of floats": (lambda a, b: (a % b, torch.fmod(a, b)), TOP, BOTTOM),
    "remainders of f64": (lambda a, b: (a % b, torch.fmod(a, b)), TOP.double(), BOTTOM.double()),
    "remainders of bf16": (lambda a: (a % 0.3, torch.fmod(a, 0.7), a // 0.7, a % -a.flip(0)), torch.linspace(-3, 3, 40).bfloat16()),
    "shifts": (lambda a, b: (a << b, a >> b), i(1, -1, 5, -8, 1, 1, -8), i(3, 3, 1, 63, 62, 64, -1)),
    "casts to whole numbers": (lambda a: (a.long(), a.int(), a.bool()), f(1.9, -1.9, 0.4, -0.4, -0.0, 5e8)),
    "casts out of range": (lambda a: (a.bfloat16(), a.half(), a.bool()), f(NAN, INF, -INF, 1e20, 3e9, 65520, 1e-8, 3e38)),
    "casts of f64": (lambda a: (a.float(), a.half()), f(NAN, INF, -INF, 1e20, 1e-40).double() * 1e19),
    "signs": (lambda a: (a.abs(), -a, a.floor(), a.ceil(), a.trunc(), a * 0, a - a, a.square()), SPECIAL),
    "sign": (lambda a: (a.sign(), a.double().sign()), SPECIAL[SPECIAL != 0]),
    "functions": (lambda a: (1 / a, a.rsqrt(), a.sqrt(), a.log(), a.log1p(), a.log2(), a.exp(), a.expm1()), SPECIAL),
    "activations": (lambda a: (a.sigmoid(), a.tanh(), a.erf(), F.softplus(a), F.logsigmoid(a), F.silu(a), F.elu(a)), SPECIAL),
    "angles": (lambda a: (a.atan(), a.asin(), a.acos(), a.tan(), a.atanh(), a.asinh(), a.acosh()), SPECIAL),
    "angles of points": (torch.atan2, f(0, -0.0, 1, -1, 1, -2, NAN, 3, -3, INF, 1, -1), f(0, 2, 0, 0, -1, -3, 1, INF, -INF, 1, -0.0, -0.0)),
    "angles of the ends": (torch.atan2, f(INF, -INF, INF, -INF, -0.0, 0, 2, NAN), f(INF, INF, -INF, -INF, -1, -1, NAN, 0)),
    "lengths of points": (torch.hypot, f(0, 3, -3, 1e30, INF, NAN, INF, -INF), f(0, -4, 0, 1e30, 1, 2, INF, NAN)),
    "digits of small numbers": (lambda a: (a.sinh(), a.asinh(), a.atanh(), a.tan(), a.digamma()), f(1e-8, -1e-5, 1e-4, -3e-3, 0.02, -1e-12)),
    "large hyperbolic functions": (lambda a: (a.sinh(), a.cosh(), a.acosh()), f(89, -89, 21, 19, 1e10, -1e8, 0.5)),
    "hyperbolic functions": (lambda a: (a.sinh(), a.cosh(), (a * 1e-3).sinh(), a.erfc(), a.exp2(), a.log2(), a.log10()), SPECIAL),
    "gamma functions": (lambda a: (a.lgamma(), a.digamma(), torch.polygamma(1, a)), f(NAN, 0.0, INF, -1.5, 1.5, -0.25, 1e-3, 2, 77)),
    "gradients of gammas": (lambda a: (a.lgamma() + a.digamma() + a.erfc() + a.atan() + (a / 3).acos()).sum(), leaf(0.3, 1.5, 2.5)),
    "shrinks": (lambda a: (F.hardshrink(a) + F.softshrink(a)).sum(), leaf(0.3, -0.7, 2.0)),
    "norms of maps": (lambda a: (F.group_norm(a[..., None], 2), F.batch_norm(a, None, None, training=True)), Z[:, :4].sin()),
    "powers": (torch.pow, f(0, 0, 0, -0.0, -0.0, NAN, 1, -1, -2, INF, -INF, -8), f(0, 1, -1, -1, -3, 0, NAN, INF, 0.5, 0, 3, 1 / 3)),
    "powers by numbers": (lambda a: tuple(a**e for e in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.5)), SPECIAL),
    "powers of numbers": (lambda a: (2.0**a, 0.0**a, (-1.0) ** a, 1**a), SPECIAL),
    "x log x": (lambda a: (torch.xlogy(a, a), torch.special.entr(a)), SPECIAL),
    "tests": (lambda a: (a.isnan(), a.isinf(), a.isfinite(), a == a, a != a, a < 1, a >= 1, a.bool(), ~a.bool()), SPECIAL),
    "extremes of two": (lambda a, b: (torch.maximum(a, b), torch.minimum(a, b), torch.fmax(a, b)), f(NAN, 1, INF), f(1, NAN, NAN)),
    "clamps": (lambda a: (a.clamp(1, 2), a.clamp(min=1), a.clamp(max=-1), a.clamp(2, 1), F.hardtanh(a)), SPECIAL),
    "nan_to_num, where": (lambda a: (a.nan_to_num(), torch.where(a > 0, a, 0.0), a.masked_fill(a != a, -INF)), SPECIAL),
    "extremes of rows": (lambda a: (a.amax(1), a.amin(1), a.argmax(1), a.argmin(1), *a.max(1), *a.min(1)), ROWS),
    "extremes of all": (lambda a: (a.max(), a.min(), a.argmax(), a.argmin()), ROWS),
    "sums of rows": (lambda a: (a.sum(1), a.mean(1), a.logsumexp(1), a.cumsum(1), a.logcumsumexp(1)), ROWS),
    "softmax": (lambda a: (a.softmax(1), a.log_softmax(1)), ROWS),
    "softmax of inf": (lambda a: (a.softmax(1), a.log_softmax(1), a.logsumexp(1), a.logcumsumexp(1)), TOPS),
    "softmax of inf alone": (lambda a: a.softmax(1), TOPS),
    "log_softmax of inf alone": (lambda a: a.log_softmax(1), TOPS),
    "softmax of inf in f64": (lambda a: (a.softmax(0), a.log_softmax(0), a.logsumexp(0)), TOPS.T.double()),
    "cross entropy of inf": (lambda z, y: F.cross_entropy(z, y, reduction="none"), TOPS, i(1, 0, 1, 0, 0, 2)),
    "gradients of a softmax of inf": (lambda a: (a.log_softmax(1) * 0.5 + a.softmax(1)).sum(), leaf([INF, 1.0], [1, 2])),
    "integers that wrap": (lambda a: (a + 1, a - 1, a * 3, -a, a.abs(), a + a, a * a, a.sum(), a.cumsum(0)), LONG),
    "order of integers": (lambda a: (a.clamp(5), a.max(), a.min(), a.argmax(), a.argmin(), *a.sort(), a == a.flip(0)), LONG),
    "sums of rows of integers": (lambda a: (a.sum(0), a.sum(1), a.amax(0), a.amin(1), *a.min(1)), LONG.reshape(2, 5)),
    "long quotients": (lambda a: tuple(q for b in (3, -7, 2**40 + 1, 1, -(2**62)) for q in (a // b, a % b)), LONG),
    "long cut quotients": (lambda a: tuple(a.div(b, rounding_mode="trunc") for b in (3, -7, 2**40 + 1)), LONG),
    "casts of integers": (lambda a: (a.int(), a.int() * 3, a.float(), (a + 1).float(), a.bool(), a.double()), LONG),
    "i32 that wraps": (lambda a: (a + 1, a - 1, a * a, -a, a.abs(), a.sum(), a.amin(), a.argmin(), a.float(), (a + 1) < a), INTS),
    "equal labels beside numbers": (lambda y, x: torch.where(y[:, None] == y.flip(0), x, -x) * 0.5, NEAR, Z[:, :4] + 1),
    "sums of labels beside numbers": (lambda y, x: torch.where(y - 3 == 2**24, x, -x) + torch.where(y + y > 2**25 + 1, x, 0.0), NEAR, f(1, 2, 3, 4)),
    "order": (lambda a: (*a.sort(dim=1, stable=True), *a.sort(dim=1, descending=True, stable=True)), ROWS),
    "order of a few": (lambda a: (a.topk(2, 1)[0], a.topk(2, 1, largest=False)[0], a.median(1)[0], a.kthvalue(2, 1)[0]), ROWS),
    "bucketize": (lambda a: (torch.bucketize(a, f(0, 1, 2)), torch.bucketize(a, f(0, 1, 2), right=True)), SPECIAL),
    "empty sums": (lambda a: (a.sum(1), a.mean(1), a.sum(), a.mean(), a.logsumexp(1), a.prod(1), a @ a.T), EMPTY),
    "products": (lambda a: (a.cumprod(1), a.cumprod(0), a.prod(1), a.prod(0, True), a.prod(), a.half().prod(1)), ROWS),
    "running extremes": (lambda a: (*a.cummax(1), *a.cummin(1), *a.cummax(0), *a.long().cummin(1), *(a > 0).cummax(1)), ROWS),
    "empty products": (lambda a: (a.cumprod(1), a.prod(1), a.prod(), a.prod(0), a.cumprod(0), a.cummax(0)[0]), EMPTY),
    "gradients of products beside zeros": (
        lambda a: ((a.cumprod(1) * Z[:2, :4]).sum() + a.prod(1).sin().sum() + a.prod(0).sum(),),
        leaf([2.0, 0.0, 3.0, 0.0], [0.5, -2.0, 0.0, 3.0]),
    ),
    "segments": (
        lambda a, y: tuple(a.new_ones(5).scatter_reduce(0, y, a, how, include_self=own) for how in ("amax", "amin", "mean", "sum", "prod") for own in (True, False)),
        SPECIAL, i(0, 0, 1, 1, 1, 2, 2, 0, 2, 4, 4),
    ),
    "many segments": (
        lambda a, y: tuple(a.new_ones(5).scatter_reduce(0, y.repeat(2), a.repeat(2), how, include_self=own) for how in ("amax", "amin") for own in (True, False)),
        SPECIAL, i(0, 0, 1, 1, 1, 2, 2, 0, 2, 4, 4),
    ),
    "windows": (lambda a: (*F.max_pool1d(a[None], 2, 1, 1, return_indices=True), a.unfold(1, 2, 1), F.avg_pool1d(a[None], 2, 1)), ROWS),
    "gradients of no windows": (lambda a: (a.unfold(1, 3, 1).exp().sum(),), torch.empty(0, 10, requires_grad=True)),
    "empty conditions": (lambda a: (a.any(1), a.all(1), a.any(), a.all(), a.any(0), a.all(0)), EMPTY),
    "empty rows": (lambda a: (a.softmax(1), a.cumsum(1), a.sort(1)[0], a.amax(0), torch.linalg.vector_norm(a)), EMPTY),
    "no tokens": (lambda z, y: F.cross_entropy(z, y), torch.empty(0, 5), i()),
    "all ignored": (lambda z, y: F.cross_entropy(z, y), torch.rand(2, 5), i(-100, -100)),
    "gradients at ties": (lambda a: a.amax(1).sum() + a.max(1)[0].sum() + a.median(1)[0].sum(), leaf([1.0, 1, 0], [0, 0, 0])),
    "gradients at 0": (lambda a: a.abs().sum() + a.relu().sum() + a.clamp(0, 1).sum() + a.sqrt().sum(), leaf(0.0, -0.0, 1, 4)),
    "gradients at a NaN": (lambda a: a.abs().sum() + a.log().sum() + (a**2).sum(), leaf(NAN, 1, INF)),
    "gradients of a norm at 0": (lambda a: torch.linalg.vector_norm(a, dim=1).sum() + F.normalize(a, dim=1).sum(), leaf([0.0, 0], [1, 2])),
    "gradients of empty rows": (lambda a: a.logsumexp(1).sum(), leaf([-INF, -INF], [1, -INF])),
}

# Integers, but labels of a loss alone, have all their bits on a GPU, too.
INTEGERS = [
    name
    for name, (_, *arguments) in VALUES.items()
    if any(a.dtype in (torch.int32, torch.int64) for a in arguments)
    and name not in ("cross entropy of inf", "no tokens", "all ignored")
]

# The signs of zeros are PyTorch's.
SIGNS = {
    "neutral numbers": (lambda a: (a + 0.0, 0.0 + a, a + -0.0, a - 0.0, a - -0.0, 0.0 - a, a * 1, a / 1, -(-a), a**1), ZEROS),
    "bounds": (lambda a: (a.relu(), a.clamp(0), a.clamp(max=0), a.clamp(0, 1), a.clamp(-1, 0), F.relu6(a)), ZEROS),
    "choices": (lambda a: (torch.where(a == 0, a, a), torch.maximum(a, a), torch.minimum(a, a), a.sign(), a.abs()), ZEROS),
    "rounding": (lambda a: (a.round(), a.trunc(), a.floor(), a.ceil()), torch.cat([FRACTIONS, ZEROS])),
    "rounding f64": (lambda a: (a.round(), a.trunc(), a.floor(), a.ceil()), torch.cat([FRACTIONS, ZEROS]).double()),
    "sums": (lambda a: (a[:, None].sum(1), a.mean(), a.cumsum(0), a + a, a - a, a * 0), ZEROS),
}

# Operations for which every executor raises an error.
REFUSED = {
    "quotient by 0": (lambda a, b: a // b, i(7, -7), i(0, 2)),
    "cut quotient by 0": (lambda a, b: a.div(b, rounding_mode="trunc"), i(7, -7), i(0, 2)),
    "remainder by 0": (lambda a, b: a % b, i(7, -7), i(0, 2)),
    "greatest of none": (lambda a: a.max(1)[0], EMPTY),
    "greatest of no number": (lambda a: a.amax(1), EMPTY),
    "index of none": (lambda a: a.argmax(), EMPTY),
}

FAR = 2**33  # as an i32 it would be 0
# name -> (function, x, a good index, bad ones with line and position)
INDICES = {
    "cross_entropy": (lambda z, y: F.cross_entropy(z, y), Z, i(1, 2, -100, 4), [(3, 5), (0, -1), (1, FAR), (2, FAR + 1)]),
    "nll_loss": (lambda z, y: F.nll_loss(z.log_softmax(1), y, ignore_index=2), Z, i(1, 2, 0, 4), [(3, 5)]),
    "weighted": (lambda z, y: F.cross_entropy(z, y, z[0].detach(), label_smoothing=0.1), Z, i(1, 2, 0, 4), [(3, 5)]),
    "gather": (lambda z, y: z.gather(1, y[:, None]).sum(), Z, i(1, 2, 0, 4), [(3, 5), (2, -1), (0, FAR)]),
    "gather of several": (lambda z, y: z.gather(1, y.expand(2, 4).T).sum(), Z, i(1, 2, 0, 4), [(3, 5), (2, -1)]),
    "one of each row": (lambda z, y: z[torch.arange(4), y].sum(), Z, i(1, 2, -5, 4), [(3, 5), (2, -6), (0, FAR)]),
    "rows": (lambda z, y: z[y].sum(), Z, i(1, 2, -4, 3), [(3, 4), (2, -5), (0, FAR)]),
    "several": (lambda z, y: z[y, y].sum(), Z, i(1, 2, -4, 3), [(3, 4), (2, -5)]),
    "embedding": (lambda w, y: F.embedding(y, w).square().sum(), W, i(1, 2, 0, 5), [(3, 6), (2, -1), (0, FAR)]),
    "embedding by i32": (lambda w, y: F.embedding(y.int(), w, padding_idx=0).sum(), W, i(1, 2, 0, 5), [(3, 6)]),
    "index_select": (lambda w, y: w.index_select(0, y).square().sum(), W, i(1, 2, 0, 5), [(3, 6), (2, -1), (0, FAR)]),
    "columns": (lambda w, y: w.index_select(1, y).square().sum(), W, i(1, 2, 0), [(2, 3), (0, -1)]),
    "one_hot": (lambda w, y: (F.one_hot(y, 5) * w[:4, :1]).sum(), W, i(1, 2, 0, 4), [(3, 5), (2, -1)]),
    "scatter": (lambda z, y: z.scatter(1, y[:, None], 7.0).square().sum(), Z, i(1, 2, 0, 4), [(3, 5), (2, -1)]),
    "scatter_add": (lambda z, y: z.scatter_add(1, y[:, None], z[:, :1]).square().sum(), Z, i(1, 2, 0, 4), [(3, 5), (2, -1)]),
    "index_add": (lambda z, y: torch.zeros(4, 5).index_add(0, y, z).square().sum(), Z, i(1, 2, 0, 3), [(3, 4), (2, -1)]),
    "index_put": (lambda z, y: z.index_put((y,), z[0, 0]).square().sum(), Z, i(1, 2, -4, 3), [(3, 4), (2, -5)]),
    "adding index_put": (lambda z, y: z.index_put((y,), z[0], True).square().sum(), Z, i(1, 1, -4, 3), [(3, 4), (2, -5)]),
    "index_copy": (lambda z, y: z.index_copy(0, y, z[:2]).square().sum(), Z, i(1, 2), [(1, 4), (0, -1)]),
    "index_fill": (lambda z, y: z.index_fill(0, y, 2.0).square().sum(), Z, i(1, 2), [(1, 4), (0, -5)]),
    "take": (lambda z, y: z.take(y).square().sum(), Z, i(1, 19, -20), [(1, 20), (0, -21)]),
    "computed": (lambda w, y: F.embedding((2 * y).clamp(min=0) // 2, w).sum(), W, i(1, 2, 0, -9), [(1, 6)]),
    "multi_margin_loss": (lambda z, y: F.multi_margin_loss(z, y), Z, i(1, 2, 0, 4), [(3, 5)]),
}


def results(function, arguments):
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments]
    made = function(*given)
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    leaves = [t for t in given if t.requires_grad]
    if leaves and outputs[0].requires_grad:
        outputs[0].backward()
    return [o.detach() for o in outputs] + [t.grad for t in leaves]


def compare(got, wanted):
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=1e-6, equal_nan=True)


def chunked(function, executor):
    """Returns the function by an executor, or by the fallback where the library does not take it."""
    return autochunk(function, executor=executor if executor == "python" else "auto")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", VALUES if ON_CPU else INTEGERS)
def test_values(name, executor):
    function, *arguments = VALUES[name]
    compare(results(chunked(function, executor), arguments), results(function, arguments))


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_sign_of_a_zero(executor):
    def function(a):
        return 1 / (-a), 1 / a.floor(), 1 / a.ceil(), 1 / a.trunc(), 1 / (a * 3), 1 / a.sin(), 1 / a.expm1()

    compare(results(chunked(function, executor), [f(0.0, -0.0)]), results(function, [f(0.0, -0.0)]))


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SIGNS)
def test_signs(name, executor):
    function, x = SIGNS[name]
    for got, wanted in zip(chunked(function, executor)(x), function(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert got.signbit().tolist() == wanted.signbit().tolist()


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, executor):
    function, *arguments = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)):
        function(*arguments)
    with pytest.raises((RuntimeError, IndexError)):
        chunked(function, executor)(*arguments)


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", INDICES)
def test_indices(name, executor):
    """A bad index raises PyTorch's error, with the line, the position and the index; the next good index works."""
    function, x, index, bad = INDICES[name]
    x, made = x.clone().requires_grad_(), chunked(function, executor)
    compare(results(made, [x, index]), results(function, [x, index]))
    for place, number in bad:
        wrong = index.clone()
        wrong[place] = number
        with pytest.raises((IndexError, RuntimeError)) as error:
            function(x, wrong)
        with pytest.raises(type(error.value), match=rf"test_autochunk_edges.*index {number}\b.*at \[{place}[],].*out of bounds"):
            made(x, wrong)
    compare(results(made, [x, index]), results(function, [x, index]))


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_bad_label_of_a_head(executor):
    """Bad labels of logits that the head engine never makes: every order of gradients, under torch.func and no_grad."""
    h, w, y = torch.rand(64, 16, requires_grad=True), torch.rand(8192, 16), torch.randint(0, 8192, (64,))
    y[7] = 8192

    def loss(h, w, y):
        return F.cross_entropy(h @ w.T, y)

    for options in ({}, {"gradients": "backward"}, {"memory_budget": "256KiB"}):
        made = autochunk(loss, executor=executor, **options)
        for call in (made, torch.func.grad(made), torch.no_grad()(made)):
            with pytest.raises(IndexError, match=r"index 8192 at \[7\] is out of bounds for dimension 1 with size 8192"):
                call(h, w, y)


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_index_that_is_computed_from_large_values(executor):
    """Its check takes no more than the budget, and is in the report."""
    h, w = torch.rand(256, 16, requires_grad=True), torch.rand(1024, 16, requires_grad=True)

    def loss(h, w, shift=0):
        z = h @ w.T
        best = torch.take_along_dim(z, z.detach().topk(4, 1).indices, 1)  # inside, whatever the logits
        place = (z.detach().sum(1).tanh() * 3 + 4).long() + shift
        return (best**2).sum() + z.gather(1, place[:, None]).sum()

    made = autochunk(loss, memory_budget="256KiB", executor=executor)
    compare(results(made, [h, w]), results(loss, [h, w]))
    ((compiled, took),) = plan_peaks(made.last, [h, w], lambda run: peak_of(run, device="cpu")[0])
    assert took <= compiled.after <= 2**18
    with pytest.raises(IndexError, match="index 1031 at .* is out of bounds for dimension 1 with size 1024"):
        autochunk(functools.partial(loss, shift=1024), executor=executor)(h, w)


@cpu
@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_that_a_mask_leaves_out_may_hold_any_label(executor):
    z, y = torch.rand(6, 5, requires_grad=True), i(1, -1, 2, 99, 0, -100)

    def loss(z, y):
        kept = (y >= 0) & (y < 5)
        return F.cross_entropy(z[kept], y[kept]) + torch.where(kept, z.gather(1, y.clamp(0, 4)[:, None])[:, 0], 0.0).sum()

    compare(results(autochunk(loss, executor=executor), [z, y]), results(loss, [z, y]))


@cpu
def test_indices_that_are_inside_take_no_check():
    """The indices of a sort, a count, a clamp, a test or a maximum are inside: nothing runs beside the program."""

    def function(x, y):
        order = x.argsort(-1)
        return x.gather(-1, order).sum() + x[y.clamp(0, 3)].sum() + x[torch.arange(4)].sum() + x[(y > 2).long()].sum() + x.max(-1).values.sum()

    made = autochunk(function, executor="native")
    x, y = torch.rand(4, 5), i(-9, 2, 99, 1)
    compare(results(made, [x, y]), results(function, [x, y]))
    assert made.last.forward.request.checks is None


@cpu
def test_checks_are_text_and_back():
    made = autochunk(lambda z, y: z[y].sum(), executor="native")
    made(Z, i(1, 2))
    checks = made.last.forward.request.checks
    assert unpacked(checks.packed()) == checks and unpacked("") is None


@cpu
@pytest.mark.parametrize("native", [True, False])
def test_on_a_gpu_a_bad_label_is_a_nan(native, monkeypatch):
    """A GPU's program, run on a CPU: the loss is NaN, no memory outside is read, and the head is found."""
    monkeypatch.setattr(program, "_device", lambda made: "cuda")
    tensors = torch.rand(64, 8), torch.rand(4096, 8), torch.randint(0, 4096, (64,))
    with alone() as around, warnings.catch_warnings():
        fakes = program_fakes(tensors)
        traced = trace(lambda h, w, y: F.cross_entropy(h @ w.T, y), fakes, ["h", "w", "y"], [True, True, False], around)
        made = program.to_text(traced.joint, ["h", "w", "y", "t"], ["loss", "d_h", "d_w"], [3], "main", native)
    assert made.checks is None
    compiled = Program(made.text)
    if native:
        assert compiled.report["heads"]
    for place, number in ((0, 3), (3, 4096), (5, -1), (7, 2**33)):
        tensors[2][place] = number
        loss, *_ = compiled.run(*(t.numpy() for t in tensors))
        assert (loss != loss) == (number != 3)
        tensors[2][place] = 0


@gpu
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_gpu_makes_a_nan_of_a_bad_label(executor):
    h, w, y = torch.rand(64, 8), torch.rand(4096, 8), torch.randint(0, 4096, (64,))
    made = autochunk(lambda h, w, y: F.cross_entropy(h @ w.T, y), executor=executor)
    for place, number in ((0, 3), (3, 4096), (5, -1), (7, 2**33), (9, 2**33 + 3), (11, -(2**63))):
        y[place] = number
        assert made(h, w, y).isnan().item() == (number != 3)
        y[place] = 0


@cpu
@pytest.mark.parametrize("name", INDICES)
def test_on_a_gpu_generated_code_takes_any_index(name, monkeypatch):
    """A GPU's code, run on a CPU: no PyTorch operation gets an index outside, which would end the use of a GPU."""
    monkeypatch.setattr(program, "_device", lambda made: "cuda")
    function, x, index, bad = INDICES[name]
    x = x.clone().requires_grad_()
    with alone() as around, warnings.catch_warnings():
        traced = trace(function, program_fakes([x, index]), ["x", "y"], [True, False], around)
    made = program.to_text(traced.joint, ["x", "y", "t"], ["loss", "d_x"], [2], "main", False)
    if made.calls:
        pytest.skip(f"{made.calls[0].key} is PyTorch's, and so is what it makes of an index outside")
    code = load(to_source(parse(Program(made.text).text, DTYPES), "main", False), "main")
    given = {"x": x.detach(), "y": index, "t": torch.tensor(1.0)}
    loss, d_x = code(*(given[p] for p in made.parameters))
    function(x, index).backward()
    compare([d_x], [x.grad])
    for place, number in bad:
        wrong = index.clone()
        wrong[place] = number
        loss, d_x = code(*({**given, "y": wrong}[p] for p in made.parameters))
        assert loss.shape == () and d_x.shape == x.shape


def program_fakes(tensors):
    from logitless.torch._autochunk.arguments import fakes_of, layout_of

    return fakes_of([(*layout_of(t), t) for t in tensors])


# A product in 16 bits whose parts are read in f32.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_a_product_in_16_bits(dtype):
    def function(x, w):
        gate, up = torch.nn.functional.linear(x, w).chunk(2, dim=-1)
        return (torch.nn.functional.gelu(gate.float()) * up.float()).square().mean()

    torch.manual_seed(0)
    x, w = torch.randn(40, 24), torch.randn(64, 24)
    x, w = (t.to(dtype).requires_grad_() for t in (x, w))
    wanted = torch.autograd.grad(function(x, w), (x, w))
    for executor in ("native", "python"):
        made = autochunk(function, executor=executor)(x, w)
        torch.testing.assert_close(made, function(x, w), rtol=1e-2, atol=1e-3)
        for a, b in zip(torch.autograd.grad(made, (x, w)), wanted):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


# A maximum is rounded to its 16 bits, so what is compared with it is as well: each row has an entry that equals it.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_computed_numbers_of_16_bits_are_compared_rounded(dtype, reduce):
    def function(x, w):
        z = (x @ w.T) * 0.3 + x[:, :1]
        best = getattr(z, reduce)(1)
        return best.float().mean() + getattr(z, reduce)(0).float().mean(), (z == best[:, None]).sum(1)

    torch.manual_seed(0)
    x, w = torch.randn(90, 16), torch.randn(300, 16)
    x, w = (t.to(dtype).requires_grad_() for t in (x, w))
    for executor in ("native", "python"):
        for budget in (None, "64KiB"):
            mean, equal = autochunk(function, executor=executor, memory_budget=budget)(x, w)
            assert (equal >= 1).all()
            assert all(d.isfinite().all() for d in torch.autograd.grad(mean, (x, w)))


def test_refusals_that_name_what_is_expected():
    """A device without values, mixed dtypes, and a function inside of another whose options hold."""
    with pytest.raises(Unsupported, match="tensors on meta among the arguments"):
        autochunk(torch.sum, executor="python")(torch.ones(2, device="meta"))
    with pytest.raises(Unsupported, match=r"test_autochunk_edges.py:\d+: .*: dot: operands are f32\[2, 2\] and bf16"):
        autochunk(lambda x: (x @ x.bfloat16()).sum())(torch.ones(2, 2, device=oracle.DEVICE))
    inner = autochunk(lambda x: x.sum().item() * x.sum(), unsupported="run")
    with pytest.raises(Unsupported, match=r"options of the outermost chunked function hold, unsupported='error'\)"):
        autochunk(lambda x: inner(x))(torch.ones(2, device=oracle.DEVICE))
