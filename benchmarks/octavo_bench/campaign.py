"""Test campaigns: malformed input and kills, drawn at random from a seed, counted by class.

A row has a class and its number of trials: all (`tried`), those that Octavo `survived` by the right result or by a
refusal that names what is at fault, those with a wrong result in `silent`, and those with an `unclear` message; the
rest lost something, or hang. Trials that failed are in `failed`. Uses whose outcome needs no draw are tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Literal, NamedTuple

from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, positive
from octavo_bench.render import figures
from octavo_bench.results import Row

Outcome = Literal["held", "refused", "silent", "unclear", "lost"]
"""Right result; clear error; wrong result; other error; work lost, or a hang."""
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


CLASSES: dict[str, tuple[int, str]] = {
    "malformed files": (300, "command_line:malformed_files"),
    "malformed command lines": (600, "command_line:malformed_commands"),
    "kills of runs": (200, "crash:kills_of_runs"),
    "kills of ranks": (40, "crash:kills_of_ranks"),
}
"""Number of trials, and the function `(tried, seed) -> trials`, as module and name."""
COLUMNS = tuple((key, f"{{{key}}}") for key in ("class", "tried", "survived", "silent", "unclear"))


def of_today(rows: Sequence[Row]) -> str:
    """Return the table of the classes that there are; empty without any. Those of older results have become tests."""
    own = [row for row in rows if row["class"] in CLASSES]
    return figures(COLUMNS, own) if own else ""


KIND = Kind(
    name="robustness",
    keys={"class": str, "tried": int, "survived": int, "silent": int, "unclear": int, "seed": int},
    columns=COLUMNS,
    show=of_today,
    may_fail=False,
    session=("class",),
)


def trials_of(name: str, tried: int, seed: int) -> Iterator[Trial]:
    """Yield the trials of a class; each is reproducible by its seed and number."""
    module, _, function = CLASSES[name][1].partition(":")
    yield from getattr(import_module(f"octavo_bench.{module}"), function)(tried, seed)


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
            "silent": counts["silent"], "unclear": counts["unclear"], "seed": seed,
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
