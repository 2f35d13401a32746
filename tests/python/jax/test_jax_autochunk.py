"""autochunk against the function it was given: outputs and gradients."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autochunk_losses import (
    LOSSES,
    ROWS,
    arguments,
    check_same,
    contrastive,
    cross_entropy,
    distillation,
    dpo,
    exactly,
    integer_labels,
    per_token,
    random,
    run,
    softcapped,
    whole,
)
from jax_oracle import GRADIENT_ERROR, enable_x64, relative_error

from logitless.jax import autochunk, linear_cross_entropy


def doubled(args):
    return tuple(a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args)


# Gradients that wait for the last chunk's outputs: without a budget nothing is computed twice.
PHASES = (dpo, contrastive)


@pytest.mark.parametrize("fn", LOSSES, ids=lambda f: f.__name__)
def test_float32(fn):
    args = arguments(fn)
    chunked = autochunk(fn, memory_budget="96KiB") if fn in PHASES else autochunk(fn, chunks=3)
    check_same(run(chunked, args), exactly(fn, args), GRADIENT_ERROR["float32"])
    assert "lax.fori_loop(0, " in chunked.source()
    assert ("met)" if fn in PHASES else " in 3 chunks of ") in chunked.explain()
    assert "NOT met" not in chunked.explain()


def test_float64():
    with enable_x64(True):
        args = doubled(arguments(dpo))
        chunked = autochunk(dpo, memory_budget="200KiB")
        check_same(run(chunked, args), run(dpo, args), 1e-13)
        assert "lax.fori_loop(" in chunked.source()


@pytest.mark.parametrize("gradients", ["auto", "backward"])
def test_bfloat16_with_logits_in_fp32(gradients):
    args = arguments(cross_entropy, "bfloat16")
    chunked = autochunk(cross_entropy, chunks=4, gradients=gradients)
    outputs, found = run(chunked, args)
    _, expected = exactly(cross_entropy, args)
    assert all(g.dtype == jnp.bfloat16 for g in found)
    check_same(([], found), ([], expected), GRADIENT_ERROR["bfloat16"])
    assert "preferred_element_type=jnp.float32" in chunked.source()


@pytest.mark.parametrize("fn", [softcapped, distillation], ids=lambda f: f.__name__)
def test_bfloat16_as_close_as_the_function_itself(fn):
    args = arguments(fn, "bfloat16")
    exact, plain, mine = exactly(fn, args), run(fn, args), run(autochunk(fn, chunks=4), args)
    for e, p, m in zip(*([*o, *g] for o, g in (exact, plain, mine))):
        assert m.dtype == p.dtype == jnp.bfloat16
        assert relative_error(m, e) <= 1.5 * relative_error(p, e) + 2**-8


def test_sums_of_16_bit_are_fp32():
    """A weight's gradient of many rows, whose terms cancel: a bf16 sum over chunks would be far off."""
    hidden, weight = random(4000, 4, dtype="bfloat16"), random(200, 4, dtype="bfloat16")
    args = hidden, weight, whole(200, 4000)
    chunked = autochunk(cross_entropy, chunks=100)
    check_same(([], run(chunked, args)[1]), ([], exactly(cross_entropy, args)[1]), GRADIENT_ERROR["bfloat16"])
    assert "chunks of 40" in chunked.explain()


def test_the_scale_of_an_fp16_loss():
    """Gradients that exceed fp16 until they are multiplied by the cotangent."""

    def faint(hidden, weight, target):
        return cross_entropy(hidden, weight, target) * 1e-7

    args = arguments(cross_entropy, "float16")
    chunked = autochunk(faint, chunks=4)
    found = jax.grad(lambda h, w: chunked(h, w, args[2]) * 1e7, (0, 1))(*args[:2])
    assert "def backward(" in chunked.source()
    by = jax.jit(jax.grad(cross_entropy, (0, 1)))
    expected = by(*(a.astype("float32") for a in args[:2]), args[2])
    check_same(([], found), ([], expected), GRADIENT_ERROR["float16"])


