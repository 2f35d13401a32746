"""The far field of JAX on a GPU: near float64 and the CPU, the same bits when it is repeated or resumed, and the
errors of the CPU. Runs with JAX_PLATFORMS=cuda,cpu."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import ON_CPU, check_gradients, cross_entropy, in_float64, relative_error
from jax_oracle import problem as small_problem

from logitless.jax import (
    FarFieldState, _backend, far_field_cross_entropy, far_field_report, far_field_state, linear_cross_entropy,
)

if ON_CPU or _backend.gpu_capability() < 8.0:
    pytest.skip("no GPU from compute capability 8.0 on under test (JAX_PLATFORMS=cuda,cpu)", allow_module_level=True)
V, D, N = 131072, 128, 2048  # the far field pays
QUICK = dict(error=0.05, audit_every=3, refresh_every=3, refresh_delay=2, sample_rows=256)
STEPS = 8
AT_ONCE = dict(error=0.05, refresh_every=1, refresh_delay=0)  # a far-field step from the first one on


def problem():
    """Returns hidden [N, D], weight [V, D] in bf16, targets [N]: shuffled clusters of similar vocabulary entries, and
    tokens of four topics."""
    g = np.random.default_rng(0)
    normal = lambda *shape: g.standard_normal(shape, np.float32)  # noqa: E731
    weight = (8 / D) ** 0.5 * (np.repeat(normal(V // 128, D), 128, 0) + 0.02 * normal(V, D))
    hidden = 1.2 * np.repeat(normal(4, D), N // 4, 0) + 0.1 * normal(N, D)
    bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    return bf16(hidden), bf16(weight[g.permutation(V)]), jnp.asarray(g.integers(0, V, N), jnp.int32)


HIDDEN, WEIGHT, TARGETS = problem()


@jax.jit
def step(hidden, weight, targets, state):
    loss_of = lambda h, w: far_field_cross_entropy(h, w, targets, state)  # noqa: E731
    return jax.value_and_grad(loss_of, (0, 1), has_aux=True)(hidden, weight)


def run(state, steps=STEPS, hidden=HIDDEN, weight=WEIGHT):
    results = []
    for _ in range(steps):
        (loss, state), (d_hidden, d_weight) = step(hidden, weight, TARGETS, state)
        results.append([np.asarray(a) for a in (loss, d_hidden, d_weight)])
        hidden, weight = hidden - 0.5 * d_hidden, weight - 0.5 * d_weight
    return results, (state, hidden, weight)


def same(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for s, t in zip(a, b) for x, y in zip(s, t))


def float64_of(hidden, weight, targets):
    """Returns the mean loss, d_hidden and d_weight in float64, some tokens at a time."""
    hidden, weight, targets = (np.asarray(a).astype(np.float64) for a in (hidden, weight, targets))
    loss, d_hidden, d_weight = 0.0, np.empty_like(hidden), np.zeros_like(weight)
    for rows in np.split(np.arange(N), N // 256):
        logits = hidden[rows] @ weight.T
        top = logits.max(-1, keepdims=True)
        lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        at = np.arange(rows.size), targets[rows].astype(int)
        loss += (lse[:, 0] - logits[at]).sum() / N
        answer = np.exp(logits - lse) / N
        answer[at] -= 1 / N
        d_hidden[rows], d_weight = answer @ weight, d_weight + answer.T @ hidden[rows]
    return loss, d_hidden, d_weight


@pytest.fixture(scope="module")
def whole():
    results, (state, *_) = run(far_field_state(V, D, **QUICK))
    return results, far_field_report(state)


def test_a_far_field_step_is_near_float64_and_the_cpu():
    state = far_field_state(V, D, **AT_ONCE)
    (loss, after), gradients = step(HIDDEN, WEIGHT, TARGETS, state)
    report = far_field_report(after)
    assert report.far and report.dense_steps == 0 and report.refreshes == 1 and 0 < report.last_error < 0.05
    expected = float64_of(HIDDEN, WEIGHT, TARGETS)
    assert abs(float(loss) - expected[0]) < 1e-5 * expected[0]
    for found, exact in zip(gradients, expected[1:]):
        assert 0 < relative_error(found, exact) < 0.05

    there = jax.devices("cpu")[0]
    given = [jax.device_put(a, there) for a in (HIDDEN, WEIGHT, TARGETS)]
    (loss_there, state_there), gradients_there = step(*given, jax.device_put(state, there))
    assert list(state_there.data.devices()) == [there] and far_field_report(state_there).far
    assert abs(float(loss) - float(loss_there)) < 1e-5 * expected[0]
    for found, other in zip(gradients, gradients_there):
        assert relative_error(found, np.asarray(other)) < 0.1


def test_a_run_takes_the_far_field_and_repeats(whole):
    results, report = whole
    assert report.far and report.steps == STEPS and report.audits > 0 and report.last_error < 0.05
    assert 0 < report.dense_steps < STEPS and 0 < report.mean_selected < 0.7
    again, (state, *_) = run(far_field_state(V, D, **QUICK))
    assert same(again, results) and far_field_report(state) == report


def test_a_run_resumes(whole):
    """Resumes while an order waits to be used, from the array that a checkpoint would hold."""
    first, (state, hidden, weight) = run(far_field_state(V, D, **QUICK), 4)
    saved = np.asarray(state.data).copy()
    run(state, 2, hidden, weight)  # the library's head has a later state then
    restored = FarFieldState(jnp.asarray(saved), state.options, V, D)
    rest, (state, *_) = run(restored, STEPS - 4, hidden, weight)
    assert same(first + rest, whole[0]) and far_field_report(state) == whole[1]
    length = int.from_bytes(np.asarray(state.data[:8]).tobytes(), "little")
    assert 12 * V < length < state.data.size and not np.asarray(state.data[8 + length :]).any()


def test_transformations():
    """A scan carries the state; a checkpoint recomputes the same step; a call that is not differentiated is no step."""
    state = far_field_state(V, D, **AT_ONCE)
    two, (after, *_) = run(state, 2)

    def turn(carry, _):
        hidden, weight, state = carry
        (loss, state), (d_h, d_w) = step(hidden, weight, TARGETS, state)
        return (hidden - 0.5 * d_h, weight - 0.5 * d_w, state), (loss, d_h)

    (*_, scanned), (losses, d_hidden) = jax.lax.scan(turn, (HIDDEN, WEIGHT, state), None, length=2)
    assert far_field_report(scanned) == far_field_report(after) and far_field_report(after).far
    assert same([[np.asarray(losses), np.asarray(d_hidden)]], [[np.stack([r[0] for r in two]), np.stack([r[1] for r in two])]])

    once = lambda h: far_field_cross_entropy(jnp.tanh(h), WEIGHT, TARGETS, state)  # noqa: E731
    found = [jax.jit(jax.value_and_grad(f, has_aux=True))(HIDDEN) for f in (jax.checkpoint(once), once)]
    assert np.array_equal(found[0][1], found[1][1])
    assert far_field_report(found[0][0][1]) == far_field_report(found[1][0][1])

    loss, unchanged = far_field_cross_entropy(HIDDEN, WEIGHT, TARGETS, after)
    assert np.array_equal(unchanged.data, after.data)
    assert loss == linear_cross_entropy(HIDDEN, WEIGHT, TARGETS)


def test_far_both():
    state = far_field_state(V, D, **{**AT_ONCE, "accuracy": "far_both"})
    (loss, after), (d_hidden, _) = step(HIDDEN, WEIGHT, TARGETS, state)
    expected = float64_of(HIDDEN, WEIGHT, TARGETS)
    assert far_field_report(after).audits > 0 and abs(float(loss) - expected[0]) < 0.05
    assert relative_error(d_hidden, expected[1]) < 0.05


@pytest.mark.parametrize("options", [
    dict(label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7),
    dict(reduction="sum", softcap=9.0),
    dict(normalizer=jnp.float32(7.0), token_weight=np.linspace(0, 1, 21, dtype=np.float32).reshape(3, 7)),
])
def test_a_small_vocabulary_takes_dense_steps(options):
    hidden, weight, targets, bias = small_problem(dtype="bfloat16")
    state = far_field_state(*weight.shape)
    far = lambda h, w, b: far_field_cross_entropy(h, w, targets, state, b, **options)  # noqa: E731
    (loss, after), found = jax.jit(jax.value_and_grad(far, (0, 1, 2), has_aux=True))(hidden, weight, bias)
    expected, gradients = in_float64(functools.partial(cross_entropy, **options), hidden, weight, targets, bias)
    assert abs(float(loss) - expected) <= 1e-5 * max(abs(expected), 1.0)
    check_gradients(found, gradients, "bfloat16")
    report = far_field_report(after)
    assert (report.steps, report.dense_steps, report.far) == (1, 1, False)


BUDGET = 96 << 20


def print_extra_bytes():
    """Prints the peak of XLA's memory in two steps of a small budget, less arrays and gradients: of a new process."""
    (device,) = HIDDEN.devices()
    state = far_field_state(V, D, **AT_ONCE, memory_budget=BUDGET)
    (_, after), _ = step(HIDDEN, WEIGHT, TARGETS, state)
    before = device.memory_stats()["bytes_in_use"]
    (_, after), gradients = jax.block_until_ready(step(HIDDEN, WEIGHT, TARGETS, after))
    assert far_field_report(after).far
    # The handler's gradients, and those that are scaled by the cotangent.
    results = 2 * sum(g.nbytes for g in gradients) + after.data.nbytes
    print(device.memory_stats()["peak_bytes_in_use"] - before - results)


