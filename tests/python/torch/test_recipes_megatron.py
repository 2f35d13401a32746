"""docs/use/recipes/megatron.md: GPTModel's output layer and loss, by itself and with tensor and sequence parallelism."""

import pytest
from recipes.models import run_worker

pytest.importorskip("megatron.core", exc_type=ImportError)


@pytest.mark.parametrize("ranks", [1, 2])
def test_model(ranks):
    run_worker("megatron_worker.py", ranks)
