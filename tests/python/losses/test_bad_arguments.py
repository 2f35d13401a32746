"""Errors of the ready-made losses name the argument, the expected value and the given one."""

import types

import numpy as np
import pytest
from loss_frameworks import B, HIDDEN, REF_HIDDEN, REF_WEIGHT, TARGETS, V, VALID, WEIGHT

ONES = np.ones(2 * B, bool)


def calls(f):
    """Returns the losses with arguments of the problem, by short names."""
    x, w, ids, zeros = map(f.array, (HIDDEN, WEIGHT, TARGETS, np.zeros(2 * B, np.float32)))
    t, of_teacher = map(f.array, (REF_HIDDEN, REF_WEIGHT))
    p = types.SimpleNamespace(x=x, w=w, ids=ids, t=t, of_teacher=of_teacher, ref=f.reference, array=f.array)
    p.losses = f.losses
    p.dpo = lambda **o: f.losses.dpo_loss(x, w, ids, **o)
    p.orpo = lambda x=x, w=w, ids=ids, **o: f.losses.orpo_loss(x, w, ids, **o)
    p.kto = lambda labels=ONES, **o: f.losses.kto_loss(x, w, ids, f.array(labels), **o)
    p.ppo = lambda advantages=zeros, **o: f.losses.ppo_loss(x, w, ids, advantages, **o)
    p.policy = lambda name, advantages=zeros, **o: getattr(f.losses, f"{name}_loss")(x, w, ids, advantages, **o)
    p.jsd = lambda x=x, w=w, t=t, of_teacher=of_teacher, **o: f.losses.jsd_loss(x, w, t, of_teacher, **o)
    p.top_k = lambda ids, log_probs, **o: f.losses.top_k_loss(
        x, w, f.losses.TopK(f.array(ids.astype(np.int32)), f.array(log_probs.astype(np.float32))), **o)
    p.zeros = lambda *shape: f.array(np.zeros(shape, np.float32))
    return p


