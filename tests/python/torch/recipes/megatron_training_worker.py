"""One of the gloo processes that train Megatron-Core's GPTModel on CPUs as Megatron does: microbatches in its DDP with
main gradients, multi-token prediction, pipelines. The argument is "tensor" or "pipeline", the parallelism of all
processes. Rank 0 prints "ok" when patched models have losses and gradients of unmodified ones."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.megatron_cpu import BATCH, DIM, LENGTH, VOCAB, agree, in_ddp, inputs, made, main_grads, no_logits, start  # noqa: E402, isort: skip
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402

from logitless.torch.integrations import megatron as recipe  # noqa: E402

COUNT = 3  # microbatches


def step(model, mask=False, weight=None, added=False):
    """Returns the losses of some microbatches of a model in DDP, main gradients, and what multi-token prediction logs.
    mask: the first tokens have no loss. weight: of the head, if it is checked whether its gradient is added."""
    MTPLossLoggingHelper.tracker.clear()
    losses = []
    for k in range(COUNT):
        *given, targets = inputs(k)
        loss_mask = torch.ones(BATCH, LENGTH)
        if mask:
            loss_mask[0, :3] = 0
        found = model(*given, labels=targets, loss_mask=loss_mask)
        (found * loss_mask * torch.linspace(0.5, 2, found.numel()).view_as(found)).sum().backward()
        losses.append(found.detach())
    assert weight is None or (weight.grad is None and weight.grad_added_to_main_grad == added)
    logged = {k: v.clone() for k, v in MTPLossLoggingHelper.tracker.items() if isinstance(v, torch.Tensor)}
    return torch.stack(losses), {**main_grads(model), **logged}


def compared(mask=False, fused=True, **options):
    expected = step(in_ddp(made(**options)), mask)
    if options.get("mtp"):
        assert expected[1]["loss_values" if "loss_values" in expected[1] else "values"].all()
    model = made(**options, gradient_accumulation_fusion=fused)
    agree(step(in_ddp(model), mask), expected)  # of Megatron itself
    recipe.patch(model, memory_budget="1MiB")
    training = in_ddp(model)
    weight = model.shared_embedding_or_output_weight() if options.get("tied") else model.output_layer.weight
    with no_logits(model.output_layer):
        found = step(training, mask, weight, fused)
        agree(found, expected)
        agree(step(training, mask), found, 1e-6)  # from cleared main gradients


def counted(**options):
    """Versions that count the right tokens of multi-token prediction count as many without logits."""
    model = recipe.patch(made(**options))
    counts, layer = getattr(recipe._mtp(), recipe._COUNTS, None), model.output_layer
    if counts is None:
        return
    rows = LENGTH // dist.get_world_size() if options.get("sequence_parallel") else LENGTH
    hidden = torch.randn(LENGTH, BATCH, DIM)[dist.get_rank() * rows % LENGTH :][:rows]
    with torch.no_grad():
        real, _ = layer(hidden)
    labels = tensor_parallel.gather_from_tensor_model_parallel_region(real).argmax(-1).transpose(0, 1).clone()
    labels[:, ::3] = (labels[:, ::3] + 1) % VOCAB
    labels[0, 1], mask = -1, torch.ones(BATCH, LENGTH)
    mask[1, :2] = 0
    logits = recipe._Logits(layer, hidden, layer.weight)
    recipe._losses(labels, logits, None, True)
    found, expected = (counts(z, labels, mask, layer, None, layer.tp_group) for z in (logits, real))
    assert found == expected and 0 < found[0] < found[1] == mask.sum()


def in_bf16():
    """The fusion changes the roundings of the head's gradient alone, whose errors then are those of one microbatch."""
    found = [step(in_ddp(recipe.patch(made(dtype=torch.bfloat16, gradient_accumulation_fusion=f)))) for f in (False, True)]
    agree(*found, 4e-3)
    name = "output_layer.weight"
    assert found[0][1][name].dtype == torch.float32 and not torch.equal(found[0][1][name], found[1][1][name])


