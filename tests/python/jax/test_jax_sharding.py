"""Heads on meshes of four devices, given by an argument or by the arrays' types, against one device."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_oracle import check_gradients, relative_error

from logitless.jax import Sharding, linear_cross_entropy, linear_logprobs

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

TOKENS, DIM, VOCAB = (8, 4), 16, 104
RANDOM = np.random.default_rng(0)
CLASSES = jnp.asarray(RANDOM.uniform(0.5, 2.0, VOCAB), "float32")
WEIGHTS = jnp.asarray(RANDOM.uniform(0.0, 2.0, TOKENS), "float32")


def arrays():
    """Returns hidden, weight, targets, bias; all tokens of one row are ignored."""
    r = np.random.default_rng(1)
    targets = r.integers(0, VOCAB, TOKENS)
    targets[3], targets[5, 1] = -100, -100
    floats = (r.normal(size=(*TOKENS, DIM)), r.normal(size=(VOCAB, DIM)) * 0.5, r.normal(size=VOCAB))
    hidden, weight, bias = (jnp.asarray(a, "float32") for a in floats)
    return hidden, weight, jnp.asarray(targets, "int32"), bias


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


LAYOUTS = {
    "data": dict(tokens="data"),
    "all data": dict(tokens=P(("data", "model"))),
    "vocab": dict(vocab="model"),
    "data and vocab": dict(tokens="data", vocab="model"),
    "fsdp": dict(tokens=P(("data", "model")), vocab=("data", "model")),
    "hsdp": dict(tokens=P(("data", "model")), vocab="model"),
    "sequence": dict(tokens=P("data", "model"), vocab="model"),
}


def placed(layout, *given):
    """Returns the arrays with the sharding of the layout."""
    s = Sharding(mesh(), **layout)
    tokens, vocab = s.tokens if isinstance(s.tokens, P) else P(s.tokens), P(s.vocab)
    specs = (tokens, vocab, tokens, vocab)
    return [jax.device_put(a, NamedSharding(s.mesh, spec)) for a, spec in zip(given, specs)]


OPTIONS = {
    "mean": {},
    "sum": dict(reduction="sum", label_smoothing=0.1),
    "weights": dict(class_weight=CLASSES, token_weight=WEIGHTS, z_loss=1e-2),
}


@pytest.mark.parametrize("name, options", [*((n, "weights") for n in LAYOUTS), ("data", "sum"), ("fsdp", "mean"), ("fsdp", "sum")])
def test_loss_and_gradients(name, options):
    layout, options = LAYOUTS[name], OPTIONS[options]
    where = Sharding(mesh(), **layout)
    step = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, sharding=where, **options), (0, 1, 3)))
    value, gradients = step(*placed(layout, *arrays()))
    expected, others = jax.value_and_grad(lambda *a: linear_cross_entropy(*a, **options), (0, 1, 3))(*arrays())
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


@pytest.mark.parametrize("name", ["vocab", "data and vocab", "fsdp", "sequence"])
def test_neither_weights_nor_their_gradients_travel(name):
    given = placed(LAYOUTS[name], *arrays())
    where = Sharding(mesh(), **LAYOUTS[name])
    step = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, sharding=where), (0, 1)))
    text = step.lower(*given).compile().as_text()
    moved = re.findall(r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", text)
    rows = VOCAB // where._size(where._vocab)
    wide = [shape for shape, _ in moved if f"[{VOCAB},{DIM}]" in shape or f"[{VOCAB}]" in shape]
    assert moved and not wide, wide
    if name in ("vocab", "fsdp"):  # with data beside the vocabulary, d_weight is summed over data
        assert not [shape for shape, _ in moved if f"[{rows},{DIM}]" in shape]


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("all data", "data and vocab", "fsdp")])
def test_losses_of_tokens_and_what_is_asked_for(layout):
    where, given = Sharding(mesh(), **layout), placed(layout, *arrays())
    asked = dict(return_lse=True, return_target_logits=True, return_argmax=True, accuracy=True, softcap=6.0)
    for reduction in ("none", "mean"):
        found = jax.jit(lambda *a: linear_cross_entropy(*a, sharding=where, reduction=reduction, **asked))(*given)
        expected = linear_cross_entropy(*arrays(), reduction=reduction, **asked)
        assert len(found) == len(expected)
        for f, e in zip(found, expected):
            assert f.shape == e.shape and f.dtype == e.dtype and relative_error(f, e) < 2e-6
    losses = jax.grad(lambda *a: (WEIGHTS * linear_cross_entropy(*a, sharding=where, reduction="none")).sum(), (0, 1))
    check_gradients(jax.jit(losses)(*given), jax.grad(lambda *a: (WEIGHTS * linear_cross_entropy(*a, reduction="none")).sum(), (0, 1))(*arrays()))
    numbers = jax.jit(lambda *a: linear_logprobs(*a, sharding=where))(*given)
    for f, e in zip(numbers, linear_logprobs(*arrays())):
        assert f.shape == e.shape and relative_error(f, e) < 2e-6


def test_the_example_of_the_page():
    page = Path(__file__).parents[3] / "docs/use/jax.md"
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S) if "Sharding(" in c]
    names = {}
    exec(compile(code, page.name, "exec"), names)
    hidden, weight, targets, _ = arrays()
    assert relative_error(names["loss"](hidden, weight, targets), linear_cross_entropy(hidden, weight, targets)) < 2e-6


def on(layout, *given, **options):
    """Returns the compiled loss of the arrays on the mesh. Without jit, a shard_map compiles each operation by itself."""
    return jax.jit(lambda *a: linear_cross_entropy(*a, sharding=Sharding(mesh(), **layout), **options))(*placed(layout, *given))


@pytest.mark.parametrize("normalizer", [20.0, jnp.float32(20.0)], ids=["number", "array"])
def test_normalizer(normalizer):
    for layout in (LAYOUTS["data"], LAYOUTS["fsdp"]):
        found = on(layout, *arrays(), normalizer=normalizer)
        assert relative_error(found, linear_cross_entropy(*arrays(), normalizer=normalizer)) < 2e-6


def test_no_token_is_a_loss_of_zero():
    hidden, weight, targets, bias = arrays()
    none = jnp.full_like(targets, -100)
    for layout in (LAYOUTS["data"], LAYOUTS["fsdp"]):
        assert on(layout, hidden, weight, none, bias) == 0.0


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("data", "vocab", "fsdp")])
@pytest.mark.parametrize("options", [dict(label_smoothing=0.1, class_weight=CLASSES), dict(reduction="sum", label_smoothing=1.0)])
def test_several_targets_a_token(layout, options):
    hidden, weight, _, bias = arrays()
    several = jnp.asarray(RANDOM.integers(0, VOCAB, (*TOKENS, 3)), "int32").at[2].set(-100).at[4, :, 0].set(-100)
    q = jnp.asarray(RANDOM.uniform(size=(*TOKENS, 3)), "float32")
    where = Sharding(mesh(), **layout)

    def run(**more):
        def both(h, w):
            loss = linear_cross_entropy(h, w, several, bias, target_weight=q, **options, **more)
            return loss + (q * linear_logprobs(h, w, several, bias, **more)[0]).sum()

        return jax.jit(jax.value_and_grad(both, (0, 1)))(hidden, weight)

    (value, gradients), (expected, others) = run(sharding=where), run()
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)


@pytest.mark.parametrize("name", ["data", "vocab", "data and vocab", "fsdp"])
def test_types_of_explicit_axes_say_it(name):
    layout = LAYOUTS[name]
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        s = Sharding(explicit, **layout)
        tokens, vocab = s._tokens, P(s.vocab)
        given = [jax.device_put(a, NamedSharding(explicit, spec)) for a, spec in zip(arrays(), (tokens, vocab, P(), P()))]
        value, gradients = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*given)
        assert jax.typeof(gradients[1]).sharding.spec[0] == jax.typeof(given[1]).sharding.spec[0]
        numbers = jax.jit(linear_logprobs)(*given)
    expected, others = jax.value_and_grad(linear_cross_entropy, (0, 1))(*arrays())
    assert relative_error(value, expected) < 2e-6
    check_gradients(gradients, others)
    assert relative_error(numbers[0], linear_logprobs(*arrays())[0]) < 2e-6


def test_explicit_axes_without_a_mesh_around_the_call():
    explicit = mesh(AxisType.Explicit)
    hidden, weight, targets, bias = arrays()
    on = lambda a, spec: jax.device_put(a, NamedSharding(explicit, spec))  # noqa: E731
    expected = linear_cross_entropy(*arrays(), class_weight=CLASSES, token_weight=WEIGHTS)
    given = [on(a, s) for a, s in zip(arrays(), (P("data"), P("model"), P("data"), P("model")))]
    weights = dict(class_weight=on(CLASSES, P("model")), token_weight=on(WEIGHTS, P("data")))
    assert relative_error(jax.jit(lambda *a: linear_cross_entropy(*a, **weights))(*given), expected) < 2e-6
    where = Sharding(explicit, tokens="data", vocab="model")  # arrays on other devices are copied
    found = jax.jit(lambda *a: linear_cross_entropy(*a, class_weight=CLASSES, token_weight=WEIGHTS, sharding=where))(*arrays())
    assert relative_error(found, expected) < 2e-6
    found = jax.jit(linear_cross_entropy)(hidden, on(weight, P("model")), targets, bias)
    assert relative_error(found, linear_cross_entropy(*arrays())) < 2e-6


def test_few_dimensions():
    hidden, weight, targets, bias = arrays()
    where = Sharding(mesh(), vocab="model")
    found = jax.jit(lambda *a: linear_cross_entropy(*a, sharding=where))(hidden[0, 0], weight, targets[0, 0], bias)
    assert relative_error(found, linear_cross_entropy(hidden[0, 0], weight, targets[0, 0], bias)) < 2e-6
    where = Sharding(mesh(), tokens=P("data", None, None), vocab="model")  # the layout of hidden itself
    assert relative_error(linear_cross_entropy(*arrays(), sharding=where), linear_cross_entropy(*arrays())) < 2e-6


@pytest.mark.parametrize("layout", [LAYOUTS["data"], LAYOUTS["vocab"]])
def test_weights_of_tokens_have_no_gradient(layout):
    loss = lambda w: linear_cross_entropy(*arrays(), token_weight=w, sharding=Sharding(mesh(), **layout))  # noqa: E731
    with pytest.raises(NotImplementedError, match="token_weight: has no gradient"):
        jax.grad(loss)(WEIGHTS)


def test_messages_have_the_whole_shapes():
    hidden, weight, targets, bias = arrays()
    where = Sharding(mesh(), tokens="data", vocab="model")
    for wrong, message in (
        (dict(targets=targets[:6]), r"targets: expected \[8, 4\], got \[6, 4\]"),
        (dict(bias=bias[:102]), r"bias: expected \[104\], got \[102\]"),
        (dict(token_weight=WEIGHTS[:, 0]), r"token_weight: expected \[8, 4\], got \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(**{**dict(hidden=hidden, weight=weight, targets=targets, bias=bias), **wrong}, sharding=where)


@pytest.mark.parametrize("error, message, given", [
    (TypeError, "sharding: vocab: expected an axis or a tuple of them, got int", lambda: Sharding(mesh(), vocab=3)),
    (TypeError, "sharding: expected logitless.jax.Sharding or None, got str", lambda: "data"),
    (ValueError, "sharding: vocab: expected axes of \\('data', 'model'\\), got 'tp'", lambda: Sharding(mesh(), vocab="tp")),
    (TypeError, "sharding: mesh: expected a jax.sharding.Mesh, got str", lambda: Sharding("data")),
    (TypeError, "sharding: tokens: expected an axis, a tuple of them or a PartitionSpec, got int", lambda: Sharding(mesh(), tokens=3)),
    (ValueError, "sharding: tokens: expected axes of \\('data', 'model'\\), got 'tp'", lambda: Sharding(mesh(), tokens=("data", "tp"))),
    (ValueError, "sharding: tokens: expected axes of the leading dimensions", lambda: Sharding(mesh(), tokens=P(None, None, "data"))),
])
def test_what_is_wrong_is_named(error, message, given):
    with pytest.raises(error, match=message):
        linear_cross_entropy(*arrays(), sharding=given())


def test_tokens_over_several_axes():
    hidden, weight, targets, _ = arrays()
    both = Sharding(mesh(), tokens=("data", "model"))
    found = linear_cross_entropy(hidden, weight, targets, sharding=both)
    assert found == linear_cross_entropy(hidden, weight, targets, sharding=Sharding(mesh(), tokens=P(("data", "model"))))
    assert abs(found - linear_cross_entropy(hidden, weight, targets)) <= 1e-6


def test_a_vocabulary_that_does_not_divide_is_named():
    hidden, weight, targets, _ = arrays()
    with pytest.raises(ValueError, match=r"weight: expected a multiple of 4 along dimension 0.*got \[102, 16\]"):
        linear_cross_entropy(hidden, weight[:102], targets, sharding=Sharding(mesh(), vocab=("data", "model")))
    with pytest.raises(ValueError, match=r"hidden: expected a multiple of 2 along dimension 0.*got \[7, 4, 16\]"):
        linear_cross_entropy(hidden[:7], weight, targets[:7], sharding=Sharding(mesh(), tokens="data"))
