"""Each refusal, once: its type, and a message that names the argument, what was expected and what came."""

import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import PORTABLE, enable_x64, problem

from logitless.jax import (
    _ffi, far_field_cross_entropy, far_field_state, linear_cross_entropy, linear_logprobs, losses,
    vocab_parallel_linear_cross_entropy,
)

HIDDEN, WEIGHT, TARGETS, BIAS = problem(ignored=False)
ARGUMENTS = dict(hidden=HIDDEN, weight=WEIGHT, targets=TARGETS, bias=BIAS)

REFUSED = [
    (dict(hidden=HIDDEN[..., :5]), ValueError, r"weight: expected \[V, 5\] for hidden \[3, 7, 5\], got \[101, 16\]"),
    (dict(hidden=jnp.float32(1.0)), ValueError, r"hidden: expected \[..., D\], got a scalar"),
    (dict(hidden=HIDDEN.astype(int)), TypeError, "hidden: expected float32, bfloat16 or float16, got int32"),
    (dict(hidden=object()), TypeError, "hidden: expected an array, got object"),
    (dict(hidden=HIDDEN.tolist()), TypeError, "hidden: expected an array, got list"),
    (dict(weight=[[1.0], [1.0, 2.0]]), TypeError, "weight: expected an array, got list"),
    (dict(targets=TARGETS.tolist()), TypeError, "targets: expected an array, got list"),
    (dict(bias=tuple(BIAS.tolist())), TypeError, "bias: expected an array, got tuple"),
    (dict(hidden=HIDDEN.astype("float16"), weight=WEIGHT.astype("bfloat16")), TypeError,
     "weight: expected float16, the dtype of hidden, .*got bfloat16"),
    (dict(weight=WEIGHT[0]), ValueError, r"weight: expected \[V, 16\] for hidden \[3, 7, 16\], got \[16\]"),
    (dict(weight=WEIGHT[:0]), ValueError, r"bias: expected \[0\], got \[101\]"),
    (dict(weight=WEIGHT[:0], bias=None), ValueError, "weight: .*has no rows"),
    (dict(targets=TARGETS[0]), ValueError, r"targets: expected \[3, 7\].*, got \[7\]"),
    (dict(targets=TARGETS.astype("float32")), TypeError, "targets: expected int32 or int64, got float32"),
    (dict(targets=TARGETS.astype("uint32")), TypeError, "targets: expected int32 or int64, got uint32"),
    (dict(bias=BIAS[:7]), ValueError, r"bias: expected \[101\], got \[7\]"),
    (dict(ignore_index=0.5), TypeError, "ignore_index: expected a Python int.*, got 0.5"),
    (dict(softcap=-1.0), ValueError, "softcap: expected a number above 0, or None, got -1.0"),
    (dict(softcap=0.0), ValueError, "softcap: expected a number above 0, or None, got 0.0"),
    (dict(logit_scale=0.0), ValueError, "logit_scale: expected a finite number other than 0, got 0"),
    (dict(logit_scale=jnp.float32(2.0)), TypeError, "logit_scale: expected a Python number"),
    (dict(memory_budget="many"), ValueError, "many"),
    (dict(memory_budget=0), ValueError, "memory_budget: expected more than 0 bytes, got 0"),
    (dict(memory_budget=1 << 64), ValueError, "memory_budget: expected less than 4611686018427387904 bytes, got 1844674"),
    (dict(memory_budget=1.5), TypeError, "memory_budget: expected bytes or text such as '512MiB', got 1.5"),
    (dict(expected_ignored=1.5), ValueError, r"expected_ignored: expected a number in \[0, 1\], got 1.5"),
    (dict(expected_ignored=True), TypeError, r"expected_ignored: expected a number in \[0, 1\], got True"),
    (dict(memory_budget=64), ValueError, "budget"),
]

