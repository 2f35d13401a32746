"""The ready-made losses have the same functions, arguments, defaults and results in both frameworks, and the functions
that both call take the same arguments. The document's tables have all of them. Names are read from the source, so that
no framework is imported."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/logitless"


def read(folder):
    """Returns by name: arguments with their defaults of each public function, fields of each tuple of results."""
    found = {}
    for path in sorted((PACKAGE / folder).glob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                a = node.args
                keywords = [(arg.arg, ast.unparse(d) if d else None) for arg, d in zip(a.kwonlyargs, a.kw_defaults)]
                found[node.name] = [arg.arg for arg in a.args], [ast.unparse(d) for d in a.defaults], keywords
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign)]
    return found


def exported():
    text = (PACKAGE / "torch/losses/__init__.py").read_text()
    return ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text, re.DOTALL)[1])


def test_both_frameworks_have_the_same():
    torch, jax, shared = read("torch/losses"), read("jax/losses"), read("_losses")
    assert torch.keys() == jax.keys() >= set(exported()) and len(torch) > 25
    for name, of_torch in torch.items():
        assert re.sub(r"\btarget\b", "targets", repr(of_torch)) == repr(jax[name]), name
    functions = [name for name in exported() if name.islower() and name != "explain_divergence"]
    assert len(functions) > 18
    for name in functions:
        arguments, _, keywords = shared[name]
        own = [argument for argument in arguments if argument not in ("xp", "chunked")]
        assert (own, [k for k, _ in keywords]) == (torch[name][0], [k for k, _ in torch[name][2]]), name


def test_the_document_has_all():
    page = "".join((ROOT / "docs" / shelf / "ready_losses.md").read_text() for shelf in ("use", "explain"))
    assert {"dpo_loss", "grpo_loss", "jsd_loss"} < set(exported())
    assert [name for name in exported() if name not in page] == ["KTOLoss", "TopK"]  # the docstrings' alone
    source = (PACKAGE / "_losses/preference.py").read_text()
    kinds = ast.literal_eval(re.search(r"DPO_TYPES = (\(.*?\))", source, re.DOTALL)[1])
    assert all(f'"{kind}"' in page for kind in kinds if kind not in ("sigmoid", "ipo"))


def test_what_both_frameworks_share_imports_neither():
    code = (
        "import sys, logitless._losses.distillation, logitless._losses.policy, logitless._losses.preference, "
        "logitless._losses.selective; assert not {'torch', 'jax'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
