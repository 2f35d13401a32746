#!/usr/bin/env python3
"""Makes tokens for a training run from text on this machine: llm.c's token files, with a tokenizer trained on them.

    python3 bench/experiments/far_proof_text.py --out words [--vocab 50257 131072] [--tokens 120e6] [--text ROOT ...]

The text is documents, manuals, headers and sources below the roots; .gz files are opened. Excluded are short files,
files that are not UTF-8, and machine-made ones (very long lines, few letters, many digits). Exact copies are excluded,
and so are files whose first 2 kB have the same letters as another's. Content hashes alone decide which files are kept,
which are held out, and their order; names and the order of folders have no effect.

A held-out file is dropped if more than a quarter of its long lines occur in a training file. It is cut to --piece
tokens, so that the first validation windows come from many files. A byte-level BPE is trained once, at the largest
vocabulary, on a sample of the training files; smaller vocabularies are its first words.

Writes train_V.bin, val_V.bin (u16, or u32 from 65537 words on), tokenizer_V.json for each V, and text.json: files,
bytes and tokens by kind. Needs Hugging Face's tokenizers.
"""

import argparse
import array
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import struct
import sys
import sysconfig
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path

KINDS = {  # by the extension, without .gz
    "python": ".py .pyi .pyx .pxd .ipynb",
    "c and c++": ".h .hh .hpp .hxx .inl .c .cc .cpp .cxx .cu .cuh .tcc .ipp",
    "documents": ".md .rst .txt .text .tex .texi .adoc .info .readme .news .changes",
    "manuals": ".1 .2 .3 .4 .5 .6 .7 .8 .3pm .1ssl .3ssl .7ssl .3posix .3am",
    "pages": ".html .htm .xml .svg .xsl .dtd .css",
    "scripts": ".sh .bash .pl .pm .pod .rb .lua .tcl .js .mjs .ts .el .vim .awk .m4 .cmake .mk .r .jl .go .rs .java .f90",
    "settings": ".json .yaml .yml .toml .cfg .conf .ini .service .rules .desktop .po",
}
KIND_OF = {end: kind for kind, ends in KINDS.items() for end in ends.split()}
LEAST, HEAD, LONG_LINE, END = 256, 2048, 40, "<|end|>"
HELD_OUT_PARTS = 65536
# GPT-2's pieces, within Python's character classes; the tokenizer's pattern splits a piece again.
PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def kind_of(path):
    name = Path(path).name.lower().removesuffix(".gz")
    end = os.path.splitext(name)[1]
    if end in KIND_OF:
        return KIND_OF[end]
    if not end or end in (".debian", ".bsd", ".gpl") or name.startswith(("readme", "changelog", "news", "copyright", "licen")):
        return "documents"
    if "/man/" in str(path):
        return "manuals"
    return None