REFUSED_BY_LOSS = [
    (dict(reduction="max"), ValueError, "reduction: expected 'none', 'mean' or 'sum', got 'max'"),
    (dict(label_smoothing=1.5), ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
    (dict(label_smoothing="much"), TypeError, "label_smoothing: expected a Python number.*, got 'much'"),
    (dict(z_loss=-1.0), ValueError, "z_loss: expected a number >= 0, got -1"),
    (dict(normalizer=0.0), ValueError, "normalizer: expected a number above 0, got 0.0"),
    (dict(normalizer=3.0, reduction="sum"), ValueError, "normalizer: goes with reduction 'mean', got 'sum'"),
    (dict(normalizer=jnp.ones(2)), ValueError, r"normalizer: expected a number or a scalar array, got float32\[2\]"),
    (dict(class_weight=BIAS[:7]), ValueError, r"class_weight: expected \[101\], got \[7\]"),
    (dict(class_weight=TARGETS), TypeError, "class_weight: expected float32, bfloat16 or float16, got int32"),
    (dict(class_weight=BIAS.tolist()), TypeError, "class_weight: expected an array, got list"),
    (dict(token_weight=[1.0]), TypeError, "token_weight: expected an array, got list"),
    (dict(target_weight=[[1.0]]), TypeError, "target_weight: expected an array, got list"),
    (dict(normalizer=[3.0]), TypeError, "normalizer: expected an array, got list"),
    (dict(token_weight=BIAS), ValueError, r"token_weight: expected \[3, 7\], got \[101\]"),
    (dict(target_weight=jnp.ones((3, 7))), ValueError, r"target_weight: expected \[3, 7\] with K.*, got \[3, 7\]"),
    (dict(target_weight=jnp.ones((3, 7, 2))), ValueError, r"targets: expected \[3, 7, 2\], got \[3, 7\]"),
    (
        dict(target_weight=jnp.ones((3, 7, 1)), targets=TARGETS[..., None], accuracy=True),
        NotImplementedError,
        "accuracy: needs one target a token, got target_weight",
    ),
]


def ids(table):
    return ["-".join(case[0]) for case in table]


@pytest.mark.parametrize("change, error, match", REFUSED, ids=ids(REFUSED))
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_logprobs])
def test_refused(function, change, error, match):
    with pytest.raises(error, match=match):
        function(**{**ARGUMENTS, **change})


@pytest.mark.parametrize("change, error, match", REFUSED_BY_LOSS, ids=ids(REFUSED_BY_LOSS))
def test_refused_by_the_loss(change, error, match):
    with pytest.raises(error, match=match):
        jax.jit(lambda hidden: linear_cross_entropy(**{**ARGUMENTS, "hidden": hidden, **change}))(HIDDEN)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "token_weight"])
def test_float64_beside_float32_is_refused_by_name(name):
    with enable_x64(True):
        value = np.ones((3, 7)) if name == "token_weight" else ARGUMENTS[name]
        given = {**ARGUMENTS, name: jnp.asarray(value, "float64")}
        with pytest.raises(TypeError, match=f"(weight|{name}): expected float"):
            linear_cross_entropy(**given)
        wide = {n: a.astype("float64") if a.dtype == jnp.float32 else a for n, a in ARGUMENTS.items()}
        with pytest.raises(TypeError, match="hidden: expected float32, bfloat16 or float16, got float64"):
            far_field_cross_entropy(**wide, state=far_field_state(*WEIGHT.shape))


def test_int64_targets_of_x64():
    with enable_x64(True):
        wide = linear_cross_entropy(HIDDEN, WEIGHT, TARGETS.astype("int64"))
        assert wide == linear_cross_entropy(HIDDEN, WEIGHT, TARGETS)


@pytest.mark.parametrize(
    "name, value, targets",
    [
        ("class_weight", jnp.ones(101), TARGETS),
        ("token_weight", jnp.ones((3, 7)), TARGETS),
        ("target_weight", jnp.ones((3, 7, 1)), TARGETS[..., None]),
    ],
)
def test_what_has_no_gradient_says_so(name, value, targets):
    def loss(value):
        return linear_cross_entropy(HIDDEN, WEIGHT, targets, **{name: value})

    with pytest.raises(NotImplementedError, match=f"{name}: has no gradient here; wrap it in jax.lax.stop_gradient"):
        jax.grad(loss)(value)
    assert (jax.grad(lambda v: loss(jax.lax.stop_gradient(v)))(value) == 0.0).all()


@pytest.mark.skipif(jax.default_backend() != "cpu" or PORTABLE, reason="results are NaN instead")
@pytest.mark.parametrize("bad", [101, -1, -101])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bad_target_is_named_with_its_position(bad, compiled):
    targets = TARGETS.at[1, 2].set(bad)
    for function in (linear_cross_entropy, lambda *a: linear_logprobs(*a)[0], jax.grad(linear_cross_entropy)):
        run = jax.jit(function) if compiled else function
        with pytest.raises((ValueError, RuntimeError), match=rf"targets: {bad} at position 9 is outside \[0, 101\)"):
            run(HIDDEN, WEIGHT, targets).block_until_ready()


