"""The head in JAX's own operations: values in every plan, memory, lowering for a TPU, and who is served by it."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax_oracle import (
    ON_CPU, check_gradients, cross_entropy, doubles, enable_x64, in_float64, logits, logprobs, problem, relative_error,
)

from logitless._library import parse_bytes
from logitless.jax import (
    Sharding, _backend, _portable, backend, linear_cross_entropy, linear_logprobs, linear_sample, linear_top_logprobs, losses,
)
from logitless.jax._portable_plan import Plan, plan

VOCAB = 101
RANDOM = np.random.default_rng(7)
CLASSES = jnp.asarray(RANDOM.uniform(0.5, 2.0, VOCAB), "float32")
TOKENS = jnp.asarray(RANDOM.uniform(0.0, 2.0, (3, 7)), "float32")
ALL = dict(label_smoothing=0.1, class_weight=CLASSES, z_loss=1e-3, softcap=8.0, logit_scale=1.3, token_weight=TOKENS)


@pytest.fixture(autouse=True, scope="module")
def portable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITLESS_BACKEND", "portable")
        jax.clear_caches()
        yield
    jax.clear_caches()


# Three chunks of which two overlap, and blocks of the vocabulary of which two overlap too.
PLANS = {"whole": Plan(21, VOCAB, 0), "chunks": Plan(8, VOCAB, 0), "blocks": Plan(8, 32, 0)}


@pytest.fixture(params=["blocks"])
def sizes(request, monkeypatch):
    monkeypatch.setattr(_portable, "plan", lambda *_: PLANS[request.param])
    jax.clear_caches()


@pytest.mark.parametrize("sizes, dtype, options", [
    ("whole", "float32", {}), ("chunks", "float32", ALL), ("blocks", "float32", ALL),
    ("blocks", "bfloat16", ALL | dict(reduction="sum")), ("chunks", "float16", dict(normalizer=11.0)),
], indirect=["sizes"], ids=["plain", "all", "all in blocks", "sum", "normalizer"])
def test_loss_and_gradients(sizes, dtype, options):
    arrays = problem(dtype=dtype)
    ours = lambda *a, **o: linear_cross_entropy(*a, return_argmax=True, **o)  # noqa: E731
    (value, argmax), gradients = jax.value_and_grad(ours, (0, 1, 3), has_aux=True)(*arrays, **options)
    expected, others = in_float64(cross_entropy, *arrays, **options)
    assert relative_error(value, expected) <= 2e-6
    check_gradients(gradients, others, dtype)
    assert [g.dtype for g in gradients] == [arrays[0].dtype, arrays[1].dtype, jnp.float32]
    best = logits(*doubles(arrays[0], arrays[1], arrays[3])).argmax(-1)
    assert dtype != "float32" or (argmax == np.where(arrays[2] == -100, -1, best)).all()


def test_losses_of_weighted_targets(sizes):
    arrays = problem(per_token=3)
    shares = jnp.asarray(RANDOM.dirichlet(np.ones(3), (3, 7)), "float32")

    def weighted(function):
        return lambda *a, **o: (TOKENS * function(*a, reduction="none", target_weight=shares, **o)).sum()

    value, gradients = jax.value_and_grad(weighted(linear_cross_entropy), (0, 1, 3))(*arrays)
    expected, others = in_float64(weighted(cross_entropy), *arrays)
    assert relative_error(value, expected) <= 2e-6
    check_gradients(gradients, others)


@pytest.mark.parametrize(
    "sizes, per_token, options", [("chunks", 0, dict(softcap=6.0)), ("blocks", 3, dict(logit_scale=-0.7))],
    indirect=["sizes"], ids=["one", "several"],
)
def test_outputs_of_the_head(sizes, per_token, options):
    arrays = problem(per_token=per_token)
    if per_token:
        arrays = (*arrays[:2], arrays[2].at[0, 1, 2].set(arrays[2][0, 1, 0]), arrays[3])  # one target twice
    shapes = (arrays[2].shape, (3, 7), (3, 7))
    factors = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]

    def weighted(function):
        return lambda *a: sum((f * o).sum() for f, o in zip(factors, function(*a, **options)))

    value, gradients = jax.value_and_grad(weighted(linear_logprobs), (0, 1, 3))(*arrays)
    expected, others = in_float64(weighted(logprobs), *arrays)
    assert abs(value - expected) <= 2e-6 * sum(np.abs(f).sum() for f in factors)
    check_gradients(gradients, others)


def test_float64(monkeypatch):
    """Arrays of float64 are served by it on every device."""
    monkeypatch.delenv("LOGITLESS_BACKEND")
    monkeypatch.setattr(_portable, "plan", lambda *_: PLANS["blocks"])
    factors = np.asarray(TOKENS, "float64")
    loss = lambda *a, **o: linear_cross_entropy(*a, return_lse=True, **o)  # noqa: E731
    with enable_x64(True):
        hidden, weight, targets, bias = problem()
        arrays = [a.astype("float64") if a.dtype == jnp.float32 else a for a in (hidden, weight, targets, bias)]
        options = {n: v.astype("float64") if hasattr(v, "dtype") else v for n, v in ALL.items()}
        (value, lse), gradients = jax.value_and_grad(loss, (0, 1, 3), has_aux=True)(*arrays, **options)
        by_entropy = jax.grad(lambda *a: (factors * linear_logprobs(*a)[1]).sum(), (0, 1))(*arrays)
    assert {a.dtype.name for a in (value, lse, *gradients, *by_entropy)} == {"float64"}
    expected, others = in_float64(cross_entropy, *arrays, **options)
    _, of_entropy = in_float64(lambda *a: (factors * logprobs(*a)[1]).sum(), *arrays)
    assert relative_error(value, expected) < 1e-13
    assert all(relative_error(g, o) < 1e-12 for g, o in zip((*gradients, *by_entropy), (*others, *of_entropy[:2])))


def test_confident_tokens_keep_their_digits():
    """A target with all but 1e-6 of the probability, and an offset that all logits have in common."""
    hidden, weight, targets, _ = problem((5,), 8, 40, ignored=False)
    bias = jnp.full(40, 96.0).at[targets].add(24.0)
    value, gradients = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, targets[:1].repeat(5), bias)
    expected, others = in_float64(cross_entropy, hidden, weight, targets[:1].repeat(5), bias)
    assert abs(value - expected) <= 1e-4 * abs(expected)
    assert all(relative_error(g, o) < 1e-4 for g, o in zip(gradients, others[:2]))


def test_masked_entries_and_bad_targets(sizes):
    hidden, weight, targets, bias = problem()
    masked = bias.at[30:70].set(-jnp.inf)
    targets = jnp.where(targets == -100, -100, targets % 30)
    expected, others = in_float64(cross_entropy, hidden, weight, targets, masked)
    value, gradients = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(hidden, weight, targets, masked)
    assert relative_error(value, expected) <= 2e-6
    check_gradients(gradients, others)
    bad = targets.at[1, 2].set(VOCAB)
    value, gradients = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, bad, normalizer=9.0)
    ignored = jax.grad(linear_cross_entropy, (0, 1))(hidden, weight, bad.at[1, 2].set(-100), normalizer=9.0)
    assert jnp.isnan(value) and all((g == i).all() for g, i in zip(gradients, ignored))
    for output in linear_logprobs(hidden, weight, bad):
        assert jnp.isnan(output[1, 2]) and jnp.isnan(output).sum() == 1


def test_under_transformations():
    hidden, weight, targets, _ = problem(ignored=False)
    step = jax.value_and_grad(linear_cross_entropy, (0, 1))
    mapped = jax.jit(jax.vmap(step, (0, None, 0)))(hidden.repeat(3, 1), weight, targets.repeat(3, 1))
    for i in range(3):
        expected = step(hidden[i].repeat(3, 0), weight, targets[i].repeat(3, 0))
        for one, other in zip(jax.tree.leaves(jax.tree.map(lambda a: a[i], mapped)), jax.tree.leaves(expected)):
            assert relative_error(one, other) < 1e-6
    with pytest.raises(ValueError, match="logitless_cross_entropy.*cannot be differentiated"):
        jax.grad(lambda h: jax.grad(linear_cross_entropy)(h, weight, targets).sum())(hidden)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("vocab", [None, "model"])
def test_on_a_mesh(vocab):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hidden, weight, targets, bias = problem((8, 4), vocab=104)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_portable, "plan", lambda *_: Plan(6, 20, 0))
        where = Sharding(mesh, tokens="data", vocab=vocab)
        step = jax.value_and_grad(functools.partial(linear_cross_entropy, sharding=where), (0, 1, 3))
        value, gradients = jax.jit(step)(hidden, weight, targets, bias)
    expected, others = in_float64(cross_entropy, hidden, weight, targets, bias)
    assert relative_error(value, expected) <= 2e-6
    check_gradients(gradients, others)


SHAPES = [
    jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((2048, 64), "float32"), ((8192, 64), "float32"), ((2048,), "int32"))
]


def mean(budget):
    return lambda *a: linear_cross_entropy(*a, memory_budget=budget)


def of_logprobs(budget):
    return lambda *a: sum(o.mean() for o in linear_logprobs(*a, memory_budget=budget))


@pytest.mark.parametrize("function", [mean, of_logprobs])
@pytest.mark.parametrize("budget", [None, "4MiB"])
def test_no_program_has_the_logits(function, budget):
    step = jax.jit(jax.value_and_grad(function(budget), (0, 1)))
    narrow = [jax.ShapeDtypeStruct(s.shape, "bfloat16" if s.dtype == jnp.float32 else s.dtype) for s in SHAPES]
    text = jax.export.export(step, platforms=["tpu"])(*narrow).mlir_module()
    assert "stablehlo.dot_general" in text and "custom_call @logitless" not in text
    assert not re.findall(r"tensor<(?:2048x8192|8192x2048)x\w+>", text)


@pytest.mark.skipif(not ON_CPU, reason="counts what XLA's CPU compiler stores")
@pytest.mark.parametrize("function, budget, by", [
    (mean, "2MiB", (0, 1)), (mean, "24MiB", (0, 1)), (mean, "24MiB", ()), (mean, None, (0,)), (of_logprobs, "4MiB", (0, 1)),
])
def test_a_budget_is_a_ceiling(function, budget, by):
    function = jax.value_and_grad(function(budget), by) if by else function(budget)
    compiled = jax.jit(function).lower(*SHAPES).compile({"xla_backend_optimization_level": 2})
    assert compiled.memory_analysis().temp_size_in_bytes <= (parse_bytes(budget) or (18 << 20))
    assert not re.findall(r"\[(?:2048,8192|8192,2048)\]", compiled.as_text())


def divergence(budget):
    return lambda h, w, y: losses.jsd_loss(h, w, h[:, :48], w[:, :48], targets=y, memory_budget=budget)


@pytest.mark.skipif(not ON_CPU, reason="counts what XLA's CPU compiler stores")
def test_formulas_of_whole_logits(monkeypatch):
    """tests/python/losses compares them with the papers. Here are their memory, programs for a TPU, and samples."""
    step = jax.jit(jax.value_and_grad(divergence("12MiB"), (0, 1)))
    compiled = step.lower(*SHAPES).compile({"xla_backend_optimization_level": 2})
    assert compiled.memory_analysis().temp_size_in_bytes <= 12 << 20
    margin = jax.grad(lambda h, w, y: losses.arcface_loss(h, w, y, memory_budget="12MiB"), 1)
    sample = lambda h, w, y: linear_sample(h, w, key=jax.random.key(0), top_k=9, memory_budget="12MiB")  # noqa: E731
    for function in (step, margin, sample):
        text = jax.export.export(jax.jit(function), platforms=["tpu"])(*SHAPES).mlir_module()
        assert "custom_call @logitless" not in text and not re.findall(r"tensor<(?:2048x8192|8192x2048)x\w+>", text)
    assert "JAX's own operations, because LOGITLESS_BACKEND=portable" in losses.explain_divergence(*SHAPES[:2], *SHAPES[:2])

    hidden, weight = (jnp.asarray(RANDOM.standard_normal((n, 24)), "float32") for n in (90, 500))
    calls = [lambda of=of: linear_sample(hidden, weight, key=jax.random.key(1), memory_budget="256KiB", **of).tokens
             for of in (dict(top_k=50, top_p=0.9), dict(min_p=0.05), dict(temperature=0))]
    calls += [lambda: linear_top_logprobs(hidden, weight, k=9).top_ids, lambda: losses.teacher_top_k(hidden, weight, k=9)[0]]
    found = [call() for call in calls]
    monkeypatch.delenv("LOGITLESS_BACKEND")
    jax.clear_caches()
    for ours, call in zip(found, calls):
        np.testing.assert_array_equal(ours, call())
    jax.clear_caches()


def test_plans():
    both = {"d_hidden": ((8192, 4096), "bfloat16"), "d_weight": ((128256, 4096), "bfloat16")}
    sizes = functools.partial(plan, 8192, 4096, 128256, "bfloat16", both, host=False)
    default, sums = sizes(budget=0), 128256 * 4096 * 4
    assert default.block == 128256 and default.chunk >= 1024 and default.bytes <= 8192 * 128256 + sums + (1 << 20)
    for budget in (200 << 20, 1 << 30, 4 << 30, 16 << 30):
        assert sizes(budget=budget).bytes <= budget
    assert sizes(budget=1 << 30).block < 128256 and sizes(budget=16 << 30).chunk == 8192
    with pytest.raises(ValueError, match=r"memory_budget: 1048576 bytes are less than the smallest plan needs, 135\d+ bytes"):
        sizes(budget=1 << 20)
    assert sizes(budget=-(1 << 20)).bytes > 1 << 20  # a hint


def test_who_is_served_by_it(monkeypatch):
    assert backend() == ("portable", "LOGITLESS_BACKEND=portable")
    monkeypatch.setenv("LOGITLESS_BACKEND", "fast")
    with pytest.raises(ValueError, match="LOGITLESS_BACKEND: expected native or portable, got 'fast'"):
        backend()
    monkeypatch.delenv("LOGITLESS_BACKEND")
    jax.clear_caches()
    arrays = problem()
    expected = linear_cross_entropy(*arrays)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    jax.clear_caches()
    assert backend() == ("portable", "the library has kernels for cpu and cuda, JAX's backend is tpu")
    assert relative_error(linear_cross_entropy(*arrays), expected) < 2e-6
    monkeypatch.setattr(_backend, "refusal_of", lambda platform: "no library")
    assert backend() == ("portable", "no library")
    jax.clear_caches()


def test_a_missing_library_is_not_needed():
    code = """
import jax.numpy as jnp
from logitless.jax import backend, linear_cross_entropy, losses
print(backend().name, "cannot load /none.so" in backend().reason)
print(float(linear_cross_entropy(jnp.zeros((4, 8)), jnp.ones((32, 8)), jnp.arange(4), memory_budget="1MiB")))
print(float(losses.forward_kl_loss(jnp.zeros((4, 8)), jnp.ones((32, 8)), jnp.zeros((4, 8)), jnp.ones((32, 8)))))
"""
    environment = {**os.environ, "LOGITLESS_LIBRARY": "/none.so"}
    del environment["LOGITLESS_BACKEND"]
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    chosen, loss, divergence = run.stdout.splitlines()
    assert chosen == "portable True" and abs(float(loss) - np.log(32)) < 1e-6 and abs(float(divergence)) < 1e-6
