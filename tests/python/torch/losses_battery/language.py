"""Losses of language models."""

import torch
import torch.nn.functional as F

from losses_battery.case import case


def head(m):
    return m.hidden(), m.head(), m.targets()


def batch(m):
    z = m.z
    return m.sequences(), m.head(), m.targets(z.sequences, z.length)


@case("language", head)
def cross_entropy_mean(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target, ignore_index=-100)


@case("language", head)
def cross_entropy_sum(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")


@case("language", head)
def cross_entropy_none(hidden, weight, target):
    """The loss of each token, which the caller reduces."""
    return F.cross_entropy(F.linear(hidden, weight), target, reduction="none")


@case("language", head)
def completion_only(hidden, weight, target):
    """The head runs on the tokens of the answer alone."""
    answered = target != -100
    return F.cross_entropy(F.linear(hidden[answered], weight), target[answered])


@case("language", head)
def masked_logits(hidden, weight, target):
    answered = target != -100
    log_probs = F.log_softmax(F.linear(hidden, weight)[answered], dim=-1)
    return -log_probs.gather(-1, target[answered].unsqueeze(-1)).squeeze(-1).mean()


@case("language", head)
def nll_of_log_softmax(hidden, weight, target):
    log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
    return F.nll_loss(log_probs, target)


@case("language", head)
def label_smoothing(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight), target, label_smoothing=0.1)


@case("language", head)
def label_smoothing_by_hand(hidden, weight, target):
    """A mixture of the target's loss and the mean of all, in the form of sequence-to-sequence toolkits."""
    log_probs = F.log_softmax(F.linear(hidden, weight), dim=-1)
    padding = target.eq(-100)
    nll = -log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smooth = -log_probs.sum(-1)
    nll = nll.masked_fill(padding, 0.0)
    smooth = smooth.masked_fill(padding, 0.0)
    epsilon = 0.1 / (log_probs.shape[-1] - 1)
    return ((1.0 - 0.1 - epsilon) * nll + epsilon * smooth).sum() / (~padding).sum()


@case("language", lambda m: (*head(m), m.uniform(m.z.vocab, low=0.5, high=2.0)))
def class_weights(hidden, weight, target, weights):
    return F.cross_entropy(F.linear(hidden, weight), target, weight=weights)


@case("language", batch)
def causal_shift(hidden, weight, labels):
    """Each token predicts the next: logits and labels shifted by slices."""
    logits = F.linear(hidden, weight)
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


@case("language", batch)
def causal_shift_of_items(hidden, weight, labels):
    """Labels are padded instead of cutting logits; the caller gives the count over all micro batches that divides the
    sum."""
    logits = F.linear(hidden, weight).float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    total = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100, reduction="sum")
    return total / 1999.0


@case("language", head)
def z_loss(hidden, weight, target):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()


@case("language", head)
def softcapped(hidden, weight, target):
    logits = F.linear(hidden, weight)
    logits = torch.tanh(logits / 30.0) * 30.0
    return F.cross_entropy(logits, target)


@case("language", lambda m: (*head(m), m.normal(m.z.vocab)))
def scaled_with_bias(hidden, weight, target, bias):
    """A width multiplier on the output and a bias."""
    return F.cross_entropy(F.linear(hidden * 0.25, weight, bias), target)


@case("language", lambda m: (*head(m), m.uniform(m.z.rows)))
def token_weights(hidden, weight, target, weights):
    losses = F.cross_entropy(F.linear(hidden, weight), target, reduction="none")
    return (losses * weights).sum() / weights.sum()


@case("language", head)
def focal(hidden, weight, target):
    nll = F.cross_entropy(F.linear(hidden, weight), target, reduction="none")
    return ((1.0 - torch.exp(-nll)) ** 2 * nll).mean()


@case("language", head)
def poly(hidden, weight, target):
    """Cross entropy and a multiple of 1 - p."""
    logits = F.linear(hidden, weight)
    kept = target != -100
    p = logits.softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
    losses = F.cross_entropy(logits, target, reduction="none") + 2.0 * (1.0 - p) * kept
    return losses.sum() / kept.sum()


@case("language", lambda m: (
    m.sequences(torch.bfloat16), m.head(torch.bfloat16), m.targets(m.z.sequences, m.z.length)
))
def upcast_between_views(hidden, weight, labels):
    """bf16 logits, in fp32 before they are flattened."""
    logits = F.linear(hidden, weight)
    logits = logits.float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@case("language", head)