def text_of(path, most):
    """Returns at most `most` bytes of a file, decoded, up to the end of a line; None where they are not UTF-8."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raw = raw[: raw.rfind(b"\n", 0, most) + 1]
        return raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return None


def is_written(text):
    """Returns whether a person probably wrote the text."""
    lines = text.split("\n")
    if len(text) < LEAST or "\0" in text or max(map(len, lines)) > 4000 or len(text) > 160 * len(lines):
        return False
    solid = "".join(text[:8000].split())
    return sum(map(str.isalpha, solid)) > 0.5 * len(solid) and sum(map(str.isdigit, solid)) < 0.2 * len(solid)


def looked_at(job):
    """Returns (path, kind, bytes, hash of the content, hash of its first letters); None: excluded."""
    path, kind, most = job
    text = text_of(path, most)
    if text is None or not is_written(text):
        return None
    raw = text.encode()
    head = re.sub(r"[\W\d_]+", "", text[: 2 * HEAD].lower())[:HEAD]
    digest = hashlib.sha256(raw).hexdigest()
    return str(path), kind, len(raw), digest, hashlib.sha256(head.encode()).hexdigest()


def paths_under(roots):
    """Returns sorted paths of files of a known kind; links are not followed."""
    found = set()
    for root in roots:
        root = os.path.realpath(root)
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("__pycache__", ".git", "node_modules")]
            found.update(os.path.join(folder, name) for name in names if kind_of(os.path.join(folder, name)))
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def collect(pool, roots, most_of_file, most, share):
    """Returns files in the order of their content hashes, and the counts of excluded ones. At most `most` bytes,
    `share` of them of one kind."""
    jobs = [(path, kind_of(path), most_of_file) for path in paths_under(roots)]
    left_out = Counter()
    by_digest, heads, by_kind, total, kept = {}, set(), Counter(), 0, []
    for found in pool.imap(looked_at, jobs, chunksize=64):
        if found is None:
            left_out["no text, short or machine-made"] += 1
        elif by_digest.setdefault(found[3], found) is not found:
            left_out["copies"] += 1
    for path, kind, size, digest, head in sorted(by_digest.values(), key=lambda found: found[3]):
        if head in heads:
            left_out["begin as another"] += 1
        elif total + size > most or by_kind[kind] + size > share * most:
            left_out["over --bytes or --share"] += 1
        else:
            kept.append({"path": path, "kind": kind, "bytes": size, "digest": digest})
            total, by_kind[kind] = total + size, by_kind[kind] + size
            heads.add(head)
    return kept, left_out


def is_held_out(digest, part):
    return int(digest[-4:], 16) < part * HELD_OUT_PARTS


def long_lines(text):
    return {line for line in map(str.strip, text.split("\n")) if len(line) >= LONG_LINE}


def lines_met(job):
    paths, most = job
    met = set()
    for path in paths:
        met |= WATCHED.intersection(long_lines(text_of(path, most) or ""))
    return met


def watch(lines):
    global WATCHED
    WATCHED = lines


def chunks(files, count):
    return [files[i : i + count] for i in range(0, len(files), count)]


def without_leaks(processes, train, held_out, most):
    """Returns held-out files that do not consist of lines of training files, their lines, and the lines found in
    training."""
    lines = {f["path"]: long_lines(text_of(f["path"], most) or "") for f in held_out}
    with multiprocessing.Pool(processes, watch, (set().union(*lines.values()),)) as pool:
        jobs = [([f["path"] for f in part], most) for part in chunks(train, 256)]
        met = set().union(*pool.imap_unordered(lines_met, jobs))
    clean = [f for f in held_out if len(lines[f["path"]] & met) <= 0.25 * len(lines[f["path"]])]
    return clean, sum(len(lines[f["path"]]) for f in clean), sum(len(lines[f["path"]] & met) for f in clean)


def train_tokenizer(files, most_of_file, vocab, sample):
    """Trains a tokenizer on a selection of files with `sample` bytes in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], show_progress=False, max_token_length=32,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    part = min(1.0, sample / max(1, sum(f["bytes"] for f in files)))

    def texts():
        for f in files:  # whole files, so that rare words of long ones count
            if int(f["digest"][:8], 16) < part * 2**32:
                yield text_of(f["path"], most_of_file)

    tokenizer.train_from_iterator(texts(), trainer)
    return json.loads(tokenizer.to_str())


def first_words(tokenizer, vocab):
    """Returns the tokenizer truncated to `vocab` tokens: merges are in the order of the tokens that they make."""
    model = tokenizer["model"]
    merges = []
    for pair in model["merges"]:
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        if model["vocab"][left + right] >= vocab:
            break
        merges.append(pair)
    words = {word: number for word, number in model["vocab"].items() if number < vocab}
    return {**tokenizer, "model": {**model, "vocab": words, "merges": merges}}


class Words(dict):
    """A cache of encoded pieces: about 10 times as fast as the tokenizer on whole texts."""

    def __init__(self, text):
        super().__init__()
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(text)

    def __missing__(self, piece):
        self[piece] = words = tuple(self.tokenizer.encode(piece).ids)
        return words

    def of(self, text):
        return list(itertools.chain.from_iterable(map(self.__getitem__, PIECES.findall(text))))


def begin_encoding(text):
    global WORDS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    WORDS = Words(text)


def encoded(job):
    """Returns the token ids and the end token of each file, or of a slice of it that its hash selects."""
    files, most, piece, kind = job
    out = []
    for f in files:
        words = WORDS.of(text_of(f["path"], most))
        if piece and len(words) > piece:
            first = int(f["digest"][:8], 16) % (len(words) - piece)
            words = words[first : first + piece]
        out.append(array.array(kind, [*words, 0]))
    return out


def write_tokens(path, parts, vocab, most):
    """Writes at most `most` tokens in llm.c's format. Returns the number of tokens written for each part."""
    magic, version = (20240801, 7) if vocab > 65536 else (20240520, 1)
    counts, total = [], 0
    with open(path, "wb") as file:
        file.write(bytes(1024))
        for part in parts:
            part = part[: most - total]
            file.write(part.tobytes())
            counts.append(len(part))
            total += len(part)
            if total >= most:
                break
        file.seek(0)
        file.write(struct.pack("<3i", magic, version, total))
    return counts


