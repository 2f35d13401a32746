"""Primitives and options that autochunk takes or refuses, one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autochunk_losses import DIM, VOCAB, arguments, check_same, cross_entropy, exactly, random, run, whole
from autochunk_options import check_options
from jax_oracle import GRADIENT_ERROR, enable_x64, relative_error

from logitless.jax import autochunk
from logitless.jax._autochunk import Unsupported


def arithmetic(x, i):
    a = jnp.clip(x**3, -1, 1) + jnp.sqrt(jnp.abs(x)) - x / (1 + x * x) + jnp.where(x > 0, 1.0, 0.0) * x
    b = jnp.maximum(x, x.mean(0)) + jnp.minimum(x, jax.lax.stop_gradient(x) * 2) + jnp.exp(2 - x) + jnp.sign(x) * x
    c = jnp.abs(x) ** 2.5 + x**-2 + jnp.exp2(x) + jnp.log2(jnp.abs(x)) + jnp.expm1(x) + jnp.log1p(x * x)
    d = jnp.sin(x) * jnp.cos(x) + jnp.floor(x) * x + jnp.ceil(x) * x + jnp.square(x) + jax.lax.rem(x, 0.3) + x**0
    return (a + b).sum() + (c * d).mean() + jax.lax.rsqrt(x * x + 1).sum() + jnp.tan(x).sum()


def activations(x, i):
    silu = jax.nn.gelu(x) + jax.nn.gelu(x, approximate=False) + jax.nn.silu(x) + jax.nn.softplus(x) + jax.nn.elu(x)
    return silu + jax.nn.leaky_relu(x) + jax.nn.relu6(x) + jax.lax.erf(x) + jax.nn.sigmoid(x) + jax.nn.mish(x)


def reductions(x, i):
    some = x.var() + jnp.linalg.norm(x) + x.std(1).sum() + x.min(0).sum() + x.mean() + x.max(1).sum() + x.max()
    return some, x.argmax(1), x.argmin(0), (x > 1).any(1), (x > -9).all(), (i > 2).sum()


def softmaxes(x, i):
    kept = jnp.where(i[:, None] > 3, -jnp.inf, x)
    lse = jax.scipy.special.logsumexp(x, 1, keepdims=True)
    both = jax.nn.softmax(kept, 0) + jax.nn.log_softmax(x, 1) * lse + jnp.logaddexp(x, x[:1])
    return both + jax.nn.softmax(x, (0, 1)) + jax.nn.logsumexp(x, b=jnp.abs(x)) + jax.nn.standardize(x)


def masked_rows(x, i):
    """A row without elements."""
    kept = jnp.where((i == i[0])[:, None], -jnp.inf, x)
    return jax.nn.logsumexp(kept, 1)


def shapes(x, i):
    parts = (jnp.concatenate([x[:, :3], x[:, 5:]], 1) ** 2).sum() + jnp.split(x, 2, 1)[1].sum() + x[-3:, 2].sum()
    moved = jnp.exp(jnp.moveaxis(x, 0, 1) @ jnp.tril(x)).sum() + jnp.stack([x, x * 2]).var() + jnp.tile(x, (2, 3)).var()
    turned = jnp.exp(jnp.roll(x, 2, 1)[:, 0]).sum() + jnp.exp(jnp.pad(x, ((1, 2), (0, 3)), constant_values=3.0)).sum()
    whole_ = x.reshape(4, 6, 10).transpose(2, 0, 1).reshape(10, -1)
    return parts + moved + turned + (whole_ @ x).var() + jax.lax.dynamic_slice(x, (3, 2), (5, 4)).var()


def indices(x, i):
    rows = jnp.arange(x.shape[0])
    one = x[rows, i].sum() + jnp.exp(x[i]).sum() + jnp.exp(x[:, i]).sum() + jnp.exp(x[i, i]).sum() + x[i[0], 2] * 3
    several = jnp.take_along_axis(x, jnp.stack([i, (i + 1) % 5], 1), 1)
    deep = x.reshape(4, 6, 10)[jnp.arange(4)[:, None], jnp.arange(6), i.reshape(4, 6)]
    two = jnp.exp(several).sum() + jnp.exp(jnp.take(x, i, axis=1)).sum() + jnp.exp(deep).sum()
    some = jax.lax.gather(  # the form that x[2:5, 1:4] had before JAX 0.8
        x,
        jnp.concatenate([jnp.full(1, 2), jnp.full(1, 1)]),
        jax.lax.GatherDimensionNumbers((0, 1), (), (0, 1)),
        (3, 3),
        mode="clip",
    )
    three = some.var() + jnp.exp(x.reshape(4, 6, 10)[jnp.arange(4), i[:4]]).sum()
    return one + two + three + (jnp.zeros_like(x).at[rows, i].add(x[:, 0]) * x).sum()


def writes(x, i):
    rows = jnp.arange(x.shape[0])
    set_ = x.at[rows, i].set(x[:, 0] * 3, unique_indices=True).at[:, 2].set(5.0).at[3].set(x[4])
    return (set_**2).sum() + (x.at[i].add(x * 2) ** 2).sum() + (x.at[i, i].add(x[:, 1]) ** 2).sum()


def writes_that_may_meet(x, i):
    masked = x.at[:, 7:].set(-jnp.inf)
    some = x.at[:, jnp.array([1, 5])].set(-9.0).at[i].set(x[0] * 2)
    return jax.nn.logsumexp(masked, 1).sum() + (some**2).sum() + jnp.fill_diagonal(x @ x.T, 0.5, inplace=False).var()


def gammas(x, i):
    a = jnp.abs(x) + 0.5
    angles = jnp.arccos(jnp.tanh(x) * 0.9) + jnp.arctan2(x, -a) + jnp.arcsinh(x) + jnp.sinh(x * 1e-6)
    return (jax.lax.lgamma(a) + jax.lax.digamma(a) + jax.lax.erfc(x) + angles).sum()


def outside(x, i):
    """Reads and writes at indices outside of the array, in every mode."""
    far = i * 7 - 5
    one = jnp.take_along_axis(x, far[:, None], 1, mode="clip").sum() + x.at[far].get(mode="fill", fill_value=2).sum()
    return one + (x.at[far].add(x, mode="drop") ** 2).sum() + x.at[jnp.arange(24), far].get(mode="clip").var()


def not_numbers(x, i):
    return jnp.take_along_axis(x, (i * 7)[:, None], 1)[:, 0]


def products(x, i):
    batched = jnp.exp(x.reshape(4, 6, 10) @ x.reshape(4, 10, 6)).sum() + jnp.exp(x.reshape(4, 6, 10) @ x[:10]).sum()
    odd = jnp.einsum("abc,dbc->ad", x.reshape(4, 3, 20), x.reshape(4, 3, 20)) + jnp.einsum("ab,cb->ac", x, x).mean()
    heads = jnp.einsum("abc,bcd->bad", x.reshape(4, 6, 10), x.reshape(6, 10, 4))
    return batched + odd.var() + (x @ x[0]).var() + jnp.outer(x[0], x[1]).var() + heads.var() + jnp.vdot(x, x * x)


def integers(x, i):
    far = i * 123456789 - 7
    exact = far // 7 + far % 11 + far // -31 + jax.lax.rem(far, far * 0 + 1000003) + jax.lax.div(far, far // 5 + 1)
    small = (i // 2 + i % 3 - (-i) // 2 + jnp.where(i > 2, i, -i) ** 2).sum()
    return exact, small, (x * (i % 2)[:, None]).sum(), i.max()


def bools(x, i):
    a, b = x > 0, i[:, None] > 1
    one = jnp.where((a & b) | ~a, x, 0) + jnp.where(a ^ b, x * 2, 1) + jnp.select([a, b], [x, x * 3], 4.0)
    return one.sum(), a.any(), jnp.logical_and(a, b).sum(), jnp.isfinite(x).all(), jnp.isnan(x).any()


def called(x, i):
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))

    @jax.custom_vjp
    def straight(x):
        return jnp.floor(x * 4) / 4

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))
    inner = jax.jit(lambda x: jax.checkpoint(jnp.sin)(x) * 2)
    return (cube(x) + straight(x) * inner(x) + inner(inner(x))).sum()


def constants(x, i):
    scaled = x * jnp.arange(1.0, 11.0) + np.linspace(0, 1, 10) + jnp.asarray([2.0] * 10)
    return x, scaled.sum(), {"transposed": x.T, "rows": 3, "none": None, "number": jnp.float32(3)}


FUNCTIONS = [
    arithmetic,
    activations,
    reductions,
    softmaxes,
    masked_rows,
    shapes,
    indices,
    writes,
    writes_that_may_meet,
    gammas,
    outside,
    not_numbers,
    products,
    integers,
    bools,
    called,
    constants,
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_primitives(fn):
    with enable_x64(True):
        args = random(24, 10).astype("float64"), whole(5, 24)
        arrays = lambda *a: [o for o in jax.tree.leaves(fn(*a)) if hasattr(o, "shape")]  # noqa: E731
        expected = run(arrays, args)
        chunked = autochunk(fn, chunks=3)
        found = run(lambda *a: [o for o in jax.tree.leaves(chunked(*a)) if hasattr(o, "shape")], args)
        for a, e in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
            assert a.dtype == e.dtype and a.shape == e.shape
            a, e = (np.asarray(v) for v in (a, e))
            assert (np.isfinite(a) == np.isfinite(e)).all()
            assert relative_error(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(e), e, 0)) <= 1e-12


def test_whole_numbers_are_divided_exactly():
    """Without x64, only f32 divides."""
    i = whole(17, 200)
    found, *_ = autochunk(integers)(random(200, 3), i)
    assert (found == integers(random(200, 3), i)[0]).all()


def test_outputs_that_are_no_arrays():
    x, i = random(24, 10), whole(5, 24)
    made = autochunk(constants)(x, i)
    assert made[2]["rows"] == 3 and made[2]["none"] is None and (made[2]["transposed"] == x.T).all()


def test_embedding_shifted_labels_and_causal_attention():
    """A small language model."""

    def fn(tokens, table, query, weight):
        x = table[tokens]
        q = (x @ query).reshape(2, 25, 2, 4).transpose(0, 2, 1, 3)
        scores = q @ q.transpose(0, 1, 3, 2)
        causal = jax.lax.broadcasted_iota(jnp.int32, (25, 25), 0) >= jax.lax.broadcasted_iota(jnp.int32, (25, 25), 1)
        y = (jax.nn.softmax(jnp.where(causal, scores, -1e30)) @ q).transpose(0, 2, 1, 3).reshape(2, 25, DIM)
        logits = y[:, :-1] @ weight.T
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -log_p.mean()

    args = whole(30, 2, 25), random(30, DIM), random(DIM, DIM), random(VOCAB, DIM)
    chunked = autochunk(fn, memory_budget="96KiB")
    check_same(run(chunked, args), exactly(fn, args), GRADIENT_ERROR["float32"])
    assert "NOT met" not in chunked.explain() and "lax.fori_loop(" in chunked.source()


def test_chunks_of_a_table():
    """A large table is read and added into one block of its rows at a time."""

    def fn(index, table, projection):
        return jnp.square(jax.nn.log_softmax(table @ projection)[index]).sum()

    args = whole(3000, 20), random(3000, 4), random(4, 32)
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(run(chunked, args), exactly(fn, args), GRADIENT_ERROR["float32"])
    assert "_take(" in chunked.source() and "_scatter_add(" in chunked.source()
    assert "3000 in " in chunked.explain()


def test_many_indices_of_a_row_are_one_operation():
    index = whole(VOCAB, 50, 40)
    index = index.at[:, 1].set(index[:, 0])  # two rows that add up

    def fn(hidden, weight, share):
        log_p = jax.nn.log_softmax(hidden @ weight.T, -1)
        return -(jnp.take_along_axis(log_p, index, 1) * share).sum(-1).mean()

    args = random(50, DIM), random(VOCAB, DIM, seed=1), random(50, 40, seed=2)
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(run(chunked, args), exactly(fn, args), GRADIENT_ERROR["float32"])
    assert chunked.source().count(" = _pick_several(") == 1 and chunked.source().count(" = _put(") == 1


def test_a_16_bit_softmax_is_one_of_fp32():
    """The error is that of rounding the result to bf16, although the function itself rounds at every step."""
    x = random(40, 600, dtype="bfloat16", scale=3.0)
    exact = jax.nn.softmax(x.astype("float32"))
    assert relative_error(autochunk(jax.nn.softmax)(x), exact) <= GRADIENT_ERROR["bfloat16"]


def test_precision_is_kept():
    def fn(x, y):
        return (jnp.matmul(x, y, precision="highest") @ y.T).sum()

    chunked = autochunk(fn)
    x = random(8, 8)
    assert relative_error(chunked(x, x), fn(x, x)) <= 1e-6
    assert "precision=(lax.Precision.HIGHEST, lax.Precision.HIGHEST)" in chunked.source()
    with jax.default_matmul_precision("float32"):
        assert "HIGHEST" in autochunk(lambda x: (x @ x).sum()).source(x)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda x: jnp.abs(jnp.fft.rfft(x)).sum(), r"fft\(float32\[4, 6\]\).*dtype complex64"),
        (lambda x: x * jax.random.gamma(jax.random.key(0), 2.0, x.shape), r"random_gamma|random_seed.*by one threefry key"),
        (lambda x: x * jax.random.bits(jax.random.key(0), x.shape, "uint8"), r"random_bits\(.*dtype uint8"),
        (lambda x: jnp.abs(x.astype("complex64")).sum(), r"complex64"),
        (lambda x: x.astype("int8").sum(), r"convert_element_type\(float32\[4, 6\]\): dtype int8"),
        (lambda x: x[x > 0].sum(), r"needs the values of an array"),
        (lambda x: x * float(x.sum()), r"needs the values of an array"),
    ],
    ids="fft gamma random complex int8 mask item".split(),
)
def test_refusals_name_the_primitive(fn, named):
    with pytest.raises(NotImplementedError, match=named) as raised:
        autochunk(fn)(random(4, 6))
    assert isinstance(raised.value, Unsupported)


def test_a_gradient_that_is_refused():
    """The outputs have a form in the library; the gradients have none."""

    @jax.custom_vjp
    def odd(x):
        return x * 2

    odd.defvjp(lambda x: (x * 2, None), lambda _, g: (g * abs(jnp.fft.rfft(g)).sum(),))
    x = random(4, 6)
    fn = lambda x: odd(x).var()  # noqa: E731
    assert relative_error(autochunk(fn)(x), fn(x)) <= 1e-6
    with pytest.raises(Unsupported, match="fft"):
        jax.grad(autochunk(fn))(x)
    chunked = autochunk(fn, unsupported="run")
    with pytest.warns(UserWarning, match="runs unchunked: .*fft"):
        found = jax.jit(jax.grad(chunked))(x)
    assert relative_error(found, jax.grad(fn)(x)) <= 1e-6 and "fft" in chunked.explain()


def test_unsupported_can_run_unchunked():
    chunked = autochunk(lambda x: abs(jnp.fft.fft(x)).sum(), unsupported="run")
    with pytest.warns(UserWarning, match=r"runs unchunked: .*fft"):
        assert chunked(jnp.ones((2, 3))) == 6
    assert "fft" in chunked.explain()
    with pytest.raises(RuntimeError, match="runs unchunked"):
        chunked.source()


def test_what_is_closed_over():
    hidden, weight, target = arguments(cross_entropy)
    chunked = autochunk(lambda hidden: cross_entropy(hidden, weight, target), chunks=3)
    expected = jax.grad(cross_entropy)(hidden, weight, target)
    assert relative_error(jax.grad(chunked)(hidden), expected) <= 1e-5

    def inside(weight):
        return autochunk(lambda hidden: cross_entropy(hidden, weight, target))(hidden)

    with pytest.raises(ValueError, match=r"closes over a traced array float32\[600, 8\], .* pass it as an argument"):
        jax.grad(inside)(weight)


def test_strict():
    def fn(x):
        return jnp.exp(x @ x.T).sum()

    x = random(64, 2)
    with pytest.raises(ValueError, match=r"strict: forward_and_gradients takes [\d.]+ \w+ beyond .*, memory_budget is 100 B"):
        autochunk(fn, memory_budget=100, strict=True).explain(x)
    assert "NOT met" in autochunk(fn, memory_budget=100).explain(x)


def test_decorators():
    @autochunk
    def plain(x):
        return x.sum()

    @autochunk(memory_budget="1MiB", gradients="backward")
    def with_options(x):
        return x.sum()

    x = random(4, 6)
    assert relative_error(plain(x), x.sum()) <= 1e-6 and relative_error(with_options(x), x.sum()) <= 1e-6
    assert relative_error(jax.grad(plain)(x), jnp.ones((4, 6))) == 0
    assert relative_error(jax.grad(with_options)(x), jnp.ones((4, 6))) == 0


def test_options():
    check_options(autochunk, cross_entropy, jnp.ones(2), "an array")
