"""The precision of products of float32 arrays: given, or JAX's."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import problem

from logitless.jax import _arguments, _backend, _ffi, linear_cross_entropy, linear_logprobs

HIDDEN, WEIGHT, TARGETS, BIAS = problem(ignored=False)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")


@on_cpu
def test_a_cpu_refuses_tf32():
    for call in (linear_cross_entropy, linear_logprobs):
        with pytest.raises(ValueError, match="precision: tf32 is for a GPU, the device is a CPU"):
            call(HIDDEN, WEIGHT, TARGETS, precision="tf32")


def test_refusals_name_the_precision():
    for value in ("highest", 1, jax.lax.Precision.HIGHEST):
        with pytest.raises(ValueError, match="precision: expected 'ieee', 'tf32', 'bf16x3' or None, got "):
            linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, precision=value)


@on_cpu
def test_ieee_is_what_a_cpu_does():
    found = linear_cross_entropy(HIDDEN, WEIGHT, TARGETS)
    assert found == linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, precision="ieee")


@pytest.mark.parametrize("setting, tf32", [
    (None, True), ("default", True), ("high", True), ("tensorfloat32", True), ("TF32_TF32_F32", True),
    ("highest", False), ("float32", False), ("F32_F32_F32", False), ("BF16_BF16_F32", False),
])
def test_none_is_jaxs(monkeypatch, setting, tf32):
    monkeypatch.setattr(_ffi, "gpu_capability", lambda: 9.0)
    with jax.default_matmul_precision(setting):
        found = _arguments.precision(None, jnp.dtype("float32"))
        assert _ffi._precision_on(_ffi.c.DEVICE_CUDA, found) == ("tf32" if tf32 else "ieee")
        assert _ffi._precision_on(_ffi.c.DEVICE_CPU, found) == "ieee"
        assert _arguments.precision(None, jnp.dtype("bfloat16")) == "ieee"
        assert _arguments.precision("ieee", jnp.dtype("float32")) == "ieee"
    monkeypatch.setattr(_ffi, "gpu_capability", lambda: 7.5)
    assert _ffi._precision_on(_ffi.c.DEVICE_CUDA, found) == "ieee"


# A program for a GPU is lowered without one: its plans are replaced by a stand-in.
@on_cpu
@pytest.mark.parametrize("given", [None, "ieee"])
def test_the_program_has_it(monkeypatch, given):
    plan = _ffi._workspace_bytes
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_backend, "refusal_of", lambda platform: "")
    monkeypatch.setattr(_ffi, "_workspace_bytes", lambda device, *rest: 256 if device else plan(device, *rest))
    monkeypatch.setattr(_ffi, "gpu_capability", lambda: 9.0)
    jax.clear_caches()
    function = lambda x, w: linear_cross_entropy(x, w, TARGETS, precision=given)
    for setting in (None, "highest"):
        with jax.default_matmul_precision(setting):
            traced = jax.jit(jax.grad(function)).trace(HIDDEN, WEIGHT)
            for platform in ("cuda", "cpu"):
                text = traced.lower(lowering_platforms=(platform,)).as_text()
                tf32 = platform == "cuda" and given is None and setting is None
                assert re.findall(r"precision = (\d) : i64", text) == [str(int(tf32))]
    jax.clear_caches()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_values_on_a_gpu():
    if _ffi.gpu_capability() < 8.0:
        pytest.skip("a GPU without TF32")
    random = np.random.default_rng(0)
    x, w = random.standard_normal((300, 256)), random.standard_normal((5001, 256)) / 16
    y = random.integers(5001, size=300)
    z = x @ w.T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(300), y] -= 1
    exact = p @ w / 300

    def error(**options):
        loss = lambda h: linear_cross_entropy(h, w.astype("float32"), y, **options)
        found = np.asarray(jax.grad(loss)(x.astype("float32")), np.float64)
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    assert 2e-5 < error(precision="tf32") < 4e-3 and error(precision="ieee") < 1e-5
    assert error(precision="bf16x3") < 2e-5
    with jax.default_matmul_precision("highest"):
        assert error() < 1e-5
    with jax.default_matmul_precision("tensorfloat32"):
        assert 2e-5 < error() < 4e-3


def test_the_page_with_the_cast():
    text = (Path(__file__).parents[3] / "docs/use/jax.md").read_text(encoding="utf-8")
    (script,) = (s for s in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "astype(jnp.bfloat16)" in s)
    names = {}
    exec(compile(script, "jax.md", "exec"), names)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, shape) / 6 for name, key, shape in zip(
        ("embed", "layer", "head"), keys, ((500, 32), (32, 32), (500, 32)))}
    ids = jax.random.randint(keys[3], (2, 9), 0, 500)
    loss, after = names["step"](params, ids)
    hidden = jnp.tanh(params["embed"][ids[:, :-1]] @ params["layer"])
    plain = -jnp.take_along_axis(jax.nn.log_softmax(hidden @ params["head"].T), ids[:, 1:, None], -1).mean()
    assert loss.dtype == jnp.float32 and abs(loss - plain) < 0.01 * plain
    assert all(p.dtype == jnp.float32 for p in after.values()) and names["step"](after, ids)[0] < loss


def test_the_quick_start(capsys):
    text = (Path(__file__).parents[3] / "docs/use/quick_start.md").read_text(encoding="utf-8")
    (script,) = (s for s in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "jax" in s)
    exec(compile(script, "quick_start.md", "exec"), {})
    ours, plain = map(float, capsys.readouterr().out.split())
    assert ours == pytest.approx(plain, rel=1e-5)
