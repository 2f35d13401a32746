"""Policy and preference losses are functions of log-probabilities: GRPO, PPO's entropy bonus and DPO without logits.

    python examples/python/grpo_step.py [--steps N]
"""

import argparse

import torch
from logitless.torch import linear_logprobs

IGNORED = -100


def grpo_loss(log_prob, old_log_prob, reference, advantage, mask, clip=0.2, beta=0.04):
    """Returns the loss. log_prob, old_log_prob, reference, mask [G, T]; advantage [G] of the G completions of one
    prompt.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    difference = reference - log_prob
    divergence = torch.exp(difference) - difference - 1
    return -((gain - beta * divergence) * mask).sum() / mask.sum()


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.1):
    """Returns the loss from log-probabilities of full completions [B]."""
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -torch.nn.functional.logsigmoid(beta * margin).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    completions, length, dim, vocab = 8, 32, 64, 32000
    body = torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Tanh())
    head = torch.nn.Parameter(torch.randn(vocab, dim) / dim**0.5)
    states = torch.randn(completions, length, dim)
    tokens = torch.randint(0, vocab, (completions, length))
    tokens[:, -4:] = IGNORED  # after the end of a completion
    mask = (tokens != IGNORED).float()
    rewards = torch.linspace(-1, 1, completions)
    advantage = (rewards - rewards.mean()) / rewards.std()
    with torch.no_grad():
        old, _, _ = linear_logprobs(body(states), head, tokens)
    optimizer = torch.optim.Adam([*body.parameters(), head], lr=3e-3)
    for step in range(args.steps):
        log_prob, entropy, _ = linear_logprobs(body(states), head, tokens)
        loss = grpo_loss(log_prob, old, old, advantage, mask) - 1e-3 * (entropy * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            gain = ((log_prob - old) * mask).sum(1).detach()
            print(f"step {step}: loss {loss.item():.4f}, best completion {gain[-1]:+.3f} nats, worst {gain[0]:+.3f}", flush=True)
    totals = [(linear_logprobs(body(states), head, tokens)[0] * mask).sum(1), (old * mask).sum(1)]
    preference = dpo_loss(totals[0][-4:], totals[0][:4], totals[1][-4:], totals[1][:4])
    preference.backward()
    print(f"DPO on the same completions: {preference.item():.4f}")


if __name__ == "__main__":
    main()
