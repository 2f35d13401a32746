"""A step of GPT-2 124M in bf16 autocast over fp32 weights: the loss in chunks, compiled and not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from logitless.torch import autochunk, linear_cross_entropy
import seeds.measure as m


def config(args):
    import transformers

    sizes = dict(vocab_size=50304, n_embd=768, n_layer=args.layers or 12, n_head=12, n_positions=1024)
    if args.tiny:
        sizes = dict(vocab_size=3072, n_embd=64, n_layer=args.layers or 2, n_head=4, n_positions=64)
    return transformers.GPT2Config(tie_word_embeddings=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)


def logits_loss(hidden, weight, target):
    return F.cross_entropy((hidden @ weight.T).float(), target)


def chunker(chunks):
    """Turns Inductor's own chunker on; chunks: a number, or None for Inductor's choice. Returns a note on its effect."""
    from torch._inductor import config as inductor
    from torch._inductor import metrics

    if not hasattr(inductor, "auto_chunker"):
        raise m.Skipped(f"torch {torch.__version__} has no torch._inductor.config.auto_chunker")
    inductor.auto_chunker.enable = inductor.force_disable_caches = True  # a cached graph is not counted
    inductor.auto_chunker.num_chunk = chunks
    before = metrics.num_auto_chunking
    return lambda: "" if metrics.num_auto_chunking > before else "Inductor's chunker found nothing to cut"


def head_of(variant):
    """Returns the loss of (hidden [N, D], weight [V, D], target [N]) of a variant, and its note."""
    kind, _, size = variant.partition("-")
    if kind == "head":
        return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, memory_budget=size or None), ""
    if kind == "autochunk":
        return autochunk(logits_loss, chunks=int(size)), ""
    if kind == "chunker":
        return logits_loss, chunker(int(size) if size else None)
    return logits_loss, ""


def make(args, variant):
    import torch._dynamo
    from torch._inductor import config as inductor

    torch._dynamo.reset()
    if hasattr(inductor, "auto_chunker"):
        inductor.auto_chunker.enable = False
    torch.set_float32_matmul_precision("high")
    made = config(args)
    model = m.made(args, made, torch.float32).train()
    head, note = head_of(variant)
    ids = m.batch(args, 3000 if args.tiny else 50257)

    def loss_of(model, ids):
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=not args.tiny):
            hidden = model.transformer(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
            weight = model.lm_head.weight
            if not args.tiny:
                hidden, weight = hidden.bfloat16(), weight.bfloat16()
            return head(hidden, weight, ids[:, 1:].flatten())

    # Tiny models compile where that is what is measured: it takes ten seconds.
    compiled = variant.startswith(("compile", "chunker")) if args.tiny else variant != "eager"
    return m.trained(model, torch.compile(loss_of) if compiled else loss_of, ids), note


def work(args, report):
    args.sequences, args.length = args.sequences or (4 if args.tiny else 32), args.length or (64 if args.tiny else 1024)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    m.each(args, report, make, f"GPT-2 124M, {args.sequences} x {args.length} tokens", dtype)
