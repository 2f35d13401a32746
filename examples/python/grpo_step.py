"""GRPO from end to end: samples completions of a small model without logits, rewards them and trains on them.

    python examples/python/grpo_step.py [--steps N] [--device cuda] [--dtype bfloat16]

Sampler and trainer share the head, whose bits do not depend on the batch: the ratio of the first update on new samples
is exactly 1. It is so on a CPU in either dtype, and on GPUs of compute capability 8.0 or later in bf16, their default. The
body of this model has no matrix product, whose bits would depend on the batch in PyTorch.
"""

import argparse

import torch
from logitless.torch import linear_sample
from logitless.torch.losses import group_advantages, grpo_loss


class Model(torch.nn.Module):
    """A next-token model of the last token and the position."""

    def __init__(self, vocab, dim, length):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(length, dim)
        self.gain = torch.nn.Parameter(torch.ones(dim))
        self.head = torch.nn.Parameter(torch.randn(vocab, dim) / dim**0.5)

    def forward(self, tokens):
        """Returns hidden states [B, T, D] of token ids [B, T]."""
        return torch.tanh(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]) * self.gain


@torch.no_grad()
def generate(model, completions, length, seed):
    """Returns token ids [completions, length + 1], of which the first is 0, and log-probabilities [completions, length].
    """
    device = model.head.device
    tokens, log_probs = torch.zeros(completions, 1, dtype=torch.long, device=device), []
    for t in range(length):
        counter = torch.arange(completions, device=device) * length + t  # each token has noise of its own
        states = model(tokens)[:, -1]
        made = linear_sample(states, model.head, top_k=1000, seed=seed, counter=counter)
        tokens = torch.cat([tokens, made.tokens[:, None]], 1)
        log_probs.append(made.log_prob)
    return tokens, torch.stack(log_probs, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.manual_seed(0)
    completions, length, vocab = 32, 8, 4000
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    model = Model(vocab, 64, length).to(args.device, getattr(torch, dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for step in range(args.steps):
        tokens, old = generate(model, completions, length, seed=step)
        rewards = (tokens[:, 1:] % 2 == 0).float().mean(1)  # completions of even tokens are wanted
        advantages = group_advantages(rewards, completions)
        for update in range(2):
            states = model(tokens[:, :-1])
            found = grpo_loss(states, model.head, tokens[:, 1:], advantages, old_per_token_logps=old)
            ratio = torch.exp(found.logps - old)
            if update == 0:
                exact = bool((ratio == 1).all())
            found.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            print(
                f"step {step}: reward {rewards.mean().item():.3f}, first ratio {'exactly 1' if exact else 'not 1'}, "
                f"second from {ratio.min().item():.3f} to {ratio.max().item():.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
