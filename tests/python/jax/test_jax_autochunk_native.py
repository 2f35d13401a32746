"""autochunk with executor="native": programs that the library runs as custom calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autochunk_losses import (
    DIM,
    ROWS,
    VOCAB,
    arguments,
    attention,
    check_same,
    contrastive,
    cross_entropy,
    distillation,
    dpo,
    exactly,
    integer_labels,
    masked,
    mlp,
    per_token,
    random,
    run,
    softcapped,
    targets,
    two_heads,
    whole,
    z_loss,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax_oracle import GRADIENT_ERROR, enable_x64, relative_error

from logitless.jax import autochunk
from logitless.jax._autochunk import Unsupported, native

ON_CPU = jax.default_backend() == "cpu"


def natively(fn, **options):
    return autochunk(fn, executor="native", **options)


def same_bits(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


FUNCTIONS = (cross_entropy, z_loss, per_token, two_heads, dpo, contrastive, attention, mlp)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_float32(fn):
    args = arguments(fn)
    chunked = natively(fn, chunks=3)
    found = run(chunked, args)
    check_same(found, exactly(fn, args), GRADIENT_ERROR["float32"])
    check_same(found, run(autochunk(fn, chunks=3), args), 2 * GRADIENT_ERROR["float32"])
    assert chunked.source().startswith("graph ")
    assert "run by the library" in chunked.explain()


@pytest.mark.parametrize("fn", [z_loss, dpo, mlp], ids=lambda f: f.__name__)
def test_float64(fn):
    with enable_x64(True):
        args = tuple(a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arguments(fn))
        check_same(run(natively(fn, memory_budget="200KiB"), args), run(fn, args), 1e-12)


@pytest.mark.parametrize("fn", [softcapped, distillation, mlp], ids=lambda f: f.__name__)
def test_bfloat16_as_close_as_the_function_itself(fn):
    args = arguments(fn, "bfloat16")
    exact, plain, mine = exactly(fn, args), run(fn, args), run(natively(fn, chunks=4), args)
    for e, p, m in zip(*([*o, *g] for o, g in (exact, plain, mine))):
        assert m.dtype == p.dtype == jnp.bfloat16
        assert relative_error(m, e) <= 1.5 * relative_error(p, e) + 2**-8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_engine_serves_losses_of_logits_in_fp32(dtype):
    def loss(hidden, weight, target):
        logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(logits, -1)
        nll = lse - jnp.take_along_axis(logits, target[:, None], 1)[:, 0]
        return (nll + 1e-3 * lse**2).mean()

    args = random(256, 32, dtype=dtype), random(4000, 32, dtype=dtype), jnp.maximum(targets(256, 4000), 0)
    chunked = natively(loss, gradients="forward")
    found = run(chunked, args)
    assert "on the head engine" in chunked.explain()
    check_same(found, exactly(loss, args), GRADIENT_ERROR[dtype])


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * 4


ALIASED = {  # both operands of the logits come from one value
    "itself": lambda h: (h, h),
    "normalised": lambda h: (unit(h), unit(h)),
    "normalised one side": lambda h: (unit(h), h),
    "joined": lambda h: (jnp.concatenate([h[260:], h[:260]]),) * 2,
    "transposed": lambda h: (jnp.tanh(h.T).T,) * 2,
    "parts": lambda h: (h[:512], h),
    "detached left": lambda h: (jax.lax.stop_gradient(h), h),
    "detached right": lambda h: (h, jax.lax.stop_gradient(h)),
}
MADE_OF_THEM = {
    "cross entropy": lambda z, h, t: integer_labels(z, t).mean(),
    "masked": lambda z, h, t: masked(integer_labels(z, t), jnp.where(t % 5 == 0, -100, t)),
    "z loss": lambda z, h, t: (integer_labels(z, t) + 1e-2 * jax.nn.logsumexp(z, -1) ** 2).mean(),
    "bias": lambda z, h, t: integer_labels(0.7 * (z + h.sum(-1)), t).mean(),
    "softcap": lambda z, h, t: integer_labels(3 * jnp.tanh(z / 3), t).mean(),
}


@pytest.mark.parametrize(
    "sides, made", [(s, "cross entropy") for s in ALIASED] + [("itself", m) for m in list(MADE_OF_THEM)[1:]]
)
def test_both_sides_are_one_value(sides, made):
    def loss(h, t):
        x, w = ALIASED[sides](h)
        return MADE_OF_THEM[made](x @ w.T, h, t[: x.shape[0]])

    args = random(520, 16, scale=1.0), whole(520, 520)  # 1 MiB of logits
    check_same(run(natively(loss), args), exactly(loss, args), GRADIENT_ERROR["float32"])


@pytest.mark.parametrize("budget", ["48KiB", "64KiB", "300KiB"])
@pytest.mark.parametrize("fn", [cross_entropy, z_loss, dpo], ids=lambda f: f.__name__)
def test_the_budget_bounds_what_xla_holds(fn, budget, monkeypatch):
    args = arguments(fn)
    monkeypatch.setattr("logitless.jax._ffi.threads_of", lambda device: 1 if device == 0 else 0)
    chunked = natively(fn, memory_budget=budget)
    text = chunked.explain(*args)
    assert "NOT met" not in text and "met)" in text
    plan = chunked._planned(args, {})
    compiled = plan.forward.compiled
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    named = dict(zip(plan.call.names, shapes))
    program = jax.jit(compiled.function).lower(*(named[p] for p in compiled.parameters)).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert compiled.after <= held + 1024  # the arena is among the temporaries,
    assert held <= int(budget.removesuffix("KiB")) * 1024 + 1024  # and little else


@pytest.mark.skipif(not ON_CPU, reason="threads are the CPU's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_for_any_number_of_threads(dtype, monkeypatch):
    args = arguments(z_loss, dtype)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr("logitless.jax._ffi.threads_of", lambda device, n=threads: n)
        chunked = natively(z_loss, memory_budget="64KiB")
        found += [run(chunked, args), run(chunked, args)]
        assert ("for 3 threads" in chunked.explain()) == (threads == 3)
    assert all(same_bits(found[0], other) for other in found[1:])


def test_transformations():
    args = arguments(cross_entropy)
    chunked = natively(cross_entropy, memory_budget="64KiB")
    value, gradients = jax.jit(jax.value_and_grad(chunked, (0, 1)))(*args)
    assert same_bits((value, gradients), jax.value_and_grad(chunked, (0, 1))(*args))

    hidden, weight, target = args
    batches = jnp.stack([hidden, 2 * hidden, 3 * hidden])
    mapped = jax.jit(jax.vmap(jax.value_and_grad(chunked), (0, None, None)))(batches, weight, target)
    each = [jax.value_and_grad(chunked)(h, weight, target) for h in batches]
    assert same_bits(mapped, jax.tree.map(lambda *parts: jnp.stack(parts), *each))

    def body(total, h):
        return total + jax.checkpoint(chunked)(h, weight, target), None

    scanned = jax.jit(jax.grad(lambda hs: jax.lax.scan(body, 0.0, hs)[0]))(batches)
    check_same(([], [scanned]), ([], [mapped[1]]), 1e-6)

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(chunked)(*args)
    with pytest.raises(TypeError, match="forward-mode|jvp"):
        jax.jvp(lambda h: chunked(h, weight, target), (hidden,), (hidden,))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="takes four devices")
def test_shard_map():
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    hidden, weight = random(ROWS * 4, DIM), random(VOCAB, DIM)
    target = jnp.maximum(targets(ROWS * 4), 0)
    chunked = natively(z_loss, memory_budget="64KiB")

    @jax.jit
    def mean(hidden, weight):
        def part(h, w, t):
            return jax.lax.pmean(chunked(h, w, t), "rows")

        specs = P("rows"), P(), P("rows")
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(hidden, weight, target)

    found = jax.value_and_grad(mean, (0, 1))(hidden, weight)
    expected = jax.jit(jax.value_and_grad(lambda h, w: z_loss(h, w, target), (0, 1)))(hidden, weight)
    check_same(([found[0]], found[1]), ([expected[0]], expected[1]), GRADIENT_ERROR["float32"])


def test_without_gradients_and_with_other_results():
    def several(hidden, weight):
        logits = hidden @ weight.T
        return {"largest": logits.argmax(-1), "positive": logits.sum(-1) > 0, "n": 3}

    hidden, weight = random(ROWS, DIM), random(VOCAB, DIM)
    expected, made = several(hidden, weight), natively(several)(hidden, weight)
    assert made["n"] == 3 and made["positive"].dtype == bool
    assert same_bits(made, expected)


@pytest.mark.skipif(not ON_CPU, reason="of a machine without a GPU")
def test_a_program_of_each_platform(monkeypatch):
    """A machine with a GPU lowers one call for each platform, with the arena that the platform needs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(native, "_compute_capability", lambda: 90)
    jax.clear_caches()
    args = arguments(mlp)
    traced = jax.jit(natively(mlp, chunks=3)).trace(*args)
    arenas = {}
    for platform in ("cuda", "cpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        [call] = [line for line in text.splitlines() if "custom_call @logitless_program" in line]
        assert ("threads = 0 : i64" in call) == (platform == "cuda")
        arenas[platform] = int(call.rsplit("tensor<", 1)[1].split("xi8")[0])
    assert all(size > 256 for size in arenas.values())
    jax.clear_caches()


def test_refusals():
    args = arguments(cross_entropy)
    with pytest.raises(ValueError, match="executor: expected one of auto, python, native, got 'xla'"):
        autochunk(cross_entropy, executor="xla")
    with pytest.raises(Unsupported, match="nextafter"):
        natively(lambda x: jax.lax.nextafter(x, x))(args[0])
    with pytest.raises(Unsupported, match="uint8"):
        natively(lambda x: (x * 2).sum())(jnp.ones(3, jnp.uint8))
    with pytest.raises(ValueError, match="strict: forward takes"):
        natively(cross_entropy, memory_budget=8, strict=True)(*args)


def test_the_default_is_the_library_on_one_gpu(monkeypatch):
    args = arguments(z_loss, "bfloat16")
    generated = autochunk(z_loss, chunks=3)
    text = generated.explain(*args)
    assert ("run by the library" in text) == (not ON_CPU)
    if ON_CPU:
        assert "not by the library: XLA's loops are chosen on a cpu" in text
    monkeypatch.setattr(native, "why_not", lambda axes: "")
    chunked = autochunk(z_loss, chunks=3)
    check_same(run(chunked, args), run(natively(z_loss, chunks=3), args), 0)
    assert "run by the library" in chunked.explain()
    wide = autochunk(z_loss, chunks=3).explain(*arguments(z_loss))
    assert "run by the library" not in wide and "XLA multiplies fp32 arrays in TF32 by default" in wide


def test_generated_code_runs_where_a_gpu_lacks_something(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(native, "machine_of", lambda device: None)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(native, "missing", lambda machine, index: "libnvrtc.so.13 was not found")
    assert native.why_not(frozenset()) == "libnvrtc.so.13 was not found"
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert "among several GPUs" in native.why_not(frozenset())
    assert native.why_not(frozenset({"x"})) == "libnvrtc.so.13 was not found"
