"""docs/use/recipes/maxtext.md on a model with the names of MaxText 0.2.5, against a loss on full logits. Where maxtext is
installed, its own functions are compared, too."""

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logitless.jax import Sharding
from logitless.jax.integrations import maxtext as recipe

B, T, D, V = 2, 12, 8, 3000


class Leaf:
    """The part of nnx.Param that the loss uses."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self.value


def standing_in(tied, table, gain):
    """The methods of MaxText's Transformer that make logits of hidden states."""
    norm = lambda y: (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * gain).astype(y.dtype)  # noqa: E731
    decoder = types.SimpleNamespace(decoder_norm=norm, dropout=lambda y, deterministic: y)
    if not tied:
        decoder.logits_dense = types.SimpleNamespace(
            kernel=Leaf(table.T), bias=None, dtype=jnp.float32, quant=None, weight_quant=None)
    embedder = types.SimpleNamespace(embedding=Leaf(table))
    return types.SimpleNamespace(mesh=None, decoder=decoder, token_embedder=embedder)


def settings(tied, **options):
    return types.SimpleNamespace(**{
        "logits_via_embedding": tied, "dtype": jnp.float32, "enable_dropout": False, "z_loss_multiplier": 1e-3,
        "normalize_embedding_logits": tied, "final_logits_soft_cap": 3.0 if tied else None, **options,
    })


def batch():
    keys = jax.random.split(jax.random.key(0), 4)
    segments = jnp.ones((B, T), jnp.int32).at[:, -3:].set(0)
    data = {"targets": jax.random.randint(keys[0], (B, T), 0, V), "targets_segmentation": segments}
    return data, jax.random.normal(keys[1], (B, T, D)), jax.random.normal(keys[2], (V, D)), jax.random.normal(keys[3], (D,))


def on_logits(tied, hidden, table, gain, data, config):
    y = standing_in(tied, table, gain).decoder.decoder_norm(hidden)
    logits = y @ (table.astype(jnp.bfloat16) if tied else table).astype(jnp.float32).T
    if tied:
        logits = 3.0 * jnp.tanh(logits / D**0.5 / 3.0)
    lse = jax.nn.logsumexp(logits, -1)
    target_logits = jnp.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
    counts = data["targets_segmentation"] != 0
    squares = config.z_loss_multiplier * jnp.where(counts, lse**2, 0.0).sum()
    return jnp.where(counts, lse - target_logits, 0.0).sum() + squares, squares


@pytest.mark.parametrize("tied", [False, True])
def test_loss(tied):
    data, *arrays = batch()
    config = settings(tied)

    def ours(hidden, table, gain):
        return recipe.vocab_tiling_nnx_loss(standing_in(tied, table, gain), hidden, data, config, True)

    def plain(*arrays):
        return on_logits(tied, *arrays, data, config)

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(*arrays) for f in (ours, plain))
    # The gradient of a tied table is rounded to bfloat16 on its way, in MaxText as well.
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert got.dtype == want.dtype and np.linalg.norm(got - want) <= (4e-3 if tied else 1e-5) * np.linalg.norm(want)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("where", [dict(tokens="fsdp"), dict(tokens="fsdp", vocab="tensor")])
def test_on_a_mesh(where):
    data, *arrays = batch()
    config = settings(False)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def ours(hidden, table, gain):
        model = standing_in(False, table, gain)
        model.mesh = mesh
        return recipe.vocab_tiling_nnx_loss(model, hidden, data, config, True, sharding=Sharding(mesh, **where))

    def plain(*arrays):
        return on_logits(False, *arrays, data, config)

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(*arrays) for f in (ours, plain))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert got.dtype == want.dtype and np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_refusals():
    data, hidden, table, gain = batch()
    model = standing_in(False, table, gain)
    model.decoder.logits_dense.quant = "int8"
    with pytest.raises(NotImplementedError, match="quant, got int8"):
        recipe.vocab_tiling_nnx_loss(model, hidden, data, settings(False), True)
    model.mesh = types.SimpleNamespace(size=2, shape={"fsdp": 2}, axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="sharding: expected logitless.jax.Sharding for the mesh {'fsdp': 2}, got None"):
        recipe.vocab_tiling_nnx_loss(model, hidden, data, settings(False), True)


