"""One of the gloo processes that run Megatron-Core's GPTModel on CPUs, by itself and patched, with tensor parallelism over
all of them. Rank 0 prints "ok" when losses and gradients agree and no output layer has multiplied."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.megatron_cpu import BATCH, LENGTH, VOCAB, agree, inputs, made, no_logits, start  # noqa: E402, isort: skip
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from recipes.models import snippet  # noqa: E402

from logitless.torch.integrations import megatron as recipe  # noqa: E402


def step(model, labels=None):
    """Returns the losses, and the gradients of a weighted sum of them."""
    *given, targets = inputs()
    losses = model(*given, labels=targets if labels is None else labels)
    model.zero_grad()
    (losses * torch.linspace(0.5, 2, losses.numel()).view_as(losses)).sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compared(**options):
    model = made(**options)
    own = type(model), type(model.output_layer)
    expected = step(model)
    assert recipe.patch(model, memory_budget="1MiB") is model and isinstance(model, own[0])
    with no_logits(model.output_layer):
        agree(step(model), expected)
    logits = model(*inputs()[:3])  # without labels
    assert logits.shape == (BATCH, LENGTH, VOCAB // dist.get_world_size())
    labels = inputs()[4].clone()
    labels[0, :3], labels[1, 5] = -100, -1
    losses, _ = step(model, labels)
    assert (losses[labels < 0] == 0).all() and torch.allclose(losses[labels >= 0], expected[0][labels >= 0], atol=1e-5)
    recipe.unpatch(model)
    assert (type(model), type(model.output_layer)) == own and recipe.unpatch(model) is None
    agree(step(model), expected)


def of_verl(gathered):
    """verl's Megatron engine calls its kernel on hidden states that Megatron gathers, whose backward sums over ranks."""
    from logitless.torch.integrations import verl

    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(2)
    hidden, weight, labels = torch.randn(8, 1, 16), torch.randn(VOCAB, 16), torch.randint(0, VOCAB, (1, 8))
    part = slice(8 // ranks * rank, 8 // ranks * (rank + 1)) if gathered else slice(None)
    rows = slice(VOCAB // ranks * rank, VOCAB // ranks * (rank + 1))
    own, local = hidden[part].clone().requires_grad_(), weight[rows].clone().requires_grad_()
    given = tensor_parallel.gather_from_sequence_parallel_region(own) if gathered else own
    group = parallel_state.get_tensor_model_parallel_group()
    found = verl.linear_cross_entropy(given, local, labels, 0.7, "none", group)
    (found[0].sin().sum() + found[1].cos().sum()).backward()

    full, whole = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (full.flatten(0, 1) @ whole.T / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, labels.view(-1, 1))[:, 0], -(log_p.exp() * log_p).sum(-1)
    (expected[0].sin().sum() + expected[1].cos().sum()).backward()
    for got, want in zip((*found, own.grad, local.grad), (*expected, full.grad[part], whole.grad[rows])):
        assert got.shape == want.shape and (got - want).norm() <= 1e-5 * want.norm(), (gathered, (got - want).norm() / want.norm())


def refusals():
    model = made()
    for wrong, error in ((torch.nn.Linear(2, 2), TypeError), (model, NotImplementedError)):
        model.config.defer_embedding_wgrad_compute = True
        try:
            recipe.patch(wrong)
        except error as told:
            assert "GPTModel" in str(told) or "defer_embedding_wgrad_compute" in str(told)
        else:
            raise AssertionError("no error")


def main():
    start(int(os.environ["WORLD_SIZE"]))
    if dist.get_world_size() > 1:
        compared()
        compared(sequence_parallel=True)
        compared(sequence_parallel=True, tied=True)
        of_verl(gathered=True)
        of_verl(gathered=False)
    else:
        compared(tied=True)
        refusals()
        model = made()
        expected = step(model)
        snippet("megatron.md", model=model)
        agree(step(model), expected)
        assert isinstance(model, recipe._Model)
    if dist.get_rank() == 0:
        print("ok", flush=True)
    dist.destroy_process_group()


main()