def confidence_penalty(hidden, weight, target):
    logits = F.linear(hidden, weight)
    log_probs = F.log_softmax(logits, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return F.nll_loss(log_probs, target) - 0.1 * entropy.mean()


@case("language", head)
def with_statistics(hidden, weight, target):
    """Returns the loss, and statistics of the logits for the log."""
    logits = F.linear(hidden, weight)
    loss = F.cross_entropy(logits, target)
    with torch.no_grad():
        lse = logits.logsumexp(-1)
        statistics = {"max": logits.amax(), "mean": logits.mean(), "lse": lse.mean(), "rms": logits.pow(2).mean().sqrt()}
    return loss, statistics


@case("language", head)
def with_accuracy(hidden, weight, target):
    logits = F.linear(hidden, weight)
    kept = target != -100
    right = (logits.argmax(-1) == target) & kept
    return F.cross_entropy(logits, target), right.sum().float() / kept.sum()


@case("language", lambda m: (*head(m), m.whole(m.z.vocab, m.z.rows)))
def unlikelihood(hidden, weight, target, negatives):
    """Tokens to avoid are pushed down beside the target."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    mle = F.nll_loss(log_probs, target)
    p = log_probs.gather(-1, negatives[:, None]).squeeze(-1).exp()
    return mle - torch.log((1.0 - p).clamp(min=1e-6)).mean()


@case("language", lambda m: (
    m.hidden(), m.head(), m.targets(), m.normal(m.z.dim, 2 * m.z.dim, scale=m.z.dim**-0.5), m.normal(m.z.dim, 2)
), big="logits of both components [N, 2, V]", numbers=lambda z: 2 * z.rows * z.vocab)
def mixture_of_softmaxes(hidden, weight, target, latent, gate):
    prior = F.log_softmax(hidden @ gate, -1)
    parts = torch.tanh(hidden @ latent).view(hidden.shape[0], 2, -1)
    log_probs = F.log_softmax(F.linear(parts, weight), -1)
    mixed = torch.logsumexp(log_probs + prior[..., None], dim=1)
    return F.nll_loss(mixed, target)


@case("language", lambda m: (m.hidden(), m.head(), m.targets(), m.normal(m.z.dim, m.z.dim, scale=m.z.dim**-0.5)))
def next_two_tokens(hidden, weight, target, projection):
    """Two heads share the unembedding; the second predicts the token after the next."""
    first = F.cross_entropy(F.linear(hidden, weight), target)
    second = F.cross_entropy(F.linear(torch.tanh(hidden @ projection), weight)[:-1], target[1:])
    return first + 0.3 * second


@case("language", lambda m: (m.hidden(), m.head(), m.normal(m.z.rows, m.z.dim, grad=False), m.head(grad=False)))
def soft_targets(hidden, weight, other, other_weight):
    """Targets are probabilities."""
    wanted = F.softmax(other @ other_weight.T, -1)
    return F.cross_entropy(F.linear(hidden, weight), wanted)


@case("language", lambda m: (
    m.hidden(), m.head(), m.targets(ignored=False), m.uniform(m.z.vocab, low=-9.0, high=-7.0), m.whole(m.z.vocab, 64)
))
def sampled_correction(hidden, weight, target, log_frequency, noise):
    """A softmax over the vocabulary, each entry corrected by how often it is drawn; entries of the noise count
    twice."""
    logits = F.linear(hidden, weight) - log_frequency
    extra = F.linear(hidden, weight[noise]) - log_frequency[noise]
    lse = torch.logsumexp(torch.cat([logits, extra], dim=-1), -1)
    return (lse - logits.gather(-1, target[:, None]).squeeze(-1)).mean()


@case("language", batch, trains=False)
def perplexity(hidden, weight, labels):
    """Returns the perplexity of each sequence, in evaluation."""
    log_probs = torch.log_softmax(F.linear(hidden, weight)[:, :-1], -1)
    labels = labels[:, 1:]
    kept = labels != -100
    nll = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.exp((nll * kept).sum(-1) / kept.sum(-1))


@case("language", lambda m: (m.hidden(), m.head(), m.targets(ignored=False)))
def poly_of_examples(hidden, weight, target):
    """Poly-1 of one example, under vmap."""

    def loss(logits, label):
        return 2.0 * (1 - (logits.softmax(-1) * label).sum()) - (logits.log_softmax(-1) * label).sum()

    logits = F.linear(hidden, weight)
    return torch.vmap(loss)(logits, F.one_hot(target, logits.shape[-1]).to(logits.dtype)).mean()


@case("language", head, trains=False)
def evaluation_metrics(hidden, weight, target):
    """Loss, accuracy, rank of the target, confidence and entropy, in evaluation."""
    logits = F.linear(hidden, weight)
    index = target.clamp(min=0)
    probs = logits.softmax(-1)
    of_target = logits.gather(-1, index[:, None])
    return {
        "loss": F.cross_entropy(logits, target),
        "accuracy": (logits.argmax(-1) == target).float().mean(),
        "reciprocal_rank": (1.0 / (1.0 + (logits > of_target).sum(-1))).mean(),
        "confidence": probs.amax(-1).mean(),
        "entropy": -(probs * torch.log(probs + 1e-12)).sum(-1).mean(),
    }


@case("language", head, trains=False)
def top_five_accuracy(hidden, weight, target):
    found = F.linear(hidden, weight).topk(5, dim=-1).indices
    return (found == target[:, None]).any(-1).float().mean()
