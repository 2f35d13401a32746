"""The functions and classes that the Python packages export, and an extension of mkdocstrings that completes functions as
their decorators do at import: docstrings, and parameters that stand for keywords."""

import importlib
import inspect
import textwrap

import griffe

PACKAGES = ("logitless.torch", "logitless.torch.losses", "logitless.jax", "logitless.jax.losses", "logitless")


def exported(package):
    """Returns the exported functions and classes by their full names, functions first."""
    module = importlib.import_module(package)
    values = [getattr(module, name) for name in sorted(module.__all__, key=str.lower) if not name.startswith("_")]
    values = [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    return {f"{value.__module__}.{value.__qualname__}": value for value in sorted(values, key=inspect.isclass)}


KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


def parameter(p):
    given = p.annotation is not inspect.Parameter.empty
    annotation = (p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)) if given else None
    default = None if p.default is inspect.Parameter.empty else repr(p.default)
    return griffe.Parameter(p.name, annotation=annotation, kind=KINDS[p.kind], default=default)


def documentation(value):
    """Returns the docstring. A paragraph that begins with a parameter becomes a section of parameters."""
    paragraphs = inspect.getdoc(value).split("\n\n")
    names = tuple(f"{name}: " for name in inspect.signature(value).parameters)
    return "\n\n".join("Args:\n" + textwrap.indent(text, "    ") if text.startswith(names) else text for text in paragraphs)


class Completed(griffe.Extension):
    def __init__(self):
        self.values = {name: value for package in PACKAGES for name, value in exported(package).items()}

    def on_function(self, *, func, **_):
        value = self.values.get(func.path)
        if not func.docstring or value is None:
            return
        func.docstring.value = documentation(value)
        if func.name != "linear_cross_entropy" or ".jax." in func.path:  # PyTorch's has several forms, in its docstring
            func.parameters = griffe.Parameters(*(parameter(p) for p in inspect.signature(value).parameters.values()))