# Messages with the names of the framework, and calls that raise them.
VALUES = {
    "hidden: expected [B, T, D]": lambda p: p.orpo(p.x[0], p.w, p.ids[0]),
    "hidden: expected [2 B, T, D]": lambda p: p.losses.simpo_loss(p.x[:3], p.w, p.ids[:3]),
    "the chosen sequences and then the rejected ones, got [0, 6, 5]": lambda p: p.orpo(p.x[:0], p.w, p.ids[:0]),
    "{target}: expected [6, 6]": lambda p: p.orpo(ids=p.ids[:, 1:]),
    "weight: expected [V, 5]": lambda p: p.losses.cpo_loss(p.x, p.w[:, 1:], p.ids),
    "beta: expected a number above 0, got 0": lambda p: p.dpo(**p.ref, beta=0),
    "bco_delta: expected None with loss_type 'aot', got 0.5": lambda p: p.dpo(**p.ref, loss_type="aot", bco_delta=0.5),
    "bco_delta: expected {an_array} of one number": lambda p: p.dpo(
        **p.ref, loss_type="bco_pair", bco_delta=p.zeros(2)),
    "discopop_tau: expected None with loss_type 'sigmoid', got 0.05": lambda p: p.dpo(**p.ref, discopop_tau=0.05),
    "discopop_tau: expected a number above 0": lambda p: p.dpo(**p.ref, loss_type="discopop", discopop_tau=0),
    "nll_target: expected [6, 6] or [3, 6]": lambda p: p.orpo(nll_target=p.ids[:2]),
    "loss_type: expected one of 'sigmoid'": lambda p: p.losses.cpo_loss(p.x, p.w, p.ids, loss_type="bco"),
    "label_smoothing: expected a number from 0 below 0.5": lambda p: p.losses.simpo_loss(
        p.x, p.w, p.ids, label_smoothing=0.5),
    "label_smoothing: expected 0.0 for loss_type 'hinge'": lambda p: p.dpo(
        **p.ref, loss_type="hinge", label_smoothing=0.1),
    "temperature: expected a number above 0": lambda p: p.orpo(temperature=0.0),
    "ref_chosen_logps: expected it with": lambda p: p.dpo(),
    "ref_chosen_logps: expected None beside ref_hidden": lambda p: p.dpo(**p.ref, ref_rejected_logps=p.zeros(3)),
    "ref_chosen_logps: expected [3], got [6]": lambda p: p.dpo(
        ref_chosen_logps=p.zeros(6), ref_rejected_logps=p.zeros(3)),
    "ref_hidden: expected it beside ref_weight": lambda p: p.dpo(ref_weight=p.of_teacher),
    "ref_hidden: expected [6, 6, D]": lambda p: p.dpo(ref_hidden=p.t[1:]),
    "ref_weight: expected [23, D]": lambda p: p.dpo(ref_hidden=p.t, ref_weight=p.of_teacher[1:]),
    "reference_free: expected False": lambda p: p.dpo(**p.ref, reference_free=True),
    "kl: expected a number or {an_array}": lambda p: p.kto(**p.ref),
    "preference_labels: expected [6]": lambda p: p.kto(ONES[:5], **p.ref, kl=0.0),
    "advantages: expected [6] or [6, 6]": lambda p: p.ppo(p.zeros(5)),
    "advantages: expected [6], got [6, 6]": lambda p: p.losses.gspo_loss(p.x, p.w, p.ids, p.zeros(6, 6)),
    "ref_per_token_logps: expected it or ref_hidden beside beta=0.1": lambda p: p.ppo(beta=0.1),
    "ref_per_token_logps: expected None, and no ref_hidden, beside beta=0": lambda p: p.ppo(**p.ref),
    "epsilon_low: expected a number from 0 to 1": lambda p: p.ppo(epsilon_low=2),
    "delta: expected a number above 1.2": lambda p: p.ppo(delta=1.1),
    "kl_estimator: expected one of 'k1'": lambda p: p.ppo(kl_estimator="k4"),
    "delta: expected None for a loss without min(rho A, clip(rho) A), got 3.0": lambda p: p.policy("cispo", delta=3.0),
    "epsilon_high: expected a number above 0": lambda p: p.policy("cispo", epsilon_high=0),
    "sapo_temperature_neg: expected a number above 0": lambda p: p.policy("sapo", sapo_temperature_neg=0.0),
    "vespo_lambda_pos: expected a number above 0": lambda p: p.policy("vespo", vespo_lambda_pos=0),
    "importance_sampling_mode: expected 'token_truncate' or 'token_mask' for vespo_loss, got 'sequence_mask'":
        lambda p: p.policy("vespo", sampling_per_token_logps=p.zeros(6, 6)),
    "importance_sampling_mode: expected one of 'token_truncate'": lambda p: p.ppo(importance_sampling_mode="token"),
    "importance_sampling_clip_max: expected a number above 2, got 1.5": lambda p: p.ppo(
        importance_sampling_clip_min=2.0, importance_sampling_clip_max=1.5),
    "importance_sampling_clip_max: expected it or a clip_min with mode 'token_truncate', got None": lambda p: p.ppo(
        importance_sampling_mode="token_truncate", importance_sampling_clip_max=None),
    "importance_sampling_level: expected one of 'token'": lambda p: p.ppo(importance_sampling_level="word"),
    "importance_sampling_level: expected None for a loss of whole sequences, got 'token'": lambda p: p.policy(
        "gmpo", importance_sampling_level="token"),
    "advantages: expected [6], got [6, 6] ": lambda p: p.policy("gmpo", p.zeros(6, 6)),
    "sampling_per_token_logps: expected [6, 6], got [6]": lambda p: p.ppo(sampling_per_token_logps=p.zeros(6)),
    "top_entropy_quantile: expected a number from 0 to 1": lambda p: p.ppo(top_entropy_quantile=1.5),
    "off_policy_mask_threshold: expected a number above 0": lambda p: p.ppo(off_policy_mask_threshold=-1),
    "scale: expected one of 'group', 'batch', 'none'": lambda p: p.losses.group_advantages(p.zeros(6), 3, scale="std"),
    "old_per_token_logps: expected [6, T], got [5, 2]": lambda p: p.losses.kl_penalized_rewards(
        p.zeros(6), p.zeros(5, 2), p.zeros(5, 2), beta=0.1),
    "ref_per_token_logps: expected [6, 2], got [6, 3]": lambda p: p.losses.kl_penalized_rewards(
        p.zeros(6), p.zeros(6, 2), p.zeros(6, 3), beta=0.1),
    "mask: expected [6, 6]": lambda p: p.ppo(mask=p.zeros(6)),
    "normalizer: expected a number above 0": lambda p: p.ppo(normalizer=0),
    "max_completion_length: expected a whole number from 1": lambda p: p.losses.dr_grpo_loss(
        p.x, p.w, p.ids, p.zeros(6), max_completion_length=0),
    "rewards: expected [B], B a multiple of 4": lambda p: p.losses.group_advantages(p.zeros(6), 4),
    "teacher_hidden: expected [6, 6, D]": lambda p: p.jsd(t=p.t[1:]),
    "teacher_weight: expected [23, D], the vocabulary of weight": lambda p: p.jsd(of_teacher=p.of_teacher[1:]),
    "teacher_weight: expected [V, 7]": lambda p: p.jsd(of_teacher=p.of_teacher[:, 1:]),
    "weight: expected [V, 5] ": lambda p: p.jsd(w=p.w[:, 1:]),
    "beta: expected a number from 0 to 1": lambda p: p.jsd(beta=1.5),
    "reduction: expected one of": lambda p: p.jsd(reduction="batchmean"),
    "normalizer: expected None with reduction 'sum'": lambda p: p.jsd(reduction="sum", normalizer=3),
    "executor: expected one of 'native', 'python'": lambda p: p.jsd(executor="cuda"),
    "{target}: expected it with weight_hard_loss": lambda p: p.jsd(weight_hard_loss=0.5),
    "{target}: expected [6, 6] ": lambda p: p.jsd(targets=p.ids[1:]),
    "temperature: expected a number above 0 ": lambda p: p.losses.reverse_kl_loss(
        p.x, p.w, p.t, p.of_teacher, temperature=-1.0),
    "k: expected at most 23": lambda p: p.losses.teacher_top_k(p.t, p.of_teacher, k=24),
    "k: expected a whole number from 1": lambda p: p.losses.teacher_top_k(p.t, p.of_teacher, k=0),
    "top_k.vocab_ids: expected [6, 6, K]": lambda p: p.top_k(TARGETS, TARGETS),
    "top_k.log_probs: expected [6, 6, 2]": lambda p: p.top_k(np.zeros((6, 6, 2)), np.zeros((6, 6, 3))),
    "ignore_index: expected a number below 0": lambda p: p.top_k(
        np.zeros((6, 6, 2)), np.zeros((6, 6, 2)), ignore_index=1),
    "memory_budget: expected at least ": lambda p: p.jsd(memory_budget=100),
    "hidden: expected [..., D] with at least one column, got [6, 6, 0]": lambda p: p.losses.sampled_softmax_loss(
        p.x[..., :0], p.w[:, :0], p.ids, num_sampled=4, sampler="uniform", seed=1),
    "hidden: expected [..., D] with at least one column, got [6, 6, 0] ": lambda p: p.jsd(w=p.w[:, :0], x=p.x[..., :0]),
    "index: expected [6, 6]": lambda p: p.losses.selective_log_softmax(p.x, p.w, p.ids[1:]),
}
TYPES = {
    "hidden: expected {an_array}": lambda p: p.losses.dpo_loss(None, p.w, p.ids, **p.ref),
    "{target}: expected {an_array}": lambda p: p.losses.gspo_loss(p.x, p.w, None, p.zeros(6)),
    "{target}: expected int32 or int64": lambda p: p.orpo(ids=p.x[..., 0]),
    "nll_target: expected int32 or int64": lambda p: p.losses.cpo_loss(p.x, p.w, p.ids, nll_target=p.x[..., 0]),
    "shift: expected True or False": lambda p: p.orpo(shift=2),
    "beta: expected a number from 0": lambda p: p.orpo(beta="0.1"),
    "use_bias_correction_kl: expected True or False": lambda p: p.ppo(use_bias_correction_kl=1),
    "preference_labels: expected bool": lambda p: p.kto(np.ones(6, np.float32), **p.ref, kl=0.0),
    "rewards: expected {a_float}": lambda p: p.losses.group_advantages(p.array(np.arange(4, dtype=np.int32)), 2),
    "teacher_weight: expected {dtype}, the dtype of hidden": lambda p: p.jsd(
        of_teacher=p.of_teacher.half() if hasattr(p.of_teacher, "half") else p.of_teacher.astype(np.float16)),
    "top_k: expected TopK": lambda p: p.losses.top_k_loss(p.x, p.w, p.ids),
    "dpo_loss() got an unexpected keyword argument 'betas'": lambda p: p.dpo(betas=1),
    "ipo_loss() got an unexpected keyword argument 'loss_type'": lambda p: p.losses.ipo_loss(
        p.x, p.w, p.ids, loss_type="hinge"),
    "jsd_loss() got an unexpected keyword argument 'temprature'; did you mean 'temperature'": lambda p: p.jsd(
        temprature=2.0),
}


