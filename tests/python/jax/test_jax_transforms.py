"""jit, grad, scan, checkpoint and vmap, and what a compiled program computes and holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import BUDGET, ON_CPU, of_kernels, problem, relative_error

from logitless._library import parse_bytes
from logitless.jax import linear_cross_entropy, linear_logprobs


def loss(hidden, weight, targets, bias=None):
    return linear_cross_entropy(hidden, weight, targets, bias)


def calls(function, *arrays) -> list[tuple[str, str, str]]:
    """Returns (function of the library, inputs, outputs) of each custom call of a traced program."""
    text = str(jax.make_jaxpr(function)(*arrays))
    inputs = re.findall(r"\('inputs', '([\w,]*)'\)", text)
    outputs = [names.removesuffix(",workspace") for names in re.findall(r"\('outputs', '([\w,]*)'\)", text)]
    found = list(zip(re.findall(r"target_name=logitless_(\w+)", text), inputs, outputs))
    # With a GPU the program holds the call once for each platform.
    return found if ON_CPU else list(dict.fromkeys(found))


def same(one, other, error=1e-6):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert relative_error(a, b) <= error


def test_jit_and_eager_agree():
    arrays = problem()
    one = jax.value_and_grad(loss, (0, 1, 3))(*arrays)
    other = jax.jit(jax.value_and_grad(loss, (0, 1, 3)))(*arrays)
    same(one, other, 0.0)


ALL = "bias,hidden,weight,targets"


@of_kernels
@pytest.mark.parametrize(
    "by, outputs",
    [((0,), "d_hidden"), ((1,), "d_weight"), ((3,), "d_bias"), ((0, 1, 3), "d_hidden,d_weight,d_bias")],
    ids=["hidden", "weight", "bias", "all"],
)
def test_only_what_is_differentiated_is_computed(by, outputs):
    arrays = problem()
    assert calls(jax.grad(loss, by), *arrays) == [("cross_entropy", ALL, f"loss,{outputs}")]
    each = jax.grad(lambda *a: linear_cross_entropy(*a, reduction="none").sum(), by)
    assert calls(each, *arrays) == [("cross_entropy", ALL, "loss"), ("cross_entropy", f"{ALL},grad_losses", outputs)]
    logprob = jax.grad(lambda *a: linear_logprobs(*a)[0].sum(), by)
    assert calls(logprob, *arrays)[1:] == [("head_backward", f"{ALL},cotangent_log_prob", outputs)]


@of_kernels
def test_without_a_gradient_there_is_one_forward():
    assert calls(loss, *problem()) == [("cross_entropy", ALL, "loss")]
    assert calls(lambda *a: jax.lax.stop_gradient(loss(*a)), *problem()) == [("cross_entropy", ALL, "loss")]


def test_one_function_differentiated_in_turn():
    """JAX keeps one traced function for all of these; each must get its own gradients."""
    arrays = problem(bias=False)
    for function in (
        jax.jit(loss),
        jax.jit(lambda *a: linear_cross_entropy(*a, reduction="none").sum()),
        jax.jit(lambda *a: sum(o.sum() for o in linear_logprobs(*a))),
    ):
        both = jax.grad(function, (0, 1))(*arrays)
        for _ in range(2):
            assert relative_error(jax.grad(function, 0)(*arrays), both[0]) < 1e-6
            assert relative_error(jax.grad(function, 1)(*arrays), both[1]) < 1e-6
            batched = jax.vmap(jax.grad(function, 1), (0, None, 0))(arrays[0], arrays[1], arrays[2])
            assert batched.shape == (3, *arrays[1].shape)


def test_accumulation_in_a_scan():
    hidden, weight, targets, _ = problem((4, 7), ignored=False)

    @jax.jit
    def gradients(hidden, weight):
        def step(total, microbatch):
            value, gradient = jax.value_and_grad(loss, 1)(microbatch[0], weight, microbatch[1])
            return jax.tree.map(jnp.add, total, (value, gradient)), None

        return jax.lax.scan(step, (jnp.zeros(()), jnp.zeros_like(weight)), (hidden, targets))[0]

    value, gradient = gradients(hidden, weight)
    expected, other = jax.value_and_grad(loss, 1)(hidden, weight, targets)
    assert relative_error(value / 4, expected) < 1e-6 and relative_error(gradient / 4, other) < 1e-6


@pytest.mark.parametrize("checkpoint", [False, True])
def test_differentiated_scan(checkpoint):
    hidden, weight, targets, _ = problem((4, 7), ignored=False)

    def scanned(hidden, weight):
        def step(total, microbatch):
            return total + loss(microbatch[0], weight, microbatch[1]), None

        return jax.lax.scan(jax.checkpoint(step) if checkpoint else step, 0.0, (hidden, targets))[0] / 4

    same(
        jax.jit(jax.value_and_grad(scanned, (0, 1)))(hidden, weight),
        jax.value_and_grad(loss, (0, 1))(hidden, weight, targets),
    )


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "dots"])
def test_checkpoint(policy):
    arrays = problem()
    kept = jax.checkpoint(lambda h, *a: loss(jnp.tanh(h), *a), policy=policy)
    same(jax.jit(jax.grad(kept, (0, 1, 3)))(*arrays), jax.grad(lambda h, *a: loss(jnp.tanh(h), *a), (0, 1, 3))(*arrays))


def test_vmap():
    hidden, weight, targets, bias = problem(ignored=False)
    found = jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None, 0, None))(hidden, weight, targets, bias)
    for i in range(3):
        expected = jax.value_and_grad(loss, (0, 1))(hidden[i], weight, targets[i], bias)
        same(jax.tree.map(lambda a: a[i], found), expected)
    many = jax.vmap(loss, (None, 0, None))(hidden, jnp.stack([weight, 2 * weight]), targets)
    assert many.shape == (2,) and relative_error(many[1], loss(hidden, 2 * weight, targets)) < 1e-6


def test_cond_and_while():
    arrays = problem(bias=False)
    chosen = jax.jit(jax.grad(lambda h, *a: jax.lax.cond(h[0, 0, 0] > 99, lambda: 0.0, lambda: loss(h, *a))))
    same(chosen(*arrays), jax.grad(loss)(*arrays))
    descended = jax.lax.fori_loop(0, 20, lambda _, h: h - 5 * jax.grad(loss)(h, *arrays[1:]), arrays[0])
    assert loss(descended, *arrays[1:]) < 0.5 * loss(*arrays)


def test_second_derivatives_and_forward_mode_raise():
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="logitless_cross_entropy.*cannot be differentiated"):
        jax.grad(lambda h: jax.grad(loss)(h, weight, targets).sum())(hidden)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: loss(h, weight, targets), (hidden,), (hidden,))


TOKENS, DIM, VOCAB = 2048, 64, 8192
LOGITS = TOKENS * VOCAB * 4


@of_kernels  # its memory in programs that are optimised: test_jax_portable
@pytest.mark.parametrize("by", [(), (0,), (0, 1)], ids=["forward", "hidden", "both"])
@pytest.mark.parametrize("kind", ["mean", "none", "logprobs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory_is_the_workspace(kind, by, dtype):
    def mean(*a):
        return linear_cross_entropy(*a, memory_budget=BUDGET)

    def none(*a):
        return linear_cross_entropy(*a, reduction="none", memory_budget=BUDGET).mean()

    def logprobs(*a):
        return sum(o.mean() for o in linear_logprobs(*a, memory_budget=BUDGET))

    function = {"mean": mean, "none": none, "logprobs": logprobs}[kind]
    function = jax.value_and_grad(function, by) if by else function
    shapes = [
        jax.ShapeDtypeStruct((TOKENS, DIM), dtype),
        jax.ShapeDtypeStruct((VOCAB, DIM), dtype),
        jax.ShapeDtypeStruct((TOKENS,), "int32"),
    ]
    held = jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert held < parse_bytes(BUDGET) + (1 << 20) and (held < LOGITS / 6 or not ON_CPU)


def test_a_scan_of_gradients_holds_one_workspace():
    def accumulated(hidden, weight, targets):
        def step(total, microbatch):
            one = jax.grad(lambda w: linear_cross_entropy(microbatch[0], w, microbatch[1], memory_budget=BUDGET))
            return total + one(weight), None

        return jax.lax.scan(step, jnp.zeros_like(weight), (hidden, targets))[0]

    shapes = [
        jax.ShapeDtypeStruct((8, TOKENS // 8, DIM), "float32"),
        jax.ShapeDtypeStruct((VOCAB, DIM), "float32"),
        jax.ShapeDtypeStruct((8, TOKENS // 8), "int32"),
    ]
    held = jax.jit(accumulated).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert held < parse_bytes(BUDGET) + (1 << 20) + 2 * VOCAB * DIM * 4


def test_numpy_arrays_are_arrays():
    hidden, weight, targets, bias = problem()
    found = loss(*(np.asarray(a) for a in (hidden, weight, targets, bias)))
    assert found == loss(hidden, weight, targets, bias)
