"""Losses of preferences: the first half of the sequences is chosen, the second rejected."""

import torch
import torch.nn.functional as F

from losses_battery.case import case


def pairs(m):
    """Returns hidden, head, labels, and the reference's log-probabilities of the sequences."""
    z = m.z
    return m.sequences(), m.head(), m.targets(z.sequences, z.length), -m.uniform(z.sequences, low=50.0, high=60.0)


def with_reference(m):
    """The reference has hidden states and a head of its own."""
    return (*pairs(m)[:3], m.sequences(grad=False), m.head(grad=False))


def sequence_log_probs(logits, labels, average=False):
    """Returns the log-probability of each sequence's labels; a position predicts the next label."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != -100
    labels = torch.where(mask, labels, 0)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    total = (each * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def halves(values):
    return values.chunk(2, dim=0)


@case("preference", with_reference)
def dpo(hidden, weight, labels, reference_hidden, reference_weight):
    policy = sequence_log_probs(F.linear(hidden, weight), labels)
    with torch.no_grad():
        reference = sequence_log_probs(F.linear(reference_hidden, reference_weight), labels)
    (chosen, rejected), (chosen_ref, rejected_ref) = halves(policy), halves(reference)
    margin = (chosen - rejected) - (chosen_ref - rejected_ref)
    loss = -F.logsigmoid(0.1 * margin)
    return loss.mean(), (0.1 * (chosen - chosen_ref)).detach(), (0.1 * (rejected - rejected_ref)).detach()


@case("preference", pairs)
def dpo_with_cached_reference(hidden, weight, labels, reference):
    chosen, rejected = halves(sequence_log_probs(F.linear(hidden, weight), labels) - reference)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@case("preference", pairs)
def cdpo(hidden, weight, labels, reference):
    """Labels that are wrong with a probability of 0.1."""
    chosen, rejected = halves(sequence_log_probs(F.linear(hidden, weight), labels) - reference)
    logits = 0.1 * (chosen - rejected)
    return (-F.logsigmoid(logits) * 0.9 - F.logsigmoid(-logits) * 0.1).mean()


@case("preference", pairs)
def ipo(hidden, weight, labels, reference):
    chosen, rejected = halves(sequence_log_probs(F.linear(hidden, weight), labels, average=True) - reference / 30.0)
    return (chosen - rejected - 1 / (2 * 0.1)).square().mean()


@case("preference", pairs)
def hinge_dpo(hidden, weight, labels, reference):
    chosen, rejected = halves(sequence_log_probs(F.linear(hidden, weight), labels) - reference)
    return torch.relu(1 - 0.1 * (chosen - rejected)).mean()


@case("preference", pairs)
def slic(hidden, weight, labels, reference):
    """A hinge on log-probabilities, and the cross entropy of the chosen sequences."""
    logits = F.linear(hidden, weight)
    chosen, rejected = halves(sequence_log_probs(logits, labels))
    count = labels.shape[0] // 2
    regular = F.cross_entropy(logits[:count, :-1].flatten(0, 1), labels[:count, 1:].flatten())
    return torch.relu(1.0 - (chosen - rejected)).mean() + 0.1 * regular


@case("preference", pairs)
def simpo(hidden, weight, labels, reference):
    chosen, rejected = halves(sequence_log_probs(F.linear(hidden, weight), labels, average=True))
    return -F.logsigmoid(2.0 * (chosen - rejected) - 1.0).mean()


@case("preference", pairs)
def cpo(hidden, weight, labels, reference):
    logits = F.linear(hidden, weight)
    chosen, rejected = halves(sequence_log_probs(logits, labels))
    count = labels.shape[0] // 2
    nll = F.cross_entropy(logits[:count, :-1].flatten(0, 1), labels[:count, 1:].flatten())
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() + nll


@case("preference", pairs)
def orpo(hidden, weight, labels, reference):
    """The odds of the chosen sequence against those of the rejected one."""
    logits = F.linear(hidden, weight)
    chosen, rejected = halves(sequence_log_probs(logits, labels, average=True))
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen.mean() - 0.1 * F.logsigmoid(log_odds).mean()


@case("preference", with_reference)
def kto(hidden, weight, labels, reference_hidden, reference_weight):
    """Each sequence by itself, good or bad, against the mean divergence of the batch."""
    policy = sequence_log_probs(F.linear(hidden, weight), labels)
    with torch.no_grad():
        reference = sequence_log_probs(F.linear(reference_hidden, reference_weight), labels)
    gain = policy - reference
    divergence = gain.mean().detach().clamp(min=0)
    chosen, rejected = halves(gain)
    wanted, unwanted = torch.sigmoid(0.1 * (chosen - divergence)), torch.sigmoid(0.1 * (divergence - rejected))
    return torch.cat([1 - wanted, 1 - unwanted]).mean()


@case("preference", lambda m: (
    m.hidden(), m.hidden(), m.normal(m.z.dim, m.z.vocab, scale=m.z.dim**-0.5),
    m.normal(m.z.vocab, 1, scale=m.z.vocab**-0.5),
), big="hidden units [N, V]")
def bradley_terry(chosen, rejected, up, score):
    """Rewards of pairs, from a wide layer, kept near zero."""
    better = (F.silu(chosen @ up) @ score).squeeze(-1)
    worse = (F.silu(rejected @ up) @ score).squeeze(-1)
    return -F.logsigmoid(better - worse).mean() + 0.01 * (better + worse).square().mean()