def frozen():
    model = recipe.patch(made(gradient_accumulation_fusion=True))
    model.output_layer.weight.requires_grad_(False)
    training = in_ddp(model)
    with no_logits(model.output_layer):
        *given, targets = inputs()
        training(*given, labels=targets).sum().backward()
    assert not hasattr(model.output_layer.weight, "main_grad") and model.output_layer.weight.grad is None


def alone():
    """Without DDP there is no main_grad, and the gradient is autograd's."""
    gradients = []
    for fused in (False, True):
        model = recipe.patch(made(gradient_accumulation_fusion=fused))
        *given, targets = inputs()
        model.decoder.requires_grad_(False)  # its fused layers want main_grad
        model(*given, labels=targets).sum().backward()
        gradients.append(model.output_layer.weight.grad)
    assert torch.equal(*gradients)


def refused():
    model = recipe.patch(made(gradient_accumulation_fusion=True))
    training = in_ddp(model)
    model.output_layer.weight.main_grad = torch.zeros(VOCAB, DIM, dtype=torch.int32)
    *given, targets = inputs()
    try:
        training(*given, labels=targets)
    except TypeError as told:
        assert "main_grad" in str(told) and "int32" in str(told)
    else:
        raise AssertionError("no error")


def schedule(model):
    """Runs a pipeline's schedule. Returns the last stage's losses, and main gradients after Megatron summed those of
    shared embeddings."""

    def forward_step(batches, model):
        *given, labels = next(batches)
        losses = model(*given, labels=labels)
        return losses, lambda losses: (losses.mean(), {"losses": losses.detach().clone()})

    MTPLossLoggingHelper.tracker.clear()
    model.config.finalize_model_grads_func = finalize_model_grads
    found = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter([inputs(k) for k in range(COUNT)]), model=[model],
        num_microbatches=COUNT, seq_length=LENGTH, micro_batch_size=BATCH, forward_only=False,
    )
    losses = torch.stack([f["losses"] for f in found]) if found else torch.zeros(0)
    logged = {k: v.clone() for k, v in MTPLossLoggingHelper.tracker.items() if isinstance(v, torch.Tensor)}
    return losses, {**main_grads(model), **logged}


def pipelined(**options):
    expected = schedule(in_ddp(made(**options)))
    for fused in (False, True):
        model = made(**options, gradient_accumulation_fusion=fused)
        kind = type(model)
        assert recipe.patch(model) is model
        if not parallel_state.is_pipeline_last_stage():
            assert type(model) is kind and not hasattr(model, "output_layer")
            found = schedule(in_ddp(model))
        else:
            assert type(model) is not kind
            with no_logits(model.output_layer):
                found = schedule(in_ddp(model))
            assert len(found[0]) == COUNT
        agree(found, expected)
        recipe.unpatch(model)
        assert type(model) is kind
        if options.get("tied"):
            ends = [torch.empty(VOCAB, DIM) for _ in range(dist.get_world_size())]
            name = "embedding.word_embeddings.weight" if hasattr(model, "embedding") else "output_layer.weight"
            dist.all_gather(ends, found[1][name])
            assert ends[0].norm() > 0 and torch.equal(ends[0], ends[-1])


def tensor():
    for options in ({}, {"tied": True}, {"mtp": 2, "mask": True}, {"mtp": 1, "tied": True}):
        compared(**options)
    compared(mtp=2, fused=False)
    counted()
    if dist.get_world_size() > 1:
        compared(sequence_parallel=True, tied=True)
        compared(sequence_parallel=True, mtp=2, mask=True)
        counted(sequence_parallel=True)
        return
    in_bf16()
    frozen()
    alone()
    refused()


def pipeline():
    for options in ({}, {"tied": True}, {"mtp": 1}, {"mtp": 1, "tied": True}):
        pipelined(**options)


if __name__ == "__main__":
    start(**{sys.argv[1]: int(os.environ["WORLD_SIZE"])})
    {"tensor": tensor, "pipeline": pipeline}[sys.argv[1]]()
    if dist.get_rank() == 0:
        print("ok", flush=True)
    dist.destroy_process_group()
