"""docs/use/recipes/flax.md: an nnx and a linen model trained with the library's loss."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logitless.jax import linear_cross_entropy

flax = pytest.importorskip("flax")
optax = pytest.importorskip("optax")

VOCAB, DIM, STEPS = 4000, 16, 3
IDS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, 2, 65))


def plain(hidden, weight, targets, bias=None):
    logits = (hidden @ weight.T + (0 if bias is None else bias)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def nnx_model(tied):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
            self.body = nnx.Linear(DIM, DIM, rngs=rngs)
            self.head = None if tied else nnx.Linear(DIM, VOCAB, rngs=rngs)

        def hidden(self, ids):
            return jax.nn.relu(self.body(self.embed(ids)))

        def weight(self):
            return self.embed.embedding[...] if tied else self.head.kernel[...].T

    return Model(nnx.Rngs(0))


def nnx_run(loss, tied):
    from flax import nnx

    model = nnx_model(tied)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    def objective(model, ids):
        bias = None if tied else model.head.bias[...]
        return loss(model.hidden(ids[:, :-1]), model.weight(), ids[:, 1:], bias)

    @nnx.jit
    def step(model, optimizer, ids):
        value, gradients = nnx.value_and_grad(objective)(model, ids)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, jnp.asarray(ids))) for ids in IDS]
    graph, state = nnx.split(model)
    program = jax.jit(jax.grad(lambda s: objective(nnx.merge(graph, s), jnp.asarray(IDS[0]))))
    return losses, jax.tree.leaves(state), program.lower(state).compile()


def linen_run(loss, tied):
    from flax import linen

    class Model(linen.Module):
        def setup(self):
            self.embed, self.body = linen.Embed(VOCAB, DIM), linen.Dense(DIM)
            self.head = None if tied else self.param("head", linen.initializers.lecun_normal(), (VOCAB, DIM))

        def __call__(self, ids):  # hidden states and the head, instead of logits
            return jax.nn.relu(self.body(self.embed(ids))), self.embed.embedding if tied else self.head

    model = Model()
    parameters = model.init(jax.random.key(0), jnp.asarray(IDS[0]))
    optimizer = optax.sgd(1.0)

    def objective(parameters, ids):
        hidden, weight = model.apply(parameters, ids[:, :-1])
        return loss(hidden, weight, ids[:, 1:])

    program = jax.jit(jax.value_and_grad(objective)).lower(parameters, jnp.asarray(IDS[0])).compile()
    state, losses = optimizer.init(parameters), []
    for ids in IDS:
        value, gradients = program(parameters, jnp.asarray(ids))
        updates, state = optimizer.update(gradients, state)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(value))
    return losses, jax.tree.leaves(parameters), program


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("run", [nnx_run, linen_run])
def test_trains_as_before_in_less_memory(run, tied):
    losses, expected, whole = run(plain, tied)
    found, leaves, program = run(lambda *a: linear_cross_entropy(*a, memory_budget="256KiB"), tied)
    assert found == pytest.approx(losses, rel=1e-5)
    for got, want in zip(leaves, expected):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    logits = 2 * 64 * VOCAB * 4
    saved = whole.memory_analysis().temp_size_in_bytes - program.memory_analysis().temp_size_in_bytes
    assert saved > logits / 2 and "logitless" in program.as_text()


def test_page():
    from flax import nnx

    page = Path(__file__).parents[3] / "docs/use/recipes" / "flax.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    exec(compile(code, page.name, "exec"), names)
    model = nnx_model(tied=True)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    losses = [float(names["step"](model, optimizer, jnp.asarray(ids))) for ids in IDS]
    assert losses == pytest.approx(nnx_run(plain, tied=True)[0], rel=1e-5)