@pytest.mark.parametrize("function", [
    linear_cross_entropy, linear_logprobs, losses.orpo_loss,
    lambda *a, **y: far_field_cross_entropy(*a, state=far_field_state(*WEIGHT.shape), **y)[0],
])
def test_either_name_of_the_targets(function):
    hidden, targets = (HIDDEN[:2], TARGETS[:2])
    found, wanted = (jax.tree.leaves(function(hidden, WEIGHT, **{name: targets})) for name in ("target", "targets"))
    assert all((f == w).all() for f, w in zip(found, wanted))
    with pytest.raises(TypeError, match="given twice"):
        function(hidden, WEIGHT, target=targets, targets=targets)


def test_arrays_of_several_devices_are_refused():
    """JAX refuses them before anything is called."""
    there = jax.devices()[1]
    for name in ("weight", "targets", "bias"):
        given = {n: jax.device_put(a, there if n == name else jax.devices()[0]) for n, a in ARGUMENTS.items()}
        for function in (linear_cross_entropy, linear_logprobs):
            with pytest.raises(ValueError, match="incompatible devices"):
                function(**given)
    gone = WEIGHT + 1.0
    gone.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        linear_cross_entropy(HIDDEN, gone, TARGETS)


def test_an_unknown_option_is_refused_as_by_a_signature():
    arrays = (HIDDEN, WEIGHT, TARGETS)
    with pytest.raises(TypeError, match=r"linear_cross_entropy\(\) got an unexpected keyword argument 'z_los'; did you mean 'z_loss'"):
        linear_cross_entropy(*arrays, z_los=0.1)
    with pytest.raises(TypeError, match=r"vocab_parallel_linear_cross_entropy\(\) got an unexpected keyword argument 'z'"):
        vocab_parallel_linear_cross_entropy(*arrays, axis_name="tp", z=1)
    for function in (linear_cross_entropy, vocab_parallel_linear_cross_entropy):
        found = inspect.signature(function).parameters
        assert found["z_loss"].default == found["label_smoothing"].default == 0.0 and "terms" not in found
        assert found["z_loss"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "{terms}" not in linear_cross_entropy.__doc__ and "z_loss: >= 0: " in linear_cross_entropy.__doc__


@pytest.mark.parametrize("number", [np.float64(3), np.float32(3), np.int64(3), np.array(3), np.array(3.0)], ids=repr)
def test_numbers_of_numpys_are_numbers(number):
    wanted = linear_cross_entropy(**ARGUMENTS, normalizer=3.0, softcap=3.0, ignore_index=3)
    found = linear_cross_entropy(**ARGUMENTS, normalizer=number, softcap=number, ignore_index=np.int64(3))
    assert found == wanted
    with pytest.raises(ValueError, match="normalizer: expected a number above 0, got -3"):
        linear_cross_entropy(**ARGUMENTS, normalizer=np.negative(number))


def test_after_an_error_all_is_well():
    assert jnp.isfinite(linear_cross_entropy(**ARGUMENTS))


def test_a_library_without_handlers_says_how_to_build_them(monkeypatch):
    monkeypatch.setattr(_ffi, "lib", types.SimpleNamespace())
    with pytest.raises(ImportError, match="was built without XLA's headers.*LOGITLESS_XLA_INCLUDE_DIR"):
        _ffi.handlers()


def test_a_library_that_jaxlib_does_not_take_says_so(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("the handler's API version (9.9) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    _ffi._register.cache_clear()
    with pytest.raises(NotImplementedError, match=r"jaxlib .* does not take the handlers of .*\(9.9\) is incompatible"):
        _ffi._register()
    _ffi._register.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [
    lambda *a, **more: linear_cross_entropy(*a, reduction="none", **more).sum(),
    lambda *a, **more: sum(output.sum() for output in linear_logprobs(*a, **more)),
])
def test_a_forward_refuses_a_budget_below_its_backward(function, dtype):
    hidden, weight, targets, bias = problem((256,), 64, 5000, dtype)

    def least(call):
        """Returns the least budget that a call takes, and its result: each error names that of a plan."""
        budget = 1
        for _ in range(8):
            try:
                return budget, call(budget)
            except ValueError as error:
                budget = int(re.findall(r"memory_budget: .* (?:|\()(\d+) bytes", str(error))[-1])
        raise AssertionError(f"{budget} bytes are refused, which an error names")

    alone, _ = least(lambda budget: function(hidden, weight, targets, bias, memory_budget=budget))
    both, (loss, backward) = least(
        lambda budget: jax.vjp(lambda h, w, b: function(h, w, targets, b, memory_budget=budget), hidden, weight, bias))
    assert all(jnp.isfinite(g).all() for g in backward(jnp.ones_like(loss)))
    assert alone < both or jax.default_backend() != "cpu"  # a GPU's forward may take more than its backward