def encode(args, tokenizer, vocab, train, held_out):
    """Writes both files; returns a table of tokens by kind."""
    text = json.dumps(first_words(tokenizer, vocab))
    (args.out / f"tokenizer_{vocab}.json").write_text(text, encoding="utf-8")
    kind, table = "I" if vocab > 65536 else "H", {}
    with multiprocessing.Pool(args.processes, begin_encoding, (text,)) as pool:
        for name, files, piece, most in (("train", train, 0, args.tokens), ("val", held_out, args.piece, 1 << 31)):
            jobs = [(part, args.file_bytes, piece, kind) for part in chunks(files, 64)]
            parts = (part for done in pool.imap(encoded, jobs) for part in done)
            counts = write_tokens(args.out / f"{name}_{vocab}.bin", parts, vocab, most)
            by_kind = Counter()
            for f, count in zip(files, counts):
                by_kind[f["kind"]] += count
            table[name] = {"tokens": sum(counts), "files": len(counts), "by_kind": dict(by_kind)}
    return {**table, "words_learnt": len(json.loads(text)["model"]["vocab"])}


def default_roots():
    paths = sysconfig.get_paths()
    names = [paths["purelib"], paths["platlib"], paths["stdlib"], "/usr/share", "/usr/include", "/usr/lib/python3",
             "/usr/local/include", "/usr/local/share", "/usr/local/lib", "/usr/local/cuda", "/usr/src", "/usr/lib/gcc", "/opt"]
    return [name for name in names if os.path.isdir(name)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--text", nargs="+", default=default_roots(), metavar="ROOT", help="default: %(default)s")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257, 131072])
    parser.add_argument("--tokens", type=float, default=120e6, help="most of a training file")
    parser.add_argument("--bytes", type=float, default=600e6, help="most of text in all")
    parser.add_argument("--share", type=float, default=0.5, help="most of --bytes that are of one kind")
    parser.add_argument("--file-bytes", type=int, default=400_000, help="most of one file")
    parser.add_argument("--held-out", type=float, default=0.03, help="part of the files, before those are dropped")
    parser.add_argument("--piece", type=int, default=1024, help="tokens of a held-out file")
    parser.add_argument("--sample", type=float, default=40e6, help="bytes that the tokenizer is trained on")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    for root in args.text:
        if not os.path.isdir(root):
            parser.error(f"--text: {root}: there is no such folder")
    args.tokens = int(args.tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    def say(text):
        print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)

    with multiprocessing.Pool(args.processes) as pool:
        files, left_out = collect(pool, args.text, args.file_bytes, args.bytes, args.share)
    train = [f for f in files if not is_held_out(f["digest"], args.held_out)]
    held_out = [f for f in files if is_held_out(f["digest"], args.held_out)]
    held_out, lines, leaked = without_leaks(args.processes, train, held_out, args.file_bytes)
    if not train or not held_out:
        sys.exit(f"far_proof_text: --text: expected files to train on and to hold out, found {len(train)} and {len(held_out)}")
    say(f"{len(train)} files, {sum(f['bytes'] for f in train) / 1e6:.1f} MB; held out {len(held_out)}, "
        f"{leaked} of their {lines} long lines are in the training text; left out: "
        + ", ".join(f"{count} {why}" for why, count in sorted(left_out.items())))
    with multiprocessing.Pool(1) as pool:  # a separate process, so that encoding processes do not inherit its threads
        tokenizer = pool.apply(train_tokenizer, (train, args.file_bytes, max(args.vocab), args.sample))
    say(f"BPE of {len(tokenizer['model']['vocab'])} tokens")
    kinds = defaultdict(lambda: {"files": 0, "bytes": 0})
    for f in train:
        kinds[f["kind"]]["files"] += 1
        kinds[f["kind"]]["bytes"] += f["bytes"]
    report = {"roots": args.text, "kinds": kinds, "left_out": left_out, "held_out_files": len(held_out),
              "held_out_long_lines": lines, "held_out_long_lines_in_training": leaked, "vocab": {}}
    for vocab in args.vocab:
        report["vocab"][vocab] = table = encode(args, tokenizer, vocab, train, held_out)
        say(f"vocabulary {vocab}: {table['train']['tokens'] / 1e6:.2f}M tokens to train on, {table['val']['tokens']} held out")
    for kind, row in sorted(kinds.items(), key=lambda item: -item[1]["bytes"]):
        tokens = "".join(f"{report['vocab'][v]['train']['by_kind'].get(kind, 0) / 1e6:10.2f}M" for v in args.vocab)
        print(f"{kind:12s}{row['files']:8d} files{row['bytes'] / 1e6:9.1f} MB{tokens} tokens")
    (args.out / "text.json").write_text(json.dumps(report, indent=1, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    main()
