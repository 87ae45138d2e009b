"""Nothing that is read may run code: no pickle, eval or exec in the sources. Ruff's S rules say the same of calls."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
NAMES = {"eval", "exec", "FileSystemReader", "FileSystemWriter", "DefaultSavePlanner"}
"""Builtins, and classes of torch.distributed.checkpoint whose index is a pickle."""


def faults(tree: ast.AST) -> list[str]:
    """Return what of a module may run code that it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [f"from {node.module}"] * ((node.module or "").partition(".")[0] in MODULES)
            found += [a.name for a in node.names if a.name in NAMES]
        elif isinstance(node, ast.Call):
            found += _fault_of_call(node)
    return found


def _fault_of_call(node: ast.Call) -> list[str]:
    name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in NAMES:
        return [name]
    if name in ("torch.load", "torch.hub.load") and given.get("weights_only") != "True":
        return [f"{name} without weights_only=True"]
    if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        return [f"{name} with allow_pickle"]
    is_dcp = name.rpartition(".")[0] in ("state_dict_loader", "state_dict_saver", "dcp")
    if is_dcp and not {"storage_reader", "storage_writer"} & given.keys():
        return [f"{name} with the default storage, whose index is a pickle"]
    return []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "state_dict_loader.load(x, checkpoint_id=f)",
        "from torch.distributed.checkpoint import FileSystemReader",
    ],
)
def test_what_runs_code_is_found(code: str) -> None:
    assert faults(ast.parse(code))


def test_what_does_not_is_not() -> None:
    assert not faults(ast.parse("torch.load(f, weights_only=True); model.eval(); np.load(f); json.loads(f)"))


def test_no_source_reads_what_may_run_code() -> None:
    assert len(SOURCES) > 300
    found = {path.relative_to(ROOT): faults(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert not {path: said for path, said in found.items() if said}
