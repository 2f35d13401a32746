"""The losses as PyTorch computes them from logits, in float64, and the errors of results against them."""

import os

import torch
import torch.nn.functional as F

DEVICE = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")


def generator(seed):
    return torch.Generator(device=DEVICE).manual_seed(seed)


def logits(hidden, weight, bias=None, softcap=None, logit_scale=1.0):
    u = hidden @ weight.t()
    if bias is not None:
        u = u + bias
    u = u * logit_scale
    return softcap * torch.tanh(u / softcap) if softcap else u


def loss(
    hidden, weight, target, bias=None, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, class_weight=None,
    z_loss=0.0, softcap=None, logit_scale=1.0, normalizer=None, token_weight=None, target_weight=None,
):
    z = logits(hidden, weight, bias, softcap, logit_scale)
    vocab = z.shape[-1]
    rows = z.reshape(-1, vocab)
    if target_weight is not None:
        vocab_ids = target.reshape(rows.shape[0], -1)
        share = target_weight.reshape(vocab_ids.shape)
        valid = vocab_ids != ignore_index
        weights = torch.ones(vocab, dtype=z.dtype) if class_weight is None else class_weight
        log_p = torch.log_softmax(rows, 1)
        safe = torch.where(valid, vocab_ids, 0)
        losses = -(share * valid * weights[safe] * log_p.gather(1, safe)).sum(1) * (1 - label_smoothing)
        losses = losses - label_smoothing / vocab * (log_p * weights).sum(1)
        row = valid.any(1).to(z.dtype)
        count = row
    else:
        flat = target.reshape(-1)
        losses = F.cross_entropy(
            rows, flat, weight=class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        row = (flat != ignore_index).to(z.dtype)
        count = row if class_weight is None else row * class_weight[torch.where(flat == ignore_index, 0, flat)]
    losses = losses + z_loss * torch.logsumexp(rows, 1) ** 2
    scale = row if token_weight is None else row * token_weight.reshape(-1)
    losses = losses * scale
    if token_weight is not None:
        count = count * token_weight.reshape(-1)
    if reduction == "none":
        return losses.reshape(hidden.shape[:-1])
    total = losses.sum()
    return total if reduction == "sum" else total / (count.sum() if normalizer is None else normalizer)


def logprobs(hidden, weight, target, bias=None, *, ignore_index=-100, softcap=None, logit_scale=1.0):
    z = logits(hidden, weight, bias, softcap, logit_scale)
    lead = hidden.shape[:-1]
    vocab_ids = target if target.dim() > len(lead) else target[..., None]
    valid = vocab_ids != ignore_index
    row = valid.any(-1)
    lse = torch.logsumexp(z, -1)
    log_prob = torch.where(valid, z.gather(-1, torch.where(valid, vocab_ids, 0)) - lse[..., None], 0.0)
    p = torch.softmax(z, -1)
    entropy = torch.where(row, lse - (p * z).sum(-1), 0.0)
    return log_prob.reshape(target.shape), entropy, torch.where(row, lse, 0.0)


def leaves(*tensors, dtype=torch.float64):
    """Returns copies with gradients of their own."""
    return [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]


def error(found, wanted):
    """Returns the relative error in the 2-norm."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


# Checks the accuracy contract: gradients of fp32 and of 16-bit inputs, and losses.
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3, torch.float64: 1e-11}
LOSS = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6, torch.float64: 1e-12}
