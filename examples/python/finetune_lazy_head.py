"""Fine-tunes a small, randomly initialised Llama whose loss runs without logits: one line more than usual.

    python examples/python/finetune_lazy_head.py [--steps N] [--plain]
"""

import argparse

import torch
import transformers
from logitless.torch import lazy_head


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plain", action="store_true", help="with logits, to compare")
    return parser.parse_args()


def main():
    args = parse_arguments()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    if not args.plain:
        lazy_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A text that can be learnt: each token follows from the one before.
    positions = torch.arange(64).repeat(8)[:256]
    ids = (positions[None] * 37 + torch.arange(2)[:, None]) % 1000 + 3
    for step in range(args.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    logits = ids.numel() * config.vocab_size * 4 / 2**20
    print(f"fp32 logits of a step: {logits:.0f} MiB, {'made' if args.plain else 'never made'}")


if __name__ == "__main__":
    main()
