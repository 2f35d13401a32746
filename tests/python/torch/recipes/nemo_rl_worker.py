"""One of the gloo processes that score sequence-parallel tokens by NeMo-RL's own function, before and after the patch.
Rank 0 prints "ok" when log-probabilities and gradients agree."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"  # Megatron asks for it where it is imported

import nemo_rl.distributed.model_utils as utils  # noqa: E402
from recipes.models import snippet  # noqa: E402

from logitless.torch.integrations import nemo_rl as recipe  # noqa: E402

VOCAB, BATCH, LENGTH = 64, 2, 8


def step():
    """Returns the log-probabilities [B, S - 1], and the gradients of this rank's tokens and rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(LENGTH, BATCH, 16), torch.randn(VOCAB, 16), torch.randint(0, VOCAB, (BATCH, LENGTH))
    own, rows = hidden.chunk(ranks)[rank].clone().requires_grad_(), weight.chunk(ranks)[rank].clone().requires_grad_()
    begin = VOCAB // ranks * rank
    found = utils.from_parallel_hidden_states_to_logprobs(
        own, rows, None, ids, vocab_start_index=begin, vocab_end_index=begin + len(rows), tp_group=dist.group.WORLD, chunk_size=3,
    )
    (found * torch.linspace(0.5, 2, found.numel()).view_as(found)).sum().backward()
    return found.detach(), own.grad, rows.grad


def main():
    dist.init_process_group("gloo")
    expected = step()
    snippet("nemo_rl.md")
    assert recipe.patched()
    found = step()
    assert recipe.HiddenStatesToLogprobs.calls == 1
    for got, want in zip(found, expected):
        assert got.shape == want.shape and (got - want).norm() <= 2e-5 * want.norm(), (got - want).norm() / want.norm()
    recipe.unpatch()
    assert not recipe.patched() and utils.ChunkedDistributedHiddenStatesToLogprobs is recipe.HiddenStatesToLogprobs.replaced
    if dist.get_rank() == 0:
        print("ok", flush=True)
    dist.destroy_process_group()


main()