def test_patch(monkeypatch):
    own = object()
    modules = [types.ModuleType(name) for name in recipe._MODULES]
    for module in modules:
        module.vocab_tiling_nnx_loss = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for parent in range(1, module.__name__.count(".") + 1):
            name = ".".join(module.__name__.split(".")[:parent])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    page = Path(__file__).parents[3] / "docs/use/recipes" / "maxtext.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(code, page.name, "exec"), {})
    for made in (m.vocab_tiling_nnx_loss for m in modules):
        assert made.func is recipe.vocab_tiling_nnx_loss and made.keywords == {
            "memory_budget": "1GiB", "sharding": None, "expected_ignored": 0.0,
        }
    with pytest.raises(ValueError, match="expected_ignored: expected a number in"):
        recipe.patch(expected_ignored=2)
    recipe.patch(expected_ignored=0.25)
    assert modules[0].vocab_tiling_nnx_loss.keywords["expected_ignored"] == 0.25
    recipe.unpatch()
    assert all(m.vocab_tiling_nnx_loss is own for m in modules)
    del modules[0].vocab_tiling_nnx_loss
    with pytest.raises(NotImplementedError, match="vocab_tiling_nnx_loss in maxtext.utils"):
        recipe.patch()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_maxtext_itself(tied, dtype):
    """Runs MaxText's tiled function and this one on a model of its layers: loss, z-loss and all gradients agree."""
    tiling = pytest.importorskip("maxtext.utils.vocabulary_tiling", exc_type=ImportError)
    from flax import nnx
    from maxtext.common.common_types import ShardMode
    from maxtext.layers import embeddings, linears, normalizations

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    config = settings(
        tied, dtype=dtype, weight_dtype=jnp.float32, num_vocab_tiling=4, vocab_size=V, emb_dim=D, shard_mode=ShardMode.AUTO,
        debug_sharding=False, logical_axis_rules=[], parameter_memory_host_offload=False, use_iota_embed=False,
        vocab_tiling_ag_once=False,
    )

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.decoder_norm = normalizations.RMSNorm(num_features=D, dtype=dtype, kernel_axes=("norm",), rngs=rngs)
            self.dropout = linears.Dropout(rate=0.0, rngs=rngs, broadcast_dims=(-2,))
            if not tied:
                self.logits_dense = linears.DenseGeneral(
                    in_features_shape=D, out_features_shape=V, dtype=dtype, kernel_axes=("embed_vocab", "vocab"), rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mesh, self.decoder = mesh, Decoder(rngs)
            self.token_embedder = embeddings.Embed(
                num_embeddings=V, num_features=D, dtype=dtype, config=config, mesh=mesh, rngs=rngs)

        def logits_from_hidden_states_for_vocab_tiling(self, hidden, deterministic, mode):
            y = self.decoder.dropout(self.decoder.decoder_norm(hidden), deterministic=deterministic)
            if not tied:
                return self.decoder.logits_dense(y).astype(jnp.float32)
            logits = embeddings.attend_on_embedding(y, self.token_embedder.embedding[...], dtype, config, None)
            return 3.0 * jnp.tanh(logits.astype(jnp.float32) / D**0.5 / 3.0)

    data, hidden, *_ = batch()
    model, hidden = Model(nnx.Rngs(0)), hidden.astype(dtype)
    results = []
    for function in (tiling.vocab_tiling_nnx_loss, recipe.vocab_tiling_nnx_loss):
        loss = lambda m, h, f=function: f(m, h, data, config, True)  # noqa: E731
        results.append(jax.tree.leaves(nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(model, hidden)))
    tolerance = 8e-3 if tied or dtype == jnp.bfloat16 else 1e-5
    assert len(results[0]) == len(results[1]) > 4
    for want, got in zip(*results):
        want, got = (np.asarray(x, np.float32) for x in (want, got))
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
