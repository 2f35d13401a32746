"""Sequences of unknown alignment: CTC and the transducer's joint network."""

import torch
import torch.nn.functional as F

from losses_battery.case import case

LABELS = 7  # labels of a sequence; the transducer's lattice has one point more


def frames(m):
    """Returns frames [T, B, D], the head and labels [B, L], none of them blank (0)."""
    z = m.z
    return m.normal(z.length, z.sequences, z.dim), m.head(), 1 + m.whole(z.vocab - 1, z.sequences, LABELS)


@case("speech", frames, big="logits [T, B, V]")
def ctc_of_torch(hidden, weight, labels):
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    count = hidden.shape[1]
    lengths = torch.full((count,), hidden.shape[0], dtype=torch.long)
    return F.ctc_loss(log_probs, labels, lengths, torch.full((count,), LABELS, dtype=torch.long))


@case("speech", frames, big="logits [T, B, V]")
def ctc_emissions(hidden, weight, labels):
    """Returns the log-probabilities that an alignment reads: blank and labels [T, B, 1 + L]."""
    logits = F.linear(hidden, weight)
    wanted = F.pad(labels, (1, 0)).expand(hidden.shape[0], -1, -1)
    return logits.gather(-1, wanted) - logits.logsumexp(-1, keepdim=True)


@case("speech", lambda m: (m.normal(4, m.z.rows // 4, m.z.dim), m.head(), 1 + m.whole(m.z.vocab - 1, m.z.rows // 4, 2)),
      big="logits [T, B, V]")
def ctc_unrolled(hidden, weight, labels):
    """The forward recursion over four frames, for two labels each."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1)
    count = labels.shape[0]
    states = F.pad(torch.stack([torch.zeros_like(labels), labels], -1).flatten(1), (0, 1))
    emitted = log_probs.gather(-1, states.expand(hidden.shape[0], -1, -1))
    skips = F.pad((states[:, 2:] != 0) & (states[:, 2:] != states[:, :-2]), (2, 0))
    low = -1e4
    alpha = torch.cat([emitted[0, :, :2], emitted.new_full((count, states.shape[1] - 2), low)], 1)
    for t in range(1, hidden.shape[0]):
        one = F.pad(alpha, (1, 0), value=low)[:, :-1]
        two = torch.where(skips, F.pad(alpha, (2, 0), value=low)[:, :-2], low)
        alpha = torch.logaddexp(torch.logaddexp(alpha, one), two) + emitted[t]
    return -torch.logaddexp(alpha[:, -1], alpha[:, -2]).mean()


def lattice(m):
    z = m.z
    shape = 2, z.rows // 2 // (LABELS + 1), LABELS + 1
    return (
        m.normal(shape[0], shape[1], z.dim), m.normal(shape[0], shape[2], z.dim), m.head(),
        1 + m.whole(z.vocab - 1, shape[0], shape[2]),
    )


@case("speech", lattice, big="logits of the lattice [B, T, U, V]")
def transducer_joint(encoded, predicted, weight, labels):
    """The log-probabilities of blank and of the next label at each point of the lattice."""
    joint = torch.tanh(encoded[:, :, None] + predicted[:, None])
    log_probs = F.linear(joint, weight).log_softmax(-1)
    blank = log_probs[..., 0]
    index = labels[:, None, :, None].expand(-1, encoded.shape[1], -1, -1)
    return blank, log_probs.gather(-1, index).squeeze(-1)


@case("speech", lattice, big="logits of the lattice [B, T, U, V]")
def transducer_upper_bound(encoded, predicted, weight, labels):
    """A loss of the lattice: every point emits blank or its label."""
    joint = torch.tanh(encoded[:, :, None] + predicted[:, None])
    logits = F.linear(joint, weight)
    label = logits.gather(-1, labels[:, None, :, None].expand(-1, encoded.shape[1], -1, -1)).squeeze(-1)
    return (logits.logsumexp(-1) - torch.logaddexp(logits[..., 0], label)).mean()
