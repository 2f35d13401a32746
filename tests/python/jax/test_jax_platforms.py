"""Tracing and lowering on a machine with a GPU, tested without one: plans for CUDA are replaced by stand-ins."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_oracle import of_kernels, problem, relative_error

from logitless.jax import (
    _backend, _ffi, backend, far_field, far_field_cross_entropy, far_field_state, linear_cross_entropy, linear_logprobs, losses,
    vocab_parallel_linear_cross_entropy,
)
from logitless.jax.head import nan_at_bad_targets

pytestmark = [of_kernels, pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")]

CUDA_WORKSPACE = 12345 * 256


@pytest.fixture
def gpu(monkeypatch):
    plan = _ffi._workspace_bytes
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_backend, "refusal_of", lambda platform: "")
    monkeypatch.setattr(
        _ffi, "_workspace_bytes", lambda device, *rest: CUDA_WORKSPACE if device == _ffi.c.DEVICE_CUDA else plan(device, *rest)
    )
    jax.clear_caches()
    far_field._missing_on_gpu.cache_clear()
    yield
    jax.clear_caches()
    far_field._missing_on_gpu.cache_clear()


def each(hidden, weight, targets, bias):
    return linear_cross_entropy(hidden, weight, targets, bias, reduction="none").sum()


def logprob(*arrays):
    return sum(output.sum() for output in linear_logprobs(*arrays))


@pytest.mark.parametrize("function", [linear_cross_entropy, each, logprob])
def test_one_program_of_each_platform(gpu, function):
    arrays = problem()
    traced = jax.jit(jax.value_and_grad(function, (0, 1, 3))).trace(*arrays)
    for platform, found in (("cuda", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = re.findall(r"custom_call @logitless_\w+.*", text)
        assert len(calls) == (1 if function is linear_cross_entropy else 2)
        for call in calls:
            assert (f"tensor<{CUDA_WORKSPACE + 256}xi8>" in call) == found
            assert ("threads = 0 : i64" in call) == found


@pytest.mark.parametrize("function", [linear_cross_entropy, each, logprob])
def test_a_program_for_a_tpu_has_jax_s_operations(function):
    """The library serves the machine that lowers it. Its budget is a hint there."""
    arrays = problem()
    step = jax.value_and_grad(functools.partial(function, memory_budget="1MiB") if function is linear_cross_entropy else function)
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    parallel = jax.shard_map(
        lambda *a: jax.lax.pmean(function(*a), "d"), mesh=mesh, in_specs=(P(), P(), P("d"), P()), out_specs=P())
    many = jnp.stack([arrays[2]] * jax.device_count())
    for called, given in ((step, arrays), (jax.vmap(step, (0, None, 0, None)), arrays),
                          (jax.grad(lambda h, w, y, b: parallel(h[None], w, y, b)), (arrays[0], arrays[1], many, arrays[3]))):
        text = jax.export.export(jax.jit(called), platforms=["tpu"])(*given).mlir_module()
        assert "dot_general" in text and "custom_call @logitless" not in text
        assert "custom_call @logitless" in jax.jit(called).lower(*given).as_text()
    with pytest.raises(NotImplementedError, match="autochunk: executor='native' runs on cpu and cuda; this program is lowered"):
        jax.export.export(jax.jit(lambda h, w: losses.jsd_loss(h, w, h, w)), platforms=["tpu"])(*arrays[:2])


def test_dtypes_without_kernels_on_a_gpu(gpu, monkeypatch):
    for capability, served in ((7.0, ""), (7.5, "float32 float16"), (8.0, "float32 float16 bfloat16")):
        monkeypatch.setattr(_backend, "gpu_capability", lambda found=capability: found)
        assert [d for d in ("float32", "float16", "bfloat16") if backend(d).name == "native"] == served.split()
        jax.clear_caches()
        text = jax.jit(linear_cross_entropy).trace(*problem(dtype="bfloat16")).lower(lowering_platforms=("cuda",)).as_text()
        assert ("custom_call @logitless" in text) == ("bfloat16" in served)


def far(hidden, weight, targets, bias):
    return far_field_cross_entropy(hidden, weight, targets, far_field_state(*weight.shape), bias)


def test_a_step_of_the_far_field_is_one_call_on_each_platform(gpu):
    arrays = problem(dtype="bfloat16")
    step = jax.jit(jax.value_and_grad(far, (0, 1, 3), has_aux=True))
    for platform in ("cuda", "cpu"):
        text = jax.export.export(
            step, platforms=[platform], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("logitless_far_field_step")]
        )(*arrays).mlir_module()
        (call,) = re.findall(r"custom_call @logitless_\w+.*", text)
        assert "logitless_far_field_step" in call and ("threads = 0 : i64" in call) == (platform == "cuda")
    (_, after), (d_hidden, *_) = step(*arrays)  # on this machine's CPU
    assert after.data.any() and d_hidden.shape == arrays[0].shape
    with pytest.raises(NotImplementedError, match="far_field_cross_entropy: runs on cpu and cuda; this program is lowered"):
        step.trace(*arrays).lower(lowering_platforms=("tpu",))


def test_a_gpu_without_kernels_of_the_far_field_is_refused_with_the_reason(gpu, monkeypatch):
    def no_plan(device, threads, function, options, inputs, outputs, kind):
        raise NotImplementedError(f"no plan: kernel sm80 does not have kind {kind}")

    monkeypatch.setattr(_ffi, "_workspace_bytes", no_plan)
    with pytest.raises(NotImplementedError, match="no kernels for bfloat16 of dim 16 on this GPU: no plan: .* kind 4. linear_"):
        far(*problem(dtype="bfloat16"))
    monkeypatch.setattr(_backend, "platform_of_jax", lambda: "rocm")
    monkeypatch.setattr(_backend, "refusal_of", lambda platform: f"no kernels of {platform}")
    with pytest.raises(NotImplementedError, match="far_field_cross_entropy: needs the library: no kernels of rocm"):
        far(*problem(dtype="bfloat16"))


@pytest.mark.parametrize("function", [linear_cross_entropy, each, logprob])
def test_the_cpu_still_runs_it(gpu, function):
    arrays = problem()
    gradients = jax.grad(function, (0, 1, 3))(*arrays)
    mapped = jax.vmap(jax.grad(function), (0, None, 0, None))(*arrays)
    hidden, weight, targets, bias = arrays
    scanned, _ = jax.lax.scan(lambda t, x: (t + function(x[0], weight, x[1], bias), None), 0.0, (hidden, targets))
    assert all(np.isfinite(g).all() for g in gradients) and mapped.shape == arrays[0].shape and np.isfinite(scanned)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(gpu, check_vma):
    arrays = problem(vocab=104)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    parallel = jax.shard_map(
        lambda *a: vocab_parallel_linear_cross_entropy(*a, axis_name="tp"),
        mesh=mesh, in_specs=(P(), P("tp"), P(), P("tp")), out_specs=P(), check_vma=check_vma,
    )
    found = jax.jit(jax.grad(parallel, 1))(*arrays)
    assert relative_error(found, jax.grad(linear_cross_entropy, 1)(*arrays)) < 1e-5


def test_bad_targets_are_nan_where_nothing_fails(gpu):
    targets = jnp.asarray([3, -100, -1, 101, 100])
    value = nan_at_bad_targets(jnp.ones(5), targets, -100, 101)
    assert jnp.isnan(value).tolist() == [False, False, True, True, False]
    pairs = jnp.asarray([[3, -100], [4, 500]])
    assert jnp.isnan(nan_at_bad_targets(jnp.ones((2, 2)), pairs, -100, 101)).tolist() == [[False, False], [False, True]]
    assert jnp.isnan(nan_at_bad_targets(jnp.ones(2), pairs, -100, 101)).tolist() == [False, True]