def check(f, kind, message, call):
    torch = f.target == "target"
    names = dict(target=f.target, an_array="a tensor" if torch else "an array")
    names["a_float"] = "a floating type, got torch.int32" if torch else "float32, bfloat16 or float16, got int32"
    names["dtype"] = "torch.float64" if torch else "float32"
    with pytest.raises(kind) as raised:
        call(calls(f))
    assert message.strip().format(**names) in str(raised.value)


@pytest.mark.parametrize("message", VALUES)
def test_bad_values_are_named(f, message):
    check(f, ValueError, message, VALUES[message])


@pytest.mark.parametrize("message", TYPES)
def test_wrong_types_are_named(f, message):
    check(f, TypeError, message, TYPES[message])


def test_targets_have_two_names(f):
    p = calls(f)
    assert p.jsd(targets=f.targets) == p.jsd(target=f.targets)


def test_a_bad_target_is_an_error_or_nan(f):
    """PyTorch reads the targets on a CPU; on a GPU, and in JAX, the host does not wait for them."""
    jsd, bad = calls(f).jsd, f.array(np.where(VALID, TARGETS, V))
    assert not np.isnan(f.numpy(jsd(targets=f.targets)))
    if f.target == "targets" or f.device != "cpu":
        assert np.isnan(f.numpy(jsd(targets=bad)))
    else:
        message = rf"target: expected token ids in \[0, {V}\), or ignore_index -100, got {V} at position {np.argmin(VALID)}"
        with pytest.raises(ValueError, match=message):
            jsd(targets=bad)
