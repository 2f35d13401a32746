"""The ready-made losses are the same in both frameworks by name: functions, arguments, defaults and results. The
document's tables have all of them. Names are read from the source, so that no framework is imported."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(framework):
    """Returns by name: arguments with their defaults of each public function, fields of each tuple of results, entries
    of each table of keywords."""
    found = {}
    for path in sorted((ROOT / "python/logitless" / framework / "losses").glob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                a = node.args
                keywords = [(arg.arg, ast.unparse(d) if d else None) for arg, d in zip(a.kwonlyargs, a.kw_defaults)]
                found[node.name] = [arg.arg for arg in a.args], [ast.unparse(d) for d in a.defaults], keywords
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign)]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                name = getattr(node, "target", None) or node.targets[0]
                if name.id.isupper() and not name.id.startswith("_"):
                    found[name.id] = ast.unparse(node.value)
    return found


def test_both_frameworks_have_the_same():
    torch, jax = read("torch"), read("jax")
    assert torch.keys() == jax.keys() and len(torch) > 25
    for name, of_torch in torch.items():
        assert re.sub(r"\btarget\b", "targets", repr(of_torch)) == repr(jax[name]), name


def test_the_document_has_all():
    page = (ROOT / "docs/ready_losses.md").read_text()
    exported = ast.literal_eval(
        re.search(r"__all__ = (\[.*?\])", (ROOT / "python/logitless/torch/losses/__init__.py").read_text(), re.DOTALL)[1]
    )
    assert {"dpo_loss", "grpo_loss", "jsd_loss"} < set(exported)
    assert [name for name in exported if name not in page] == ["KTOLoss", "TopK"]  # the docstrings' alone
    kinds = ast.literal_eval(read("torch")["DPO_TYPES"])
    assert all(f'"{kind}"' in page for kind in kinds if kind not in ("sigmoid", "ipo"))
