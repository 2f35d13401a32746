"""Lines of a function that its operations, and their gradients, come from. Stack traces are set on FX nodes during
tracing, and formatted afterwards."""

from __future__ import annotations

import os
import re
import sys

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from logitless._autochunk.locations import chosen, shown

_TORCH = (os.path.dirname(torch.__file__) + os.sep,)
_TRACER = os.path.join(os.path.dirname(__file__), "trace.py")
_LABEL = "logitless.location"  # the key in the metadata of autograd's nodes


def location_of(stack_trace: str | None) -> str:
    """Returns the line of a traced node, such as "loss.py:12: logits = (h @ w.T).float()"; "" if unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+)', stack_trace or "")
    found = chosen([(file, int(line)) for file, line in reversed(frames)], _TORCH)
    return shown(*found) if found else ""


def _calling() -> str:
    """Returns the frame to name, among those between the tracer and a call of PyTorch."""
    frame, frames = sys._getframe(2), []
    while frame is not None and frame.f_code.co_filename != _TRACER:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    found = chosen(frames, _TORCH)
    return f'  File "{found[0]}", line {found[1]}, in function\n' if found else ""


def _set(text: str) -> None:
    fx_traceback.set_stack_trace([text])


class Locations(TorchFunctionMode):
    """A mode that records the line of each call of PyTorch, and of its gradients."""

    def __init__(self, transformed: bool):
        """transformed: whether torch.func's transforms surround the traced function. Their tensors are hidden from it.
        """
        super().__init__()
        self.transformed = transformed
        self.last = ""  # the most recent call
        self._preserved = fx_traceback.preserve_node_meta()

    def __enter__(self):
        self._preserved.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._preserved.__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        text = _calling()
        if text:
            _set(text)
            self.last = text
        for tensor in pytree.tree_leaves((args, kwargs)) if self.transformed else ():
            _check_closed_over(tensor)
        made = func(*args, **(kwargs or {}))
        text = fx_traceback.get_current_meta().get("stack_trace", "")
        for tensor in pytree.tree_leaves(made) if text else ():
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                _label(tensor.grad_fn, text)
        return made


def _check_closed_over(tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or not is_functorch_wrapped_tensor(tensor):
        return
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    if not isinstance(tensor, FakeTensor):
        raise ValueError(
            f"autochunk: the function closes over a tensor {list(tensor.shape)} that a transform of torch.func around it "
            "has made its own; pass it as an argument"
        )


def _label(grad_fn, text: str) -> None:
    """Labels all unlabelled nodes of an autograd history, since a call may make several."""
    work = [grad_fn]
    while work:
        node = work.pop()
        if node is None or _LABEL in node.metadata:
            continue
        node.metadata[_LABEL] = text
        node.register_prehook(lambda gradients: _set(text))
        work += [before for before, _ in node.next_functions]
