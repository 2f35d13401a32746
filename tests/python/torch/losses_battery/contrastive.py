"""Contrastive and metric losses: similarities of all pairs, or of examples and classes."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import all_pairs, case, logits


def two_towers(m):
    return m.normal(m.z.pairs, m.z.dim), m.normal(m.z.pairs, m.z.dim), m.normal(scale=0.1)


def labelled(m):
    """Returns embeddings, about eight for each label."""
    return m.normal(m.z.pairs, m.z.dim), m.whole(max(m.z.pairs // 8, 2), m.z.pairs)


def classified(m):
    return m.hidden(), m.head(), m.whole(m.z.vocab, m.z.rows)


SIMILARITIES = {"big": "similarities [P, P]", "numbers": all_pairs}


@case("contrastive", two_towers, **SIMILARITIES)
def clip(image, text, log_scale):
    image = image / image.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    logits_per_image = log_scale.exp() * image @ text.t()
    logits_per_text = logits_per_image.t()
    labels = torch.arange(logits_per_image.shape[0], device=image.device, dtype=torch.long)
    return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


@case("contrastive", two_towers, **SIMILARITIES)
def siglip(image, text, log_scale):
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    logits = image @ text.T * log_scale.exp() - 10.0
    labels = 2 * torch.eye(logits.shape[0], device=logits.device) - 1
    return -F.logsigmoid(labels * logits).sum() / logits.shape[0]


@case("contrastive", lambda m: (m.normal(m.z.pairs // 2, m.z.dim), m.normal(m.z.pairs // 2, m.z.dim)), **SIMILARITIES)
def nt_xent(first, second):
    """Two views of each example; all others are negatives."""
    z = F.normalize(torch.cat([first, second]), dim=-1)
    count = first.shape[0]
    similarity = z @ z.T / 0.5
    itself = torch.arange(2 * count, device=z.device)
    similarity = similarity.masked_fill(itself[:, None] == itself[None, :], float("-inf"))
    positives = torch.cat([itself[count:], itself[:count]])
    return F.cross_entropy(similarity, positives)


@case("contrastive", lambda m: (m.hidden(), m.hidden(grad=False), m.normal(m.z.vocab, m.z.dim, grad=False)),
      big="logits of the queue [N, V]", numbers=logits)
def info_nce_queue(query, key, queue):
    """Negatives come from a queue; the positive is in the first column."""
    query, key, queue = (F.normalize(x, dim=-1) for x in (query, key, queue))
    positive = (query * key).sum(-1, keepdim=True)
    negative = query @ queue.T
    logits = torch.cat([positive, negative], dim=1) / 0.2
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device))


@case("contrastive", labelled, **SIMILARITIES)
def supervised_contrastive(features, labels):
    features = F.normalize(features, dim=-1)
    logits = features @ features.T / 0.1
    logits = logits - logits.amax(dim=1, keepdim=True).detach()
    others = 1 - torch.eye(logits.shape[0], device=logits.device)
    same = (labels[:, None] == labels[None, :]).float() * others
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    positives = same.sum(1)
    mean = (same * log_prob).sum(1) / positives.clamp(min=1)
    return -(mean * (positives > 0)).mean()


@case("contrastive", labelled, **SIMILARITIES)
def hardest_triplet(features, labels):
    """The farthest example with the same label and the nearest one with another, for each example."""
    squares = features.square().sum(-1)
    distances = (squares[:, None] + squares[None, :] - 2 * features @ features.T).clamp(min=1e-12).sqrt()
    same = labels[:, None] == labels[None, :]
    farthest = torch.where(same, distances, torch.zeros_like(distances)).amax(1)
    nearest = torch.where(same, torch.full_like(distances, 1e6), distances).amin(1)
    return F.relu(farthest - nearest + 0.3).mean()


@case("contrastive", lambda m: (m.normal(_third(m.z), m.z.dim), m.whole(4, _third(m.z))),
      big="triplets [C, C, C]", numbers=lambda z: _third(z) ** 3)
def all_triplets(features, labels):
    """Every anchor with every positive and every negative."""
    features = F.normalize(features, dim=-1)
    distances = 1 - features @ features.T
    same = labels[:, None] == labels[None, :]
    losses = distances[:, :, None] - distances[:, None, :] + 0.2
    valid = (same[:, :, None] & ~same[:, None, :]).float()
    losses = F.relu(losses * valid)
    return losses.sum() / (losses > 1e-16).sum().clamp(min=1)


def _third(z) -> int:
    """C: C ^ 3 numbers are about as many as N V."""
    return round((z.rows * z.vocab) ** (1 / 3))


@case("contrastive", classified, big="logits [N, V]", numbers=logits)
def arcface(features, weight, label):
    """An angular margin added to the target's angle."""
    cosine = F.linear(F.normalize(features), F.normalize(weight))
    sine = torch.sqrt((1.0 - cosine.square()).clamp(1e-6, 1.0))
    phi = cosine * math.cos(0.5) - sine * math.sin(0.5)
    phi = torch.where(cosine > math.cos(math.pi - 0.5), phi, cosine - math.sin(math.pi - 0.5) * 0.5)
    one_hot = F.one_hot(label, weight.shape[0]).to(cosine.dtype)
    return F.cross_entropy((one_hot * phi + (1.0 - one_hot) * cosine) * 30.0, label)


@case("contrastive", classified, big="logits [N, V]", numbers=logits)
def cosface(features, weight, label):
    cosine = F.linear(F.normalize(features), F.normalize(weight))
    one_hot = torch.zeros_like(cosine).scatter_(1, label.view(-1, 1), 1.0)
    return F.cross_entropy(30.0 * (cosine - 0.35 * one_hot), label)


@case("contrastive", classified, big="logits [N, V]", numbers=logits)
def normalized_softmax(features, weight, label):
    """Cosines at a temperature; gradients flow through both norms."""
    return F.cross_entropy(F.linear(F.normalize(features), F.normalize(weight)) / 0.05, label)


@case("contrastive", lambda m: (m.normal(m.z.rows, m.z.dim), m.normal(m.z.dim, m.z.pairs, scale=m.z.dim**-0.5),
                                m.normal(m.z.rows, m.z.dim)), big="correlations [P, P]", numbers=all_pairs)
def barlow_twins(first, projector, second):
    """The correlations of a wide projection's units over the batch."""
    one, two = first @ projector, second @ projector
    one = (one - one.mean(0)) / (one.std(0) + 1e-5)
    two = (two - two.mean(0)) / (two.std(0) + 1e-5)
    c = one.T @ two / one.shape[0]
    on = (torch.diagonal(c) - 1).square().sum()
    off = c.square().sum() - torch.diagonal(c).square().sum()
    return on + 0.005 * off


@case("contrastive", lambda m: (m.normal(m.z.pairs, m.z.dim),), **SIMILARITIES)
def uniformity(features):
    """The logarithm of the mean Gaussian potential of all pairs."""
    features = F.normalize(features, dim=-1)
    distances = 2.0 - 2.0 * features @ features.T
    return torch.logsumexp((-2.0 * distances).flatten(), dim=0) - 2.0 * math.log(features.shape[0])
