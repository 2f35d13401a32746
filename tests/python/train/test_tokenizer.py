"""`logitless train` on tokenizer.json: the token ids of Hugging Face's tokenizers. LOGITLESS_ENCODE_TEXT is a test
program that writes those of the library."""

import glob
import json
import os
import random
import struct
import subprocess
import sysconfig
import unicodedata

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CLI = os.environ.get("LOGITLESS_CLI", "")
ENCODE = os.environ.get("LOGITLESS_ENCODE_TEXT", "")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
KINDS = ["llama3", "qwen2", "gpt2"]


def source(count=40):
    """Returns text that every Python has: the sources of its library."""
    paths = sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py")))[:count]
    return [open(path, encoding="utf-8").read() for path in paths]


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make(kind, vocab=3000):
    """Makes a tokenizer of the published kind, trained here."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = {"llama3": lambda: split(LLAMA3), "qwen2": lambda: split(QWEN2),
                               "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)}[kind]()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    # Accents, for tokens of several characters beyond ASCII.
    text = source(20) + ["Ünïcödé naïve façade Straße Привет мир 你好世界 こんにちは " * 50]
    tokenizer.train_from_iterator(text, trainer)
    names = {"llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|end_of_text|>more"],
             "qwen2": ["<|endoftext|>", "<|im_start|>"], "gpt2": ["<|endoftext|>"]}[kind]
    # GPT-2's file has its special token normalized.
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=kind == "gpt2") for name in names])
    if kind == "qwen2":
        tokenizer.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False, special=False),
                              tokenizers.AddedToken("Caf\u0065\u0301!", normalized=True, special=False)])
    if kind == "llama3":
        begin = tokenizer.token_to_id(names[0])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(
            single=f"{names[0]} $A", pair=f"{names[0]} $A {names[0]} $B:1", special_tokens=[(names[0], begin)])])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    made = make(request.param)
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    made.save(str(path))
    return made, path


def run(path, texts):
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return subprocess.run([ENCODE, path], input=data, capture_output=True, check=False)


def encode(path, texts):
    """Returns the token ids before a text, and for each of `texts` (bytes) its token ids and their bytes."""
    done = run(path, texts)
    assert done.returncode == 0, done.stderr
    at = 0

    def take(size):
        nonlocal at
        count = struct.unpack_from("<I", done.stdout, at)[0]
        part = done.stdout[at + 4:at + 4 + count * size]
        at += 4 + count * size
        return part

    def words():
        part = take(4)
        return list(struct.unpack(f"<{len(part) // 4}i", part))

    before, result = words(), []
    for _ in texts:
        found = words()
        result.append((found, take(1)))
    assert at == len(done.stdout)
    return before, result


def check(tokenizer, texts):
    made, path = tokenizer
    before, found = encode(path, [text.encode() for text in texts])
    for text, (words, data) in zip(texts, found):
        expected = made.encode(text).ids
        assert before + words == expected, ascii(text[:200])
        # tokenizers takes the characters of an added token for bytes wherever each could be one.
        if "Caf" in text and made.token_to_id("Cafe\u0301!") is not None:
            assert data.decode() == "Cafe\u0301! Cafe\u0301! \u0301"
            continue
        assert data.decode(errors="replace") == made.decode(words), ascii(text[:200])


ODD = [
    "", " ", "  ", "\n", "\r\n\r\n \n", "a", "\ta  b \t c\r\n  d\n\n\n e   ", "I'll I'LL don't DON'T we've 'S\u017f '\u017f x'Re 'x",
    "1 12 123 1234 12345678 ٣٤٥ Ⅳ ½ 1\u0301", "hello\u00a0world\u3000x\u2028y\u0085z\u180ew\u200b\u200d\ufeff", "\x00\x01\x7f\x80\x9f",
    "e\u0301 \u00e9 \u1e9b\u0323 \u2126 \ufb01 \u0958 \u1100\u1161\u11a8 a\u0328\u0301\u0323", "\u0301leading", "👩‍👩‍👧‍👦 🏳️‍🌈 ☃️ 😀😀",
    "\U0010ffff \U00100000 \ue000 \ufffd \ufffe", "Straße ﬆ İstanbul ǅ", "नमस्ते שלום مرحبا ภาษาไทย", "<|endoftext|>", "<|end_of_text|>more text",
    "<|end_of_text|>mor a<|begin_of_text|>b", "x<|endoftext|> y<|im_start|><|im_start|>z <|im_star <tool_call>", "<|<|endoftext|>",
    "Cafe\u0301! Caf\u00e9! <|im_start|>\u0301", " \n \n", "\u2003\u2003a", "a\u0345\u0301", "...!!!\n\n  ???\r\r", "_ __init__ x_1 $5.00",
]


def test_odd_texts(tokenizer):
    check(tokenizer, ODD)
    odd = [text for text in ODD if "Caf" not in text]
    check(tokenizer, ["".join(odd), "".join(reversed(odd))])


def test_sources(tokenizer):
    check(tokenizer, source())


def test_random_texts(tokenizer):
    # Only characters that Unicode had when the normalizer of tokenizers was written.
    old = unicodedata.ucd_3_2_0
    characters = [chr(c) for c in range(0x30000) if old.category(chr(c)) not in ("Cn", "Cs")]
    common = list(" \n\r\t'sdmtlevrSDaAzZ019.,!?-_<|>") + ["\u00e9", "\u0301", "\u3000", "\u00a0"]
    generator = random.Random(5)
    check(tokenizer, ["".join(generator.choice(characters if generator.random() < 0.3 else common)
                              for _ in range(generator.randrange(60))) for _ in range(3000)])
    check(tokenizer, ["".join(generator.choices(characters, k=40)) for _ in range(1000)])


def test_long_pieces(tokenizer):
    generator = random.Random(6)
    check(tokenizer, ["a" * 100000, " " * 100000 + "x", "\n" * 30000 + " ", "ab" * 20000 + "é" * 9999, "1" * 50001, "!" * 30000,
                      "".join(generator.choices("abcdeinorst", k=50000)), *("".join(generator.choices("etaoins", k=k)) for k in range(36, 46))])


def test_any_bytes_are_text(tokenizer):
    _, path = tokenizer
    generator = random.Random(7)
    texts = [generator.randbytes(generator.randrange(200)) for _ in range(500)]
    texts += [b"\xff", b"caf\xe9 x", b"\xe2\x82", b"ok \xf0\x9f\x98 ok", b"\xc0\x80", b"\xed\xa0\x80", bytes(range(256)) * 3]
    if path.parent.name.startswith("qwen2"):  # NFC changes others
        texts = [text for text in texts if unicodedata.is_normalized("NFC", text.decode(errors="ignore"))]
        assert len(texts) > 100
    for text, (_, data) in zip(texts, encode(path, texts)[1]):
        assert data == text


def test_older_files(tmp_path):
    """Files with merges as lines, and files without the optional fields."""
    made = make("gpt2")
    written = json.loads(made.to_str())
    model = written["model"]
    assert isinstance(model["merges"][0], list)
    model["merges"] = ["#version: 0.2"] + [" ".join(pair) for pair in model["merges"]]
    lean = {"model": {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}, "pre_tokenizer": {"type": "ByteLevel"},
            "decoder": {"type": "ByteLevel"}}
    path = tmp_path / "tokenizer.json"
    for version in (written, lean):
        path.write_text(json.dumps(version))
        assert [words for words, _ in encode(path, [text.encode() for text in source(3)])[1]] == [
            made.encode(text).ids for text in source(3)]


def edited(tmp_path, change):
    written = json.loads(make_once().to_str())
    change(written)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(written))
    done = run(path, [b"text"])
    assert done.returncode == 1, done.stdout
    return done.stderr.decode()


def make_once(made=[]):  # noqa: B006
    if not made:
        made.append(make("llama3", vocab=300))
    return made[0]


def token(**fields):
    return {"id": 0, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **fields}


REFUSED = {
    "model.type: expected \"BPE\", found \"Unigram\"": lambda t: t["model"].update(type="Unigram"),
    "model: expected an object, found null": lambda t: t.pop("model"),
    "model.vocab: expected an object, found []": lambda t: t["model"].update(vocab=[]),
    "model.vocab[\"a\"]: expected the id of a token, below 16777216, found -1": lambda t: t["model"]["vocab"].update(a=-1),
    "found 1.5": lambda t: t["model"]["vocab"].update(a=1.5),
    "found 16777216": lambda t: t["model"]["vocab"].update(a=1 << 24),
    "model.vocab[\"b\"]: expected a number of its own, not that of \"a\"": lambda t: t["model"]["vocab"].update(
        b=t["model"]["vocab"]["a"]),
    "found none for byte 0x20": lambda t: t["model"]["vocab"].pop("Ġ"),
    "model.merges: expected an array": lambda t: t["model"].update(merges="a b"),
    "model.merges[0]: expected tokens of model.vocab, which lacks \"zzz\"": lambda t: t["model"]["merges"].insert(0, ["zzz", "a"]),
    "which lacks \"~~\"": lambda t: t["model"]["merges"].append("~ ~"),
    "model.merges[1]: expected two tokens with a blank between them, found \"ab\"": lambda t: t["model"]["merges"].insert(1, "ab"),
    "model.merges[0]: expected two tokens, found [\"a\"]": lambda t: t["model"]["merges"].insert(0, ["a"]),
    "model.merges[0][1]: expected a text, found 3": lambda t: t["model"]["merges"].insert(0, ["a", 3]),
    "model.dropout: expected null": lambda t: t["model"].update(dropout=0.1),
    "model.end_of_word_suffix: expected null or an empty text, found \"</w>\"": lambda t: t["model"].update(end_of_word_suffix="</w>"),
    "model.ignore_merges: expected true or false, found 1": lambda t: t["model"].update(ignore_merges=1),
    "normalizer.type: expected \"NFC\", found \"Lowercase\"": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "pre_tokenizer: expected an object, found null": lambda t: t.update(pre_tokenizer=None),
    "pre_tokenizer.type: expected \"ByteLevel\", \"Split\" or \"Sequence\", found \"Metaspace\"":
        lambda t: t.update(pre_tokenizer={"type": "Metaspace"}),
    "pre_tokenizer: expected one that ends in ByteLevel": lambda t: t["pre_tokenizer"]["pretokenizers"].pop(),
    "pre_tokenizer.pretokenizers[0].behavior: expected \"Isolated\", found \"Removed\"":
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "pre_tokenizer.pretokenizers[0].invert: expected false": lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
    "pre_tokenizer.pretokenizers[0].pattern.Regex: expected a text, found null":
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"String": " "}),
    "pre_tokenizer.pretokenizers[0].pattern.Regex: the pattern \"(\": missing closing parenthesis": lambda t: pattern(t, "("),
    "\"\\w\" at byte 1 is not read": lambda t: pattern(t, "a\\w"),
    "\"}+\" at byte 5 is not read": lambda t: pattern(t, "a{1,3}+"),
    "\"(?R)\" at byte 1 is not read": lambda t: pattern(t, "a(?R)"),
    "expected one that matches no empty text": lambda t: pattern(t, "a*"),
    "it ends in a backslash": lambda t: pattern(t, "a\\"),
    "pre_tokenizer.pretokenizers[1].add_prefix_space: expected false":
        lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "added_tokens[0].lstrip: expected false, found true": lambda t: t.update(added_tokens=[token(lstrip=True)]),
    "added_tokens[0].single_word: expected false": lambda t: t.update(added_tokens=[token(single_word=True)]),
    "added_tokens[0].content: expected a text that is not empty": lambda t: t.update(added_tokens=[token(content="")]),
    "added_tokens[0].id: expected an id that no other token has, found 0": lambda t: t.update(added_tokens=[token()]),
    "added_tokens[0].id: expected 2, as the vocabulary has it": lambda t: t["model"]["vocab"].update({"<x>": 2}) or t["model"][
        "vocab"].update({next(n for n, w in t["model"]["vocab"].items() if w == 2 and n != "<x>"): 9999}) or t.update(added_tokens=[token()]),
    "post_processor.type: expected \"TemplateProcessing\"": lambda t: t.update(post_processor={"type": "RobertaProcessing"}),
    "expected no token after the text": lambda t: t["post_processor"]["processors"][1]["single"].reverse(),
    "decoder.type: expected \"ByteLevel\", found \"Metaspace\"": lambda t: t.update(decoder={"type": "Metaspace"}),
    "truncation: expected null": lambda t: t.update(truncation={"max_length": 4}),
    "padding: expected null": lambda t: t.update(padding={"strategy": "BatchLongest"}),
}


def pattern(written, text):
    written["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": text})


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(tmp_path, message):
    assert message in edited(tmp_path, REFUSED[message])


def test_broken_files(tmp_path):
    """Any file is read or refused."""
    path = tmp_path / "tokenizer.json"
    whole = make_once().to_str().encode()
    generator = random.Random(8)
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            broken[generator.randrange(len(broken))] = generator.choice(b'{}[]",:0e\\\x00\xffx')
        path.write_bytes(bytes(broken if generator.random() < 0.8 else broken[:generator.randrange(len(broken))]))
        done = run(path, [b"some text"])
        assert done.returncode in (0, 1) and (done.returncode == 0 or done.stderr), done
    path.write_bytes(b"[" * 100000)
    assert run(path, []).returncode == 1
    path.write_bytes(b"")
    assert b"expected an object of JSON, found no JSON" in run(path, []).stderr


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A model of transformers with the tokenizer, and a corpus."""
    made, path = tokenizer
    llama3 = made.token_to_id("<|begin_of_text|>") is not None
    sizes = {"vocab_size": made.get_vocab_size() + 5}
    config = (transformers.LlamaConfig(**sizes, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
              if llama3 else transformers.GPT2Config(**sizes, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    end = "<|end_of_text|>" if llama3 else "<|endoftext|>"
    # Half of the published models have it in config.json, half in tokenizer_config.json.
    config.eos_token_id = made.token_to_id(end)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(path.read_bytes())
    if llama3:
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": end}, "bos_token": "<|begin_of_text|>"}))
    (tmp_path / "text").mkdir()
    for i, text in enumerate([*source(4), "".join(ODD[1:13]).replace("\0", "")]):
        (tmp_path / "text" / f"{i}.txt").write_text(text, newline="")
    return tmp_path, made, end


def train(root, *options):
    return subprocess.run([CLI, "train", "--init", root / "model", "--cache", root / "cache", "--length", "16", "--batch", "2",
                           "--steps", "1", "--threads", "1", "--json", "--device", "cpu", *options], capture_output=True, text=True, check=False)


def test_training(folder):
    root, made, end = folder
    out = root / "out"
    out.mkdir()
    (out / "tokenizer.model").write_text("of another run")
    done = train(root, "--text", root / "text", "--sample", "5", "--prompt", "def f(é):", "--export", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompt"] == "def f(é):" and report["sample"]
    # The token ids of the corpus: those of each file, between the ids before and after a text.
    stream = load_file(next((root / "cache").iterdir()))
    words, ends = [*stream["train"].tolist(), *stream["held_out"].tolist()], made.token_to_id(end)
    texts = {made.decode(made.encode(path.read_bytes().decode()).ids) for path in (root / "text").iterdir()}
    found, at = [], 0
    while at < len(words):
        stop = words.index(ends, at)
        part = words[at:stop]
        found.append(made.decode(part))
        assert made.encode(found[-1]).ids == part
        at = stop + 1
    # Texts are split where the held-out part begins.
    assert len(texts) == 5 and {*found, *(a + b for a in found for b in found)} >= texts
    # The exported folder has the tokenizer.
    assert (out / "tokenizer.json").read_bytes() == (root / "model" / "tokenizer.json").read_bytes()
    assert not (out / "tokenizer.model").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == ends and config["bos_token_id"] == (made.encode("").ids or [ends])[0]
    again = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    assert again("some text = 1")["input_ids"] == made.encode("some text = 1").ids
    # The second run reads the corpus from the cache.
    assert "tokenizer and tokens from" in train(root, "--text", root / "text").stderr
    # A resumed run has the same token ids.
    half = train(root, "--text", root / "text", "--save", root / "half", "--lr", "0.001", "--warmup", "0", "--min-lr", "0.001")
    assert half.returncode == 0, half.stderr
    more = subprocess.run([CLI, "train", "--resume", root / "half", "--steps", "2", "--device", "cpu"], capture_output=True, text=True,
                          check=False)
    assert more.returncode == 0 and "going on from step 1 of 2" in more.stderr + more.stdout, more.stderr
    (root / "model").rename(root / "gone")
    more = subprocess.run([CLI, "train", "--resume", root / "half", "--steps", "2"], capture_output=True, text=True, check=False)
    assert more.returncode == 2 and "expected tokenizer.model or tokenizer.json beside it, found neither" in more.stderr, more.stderr


def test_training_refusals(folder):
    root, made, _ = folder
    model = root / "model"
    config = json.loads((model / "config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    done = train(root, "--text", root / "text")
    assert done.returncode == 2 and f"--text: the tokenizer of '{model / 'model.safetensors'}': expected the token between two texts, \"<none>\", found none" in done.stderr
    (model / "tokenizer_config.json").unlink()
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    done = train(root, "--text", root / "text")
    assert done.returncode == 2 and "expected the token between two texts as eos_token in tokenizer_config.json or eos_token_id" in done.stderr
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 99999}))
    done = train(root, "--text", root / "text")
    assert done.returncode == 2 and f"expected the token between two texts below {made.get_vocab_size()}, found 99999" in done.stderr
    # More token ids than the model has.
    written = json.loads((model / "tokenizer.json").read_text())
    written["added_tokens"].append(token(id=made.get_vocab_size() + 9))
    (model / "tokenizer.json").write_text(json.dumps(written))
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [3, 4]}))
    done = train(root, "--text", root / "text")
    assert done.returncode == 2 and f"--text: expected a tokenizer of at most {config['vocab_size']} tokens" in done.stderr, done.stderr
