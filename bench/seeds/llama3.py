"""Llama-3-8B, full fine-tuning under FSDP2 in bf16 with AdamW and gradient checkpointing."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from logitless.torch import lazy_head, sharded_head
import seeds.measure as m


def config(args):
    import transformers

    sizes = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=args.layers or 32,
                 num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0)
    if args.tiny:
        sizes |= dict(vocab_size=3000, hidden_size=64, intermediate_size=96, num_hidden_layers=args.layers or 2, num_attention_heads=4)
        sizes |= dict(num_key_value_heads=2)
    return transformers.LlamaConfig(tie_word_embeddings=False, rms_norm_eps=1e-5, **sizes)


def make(args, variant):
    made = config(args)
    torch.manual_seed(0)
    model = m.checkpointed(m.made(args, made, dtype(args)))
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    if variant == "liger":
        m.liger(model, "llama")
    elif variant != "plain":
        lazy_head(model)
    ignored = sharded_head(model.lm_head, mesh) if variant == "sharded" else set()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    cut = f"{args.layers} of Llama-3-8B's 32 layers" if args.layers else ""
    return m.trained(model, m.of_model, m.batch(args, made.vocab_size), lr=1e-5), cut  # 1e-4 learns the batch in two steps


def dtype(args):
    return torch.float32 if args.tiny else torch.bfloat16


def work(args, report):
    args.sequences, args.length = args.sequences or 2, args.length or (64 if args.tiny else 4096)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    m.each(args, report, make, f"Llama-3-8B, FSDP2, {args.sequences} x {args.length} tokens a rank, checkpointing", dtype(args))
    dist.destroy_process_group()
