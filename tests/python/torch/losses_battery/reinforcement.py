"""Policy gradients of language models: tokens of B sequences, with a head."""

import torch
import torch.nn.functional as F

from losses_battery.case import case


def rollout(m):
    """Returns hidden, head, actions, log-probabilities of the old policy and the reference, advantages and a mask."""
    z = m.z
    shape = z.sequences, z.length
    actions = m.whole(z.vocab, *shape)
    old = -m.uniform(*shape, low=6.0, high=8.0)
    reference = -m.uniform(*shape, low=6.0, high=8.0)
    return m.sequences(), m.head(), actions, old, reference, m.normal(z.sequences, grad=False), m.mask(*shape)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def selected_log_probs(logits, index):
    return torch.gather(logits.log_softmax(-1), dim=-1, index=index.unsqueeze(-1)).squeeze(-1)


def log_probs_by_lse(logits, index):
    """The same with less memory, as trainers write it."""
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.logsumexp(logits, dim=-1)


def entropy_of(logits):
    probs = F.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(probs * logits, dim=-1)


@case("reinforcement", rollout)
def reinforce(hidden, weight, actions, old, reference, advantages, mask):
    log_probs = selected_log_probs(hidden @ weight.T, actions)
    return -masked_mean(log_probs * (advantages - advantages.mean())[:, None], mask)


@case("reinforcement", rollout)
def rloo(hidden, weight, actions, old, reference, rewards, mask):
    """Each sequence against the mean reward of the others."""
    log_probs = (log_probs_by_lse(F.linear(hidden, weight), actions) * mask).sum(1)
    count = rewards.shape[0]
    baseline = (rewards.sum() - rewards) / (count - 1)
    return -((rewards - baseline) * log_probs).mean()


@case("reinforcement", rollout)
def ppo(hidden, weight, actions, old, reference, advantages, mask):
    """The clipped ratio, with an entropy bonus and the share that was clipped."""
    logits = F.linear(hidden, weight) / 0.9
    log_probs = selected_log_probs(logits, actions)
    ratio = torch.exp(log_probs - old)
    advantages = advantages[:, None]
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 0.8, 1.2)
    policy = masked_mean(torch.max(unclipped, clipped), mask)
    entropy = masked_mean(entropy_of(logits), mask)
    share = masked_mean((clipped > unclipped).float(), mask)
    return policy - 0.01 * entropy, entropy.detach(), share


@case("reinforcement", lambda m: (*rollout(m), m.normal(m.z.dim, 1, scale=m.z.dim**-0.5)))
def ppo_with_values(hidden, weight, actions, old, reference, advantages, mask, value_head):
    """One trunk with two heads: the policy's and, clipped as well, the critic's."""
    log_probs = log_probs_by_lse(F.linear(hidden, weight), actions)
    ratio = torch.exp(log_probs - old)
    advantages = advantages[:, None]
    policy = masked_mean(torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)), mask)
    values = (hidden @ value_head).squeeze(-1)
    returns = advantages + 0.1
    near = torch.clamp(values, -0.2, 0.2)
    critic = 0.5 * masked_mean(torch.max((values - returns) ** 2, (near - returns) ** 2), mask)
    return policy + 0.1 * critic


@case("reinforcement", rollout)
def grpo(hidden, weight, actions, old, reference, rewards, mask):
    """Advantages of a group, the k3 penalty, each sequence's mean."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    log_probs = log_probs_by_lse(F.linear(hidden, weight) / 1.0, actions)
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    gain = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    loss = -gain + 0.04 * kl
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@case("reinforcement", rollout)
def dr_grpo(hidden, weight, actions, old, reference, rewards, mask):
    """Neither the length of a sequence nor the spread of rewards divides."""
    advantages = (rewards - rewards.mean())[:, None]
    log_probs = log_probs_by_lse(F.linear(hidden, weight), actions)
    ratio = torch.exp(log_probs - old)
    loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return (loss * mask).sum() / (mask.shape[0] * mask.shape[1])


@case("reinforcement", rollout)
def dapo(hidden, weight, actions, old, reference, rewards, mask):
    """A wider upper clip, the mean over all tokens, and a linear penalty of sequences that are too long."""
    lengths = mask.sum(-1)
    overlong = ((lengths - 0.8 * mask.shape[1]) / (0.2 * mask.shape[1])).clamp(0.0, 1.0)
    rewards = rewards - overlong
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    log_probs = log_probs_by_lse(F.linear(hidden, weight), actions)
    ratio = torch.exp(log_probs - old)
    loss = -torch.min(ratio * advantages, torch.clamp(ratio, 1 - 0.2, 1 + 0.28) * advantages)
    return masked_mean(loss, mask)


@case("reinforcement", rollout)
def gspo(hidden, weight, actions, old, reference, advantages, mask):
    """One ratio for a sequence: the geometric mean of its tokens'."""
    log_probs = selected_log_probs(F.linear(hidden, weight), actions)
    log_ratio = ((log_probs - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    ratio = torch.exp(log_ratio)
    return -torch.min(ratio * advantages, torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4) * advantages).mean()


@case("reinforcement", rollout)
def cispo(hidden, weight, actions, old, reference, advantages, mask):
    """The clipped ratio as a weight without a gradient."""
    log_probs = log_probs_by_lse(F.linear(hidden, weight), actions)
    ratio = torch.exp(log_probs - old).clamp(max=1.28).detach()
    return -masked_mean(ratio * advantages[:, None] * log_probs, mask)


@case("reinforcement", rollout)
def kl_k1(hidden, weight, actions, old, reference, advantages, mask):
    log_probs = selected_log_probs(F.linear(hidden, weight), actions)
    reward = advantages[:, None] - 0.05 * (log_probs - reference).detach()
    return -masked_mean(reward * log_probs, mask)


@case("reinforcement", rollout)
def kl_k2(hidden, weight, actions, old, reference, advantages, mask):
    log_probs = selected_log_probs(F.linear(hidden, weight), actions)
    return masked_mean(-advantages[:, None] * log_probs + 0.05 * 0.5 * (log_probs - reference).square(), mask)


@case("reinforcement", rollout)
def kl_k3(hidden, weight, actions, old, reference, advantages, mask):
    log_probs = selected_log_probs(F.linear(hidden, weight), actions)
    difference = reference - log_probs
    return masked_mean(-advantages[:, None] * log_probs + 0.05 * (difference.exp() - difference - 1.0), mask)


@case("reinforcement", lambda m: (*rollout(m), m.normal(m.z.vocab, m.z.dim, scale=2 / m.z.dim**0.5, grad=False)))
def full_kl_to_reference(hidden, weight, actions, old, reference, advantages, mask, frozen):
    """The KL divergence over the full vocabulary, not only at the sampled token."""
    log_p = F.log_softmax(F.linear(hidden, weight), -1)
    log_q = F.log_softmax(F.linear(hidden.detach(), frozen), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    chosen = log_p.gather(-1, actions[..., None]).squeeze(-1)
    return masked_mean(0.05 * kl - advantages[:, None] * chosen, mask)


@case("reinforcement", rollout)
def advantage_weighted(hidden, weight, actions, old, reference, advantages, mask):
    weights = torch.exp(advantages / 0.5).clamp(max=20.0)[:, None]
    losses = F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), actions, reduction="none")
    return masked_mean(weights * losses, mask)
