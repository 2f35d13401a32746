"""Dense prediction [B, C, H, W] and labels by the thousand."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import all_pairs, case


CLASSES = 128


def _image(z):
    """B, C and the side of a square image: B C side^2 numbers are N V."""
    return 2, CLASSES, math.isqrt(z.rows * z.vocab // (2 * CLASSES))


def _numbers(z):
    count, classes, side = _image(z)
    return count * classes * side * side


def pixels(m):
    """Returns features [B, D, H, W], a classifier of 1 x 1 [C, D], labels [B, H, W], some of them 255."""
    count, classes, side = _image(m.z)
    dim = max(m.z.dim // 4, 4)
    labels = m.whole(classes, count, side, side)
    labels[:, ::13] = 255
    return m.normal(count, dim, side, side), m.normal(classes, dim, scale=dim**-0.5), labels


def maps(features, classifier):
    """A 1 x 1 convolution."""
    return torch.einsum("bdhw,cd->bchw", features, classifier)


DENSE = {"big": "logits [B, C, H, W]", "numbers": _numbers}


@case("vision", pixels, **DENSE)
def segmentation(features, classifier, labels):
    return F.cross_entropy(maps(features, classifier), labels, ignore_index=255)


@case("vision", pixels, **DENSE)
def segmentation_by_convolution(features, classifier, labels):
    return F.cross_entropy(F.conv2d(features, classifier[:, :, None, None]), labels, ignore_index=255)


@case("vision", pixels, **DENSE)
def dice(features, classifier, labels):
    probs = maps(features, classifier).softmax(1)
    kept = (labels != 255)[:, None]
    index = labels.clamp(max=probs.shape[1] - 1)
    wanted = F.one_hot(index, probs.shape[1]).permute(0, 3, 1, 2).to(probs.dtype) * kept
    probs = probs * kept
    both = (probs * wanted).sum((0, 2, 3))
    return 1 - ((2 * both + 1.0) / (probs.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1.0)).mean()


@case("vision", pixels, **DENSE)
def tversky(features, classifier, labels):
    """False negatives weigh more, one-hot labels by comparison."""
    probs = maps(features, classifier).softmax(1)
    classes = torch.arange(probs.shape[1], device=probs.device).view(1, -1, 1, 1)
    wanted = (labels[:, None] == classes).to(probs.dtype)
    hit = (probs * wanted).sum((2, 3))
    false = (probs * (1 - wanted)).sum((2, 3))
    missed = ((1 - probs) * wanted).sum((2, 3))
    return (1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)).mean()


@case("vision", pixels, **DENSE)
def focal_dice(features, classifier, labels):
    logits = maps(features, classifier)
    classes = torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
    wanted = (labels[:, None] == classes).float()
    p = torch.sigmoid(logits)
    overlap = (p * wanted).sum((2, 3))
    share = 1 - (2 * overlap + 1) / (p.sum((2, 3)) + wanted.sum((2, 3)) + 1)
    bce = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    p_t = p * wanted + (1 - p) * (1 - wanted)
    alpha = 0.25 * wanted + 0.75 * (1 - wanted)
    return 20.0 * (alpha * bce * (1 - p_t) ** 2).mean() + share.mean()


@case("vision", pixels, **DENSE)
def boundary_smoothness(features, classifier, labels):
    """Cross entropy and the total variation of neighbouring pixels' probabilities."""
    logits = maps(features, classifier)
    probs = logits.softmax(1)
    down = (probs[:, :, 1:] - probs[:, :, :-1]).abs().mean()
    right = (probs[..., 1:] - probs[..., :-1]).abs().mean()
    return F.cross_entropy(logits, labels, ignore_index=255) + 0.1 * (down + right)


def multi_label(m):
    return m.hidden(), m.head(), m.whole(m.z.vocab, m.z.rows, 4)


@case("vision", lambda m: (*multi_label(m), m.uniform(m.z.vocab, low=1.0, high=3.0)))
def multi_label_bce(hidden, weight, labels, positive_weight):
    """Four labels of thousands for each example, and classes that weigh more."""
    logits = F.linear(hidden, weight)
    wanted = torch.zeros_like(logits).scatter_(1, labels, 1.0)
    return F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=positive_weight)


@case("vision", multi_label)
def sigmoid_focal(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    wanted = torch.zeros_like(logits).scatter_(1, labels, 1.0)
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    p_t = p * wanted + (1 - p) * (1 - wanted)
    loss = ce * (1 - p_t) ** 2.0 * (0.25 * wanted + 0.75 * (1 - wanted))
    return loss.sum() / labels.shape[0]


@case("vision", multi_label)
def asymmetric_multi_label(hidden, weight, labels):
    """Easy negatives are shifted to probability 0."""
    logits = F.linear(hidden, weight)
    wanted = torch.zeros_like(logits).scatter_(1, labels, 1.0)
    p = torch.sigmoid(logits)
    negative = (1 - p + 0.05).clamp(max=1)
    loss = wanted * torch.log(p.clamp(min=1e-8)) + (1 - wanted) * torch.log(negative.clamp(min=1e-8))
    p_t = p * wanted + negative * (1 - wanted)
    return -(loss * torch.pow(1 - p_t, 1 * wanted + 4 * (1 - wanted))).sum(-1).mean()


@case("vision", lambda m: (m.normal(m.z.pairs, m.z.dim, grad=False),), big="kernel [P, P]", numbers=all_pairs,
      trains=False)
def mean_shift(points):
    """One step of points towards the weighted mean of all points."""
    squares = points.square().sum(-1)
    distances = squares[:, None] + squares[None, :] - 2 * points @ points.T
    kernel = torch.exp(-0.5 * distances / points.shape[1])
    return (kernel @ points) / kernel.sum(-1, keepdim=True)


@case("vision", lambda m: (m.hidden(), m.head(), m.targets(ignored=False)))
def lovasz_softmax_of_rows(hidden, weight, target):
    """The Lovasz extension of the Jaccard index, errors of each row sorted."""
    probs = F.linear(hidden, weight).softmax(-1)
    wanted = F.one_hot(target, probs.shape[1]).to(probs.dtype)
    errors, order = torch.sort((wanted - probs).abs(), dim=-1, descending=True)
    hits = wanted.gather(-1, order).cumsum(-1)
    union = 1.0 + torch.cumsum(1 - wanted.gather(-1, order), -1)
    jaccard = 1.0 - (1.0 - hits) / union
    steps = torch.cat([jaccard[:, :1], jaccard[:, 1:] - jaccard[:, :-1]], -1)
    return (errors * steps).sum(-1).mean()