@pytest.mark.parametrize("chunks", [1, 3, 7, ROWS])
def test_ragged_chunks(chunks):
    chunked = autochunk(cross_entropy, chunks=chunks)
    args = arguments(cross_entropy)
    check_same(run(chunked, args), exactly(cross_entropy, args), GRADIENT_ERROR["float32"])
    full, rest = divmod(ROWS, -(-ROWS // chunks))
    if chunks > 1:
        assert f"lax.fori_loop(0, {full}, " in chunked.source()
    assert (f", {rest}, state)" in chunked.source()) == (rest > 0)


def test_the_source_is_what_runs():
    args = arguments(cross_entropy)
    chunked = autochunk(cross_entropy, chunks=3)
    value, gradients = jax.value_and_grad(chunked, (0, 1))(*args)
    space = {}
    exec(chunked.source(), space)
    found = jax.jit(space["forward_and_gradients"])(*args)
    for a, b in zip(found, (value, *gradients)):
        assert (np.asarray(a) == np.asarray(b)).all()


def test_gradients_backward_and_forward():
    args = arguments(cross_entropy)
    late = autochunk(cross_entropy, chunks=3, gradients="backward")
    check_same(run(late, args), exactly(cross_entropy, args), GRADIENT_ERROR["float32"])
    assert "def forward(" in late.source() and "def backward(" in late.source()
    assert "gradients in backward" in late.explain()
    with pytest.raises(ValueError, match=r"needs one differentiable output of one element, got \[50\]; use 'backward'"):
        run(autochunk(per_token, gradients="forward"), arguments(per_token))


def test_several_outputs_and_nested_arguments():
    def fn(batch, *, scale, sizes):
        logits = batch["hidden"] @ batch["weight"].T * scale
        losses = integer_labels(logits, jnp.maximum(batch["target"], 0))
        best = jax.lax.stop_gradient(logits).argmax(-1)
        top = jax.lax.stop_gradient(logits).max(-1)
        return {"loss": losses.mean(), "each": losses, "best": best, "top": top, "rows": len(losses), "sizes": sizes}

    hidden, weight, target = arguments(cross_entropy)
    chunked = autochunk(fn, chunks=3)

    def total(function, hidden, weight):
        batch = {"hidden": hidden, "weight": weight, "target": target}
        made = function(batch, scale=0.5, sizes=(1, 2))
        return made["loss"] + (made["each"] ** 2).sum(), made

    (a, made), found = jax.value_and_grad(lambda *x: total(chunked, *x), (0, 1), has_aux=True)(hidden, weight)
    whole_ = jax.jit(jax.value_and_grad(lambda *x: total(fn, *x), (0, 1), has_aux=True))
    (b, other), expected = whole_(hidden, weight)
    assert made["rows"] == ROWS and made["sizes"] == (1, 2)
    assert (made["best"] == other["best"]).all() and made["best"].dtype == other["best"].dtype
    assert relative_error(made["top"], other["top"]) <= 1e-6
    check_same(([a], found), ([b], expected), 1e-5)


def test_an_output_that_is_not_differentiable_leaves_one_pass():
    def fn(hidden, weight, target):
        logits = hidden @ weight.T
        accuracy = jax.lax.stop_gradient((logits.argmax(-1) == target).astype(jnp.float32).mean())
        return integer_labels(logits, jnp.maximum(target, 0)).mean(), accuracy

    args = arguments(cross_entropy)
    chunked = autochunk(fn, chunks=3)
    (loss, accuracy), found = jax.value_and_grad(chunked, (0, 1), has_aux=True)(*args)
    (_, right), expected = jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(*args)
    assert "outputs and gradients in one pass" in chunked.explain() and accuracy == right
    check_same(([], found), ([], expected), 1e-5)


def outputs(hidden, weight, targets):
    """A loss, and the optional outputs of linear_cross_entropy: lse, accuracy, argmax, target logits."""
    logits = hidden @ weight.T
    lse = jax.nn.logsumexp(logits, 1)
    target = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
    argmax = logits.argmax(1)
    loss = (lse - target).mean() + 0.01 * (lse**2).mean() + 0.1 * jnp.sin(target).sum()
    return loss, (lse, (argmax == targets).mean(), argmax, target)


def test_what_a_loss_returns_beside_it():
    rng = np.random.default_rng(3)
    hidden, weight = (jnp.asarray(rng.normal(size=size), "float32") for size in ((300, 16), (700, 16)))
    targets = jnp.argmax(hidden @ weight.T, 1).at[::3].set(5)
    chunked = autochunk(outputs, chunks=4)
    (loss, beside), gradients = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, weight, targets)
    (wanted, others), exact = jax.jit(jax.value_and_grad(outputs, (0, 1), has_aux=True))(hidden, weight, targets)
    assert " in 4 chunks of " in chunked.explain()
    assert 0.5 < beside[1] < 0.8 and beside[1] == others[1] and (beside[2] == others[2]).all()
    for a, e in zip((loss, beside[0], beside[3], *gradients), (wanted, others[0], others[3], *exact)):
        assert relative_error(a, e) < 1e-5


def test_calls_of_the_library_are_refused():
    hidden, weight, targets = jnp.ones((6, 8)), jnp.ones((11, 8)), jnp.arange(6)
    whole_call = lambda *a: linear_cross_entropy(*a, return_lse=True)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match="ffi_call.* has no form in a tensor program"):
        autochunk(whole_call)(hidden, weight, targets)