def test_the_workspace_is_within_the_budget():
    here = Path(__file__)
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    code = f"import jax_settings, {here.stem} as t; t.print_extra_bytes()"
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert BUDGET // 2 < int(ran.stdout.split()[-1]) < BUDGET + (8 << 20)
    with pytest.raises(Exception, match="memory_budget: 64.0 KiB .* is below the least plan"):
        jax.block_until_ready(step(HIDDEN, WEIGHT, TARGETS, far_field_state(V, D, **AT_ONCE, memory_budget=1 << 16)))


def test_errors_are_those_of_the_cpu():
    state = far_field_state(V, D, **QUICK)
    for bad in (-1, V):
        with pytest.raises(Exception, match=rf"targets: the one at position 9 is outside \[0, {V}\)"):
            jax.block_until_ready(step(HIDDEN, WEIGHT, TARGETS.at[9].set(bad), state))
    _, (state, *_) = run(far_field_state(V, D, **AT_ONCE), 1)
    for at, value, match in ((2, 127, "state: the first 8 bytes tell of"), (300000, 77, "vocab_ids"), (9, 1, "state")):
        damaged = np.asarray(state.data).copy()
        damaged[at : at + 8] = value
        with pytest.raises(Exception, match=match):
            jax.block_until_ready(step(HIDDEN, WEIGHT, TARGETS, FarFieldState(jnp.asarray(damaged), state.options, V, D)))
    (loss, _), _ = step(HIDDEN, WEIGHT, TARGETS, state)  # an error leaves nothing behind
    assert np.isfinite(loss)


def test_refusals():
    state = far_field_state(V, D, **AT_ONCE)
    with pytest.raises(NotImplementedError, match=f"no kernels for float32 of dim {D} on this GPU: "):
        far_field_cross_entropy(HIDDEN.astype("float32"), WEIGHT.astype("float32"), TARGETS, state)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    P = jax.sharding.PartitionSpec
    with pytest.raises(NotImplementedError, match="inside a shard_map"):
        jax.shard_map(
            lambda h, y: far_field_cross_entropy(h, WEIGHT, y, state)[0][None], mesh=mesh,
            in_specs=(P("data"), P("data")), out_specs=P("data"),
        )(HIDDEN, TARGETS)
