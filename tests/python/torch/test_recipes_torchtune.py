"""docs/use/recipes/torchtune.md: its models trained with the library's loss, and with a lazy output layer."""

import pytest
import torch
from recipes.models import VOCAB, Made, batches, furthest, parameters, snippet, under_fsdp

torchtune = pytest.importorskip("torchtune", exc_type=ImportError)


def model(tied=False, **more):
    from torchtune.models.llama3 import llama3
    from torchtune.models.llama3_2 import llama3_2

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCAB, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64, intermediate_dim=64
    )
    return llama3_2(**sizes) if tied else llama3(**sizes)


def train(made, loss_of):
    """Runs three steps in the manner of torchtune's recipes. Returns losses and parameters."""
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    losses = []
    for k in range(3):
        rows = batches(4 * (k + 1))[4 * k:]
        labels = torch.tensor([row["labels"][1:] + [-100] for row in rows])
        loss = loss_of(made(tokens=torch.tensor([row["input_ids"] for row in rows])), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, parameters(made)


def plain(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1))


def agree(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and furthest(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_loss(tied):
    pytest.importorskip("torchtune.modules.loss.loss_types", reason="this torchtune has no SFTLoss", exc_type=ImportError)
    from logitless.torch.integrations.torchtune import LinearCrossEntropyLoss
    from torchtune import config
    from torchtune.modules.loss import SFTLoss

    loss = config.instantiate({"_component_": "logitless.torch.integrations.torchtune.LinearCrossEntropyLoss"})
    assert isinstance(loss, SFTLoss) and isinstance(loss, LinearCrossEntropyLoss)
    with pytest.raises(RuntimeError, match="set_model_output"):
        loss(torch.zeros(1, 2, 32), torch.zeros(1, 2, dtype=torch.int64))
    made = model(tied)
    loss.set_model_output(made)
    assert made(tokens=torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 32)  # it returns hidden states
    assert not list(loss.parameters())
    agree(train(made, loss.apply_compile_strategy(backend="eager")), train(model(tied), plain))
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    assert snippet("torchtune.md", model=model(tied), tokens=tokens, labels=tokens)["value"].isfinite()
    nothing = loss(torch.ones(1, 2, 32), torch.full((1, 2), -100))
    assert nothing == 0
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        loss.patch_tp_plan({"output": None})
    made.output = torch.nn.Sequential(torch.nn.Linear(32, 10))
    with pytest.raises(TypeError, match="TiedLinear, got Sequential"):
        loss.set_model_output(made)
    with pytest.raises(ValueError, match="memory_budget"):
        LinearCrossEntropyLoss(memory_budget=0)
    with pytest.raises(ValueError, match="expected_ignored"):
        LinearCrossEntropyLoss(expected_ignored=2)


def test_fsdp():
    pytest.importorskip("torchtune.modules.loss.loss_types", reason="this torchtune has no SFTLoss", exc_type=ImportError)
    under_fsdp("torchtune")


@pytest.mark.parametrize("chunks", [0, 3])
def test_lazy_output_layer(chunks):
    """The loss of torchtune 0.6 works, too: it takes a list of chunks of logits."""
    from logitless.torch import lazy_head
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    def run(lazy):
        made = model()
        if chunks:
            made.set_num_output_chunks(chunks)
        if lazy:
            lazy_head(made.output)
        return train(made, CEWithChunkedOutputLoss(chunks) if chunks else plain)

    with Made() as asked:
        found = run(True)
    assert asked.count == 0 and asked.calls == 3 * max(chunks, 1)
    agree(found, run(False))
