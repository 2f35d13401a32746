"""Writes results into the memory of values that are not read any more."""

from __future__ import annotations

from dataclasses import replace

import torch

from logitless._autochunk.parse import Node, Type
from logitless._autochunk.source import BaseScope
from logitless._autochunk.text import INFIX, UNARY, Term


class InPlace(BaseScope):
    """The part of a scope that reuses memory."""

    def writable(self, value: str) -> bool:
        """Returns whether the value is complete, owns its memory, and is read here for the last time."""
        t = self.terms[value]
        return t.owned and all(t.present) and not t.number and self.dies(value)

    def becomes(self, value: str, operand: str, type_: Type) -> None:
        """Marks the value as stored in the operand's memory."""
        self.names[value] = self.names.pop(self.root.get(operand, operand), [])
        self.keep(value, replace(self.terms[operand], type=type_))

    def add_put(self, node: Node) -> None:
        """Adds a put to a value."""
        [value] = node.results
        [put] = [v for v in node.operands if v in self.puts]
        [other] = [v for v in node.operands if v != put]
        t = self.terms[other]
        if self.writable(other):
            self.line(self.put(t.text, *self.puts[put]))
            self.becomes(value, other, node.type)
        else:
            copy = self.full(t) if t.number else f"{self.full(t)}.clone(memory_format=torch.contiguous_format)"
            self.bind(value, self.put(copy, *self.puts[put]), node.type)

    def op_softmax(self, node: Node, x: Term) -> None:
        [operand], axis = node.operands, node.attributes["axis"]
        types, [value, *rest] = node.types or [node.type], node.results
        if not rest and self.writable(operand):
            self.line(f"torch.{node.op}({x.text}, {axis}, out={x.text})")
        elif not rest:
            self.bind(value, f"{self.full(x)}.{node.op}({axis})", types[0])
            return
        else:
            if not self.writable(operand):
                x = self.bind(value, f"{self.full(x)}.clone(memory_format=torch.contiguous_format)", types[0])
            dtype = f", {types[1].dtype}" if types[1].dtype != types[0].dtype else ""
            self.bind(rest[0], f"{self.e.helper('_softmax_')}({x.text}, {axis}{dtype})", types[1])
        if value not in self.terms:
            self.becomes(value, operand, types[0])

    op_log_softmax = op_softmax

    def op_reduce_lse(self, node: Node, x: Term) -> None:
        """Computes the log-sum-exp through a softmax in the operand's memory, or in a wider copy. PyTorch's own makes a
        copy, and its exponentials of very negative numbers are slow."""
        (text, dims), type_ = self.reduced(node, x), node.type
        wide = f".to({type_.dtype})" if type_.dtype != x.type.dtype else ""
        [first, *more] = node.numbers("dims")
        fit = not more and x.type.shape[first] != "0" and type_.dtype.itemsize >= 4
        if fit and (x.type.dtype, type_.dtype) == (torch.float32, torch.float64):
            # Its differences to logits are wide, and not its exponentials.
            copy = "" if self.writable(node.operands[0]) else ".clone(memory_format=torch.contiguous_format)"
            self.bind(node.results[0], f"{self.e.helper('_softmax_')}({text}{copy}, {dims}, {type_.dtype})", type_)
            return
        if fit and (wide or self.writable(node.operands[0])):
            self.bind(node.results[0], f"{self.e.helper('_softmax_')}({text}{wide}, {dims})", type_)
        else:
            self.bind(node.results[0], f"{text}{wide}.logsumexp({dims})", type_)

    @staticmethod
    def in_place(op: str, place: int, texts: list[str], terms: list[Term]) -> str | None:
        """Returns a function that overwrites an operand, or None if there is no such form."""
        me, other = texts[place], texts[1 - place] if len(texts) == 2 else ""
        if op in UNARY or op == "neg":
            return f"{me}.polygamma_(1)" if op == "trigamma" else f"{me}.{op}_()"
        if op in ("add", "mul") or (op in ("sub", "div") and place == 0):
            return f"{me} {INFIX[op]}= {other}"
        if op == "sub":
            return f"{me}.neg_().add_({other})"
        if op in ("max", "min") and terms[1 - place].number:
            return f"{me}.clamp_({'min' if op == 'max' else 'max'}={other})"
        if op == "select" and place == 2 and terms[1].number:
            return f"{me}.masked_fill_({texts[0]}, {texts[1]})"
        return None
