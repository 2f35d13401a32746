"""The far field in JAX: the library's bits, a state that goes through jit and scan, and refusals."""

import ctypes
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import ON_CPU
from logitless import _far_field
from logitless import _library as c
from logitless._options import LossOptions, struct_of
from logitless.jax import (
    FarFieldState, far_field_cross_entropy, far_field_report, far_field_state, linear_cross_entropy,
)

pytestmark = pytest.mark.skipif(not ON_CPU, reason="the far field of JAX runs on the CPU")
V, D, N = 65536, 8, 64
QUICK = dict(error=0.05, audit_every=3, refresh_every=3, refresh_delay=2, sample_rows=64)
STEPS = 6  # an order is begun at step 3 and tried at 5
AT_ONCE = dict(error=0.05, refresh_every=1, refresh_delay=0)  # a far-field step from the first one on


def problem():
    g = np.random.default_rng(0)
    centers = (4 * g.random((V // 128, D)) - 2).astype(np.float32)
    weight = np.tile(centers, (128, 1)) + (0.3 * g.random((V, D)) - 0.15).astype(np.float32)
    hidden = 1.2 * np.tile(centers[:4], (N // 4, 1)) + (0.6 * g.random((N, D)) - 0.3).astype(np.float32)
    return hidden.astype(np.float32), weight.astype(np.float32), g.integers(0, V, N).astype(np.int32)


HIDDEN, WEIGHT, TARGETS = problem()


@jax.jit
def step(hidden, weight, state):
    loss_of = lambda h, w: far_field_cross_entropy(h, w, TARGETS, state)  # noqa: E731
    return jax.value_and_grad(loss_of, (0, 1), has_aux=True)(hidden, weight)


def run(state, steps=STEPS, hidden=HIDDEN, weight=WEIGHT):
    results = []
    for _ in range(steps):
        (loss, state), (d_hidden, d_weight) = step(hidden, weight, state)
        results.append([np.asarray(a) for a in (loss, d_hidden, d_weight)])
        hidden, weight = hidden - np.float32(0.5) * results[-1][1], weight - np.float32(0.5) * results[-1][2]
    return results, (state, hidden, weight)


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for s, t in zip(a, b) for x, y in zip(s, t))


def tensor(array):
    made = c.Tensor(data=array.ctypes.data, rank=array.ndim, dtype=c.DTYPES[{"float32": "f32", "int32": "i32"}[array.dtype.name]])
    made.shape[: array.ndim] = array.shape
    made.strides[: array.ndim] = [s // array.itemsize for s in array.strides]
    return ctypes.pointer(made)


def by_the_library(steps):
    native = _far_field.Head(_far_field.options(**QUICK), c.Context(threads=1))
    hidden, weight, results = HIDDEN.copy(), WEIGHT.copy(), []
    for _ in range(steps):
        made = [np.empty((), np.float32), np.empty_like(hidden), np.empty_like(weight)]
        inputs, outputs = c.new(c.CrossEntropyInputs), c.new(c.CrossEntropyOutputs)
        inputs.hidden, inputs.weight, inputs.targets = map(tensor, (hidden, weight, TARGETS))
        outputs.loss, outputs.d_hidden, outputs.d_weight = map(tensor, made)
        native.step(struct_of(LossOptions()), inputs, outputs)
        results.append(made)
        hidden, weight = hidden - np.float32(0.5) * made[1], weight - np.float32(0.5) * made[2]
    return results, native.report()


@pytest.fixture(scope="module")
def whole():
    results, (state, *_) = run(far_field_state(V, D, **QUICK))
    return results, far_field_report(state)


def test_a_run_has_the_bits_of_the_library(whole):
    results, report = by_the_library(STEPS)
    assert same(whole[0], results) and whole[1] == report
    assert (report.steps, report.dense_steps, report.audits, report.refreshes) == (STEPS, 4, 1, 1) and report.far


def test_a_run_resumes(whole):
    """Resumes while an order is made, from the array that a checkpoint would hold."""
    first, (state, hidden, weight) = run(far_field_state(V, D, **QUICK), 4)
    saved = np.asarray(state.data).copy()
    fresh = far_field_state(V, D, **QUICK)
    restored = jax.tree.unflatten(jax.tree.structure(fresh), [jnp.asarray(saved)])
    rest, (state, *_) = run(restored, STEPS - 4, hidden, weight)
    assert same(first + rest, whole[0]) and far_field_report(state) == whole[1]


def test_transformations():
    """A scan carries the state; a checkpoint recomputes the same step; a call that is not differentiated is no step."""
    state = far_field_state(V, D, **AT_ONCE)
    two, (after, *_) = run(state, 2)

    def turn(carry, _):
        hidden, weight, state = carry
        (loss, state), (d_h, d_w) = step(hidden, weight, state)
        return (hidden - 0.5 * d_h, weight - 0.5 * d_w, state), (loss, d_h)

    (*_, scanned), (losses, d_hidden) = jax.lax.scan(turn, (HIDDEN, WEIGHT, state), None, length=2)
    assert far_field_report(scanned) == far_field_report(after) and far_field_report(after).far
    assert np.array_equal(d_hidden, np.stack([r[1] for r in two])) and np.array_equal(losses, [r[0] for r in two])

    again = jax.checkpoint(lambda h: far_field_cross_entropy(jnp.sin(h), WEIGHT, TARGETS, state))
    once = lambda h: far_field_cross_entropy(jnp.sin(h), WEIGHT, TARGETS, state)  # noqa: E731
    found = [jax.jit(jax.value_and_grad(f, has_aux=True))(HIDDEN) for f in (again, once)]
    assert np.array_equal(found[0][1], found[1][1])
    assert far_field_report(found[0][0][1]) == far_field_report(found[1][0][1])

    loss, unchanged = far_field_cross_entropy(HIDDEN, WEIGHT, TARGETS, after)
    assert np.array_equal(unchanged.data, after.data)
    assert loss == linear_cross_entropy(HIDDEN, WEIGHT, TARGETS)


def test_far_both_has_capacity_for_two_orders():
    _, (state, *_) = run(far_field_state(V, D, accuracy="far_both", error=0.05, refresh_every=1, refresh_delay=2), 4)
    report = far_field_report(state)  # an order at step 3, another one begun at step 4
    assert (report.steps, report.refreshes) == (4, 1) and report.far
    length = int.from_bytes(np.asarray(state.data[:8]).tobytes(), "little")
    assert 24 * V < length < state.data.size and not np.asarray(state.data[8 + length :]).any()


@pytest.mark.parametrize("options", [
    dict(label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7, ignore_index=3, bias=True),
    dict(reduction="sum", softcap=9.0, class_weight=np.linspace(0.5, 1.5, 40, dtype=np.float32)),
    dict(normalizer=jnp.float32(7.0), token_weight=np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5)),
])
def test_options_of_a_dense_step(options):
    """A small vocabulary always takes the dense plan, with the numbers of linear_cross_entropy."""
    g = np.random.default_rng(1)
    hidden, weight, bias = (g.standard_normal(s).astype(np.float32) for s in ((2, 5, 8), (40, 8), (40,)))
    targets = g.integers(0, 40, (2, 5))
    bias = bias if options.pop("bias", False) else None
    state = far_field_state(40, 8)
    far = lambda h, w: far_field_cross_entropy(h, w, targets, state, bias, **options)  # noqa: E731
    exact = lambda h, w: linear_cross_entropy(h, w, targets, bias, **options)  # noqa: E731
    (loss, after), found = jax.value_and_grad(far, (0, 1), has_aux=True)(hidden, weight)
    expected_loss, expected = jax.value_and_grad(exact, (0, 1))(hidden, weight)
    assert loss == expected_loss and all(np.array_equal(a, b) for a, b in zip(found, expected))
    assert far_field_report(after).dense_steps == 1 and far_field_report(state).steps == 0


def test_errors_are_named():
    with pytest.raises(ValueError, match=r"error: expected a number in \(0, 1\), got 1.5"):
        far_field_state(V, D, error=1.5)
    with pytest.raises(ValueError, match="vocab: expected 1 to 2147483519, got 0"):
        far_field_state(0, D)
    with pytest.raises(ValueError, match=f"dim: expected 1 to 2147483519, got {1 << 62}"):
        far_field_state(V, 1 << 62, accuracy="far_both")
    with pytest.raises(ValueError, match=f"refresh_every: expected 1 to {1 << 40}, got {(1 << 63) - 1}"):
        far_field_state(V, D, refresh_every=(1 << 63) - 1)
    with pytest.raises(ValueError, match=r"memory_budget: expected less than 4611686018427387904 bytes, got 9"):
        far_field_state(V, D, memory_budget=1 << 63)
    state = far_field_state(V, D, **AT_ONCE)
    with pytest.raises(NotImplementedError, match="reduction: .* got 'none'"):
        far_field_cross_entropy(HIDDEN, WEIGHT, TARGETS, state, reduction="none")
    with pytest.raises(TypeError, match="state: expected a FarFieldState, got ArrayImpl"):
        far_field_cross_entropy(HIDDEN, WEIGHT, TARGETS, state.data)
    with pytest.raises(ValueError, match=r"weight: expected \[65536, 8\], which the state is for, got \[128, 8\]"):
        far_field_cross_entropy(HIDDEN, WEIGHT[:128], TARGETS, state)
    with pytest.raises(ValueError, match=r"state: expected int8\[\d+\], got int8\[99\]"):
        far_field_cross_entropy(HIDDEN, WEIGHT, TARGETS, FarFieldState(state.data[:99], state.options, V, D))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    P = jax.sharding.PartitionSpec
    with pytest.raises(NotImplementedError, match="inside a shard_map"):
        sharded = jax.shard_map(
            lambda h, y: far_field_cross_entropy(h, WEIGHT, y, state)[0][None], mesh=mesh,
            in_specs=(P("data"), P("data")), out_specs=P("data"),
        )
        sharded(HIDDEN, TARGETS)


def test_a_damaged_state_fails():
    _, (state, *_) = run(far_field_state(V, D, **AT_ONCE), 1)
    for at, value, match in ((2, 127, "state: the first 8 bytes tell of"), (300000, 77, "vocab_ids"), (9, 1, "state")):
        damaged = np.asarray(state.data).copy()
        damaged[at : at + 8] = value
        bad = FarFieldState(jnp.asarray(damaged), state.options, V, D)
        with pytest.raises(Exception, match=match):
            jax.block_until_ready(step(HIDDEN, WEIGHT, bad))


def test_the_documents_example():
    """Runs the Python of docs/use/far_field.md, after the lines that a reader has before it."""
    text = (Path(__file__).parents[3] / "docs/use/far_field.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## JAX\n.*?^```python\n(.*?)^```", text, re.M | re.S)
    names = dict(
        jax=jax, trunk=lambda params, x: jnp.tanh(x @ params["trunk"]), vocab=V, dim=D, batches=[(HIDDEN, TARGETS)] * 3,
        params={"trunk": np.eye(D, dtype=np.float32), "head": WEIGHT},
    )
    exec(code, names)
    assert far_field_report(names["state"]).steps == 3 and np.isfinite(names["loss"])
    assert not np.array_equal(names["params"]["head"], WEIGHT)
