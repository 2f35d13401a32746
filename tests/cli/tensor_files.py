"""Writes and reads tensors, as flat lists, in safetensors or npy files, using the standard library only."""

import json
import math
import struct

CODES = {"F32": "f", "F64": "d", "F16": "e", "I8": "b", "I32": "i", "I64": "q"}
NPY_CODES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I8": "|i1", "I32": "<i4", "I64": "<i8"}


def bf16_bits(value):
    """Returns the 16 bits of the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def rounded(values, dtype):
    """Returns the values rounded to `dtype`."""
    if dtype == "BF16":
        return [bf16_value(bf16_bits(v)) for v in values]
    return list(struct.unpack(f"<{len(values)}{CODES[dtype]}", encode(values, dtype)))


def encode(values, dtype):
    if dtype == "BF16":
        return struct.pack(f"<{len(values)}H", *map(bf16_bits, values))
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def decode(data, dtype):
    if dtype == "BF16":
        return [bf16_value(b) for b in struct.unpack(f"<{len(data) // 2}H", data)]
    code = CODES[dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def write_safetensors(path, tensors, pad=0):
    """Writes tensors: {name: (dtype, shape, values)}. `pad` spaces after the header misalign the data."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        assert math.prod(shape) == len(values), name
        part = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    """Returns {name: (dtype, shape, values)}."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], decode(data[8 + size + begin:8 + size + end], entry["dtype"]))
    return tensors


def write_npy(path, dtype, shape, values):
    header = repr({"descr": NPY_CODES[dtype], "fortran_order": False, "shape": tuple(shape)}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + encode(values, dtype))
