"""One of several gloo processes that share the vocabulary of a lazy head; hidden states are the same on all
(worker_process.py). Prints "ok" when all checks pass."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_worker import Traffic
from torch import nn

DIM, VOCAB, TOKENS = 16, 61, (2, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, x):
        return self.lm_head(x)


def near(found, expected, what):
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), (what, (found - expected).abs().max())


def of_torch(rank, ranks, mesh):
    """parallelize_module runs before lazy_head, and after it."""
    from logitless.torch import LazyLogits, lazy_head, unpatch
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(3)
    x, y = torch.randn(*TOKENS, DIM), torch.randint(0, VOCAB, TOKENS)
    whole, hidden = Model(), x.clone().requires_grad_()
    expected = F.cross_entropy(whole(hidden).flatten(0, 1), y.flatten())
    expected.backward()
    for sequence, options in (
        (False, dict(output_layouts=Replicate())),
        (True, dict(input_layouts=Shard(1), output_layouts=Replicate())),
        (False, dict(use_local_output=False)),  # the form that loss_parallel() needs
    ):
        for first in (lazy_head, lambda m: m):
            model = parallelize_module(first(Model()), mesh, {"lm_head": ColwiseParallel(**options)})
            lazy_head(model)
            own = (x.chunk(ranks, 1)[rank] if sequence else x).clone().requires_grad_()
            z = model(own)
            with Traffic() as traffic:
                loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
                loss.backward()
            what = (options, first)
            assert isinstance(z, LazyLogits) and not z.is_real, what
            assert (VOCAB, DIM) not in traffic.redistributed, what
            near(loss, expected, what)
            near(own.grad, hidden.grad.chunk(ranks, 1)[rank] if sequence else hidden.grad, what)
            for p, q in zip(model.parameters(), whole.parameters()):
                near(p.grad.full_tensor(), q.grad, what)
            near(model(own) + 0, whole(x), what)
            z = unpatch(model)(own)
            assert type(z) is (DTensor if "use_local_output" in options else torch.Tensor), what


def of_transformers(rank, ranks):
    """A model that from_pretrained has sharded."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return
    from logitless.torch import LazyLogits, lazy_head, unpatch

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=204)
    if rank == 0:
        LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=False)).save_pretrained(folder[0])
    dist.barrier()
    whole = LlamaForCausalLM.from_pretrained(folder[0])
    model = lazy_head(LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto"))
    torch.manual_seed(4)
    ids = torch.randint(0, 204, (2, 9))
    found, expected = (m(input_ids=ids, labels=ids) for m in (model, whole))
    found.loss.backward()
    expected.loss.backward()
    assert isinstance(found.logits, LazyLogits) and not found.logits.is_real
    near(found.loss, expected.loss, "transformers")
    for (name, p), q in zip(model.named_parameters(), whole.parameters()):
        near(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad, name)
    tokens = [m.eval().generate(ids[:1, :4], max_new_tokens=3, do_sample=False) for m in (model, whole)]
    assert torch.equal(*tokens)
    assert type(unpatch(model)(input_ids=ids).logits) is torch.Tensor
    if rank == 0:
        shutil.rmtree(folder[0])


def main(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    of_torch(rank, ranks, init_device_mesh("cpu", (ranks,)))
    of_transformers(rank, ranks)
