"""Imports point down: the contract in pyproject.toml holds, and it covers every module. Signatures stay short.

The library has few rooms, and the lab is above it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_imports_point_down_the_layers() -> None:
    linter = pytest.importorskip("importlinter.cli", reason="needs import-linter")
    assert linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys, octavo, octavo.lab.data, octavo.lab.models, octavo.lab.cli.main; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def parameters(function: ast.FunctionDef) -> int:
    found = function.args
    every = (*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg)
    return len([each for each in every if each is not None and each.arg not in ("self", "cls")])


def is_compiled(function: ast.FunctionDef) -> bool:
    """Functions of Triton take pointers, strides and extents one by one."""
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


@cache
def functions() -> dict[str, tuple[int, int]]:
    """Return parameters and lines of each function of the package."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (parameters(node), (node.end_lineno or 0) - node.lineno)
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and not is_compiled(node)
    }


def test_functions_have_at_most_eight_parameters() -> None:
    found = [name for name, (count, _) in functions().items() if count > 8]
    assert not found, f"group what belongs together: {found}"


def test_functions_have_at_most_sixty_lines() -> None:
    found = [name for name, (_, lines) in functions().items() if lines >= 60]
    assert not found, f"longer than a screen, split them: {found}"


# --- the library at its top level -----------------------------------------------------------------------------------

LAB = {"__main__", "lab"}
"""What is above the library: the lab and the command."""


def arrows_of_the_library() -> set[tuple[str, str]]:
    """Return (room, imported room) of every import between rooms of the library, also of those for type checkers."""
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    graph = grimp.build_graph("octavo", cache_dir=None)
    rooms = {room.split(".")[1] for room in graph.find_children("octavo")} - LAB
    pairs = ((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))
    named = {(a.split(".")[1], b.split(".")[1]) for a, b in pairs if "." in a and "." in b}
    return {(a, b) for a, b in named if a != b and {a, b} <= rooms}


def floors(arrows: set[tuple[str, str]]) -> list[set[str]]:
    """Return the rooms floor by floor: one stands on the floor above the highest that it imports.

    Raises:
        CycleError: rooms import each other in a circle.
    """
    sorter = TopologicalSorter({a: {below for room, below in arrows if room == a} for a, _ in arrows})
    sorter.prepare()
    found = []
    while sorter.is_active():
        found.append(set(ready := sorter.get_ready()))
        sorter.done(*ready)
    return found


def test_the_library_has_few_rooms_floors_and_arrows() -> None:
    arrows = arrows_of_the_library()
    house = floors(arrows)
    assert len(set().union(*house)) <= 13 and len(house) <= 10 and len(arrows) <= 70, (house, sorted(arrows))


def test_floors_are_counted() -> None:
    assert floors({("a", "b"), ("a", "c"), ("b", "c")}) == [{"c"}, {"b"}, {"a"}]
    with pytest.raises(CycleError):
        floors({("a", "b"), ("b", "a")})


# --- state of the process -------------------------------------------------------------------------------------------

REGISTRIES = {
    "_util/collector.py": {"_capturing"},
    "_util/compiler.py": {"_answer", "_serials", "_numbers", "_opaque"},
    "_util/optimizer_steps.py": {"_callbacks", "_inner"},
    "nn/switch.py": {"_open", "_switching"},
    "conversion/autocast_mode.py": {"_blocks"},
    "conversion/first_step.py": {"_WAITING"},
    "distributed/checkpoint.py": {"_background_groups"},
    "kernels/gemm/__init__.py": {"_choices"},
    "kernels/runtime/host_state.py": {"now", "_lock"},
    "kernels/runtime/ledger.py": {"_warned"},
    "kernels/runtime/operation.py": {"_library", "_operations"},
    "kernels/sample/__init__.py": {"_idle"},
    "kernels/runtime/tape.py": {"_recordings", "_thread"},
    "nn/adopted.py": {"_CLASSES"},
    "nn/first_call.py": {"_OPEN"},
    "nn/scaling_state.py": {"_live", "_numbers"},
    "nn/seal.py": {"_marking"},
    "nn/shared.py": {"_steps", "_this_thread"},
    "nn/telemetry.py": {"_live"},
    "nn/weight_notes.py": {"_KINDS"},
    "recipes/operands.py": {"_plans"},
    "tensor/fp8_tensor.py": {"_OPERATIONS"},
    "lab/train/parallel.py": {"_runs"},
}
"""Files of the package with variables that change while a process runs. Those that change what kernels compute are in
kernels/runtime/host_state.py alone; the others are registries, which its docstring lists."""

_MUTABLE = {
    "Condition", "ContextVar", "Counter", "Library", "Lock", "OrderedDict", "RLock", "WeakIdKeyDictionary",
    "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "count", "defaultdict", "deque", "local",
}  # fmt: skip
_MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove",
             "setdefault", "update"}  # fmt: skip


def _state_of(tree: ast.Module) -> set[str]:
    """Return the names of variables of a module that its functions change, or that are made to be changed."""
    assigned: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    changed = {
        name
        for name, value in assigned.items()
        if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1].strip("_") in _MUTABLE
    }
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_local(node)}
    changed |= {n for n, v in assigned.items() if isinstance(v, ast.Call) and ast.unparse(v.func) in classes}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            changed |= _changed_in(function) & assigned.keys()
    return changed


def _is_local(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("threading.local") for base in node.bases)


def _changed_in(function: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            found |= {*node.names}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= {ast.unparse(node.value)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            found |= {ast.unparse(node.func.value)}
    arguments = {each.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for each in node.args}
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    declared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    return found - arguments - (stored - declared)


def test_state_of_the_process_is_where_it_is_listed() -> None:
    package = ROOT / "src" / "octavo"
    found = {
        path.relative_to(package).as_posix(): names
        for path in sorted(package.rglob("*.py"))
        if (names := _state_of(ast.parse(path.read_text("utf-8"))))
    }
    assert found.keys() <= REGISTRIES.keys(), f"put a switch into kernels/runtime/host_state.py: {found}"
    new = {path: names - REGISTRIES[path] for path, names in found.items() if names - REGISTRIES[path]}
    assert not new, f"put a switch into kernels/runtime/host_state.py, or list a registry here and there: {new}"


@pytest.mark.parametrize(
    "code",
    [
        "switch = 0\ndef turn():\n    global switch\n    switch = 1",
        "seen = {}\ndef note(x):\n    seen[x] = 1",
        "SEEN: set[int] = set()\ndef note(x):\n    SEEN.add(x)",
        "seen = weakref.WeakSet()",
        "here = threading.local()",
        "class Here(threading.local):\n    pass\nhere = Here()",
        "seen = []\nnote = lambda x: seen.append(x)",
    ],
)
def test_state_is_recognised(code: str) -> None:
    assert _state_of(ast.parse(code))
    assert not _state_of(ast.parse("TABLE = {1: 2}\ndef read(x, seen):\n    seen.append(x)\n    return TABLE[x]"))
