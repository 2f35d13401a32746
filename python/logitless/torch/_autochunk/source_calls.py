"""Operations of compiled programs that are one call of PyTorch: attention, and operations without a form in a tensor
program."""

from __future__ import annotations

import torch

from logitless._autochunk.options import Unsupported
from logitless._autochunk.parse import Node, Type
from logitless._autochunk.source import BaseScope
from logitless._autochunk.text import Term


class CallScope(BaseScope):
    def op_extern(self, node: Node, *operands: Term) -> None:
        call = self.e.calls[int(node.attributes["call"])]
        read = node.numbers("result")
        if call.helper:
            self.e.helper(call.helper)
        names = {k: self.e.names.fresh(r) for k, r in zip(read, node.results)}
        self.line(f"{call.targets(names)} = {call.emit([self.full(t) for t in operands], read)}")
        for value, k, type_ in zip(node.results, read, node.types):
            self.keep(value, Term(names[k], type_, (True,) * len(type_.shape), owned=True))

    def op_attention(self, node: Node, *operands: Term) -> None:
        if len(node.results) == 1:
            self.bind(node.results[0], self.attended("_attend", node, *operands), node.types[0])
            return
        out, gradients = (self.e.names.fresh(r) for r in node.results)
        self.line(f"{out}, {gradients} = {self.attended('_attention', node, *operands)}")
        self.keep(node.results[0], Term(out, node.types[0], (True,) * 4, owned=True))
        self.keep(node.results[1], Term(gradients, Type(torch.float32, ()), ()))

    def op_attention_grad(self, node: Node, q: Term, k: Term, v: Term, out: Term, *rest: Term) -> None:
        names = [self.e.names.fresh(r) for r in node.results]
        *rest, bias = rest if node.attributes.get("bias") == "1" else (*rest, None)
        if len(rest) == 2:  # the results of the paired attention
            function = rest[0].text
        else:
            function = f"{self.attended('_attention', node, q, k, v, bias)}[1]"
        self.line(f"{', '.join(names)} = {function}({self.full(rest[-1])})")
        for value, name, type_ in zip(node.results, names, node.types):
            self.keep(value, Term(name, type_, (True,) * 4, owned=True))

    def attended(self, helper: str, node: Node, q: Term, k: Term, v: Term, bias: Term | None = None) -> str:
        """Returns a call of an attention helper. One helper calls the other."""
        causal = node.attributes["causal"] == "1"
        if causal and q.type.shape[2] != k.type.shape[2]:
            raise Unsupported("autochunk: causal attention of fewer queries than keys has no form in PyTorch")
        grouped = q.type.shape[1] != k.type.shape[1]
        options = [*map(self.full, (q, k, v)), *(["is_causal=True"] if causal else [])]
        options += [] if bias is None else [f"attn_mask={self.full(bias)}"]
        options += [f"scale={node.attributes['scale']}", *(["enable_gqa=True"] if grouped else [])]
        self.e.helper("_attend")
        return f"{self.e.helper(helper)}({', '.join(options)})"
