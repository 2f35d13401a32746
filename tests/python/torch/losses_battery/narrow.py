"""Losses of 16-bit operands whose logits are cast to fp32, as training code writes them."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import Sizes, case


def floats(hidden, weight):
    return F.linear(hidden, weight).float()


def head(m):
    return m.hidden(), m.head(), m.targets(ignored=False)


def sequences(m):
    z = m.z
    return m.sequences(), m.head(), m.whole(z.vocab, z.sequences, z.length)


def policy(m):
    z = m.z
    return *sequences(m), m.normal(z.sequences, grad=False), m.mask(z.sequences, z.length)


def negatives(z: Sizes) -> int:
    return z.rows * max(z.vocab // 2, z.rows)


def contrasted(m):
    return m.hidden(), m.normal(max(m.z.vocab // 2, m.z.rows), m.z.dim)


@case("narrow", head)
def float_cross_entropy(hidden, weight, target):
    return F.cross_entropy(floats(hidden, weight), target)


@case("narrow", head)
def float_softcap_smoothing_z(hidden, weight, target):
    logits = 30.0 * torch.tanh(floats(hidden, weight) / 30.0)
    return F.cross_entropy(logits, target, label_smoothing=0.1) + 1e-4 * logits.logsumexp(-1).square().mean()


@case("narrow", head)
def float_focal(hidden, weight, target):
    nll = F.cross_entropy(floats(hidden, weight), target, reduction="none")
    return ((1.0 - torch.exp(-nll)) ** 2 * nll).mean()


@case("narrow", policy)
def float_grpo_with_entropy(hidden, weight, labels, advantages, mask):
    """One step on its own samples, at a temperature, with a bonus for entropy."""
    log_probs = F.log_softmax(floats(hidden, weight) / 0.7, dim=-1)
    chosen = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    ratio = torch.exp(chosen - chosen.detach())
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -((gain + 0.01 * entropy) * mask).sum() / mask.sum()


@case("narrow", lambda m: (m.hidden(), m.head(), m.hidden(grad=False), m.head(grad=False)))
def float_distillation(hidden, weight, teacher, teacher_weight):
    """Kullback-Leibler divergence from a teacher at temperature 2."""
    with torch.no_grad():
        wanted = F.log_softmax(floats(teacher, teacher_weight) / 2.0, dim=-1)
    log_probs = F.log_softmax(floats(hidden, weight) / 2.0, dim=-1)
    return 4.0 * F.kl_div(log_probs, wanted, log_target=True, reduction="batchmean")


@case("narrow", lambda m: (*sequences(m), m.normal(m.z.sequences, grad=False)))
def float_dpo(hidden, weight, labels, reference):
    log_probs = F.log_softmax(floats(hidden, weight), dim=-1)
    sums = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).sum(-1) - reference
    chosen, rejected = sums.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@case("narrow", contrasted, big="similarities [N, V / 2]", numbers=negatives)
def float_info_nce(query, keys):
    """The key of a query has its index; all others are negatives."""
    similarity = floats(F.normalize(query, dim=-1), F.normalize(keys, dim=-1)) / 0.07
    return F.cross_entropy(similarity, torch.arange(query.shape[0], device=query.device))


@case("narrow", head)
def float_bce_of_one_hot(hidden, weight, target):
    logits = floats(hidden, weight)
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(target, logits.shape[-1]).float())


@case("narrow", head)
def float_arcface(hidden, weight, target):
    cosine = floats(F.normalize(hidden, dim=-1), F.normalize(weight, dim=-1)).clamp(-1 + 1e-6, 1 - 1e-6)
    right = F.one_hot(target, cosine.shape[-1]).bool()
    moved = cosine * math.cos(0.5) - torch.sqrt(1.0 - cosine.square()) * math.sin(0.5)
    moved = torch.where(cosine > math.cos(math.pi - 0.5), moved, cosine - 0.5 * math.sin(0.5))
    return F.cross_entropy(30.0 * torch.where(right, moved, cosine), target)


@case("narrow", head)
def float_hinge_of_top_k(hidden, weight, target):
    """The target against the eight best logits."""
    logits = floats(hidden, weight)
    best = logits.topk(8, dim=-1).values
    right = logits.gather(-1, target.unsqueeze(-1))
    return F.relu(1.0 + best - right).mean()


@case("narrow", lambda m: (*head(m), m.uniform(m.z.rows) < 0.3))
def float_completion_only(hidden, weight, target, answered):
    """The head runs on three tokens in ten."""
    return F.cross_entropy(floats(hidden[answered], weight), target[answered])
