"""Test campaigns: robustness against hostile or unlucky use, counted by class.

A row has a class and its number of trials: all (`tried`), those that Octavo `survived` by the right result or by a
refusal that names what is at fault, those with a wrong result in `silent`, those with an `unclear` message, and those
that `executed` a program; the rest lost something, or hang. Trials that failed are in `failed`.

To add a class, register cases with `case_of`, or write a function that yields trials; and add its line to `CLASSES`.

command_line    malformed files and command lines
crash           kills of runs and of ranks
writes          ways to write a weight
silence         uses that look right, each judged by an independent answer; hostile: folders, files and writers
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from random import Random
from typing import Literal, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

from octavo.errors import OctavoError
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, positive
from octavo_bench.results import Row

Outcome = Literal["held", "refused", "silent", "unclear", "executed", "lost"]
"""Right result; clear error; wrong result; other error; a program of the folder ran; work lost, or a hang."""
SURVIVED: tuple[Outcome, ...] = ("held", "refused")


class Trial(NamedTuple):
    """One trial and its outcome."""

    kind: str
    """The file's kind, the command, or the class."""
    about: str
    """The case, or the damage and Octavo's message."""
    outcome: Outcome
    fault: str = ""
    """The fault in words."""

    def __str__(self) -> str:
        return ascii(f"{self.fault or self.outcome}: {self.kind}: {self.about}")[1:-1]


Case = Callable[[Random], Outcome]
"""Makes its subject from a `Random`; an `OctavoError` with a word of the case is `refused`, another error `unclear`."""
CASES: dict[str, dict[str, Callable[[Random], tuple[Outcome, str]]]] = {}
"""By class and name."""


def case_of(kind: str, name: str, *words: str) -> Callable[[Case], Case]:
    """Add a case; a refusal must contain one of the words. Without words the use must work."""

    def add(case: Case) -> Case:
        @functools.wraps(case)
        def judged(draw: Random) -> tuple[Outcome, str]:
            torch.manual_seed(draw.getrandbits(32))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return case(draw), ""
            except (Exception, CheckpointException) as error:
                is_clear = isinstance(error, OctavoError) and any(word in str(error) for word in words)
                return "refused" if is_clear else "unclear", f"{type(error).__name__}: {error}".splitlines()[0]

        CASES.setdefault(kind, {})[name] = judged
        return case

    return add


KIND = Kind(
    name="robustness",
    keys={"class": str, "tried": int, "survived": int, "silent": int, "unclear": int, "executed": int, "seed": int},
    columns=tuple((key, f"{{{key}}}") for key in ("class", "tried", "survived", "silent", "unclear", "executed")),
    may_fail=False,
    session=("class",),
)
CLASSES: dict[str, tuple[int, str]] = {
    "malformed files": (300, "command_line:malformed_files"),
    "malformed command lines": (600, "command_line:malformed_commands"),
    "ways to write a weight": (113, "writes:trials"),
    "kills of runs": (200, "crash:kills_of_runs"),
    "kills of ranks": (40, "crash:kills_of_ranks"),
    "written inputs": (36, ""),
    "layers alone": (40, ""),
    "modules": (8, ""),
    "copies": (18, ""),
    "optimizers": (30, ""),
    "telemetry": (4, ""),
    "chat data": (24, ""),
    "held-out loss": (2, ""),
    "folders": (50, ""),
    "programs": (8, ""),
    "writers of FP8 weights": (12, ""),
    "messages": (4, ""),
}
"""Number of trials, and the function `(tried, seed) -> trials`, as module and name; empty for those of `CASES`."""
_CASES_IN = ("silence", "hostile")
"""Modules that register cases."""


def _of_cases(kind: str, tried: int, seed: int) -> Iterator[Trial]:
    """Yield `tried` trials of the registered cases of a class, in turn."""
    cases = [*CASES[kind].items()]
    for number in range(tried):
        name, case = cases[number % len(cases)]
        outcome, said = case(Random(f"{seed} {number} {name}"))
        yield Trial(kind, name, outcome, "" if outcome in SURVIVED else f"{outcome} {said}".strip())


def trials_of(name: str, tried: int, seed: int) -> Iterator[Trial]:
    """Yield the trials of a class; each is reproducible by its seed and number."""
    module, _, function = CLASSES[name][1].partition(":")
    if module:
        yield from getattr(import_module(f"octavo_bench.{module}"), function)(tried, seed)
        return
    for module in _CASES_IN:
        import_module(f"octavo_bench.{module}")
    yield from _of_cases(name, tried, seed)


def rows_of(
    classes: Sequence[str], *, share: float = 1.0, seed: int = 0, report: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Yield a row per class; trials that Octavo did not survive are reported.

    Args:
        classes: some of `CLASSES`.
        share: share of the trials, from 0 to 1; at least one of each class.
        seed: reproduces the trials.
        report: called with each failed trial.
    """
    for name in classes:
        trials = []
        for trial in trials_of(name, max(1, round(CLASSES[name][0] * share)), seed):
            trials.append(trial)
            if trial.outcome not in SURVIVED:
                report(str(trial))
        counts = Counter(trial.outcome for trial in trials)
        failed = dict.fromkeys(str(trial) for trial in trials if trial.outcome not in SURVIVED)
        yield {
            "class": name, "tried": len(trials), "survived": sum(counts[outcome] for outcome in SURVIVED),
            "silent": counts["silent"], "unclear": counts["unclear"], "executed": counts["executed"], "seed": seed,
            **({"failed": [*failed]} if failed else {}),
        }  # fmt: skip


def command(*, only: Names = (), share: float = 1.0, seed: int = 0, output: Output = TO_STDOUT) -> int:
    """Try hostile and unlucky uses: each must end in the right result, or in one line that names the fault.

    Exits with 1 if a trial was not survived.

    Examples:

        octavo bench robustness
        octavo bench robustness --only "malformed files" --share 0.1

    Parameters
    ----------
    only
        Classes to try; all by default.
    share
        Share of the trials, from 0 to 1.
    seed
        Seed of the trials.
    """
    positive("--share", int(share > 0))
    chosen = [known("--only", name, list(CLASSES), "class") for name in only or CLASSES]
    found = rows_of(chosen, share=share, seed=seed, report=output.say)
    flags: Row = {"share": None if share == 1 else share, "seed": seed or None}
    rows = output.keep(KIND, found, device="cpu", only=only, **flags)
    return int(any(row["survived"] < row["tried"] for row in rows))
