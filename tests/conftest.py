"""Settings of all tests: a seed, few threads, the cases that run on this machine, and the order of the files."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: test shapes are small, and machines are shared.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more threads start a helper process that imports torch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

with contextlib.suppress(ImportError):  # a machine with a GPU may have pytest alone
    from hypothesis import settings

    settings.register_profile("octavo", deadline=None)  # on a busy machine an example takes as long as it takes
    settings.load_profile("octavo")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which reads it then

sys.path.append(str(Path(__file__).parent / "distributed"))
sys.path.append(str(Path(__file__).parent))
import judged  # noqa: F401  before octavo.conversion

import checks
from budget import Budget

torch.set_num_threads(min(2, os.cpu_count() or 1, int(os.environ["OMP_NUM_THREADS"])))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random numbers, whatever ran before it.

    Without a GPU, `torch.manual_seed` notes for each kind of device where it was called: a millisecond per test.
    """
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Generator[None]:
    """Let no checkpoint wait for the disk: what a test writes has to outlive a killed process, not a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def deterministic() -> Generator[None]:
    """Make backward passes deterministic: fused attention sums atomically, in an order that other streams change.

    `warn_only` does not prevent that; without it, GEMMs need an environment variable from the start of the process.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def write_text() -> Callable[[Path], Path]:
    """Return what makes a folder with text enough for a few steps of the preset `tiny`, and gives it back."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        for i in range(12):
            (folder / f"{i}.txt").write_text(f"the quick brown fox number {i} jumps over the lazy dog.\n" * 60)
        return folder

    return write


@pytest.fixture(scope="session")
def train_run(write_text: Callable[[Path], Path]) -> Callable[..., Path]:
    """Return what trains the preset `tiny`, of one layer, for two steps, in a folder that gets a text, and a run in it.

    `train_run(home, "name", model={"layers": 2}, steps=3)`: fields of `[run]` by name, other sections as mappings.
    """
    from octavo.lab.train import train
    from octavo.lab.train.config import assemble, load_preset

    def make(home: Path, name: str = "run", *, model: Any = None, optimizer: Any = None, **run: Any) -> Path:
        text = home / "text"
        settings = {
            "data": {"source": str(text if text.exists() else write_text(text)), "cache": str(home / "cache")},
            "model": {"layers": 1, **(model or {})},
            "optimizer": optimizer or {},
            "run": {"steps": 2, "device": "cpu", "baseline": False, "eval_tokens": 512, **run, "out": str(home / name)},
        }
        train(assemble(load_preset("tiny", cuda=False), ("test", settings)))
        return home / name

    return make


@pytest.fixture(scope="session")
def octavo() -> Callable[[str | Sequence[object]], int]:
    """Return what runs a command, a line or its words, in this process and returns its exit code; it raises errors."""
    from octavo.lab.cli.main import app

    def run(command: str | Sequence[object]) -> int:
        words = command if isinstance(command, str) else [str(word) for word in command]
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        assert isinstance(code, int)
        return code

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that records which checks of the capabilities page passed on a machine, and that of `make test`."""
    parser.addoption("--record", metavar="MACHINE", help="write which named checks passed: tests/checked/MACHINE.json")
    parser.addoption("--budget", metavar="SECONDS", type=float, help="say how far the run is from that time")


def pytest_configure(config: pytest.Config) -> None:
    """Record and sum up on request, in the process that gets the reports of all others."""
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--record"):
        config.pluginmanager.register(checks.Recorder(config.getoption("--record")))
    if config.getoption("--budget"):
        config.pluginmanager.register(Budget(config.getoption("--budget")))


SLOW_FIRST = ("test_docs_in_order", "lab/train/test_parallel", "lab/train/test_combined", "lab/train/test_pipelined")
SLOW_FIRST += ("lab/monitor/dashboard/test_browser", "lab/cli/test_main", "lab/guard/test_loop", "lab/train")
SLOW_FIRST += ("distributed", "kernels/triton", "nn", "test_docs", "bench", "conversion", "lab/cli", "lab/memory")
SLOW_FIRST += ("lab/guard", "kernels", "lab/evaluation", "lab/sensitivity", "lab/pilot", "optim")
"""Paths with the longest tests. They start first, so that all processes finish at about the same time."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what does not change: it took a sixth of the time of collection, and of tests.

    It is disabled during collection, and what is there then, modules and tests, it never visits again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()
        atexit.register(gc.unfreeze)  # Python ends as it does elsewhere: libraries report what is never freed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the tests that this machine does not run, and put slow files first."""
    has_gpu = torch.cuda.is_available()
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if has_gpu and (item.get_closest_marker("covering") or item.get_closest_marker("slow")):
            item.add_marker("gpu")
        elif not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(skip)
    for item in _not_covering(items):
        item.add_marker("slow")
    slow = [item for item in items if item.get_closest_marker("slow")]
    if not (has_gpu or "slow" in config.option.markexpr or config.pluginmanager.hasplugin("compile_only")):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = os.path.relpath(item.path, Path(__file__).parent)  # a test outside this folder has a path, too
    return next((i for i, start in enumerate(SLOW_FIRST) if path.startswith(start)), len(SLOW_FIRST))


def _not_covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests marked `covering` that are not needed for the cover."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            tests[item.nodeid.partition("[")[0]].append(item)
    found = []
    for cases in tests.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        kept = cover([{name: repr(value) for name, value in case.callspec.params.items()} for case in cases], strength)
        found += [case for place, case in enumerate(cases) if place not in kept]
    return found


def cover(cases: Sequence[Mapping[str, str]], strength: int) -> set[int]:
    """Return indices of a small set of cases with every value, or every combination of `strength` parameters' values.

    Greedy: the next case is the one that adds most combinations; ties go to the values used least so far.
    """
    parts = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing, taken, kept = set().union(*parts), Counter(), set()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & missing), -sum(taken[v] for v in cases[i].items())))
        kept.add(best)
        missing -= parts[best]
        taken.update(cases[best].items())
    return kept
