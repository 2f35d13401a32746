"""Gemma-2-2B or Qwen2.5-7B with LoRA on the attention's projections, in bf16 with gradient checkpointing."""

from __future__ import annotations

import torch
from torch import nn

from logitless.torch import lazy_head
import seeds.measure as m

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def config(args):
    import transformers

    tiny = dict(vocab_size=3000, hidden_size=64, intermediate_size=96, num_hidden_layers=args.layers or 2, num_attention_heads=4,
                num_key_value_heads=2)
    if args.model == "gemma2-2b":
        sizes = dict(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=args.layers or 26,
                     num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096,
                     query_pre_attn_scalar=256, final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
        return transformers.Gemma2Config(tie_word_embeddings=True, **sizes | (tiny | dict(head_dim=16) if args.tiny else {}))
    sizes = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=args.layers or 28,
                 num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768, rope_theta=1000000.0)
    return transformers.Qwen2Config(tie_word_embeddings=False, rms_norm_eps=1e-6, **sizes | (tiny if args.tiny else {}))


class Adapter(nn.Module):
    """LoRA of rank 16 around a frozen linear layer, for machines without peft."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        like = dict(dtype=torch.float32, device=base.weight.device)
        self.down, self.up = nn.Linear(base.in_features, 16, bias=False, **like), nn.Linear(16, base.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x.float())).to(x.dtype)


def adapted(model):
    """Returns (the model with adapters, a note); its own weights are frozen."""
    try:
        import peft
    except ImportError:
        for p in model.parameters():
            p.requires_grad_(False)
        for module in list(model.modules()):
            for name in set(TARGETS) & {name for name, _ in module.named_children()}:
                setattr(module, name, Adapter(getattr(module, name)))
        return model, "peft is not installed: adapters of this script's own"
    made = peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, made), None


def make(args, variant):
    made = config(args)
    model = m.made(args, made, dtype(args))
    if variant == "liger":
        m.liger(model, "gemma2" if args.model == "gemma2-2b" else "qwen2")
    torch.manual_seed(1)
    model, note = adapted(model)
    m.checkpointed(model)
    model.enable_input_require_grads()
    if variant == "lazy":
        lazy_head(model)
    elif variant == "far":
        lazy_head(model, far_field=0.01)
    cut = f"{args.layers} layer(s) of {args.model}" if args.layers else None
    return m.trained(model, m.of_model, m.batch(args, made.vocab_size)), "; ".join(filter(None, (note, cut)))


def dtype(args):
    return torch.float32 if args.tiny else torch.bfloat16


def work(args, report):
    args.sequences, args.length = args.sequences or 4, args.length or (32 if args.tiny else 2048)
    m.each(args, report, make, f"{args.model} LoRA, {args.sequences} x {args.length} tokens, checkpointing", dtype(args))
