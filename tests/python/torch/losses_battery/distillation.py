"""Distillation: a student's head against a teacher's."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import case


def both(m):
    return m.hidden(), m.head(), m.hidden(grad=False), m.head(grad=False)


def with_labels(m):
    return *both(m), m.targets()


@case("distillation", both)
def forward_kl(hidden, weight, teacher, teacher_weight):
    with torch.no_grad():
        wanted = F.log_softmax(F.linear(teacher, teacher_weight), -1)
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    return F.kl_div(log_probs, wanted, log_target=True, reduction="batchmean")


@case("distillation", both)
def reverse_kl(hidden, weight, teacher, teacher_weight):
    with torch.no_grad():
        wanted = F.log_softmax(F.linear(teacher, teacher_weight), -1)
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    return (log_probs.exp() * (log_probs - wanted)).sum(-1).mean()


@case("distillation", both)
def jensen_shannon(hidden, weight, teacher, teacher_weight):
    """Generalised, by the logarithm of the mixture."""
    beta = 0.3
    log_p = F.log_softmax(F.linear(hidden, weight), -1)
    log_q = F.log_softmax(F.linear(teacher, teacher_weight), -1).detach()
    mixture = torch.logsumexp(torch.stack([log_p + math.log(1 - beta), log_q + math.log(beta)]), dim=0)
    of_teacher = F.kl_div(mixture, log_q, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1).mean()


@case("distillation", both)
def skewed_kl(hidden, weight, teacher, teacher_weight):
    p = F.softmax(F.linear(hidden, weight), -1)
    q = F.softmax(F.linear(teacher, teacher_weight), -1).detach()
    mixed = 0.9 * q + 0.1 * p
    return (q * (torch.log(q + 1e-9) - torch.log(mixed + 1e-9))).sum(-1).mean()


@case("distillation", both)
def total_variation(hidden, weight, teacher, teacher_weight):
    p = F.softmax(F.linear(hidden, weight), -1)
    q = F.softmax(F.linear(teacher, teacher_weight), -1).detach()
    return 0.5 * (p - q).abs().sum(-1).mean()


@case("distillation", with_labels)
def hard_and_soft(hidden, weight, teacher, teacher_weight, target):
    """Labels beside a teacher at a temperature."""
    temperature = 2.0
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        wanted = F.softmax(F.linear(teacher, teacher_weight) / temperature, -1)
    soft = -(wanted * F.log_softmax(logits / temperature, -1)).sum(-1).mean() * temperature**2
    return 0.5 * F.cross_entropy(logits, target) + 0.5 * soft


@case("distillation", lambda m: (
    m.hidden(), m.head(), m.normal(m.z.rows, 8, grad=False), m.whole(m.z.vocab, m.z.rows, 8)
))
def stored_top_k(hidden, weight, teacher_logits, teacher_index):
    """A teacher whose eight most likely tokens were stored."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    wanted = F.softmax(teacher_logits, -1)
    return -(wanted * log_probs.gather(-1, teacher_index)).sum(-1).mean()


@case("distillation", both)
def live_top_k(hidden, weight, teacher, teacher_weight):
    """The eight most likely tokens of a teacher that runs in the step."""
    with torch.no_grad():
        best, index = F.linear(teacher, teacher_weight).topk(8, dim=-1)
        wanted = F.softmax(best, -1)
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    return -(wanted * log_probs.gather(-1, index)).sum(-1).mean()


@case("distillation", with_labels)
def renormalized_top_k(hidden, weight, teacher, teacher_weight, target):
    """A teacher's 32 best entries, among which the student's logits are normalized again."""
    logits = F.linear(hidden, weight).float()
    with torch.no_grad():
        best, index = F.linear(teacher, teacher_weight).float().topk(32, dim=-1)
    log_probs = F.log_softmax(torch.take_along_dim(logits, index, dim=-1) / 2, -1)
    divergence = F.kl_div(log_probs, F.softmax(best / 2, -1), reduction="none").sum(-1)
    return F.cross_entropy(logits, target, ignore_index=-100) + 4 * divergence.mean()


@case("distillation", both)
def cosine_of_logits(hidden, weight, teacher, teacher_weight):
    logits, wanted = F.linear(hidden, weight), F.linear(teacher, teacher_weight)
    return (1 - F.cosine_similarity(logits, wanted, dim=-1)).mean()


@case("distillation", both)
def squared_error_of_logits(hidden, weight, teacher, teacher_weight):
    return F.mse_loss(F.linear(hidden, weight), F.linear(teacher, teacher_weight).detach())


@case("distillation", with_labels)
def decoupled(hidden, weight, teacher, teacher_weight, target):
    """The target's probability, apart from the distribution of all other vocabulary entries."""
    index = target.clamp(min=0)[:, None]
    other = torch.arange(weight.shape[0], device=weight.device) != index
    logits, wanted = F.linear(hidden, weight), F.linear(teacher, teacher_weight).detach()
    p = F.softmax(logits, -1).gather(-1, index).squeeze(-1)
    q = F.softmax(wanted, -1).gather(-1, index).squeeze(-1)
    binary = F.binary_cross_entropy(p, q)
    log_rest = F.log_softmax(logits.masked_fill(~other, -1e4), -1)
    rest = F.softmax(wanted.masked_fill(~other, -1e4), -1)
    return binary + 2.0 * F.kl_div(log_rest, rest, reduction="batchmean")
