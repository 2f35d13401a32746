"""Tests which language models of the installed transformers train under lazy_head, and how.

    python bench/lazy_grid.py [--only TEXT] [--verbose]

Takes each class of the mappings for causal, sequence-to-sequence, masked and image-text models. Makes a tiny model with
random weights, and computes its loss and gradients with and without lazy_head, each class in its own process. The
result of a class is one of:

- saves: the loss and every gradient are right and no logits were made
- falls back: they are right and logits were made
- refused: lazy_head raised an error that names the reason
- wrong: a loss or a gradient differs
- no loss: the class has no loss or no tiny model that runs; not counted
"""

import argparse
import collections
import multiprocessing
import os
import traceback
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers.models.auto import modeling_auto

MAPPINGS = dict(
    causal="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    seq2seq="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    masked="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    image="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
VOCAB, DIM, TOKENS = 480, 64, 16
# Attributes of configurations, by name; the first match with a part of the name counts.
SIZES = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": DIM, "d_model": DIM, "n_embd": DIM,
    "embedding_size": DIM, "embed_dim": DIM, "dim": DIM, "emb_dim": DIM, "word_embed_proj_dim": DIM, "projection_dim": DIM,
    "hidden_dim": DIM, "out_hidden_size": DIM, "text_hidden_size": DIM, "d_kv": 16, "d_inner": 128, "n_inner": 128,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "depth": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_groups": 1, "max_n_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "attention_head_size": 16,
    "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "ffn_hidden_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_target_positions": 128,
    "max_source_positions": 128, "image_size": 32, "patch_size": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "sliding_window": 64, "attention_window": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2, "state_size": 8, "mamba_chunk_size": 8,
    "first_k_dense_replace": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": DIM, "block_size": 4, "num_buckets": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "image_token_id": 470, "image_token_index": 470, "video_token_id": 471,
    "video_token_index": 471, "audio_token_id": 472, "vision_start_token_id": 473, "vision_end_token_id": 474,
    "boi_token_index": 475, "eoi_token_index": 476, "mask_token_id": 3, "vocab_size_or_config_json_file": VOCAB,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "nb_layers": 2,
}


