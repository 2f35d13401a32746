"""docs/use/recipes/megatron.md: GPTModel's output layer and loss, by itself and with tensor, sequence and pipeline
parallelism, in Megatron's DDP, and with multi-token prediction."""

import pytest
from recipes.models import run_worker
from torch import nn

from logitless.torch.integrations import megatron


@pytest.mark.parametrize("ranks", [1, 2])
def test_model(ranks):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    run_worker("megatron_worker.py", ranks)


@pytest.mark.parametrize("parallel, ranks", [("tensor", 1), ("tensor", 2), ("pipeline", 2)])
def test_training(parallel, ranks):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    run_worker("megatron_training_worker.py", ranks, parallel)


def test_unpatching_keeps_what_was_mixed_in_later(monkeypatch):
    """FSDP mixes its class into that of a patched model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = nn.Linear(2, 2)

    class Wrapper:
        pass

    model = Model()
    monkeypatch.setattr(megatron, "_models", lambda model: [model])
    model._logitless_options = {}
    megatron._mix(model, megatron._Model)
    megatron._mix(model.output_layer, megatron._Output)
    for module in (model, model.output_layer):
        module.__class__ = type("FSDP" + type(module).__name__, (Wrapper, type(module)), {"later": 3})
    megatron.unpatch(model)
    for module, own, mixin in ((model, Model, megatron._Model), (model.output_layer, nn.Linear, megatron._Output)):
        assert isinstance(module, own) and isinstance(module, Wrapper) and module.later == 3
        assert not isinstance(module, mixin)
    megatron.unpatch(model)
