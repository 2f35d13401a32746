#!/usr/bin/env python3
"""Writes fuzz/corpus/: small valid and invalid tensor files, made from the descriptions of the formats alone."""

import json
import struct
from pathlib import Path

OUT = Path(__file__).parent / "corpus" / "tensor_file"

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U16": 2, "BOOL": 1}


def data(size):
    return bytes((7 * i + 3) % 256 for i in range(size))


def numel(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def safetensors(tensors, metadata=None, pad=8):
    """Returns a safetensors file. tensors: (name, dtype, shape) in the order of their bytes."""
    header, position = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        end = position + numel(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return raw_safetensors(text + b" " * (-len(text) % pad), data(position))


def raw_safetensors(header, tail, length=None):
    return struct.pack("<Q", len(header) if length is None else length) + header + tail


def npy(descr, shape, order="False", major=1, tail=None):
    text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape!r}, }}".encode()
    prefix = 10 if major == 1 else 12
    text += b" " * (-(prefix + len(text) + 1) % 64) + b"\n"
    size = numel(shape) * int(descr[2:]) if tail is None else tail
    return b"\x93NUMPY" + bytes([major, 0]) + struct.pack("<H" if major == 1 else "<I", len(text)) + text + data(size)


def one(dtype, shape, offsets):
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'.encode()


FILES = {
    "good_all_dtypes": safetensors([(d.lower(), d, [2, 3]) for d in WIDTHS if d not in ("U16", "BOOL")]),
    "good_other_dtypes": safetensors([("u", "U16", [3]), ("b", "BOOL", [2, 2]), ("f", "F32", [2])]),
    "good_shapes": safetensors([("scalar", "F32", []), ("none", "F32", [0, 5]), ("cube", "BF16", [2, 1, 3]),
                                ("four", "I8", [1, 2, 1, 2])]),
    "good_rank_five": safetensors([("five", "I8", [1, 2, 1, 2, 1])]),
    "good_metadata": safetensors([("w", "F16", [4])], {"format": "pt", "": "\n\"\\", "grüße": "\U0001f600"}),
    "good_only_metadata": safetensors([], {"k": "v"}),
    "good_empty": safetensors([]),
    "good_unaligned": safetensors([("odd", "I8", [1]), ("wide", "F64", [2])], pad=1),
    "good_unnamed": safetensors([("", "I32", [1])]),
    "good_reversed": raw_safetensors(
        b'{"b":{"data_offsets":[4,8],"shape":[1],"dtype":"F32"},"a":{"dtype":"I32","data_offsets":[0,4],"shape":[1]}}',
        data(8)),
    "good_escapes": raw_safetensors(
        b'{ "\\u0061\\n\\ud83d\\ude00" : { "dtype" : "I8" , "shape" : [ 2 ] , "data_offsets" : [ 0 , 2 ] } }\n',
        data(2)),
    "bad_length_huge": raw_safetensors(b"{}", b"", 1 << 63),
    "bad_length_long": raw_safetensors(b"{}", b"", 3),
    "bad_json": raw_safetensors(b'{"a":}', b""),
    "bad_depth": raw_safetensors(b'{"a":' + b"[" * 500, b""),
    "bad_utf8": raw_safetensors(b'{"\xff\xc0\xaf":{}}', b""),
    "bad_twice": raw_safetensors(b'{"__metadata__":{"k":"1","k":"2"}}', b""),
    "bad_overlap": raw_safetensors(
        b'{"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}',
        data(4)),
    "bad_hole": raw_safetensors(one("I8", "[2]", "[1,3]"), data(3)),
    "bad_backwards": raw_safetensors(one("I8", "[2]", "[2,0]"), data(2)),
    "bad_past_end": raw_safetensors(one("I8", "[4]", "[0,4]"), data(3)),
    "bad_overflow": raw_safetensors(one("F32", "[4294967296,4294967296,0]", "[0,0]"), b""),
    "bad_bits": raw_safetensors(one("F4", "[3]", "[0,2]"), data(2)),
    "bad_float_shape": raw_safetensors(one("F32", "[1.0]", "[0,4]"), data(4)),
    "good_npy_f4": npy("<f4", (2, 3)),
    "good_npy_f8": npy("<f8", (3,)),
    "good_npy_f2": npy("<f2", (1, 2, 3)),
    "good_npy_i1": npy("|i1", (5,)),
    "good_npy_i4_v2": npy("<i4", (2, 1), major=2),
    "good_npy_i8_v3": npy("<i8", (2,), major=3),
    "good_npy_scalar": npy("<f4", ()),
    "good_npy_none": npy("<f4", (0, 7)),
    "bad_npy_fortran": npy("<f4", (2, 3), order="True"),
    "bad_npy_big_endian": npy(">f4", (2,)),
    "bad_npy_unsigned": npy("<u2", (2,)),
    "bad_npy_overflow": npy("<f4", (4294967296, 4294967296), tail=0),
    "bad_npy_short": npy("<f4", (2, 3), tail=23),
    "bad_npy_version": npy("<f4", (2,), major=4),
    "bad_npy_magic": b"\x93NUMPY",
    "bad_nothing": b"",
}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.iterdir():
        if old.name.startswith(("good_", "bad_")):
            old.unlink()
    for name, content in FILES.items():
        (OUT / name).write_bytes(content)
    print(f"{len(FILES)} files in {OUT}")


if __name__ == "__main__":
    main()
