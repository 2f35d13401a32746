"""docs/use/recipes/levanter.md: the implementation, and levanter's own loss that calls it."""

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logitless.jax.integrations import levanter as recipe

PACKAGE = "levanter.kernels.pallas.fused_cross_entropy_loss"


def problem(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (24, 8)).astype(dtype), jax.random.normal(keys[1], (8, 3000)).astype(dtype)
    return x, jax.random.randint(keys[2], (24,), 0, 3000), w


def formula(x, labels, w, logit_soft_cap=None, **_):
    logits = x @ w
    if logit_soft_cap is not None:
        logits = jnp.tanh(logits / logit_soft_cap) * logit_soft_cap
    lse = jax.nn.logsumexp(logits, -1)
    return lse - logits[jnp.arange(len(labels)), labels], lse


def value_and_gradients(function, x, labels, w):
    def objective(x, w):
        loss, lse = function(x, labels, w, logit_soft_cap=5.0)
        return (loss + 1e-2 * lse**2).mean()

    return jax.jit(jax.value_and_grad(objective, (0, 1)))(x, w)


def test_implementation():
    x, labels, w = problem()
    for got, want in zip(*(jax.tree.leaves(value_and_gradients(f, x, labels, w)) for f in (recipe.loss_and_lse, formula))):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    loss, lse = recipe.loss_and_lse(x.astype(jnp.bfloat16), labels, w, dtype=jnp.bfloat16)
    assert loss.dtype == lse.dtype == jnp.bfloat16
    with pytest.raises(NotImplementedError, match="return_argmax"):
        recipe.loss_and_lse(x, labels, w, return_argmax=True)


def test_patch(monkeypatch):
    own = {"xla": formula, "batched_xla": formula, "reference": formula}
    module = types.ModuleType(PACKAGE)
    module.IMPLEMENTATIONS = dict(own)
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    page = Path(__file__).parents[3] / "docs/use/recipes" / "levanter.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(code, page.name, "exec"), {})
    recipe.patch()
    found = module.IMPLEMENTATIONS
    assert found["xla"].func is found["batched_xla"].func is recipe.loss_and_lse and found["reference"] is formula
    recipe.unpatch()
    assert module.IMPLEMENTATIONS == own
    with pytest.raises(ValueError):
        recipe.patch(memory_budget=0)
    module.IMPLEMENTATIONS = {"xla": formula}
    with pytest.raises(NotImplementedError, match=r"without \['batched_xla'\]"):
        recipe.patch()


def test_levanter():
    kernel = pytest.importorskip(PACKAGE, exc_type=ImportError)
    x, labels, w = problem()

    def objective(x, w):
        return kernel.fused_cross_entropy_loss_and_logsumexp_penalty(x, labels, w, logsumexp_weight=1e-2)

    run = lambda: jax.jit(jax.value_and_grad(lambda *a: objective(*a), (0, 1))).lower(x, w).compile()  # noqa: E731
    plain = run()
    recipe.patch()
    try:
        program = run()
    finally:
        recipe.unpatch()
    assert "logitless" in program.as_text() and "logitless" not in plain.as_text()
    for got, want in zip(jax.tree.leaves(program(x, w)), jax.tree.leaves(plain(x, w))):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)
