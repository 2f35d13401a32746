"""Ready-made losses on meshes of two devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax_oracle import relative_error
from loss_frameworks import normal

from logitless.jax import Sharding, losses

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.parametrize("options", [
    dict(symmetric=True, negatives=6), dict(targets=np.array([3, 0, -100, 7, 7, 1, 2, 5], np.int32), negatives=4),
    dict(reduction="none"), dict(symmetric=True, reduction="sum"),
], ids=str)  # fmt: skip
def test_info_nce(options):
    options = dict(options)
    rows, keys = normal(8, 6, seed=71), normal(8, 6, seed=72)
    negatives = normal(options.pop("negatives", 0), 6, seed=73)

    def call(sharding):
        def loss(query, key, more, temperature):
            found = losses.info_nce_loss(
                query, key, negatives=more if len(more) else None, temperature=temperature, sharding=sharding, **options)
            return (found * rows[:, 0]).sum() if found.ndim else found

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(rows, keys, negatives, jnp.float32(0.5))

    (value, gradients), (expected, others) = call(Sharding(mesh(), tokens="data")), call(None)
    assert relative_error(value, expected) < 2e-6
    for one, other in zip(gradients, others):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("message, change", {
    "key: expected a multiple of 2 rows, which are sharded over ('data',), got [7, 6]": dict(key=normal(7, 6, seed=1)),
    "negatives: expected a multiple of 2 rows": dict(negatives=normal(3, 6, seed=1)),
    "sharding: expected tokens=axes of the rows alone": dict(sharding=dict(vocab="data")),
}.items())  # fmt: skip
def test_bad_rows_are_named(message, change):
    sharding = Sharding(mesh(), **change.pop("sharding", dict(tokens="data")))
    given = {"query": normal(8, 6, seed=1), "key": normal(8, 6, seed=2), "targets": np.zeros(8, np.int32), **change}
    with pytest.raises(ValueError) as raised:
        losses.info_nce_loss(**given, sharding=sharding)
    assert message in str(raised.value)