def overrides(config_class, depth=0):
    """Returns arguments that make a configuration and its parts tiny."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
    # The attribute map renames attributes: n_embd is hidden_size, for instance.
    chosen = {}
    known = dict(vars(default))
    for name, value in known.items():
        if name in SIZES and value is not None and isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
            if isinstance(value, int):
                chosen[name] = min(SIZES[name], value) if name.startswith("num_key") else SIZES[name]
    layers = chosen.get("num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        value = known.get(name)
        if isinstance(value, (list, tuple)) and len(value) > layers:
            chosen[name] = list(value)[:layers]
    if depth < 2:
        for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
            given = getattr(default, name, None)
            part = type(given) if given is not None else part
            if given is not None and hasattr(part, "to_dict") and part is not transformers.AutoConfig:
                try:
                    inner = overrides(part, depth + 1)
                except Exception:
                    continue
                inner.setdefault("model_type", given.model_type)
                chosen[name] = inner
    return chosen


# Sizes that some classes accept only with their defaults.
LEAVE = [
    (),
    ("head_dim",),
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads", "num_key_value_heads"),
    ("num_layers", "num_hidden_layers", "n_layer", "n_layers"),
    ("hidden_size", "num_attention_heads", "head_dim", "d_kv", "n_embd", "n_head"),
]


def without(chosen, names):
    return {k: without(v, names) if isinstance(v, dict) else v for k, v in chosen.items() if k not in names}


def tiny_config(config_class, leave):
    chosen = without(overrides(config_class), leave)
    if config_class is transformers.LongformerConfig:
        chosen["attention_window"] = [8, 8]
    config = config_class(**chosen)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def tiny(cls, kind, leave=()):
    torch.manual_seed(0)
    config = tiny_config(cls.config_class, leave)
    if kind == "causal" and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    for part in [config, *[getattr(config, n, None) for n in (getattr(type(config), "sub_configs", None) or {})]]:
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model = cls(config).eval().float()
    with torch.no_grad():  # initial biases of 0 and norms of 1 hide mistakes
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return model


def batch(model, kind):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 400, (2, TOKENS), generator=g)
    labels = ids.clone()
    labels[0, :5] = -100
    return dict(input_ids=ids, labels=labels)


def step(model, inputs):
    model.zero_grad()
    torch.manual_seed(7)
    out = model(**inputs)
    loss = out.loss if hasattr(out, "loss") else out[0]
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def judge(name, kind):
    from logitless.torch import LazyHeadWarning, lazy_head
    from logitless.torch._lazy import _warnings

    _warnings.WARN_BYTES = 0
    failed = ""
    for leave in LEAVE:
        try:
            model = tiny(getattr(transformers, name), kind, leave)
            inputs = batch(model, kind)
            loss, gradients = step(model, inputs)
        except Exception as error:
            failed = failed or "".join(traceback.format_exception_only(error)).strip()[:300]
            continue
        if loss.isfinite():
            break
        failed = failed or f"the loss is {loss.item()}"
    else:
        return "no loss", failed
    try:
        lazy_head(model)
    except (TypeError, ValueError) as error:
        return "refused", str(error)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found, theirs = step(model, inputs)
    except Exception as error:
        return "wrong", "".join(traceback.format_exception(error))[-1500:]
    if not abs(found - loss) <= 1e-5 * abs(loss):
        return "wrong", f"loss {found.item()} for {loss.item()}"
    if theirs.keys() != gradients.keys():
        return "wrong", f"gradients of other parameters: {sorted(theirs.keys() ^ gradients.keys())[:3]}"
    for n, g in gradients.items():
        if g.norm() > 1e-6 and (theirs[n] - g).norm() > 1e-4 * g.norm():
            return "wrong", f"gradient of {n}: {(theirs[n] - g).norm() / g.norm():.2e}"
    told = [str(w.message) for w in seen if issubclass(w.category, LazyHeadWarning)]
    return ("falls back", told[0]) if told else ("saves", "")


def work(pipe, name, kind):
    torch.set_num_threads(1)
    pipe.send(judge(name, kind))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="classes whose names have this word")
    parser.add_argument("--verbose", action="store_true", help="also what was not counted, and why")
    args = parser.parse_args()
    import logitless.torch  # noqa: F401  (imported once for all processes, like most of transformers)

    for name in ("LlamaForCausalLM", "BartForConditionalGeneration", "LlavaForConditionalGeneration", "BertForMaskedLM"):
        getattr(transformers, name)

    transformers.logging.set_verbosity_error()
    table = {}
    seen = set()
    for kind, mapping in MAPPINGS.items():
        counts = table[kind] = collections.Counter()
        for names in getattr(modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                if name in seen or args.only not in name:
                    continue
                seen.add(name)
                here, there = multiprocessing.Pipe()
                process = multiprocessing.get_context("fork").Process(target=work, args=(there, name, kind))
                process.start()
                there.close()
                try:
                    verdict, why = here.recv() if here.poll(120) else ("no loss", "took longer than 2 minutes")
                except EOFError:
                    verdict, why = "no loss", "the process ended"
                process.kill()
                process.join()
                counts[verdict] += 1
                if args.verbose or verdict not in ("saves", "no loss"):
                    print(f"{kind} {name}: {verdict}{': ' + why if why else ''}", flush=True)
    columns = ["saves", "falls back", "refused", "wrong", "no loss"]
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for kind, counts in table.items():
        print(f"| {kind} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    total = sum(table.values(), collections.Counter())
    print("| all | " + " | ".join(str(total[c]) for c in columns) + " |")
    counted = sum(total[c] for c in columns[:-1])
    if counted:
        print(f"\n{total['saves']} of {counted} save ({100 * total['saves'] / counted:.1f} %)")


if __name__ == "__main__":
    main()
