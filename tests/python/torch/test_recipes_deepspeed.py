"""docs/use/recipes/README.md: a lazy head under DeepSpeed's ZeRO, one process on the CPU."""

import os

import pytest
import torch
from recipes.models import Made, tiny_llama
from logitless.torch import lazy_head

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed", exc_type=ImportError)


@pytest.fixture(scope="module", autouse=True)
def group():
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    deepspeed.init_distributed("gloo")
    yield
    torch.distributed.destroy_process_group()
    del os.environ["LOCAL_RANK"]


def losses(stage, lazy):
    model = tiny_llama()
    if lazy:
        lazy_head(model)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for first in range(3, 6):
        ids = torch.arange(first, first + 40).view(2, 20)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stage(stage):
    expected = losses(stage, False)
    with Made() as made:
        assert losses(stage, True) == pytest.approx(expected, rel=1e-5)
    # Stage 3 wraps the output of each module in a function of its own, which reads it.
    assert made.calls == 3 and made.count == (3 if stage == 3 else 0)
