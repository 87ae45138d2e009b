"""An examination: the checks of a machine, of a model on it, and of a run, one after another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from octavo.doctor.check import Check, Result, Verdict, failure, make
from octavo.doctor.checks import CHECKS
from octavo.errors import ConfigError, OctavoError, did_you_mean
from octavo.train import device as devices

Kind = Literal["machine", "model", "run"]


@dataclass
class Examination:
    """What was asked for, and what came out so far."""

    subjects: dict[Kind, Callable[[], Any]]
    """What makes each subject, when its turn has come."""
    only: Sequence[str] = ()
    """Names of the checks to make; all where there are none."""
    results: list[tuple[Kind, Result]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [check.name for checks in CHECKS.values() for check in checks]
        for name in self.only:
            if name not in known:
                raise ConfigError(f"--only: there is no check '{name}'.{did_you_mean(name, known)}")
        asked = [check for kind in self.subjects for check in self._checks(kind)]
        if not asked:
            raise ConfigError(f"--only: {', '.join(self.only)}: name a run file, a run or a --model to look at.")

    def begin(self) -> Iterator[tuple[Kind, Check[Any], Callable[[], Result]]]:
        """Yield each check with what makes it; its result is kept when that is called."""
        for kind, create in self.subjects.items():
            checks = self._checks(kind)
            if not checks:
                continue
            try:
                subject = create()
            except ConfigError:
                raise
            except (OctavoError, RuntimeError) as error:
                subject, checks = None, [_set_up(f"{type(error).__name__}: {' '.join(str(error).split())}")]
            for check in checks:
                yield kind, check, partial(self._make, kind, check, subject)

    def run(self) -> Examination:
        """Make all checks."""
        for _, _, carry_out in self.begin():
            carry_out()
        return self

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.count[Verdict.FAILURE]

    @property
    def count(self) -> Counter[Verdict]:
        """How many checks ended in each verdict."""
        return Counter(result.finding.verdict for _, result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        checks = [{"of": kind, **result.to_dict()} for kind, result in self.results]
        return {"passed": self.passed, **about(), "checks": checks}

    def _checks(self, kind: Kind) -> list[Check[Any]]:
        return [check for check in CHECKS[kind] if not self.only or check.name in self.only]

    def _make(self, kind: Kind, check: Check[Any], subject: Any) -> Result:
        result = make(check, subject)
        self.results.append((kind, result))
        return result


def _set_up(error: str) -> Check[Any]:
    """Return what stands in the place of all checks of a subject that cannot be made: a failure that says why."""
    symptom = "octavo train stops before its first step"
    remedy = "Put right what the message names: octavo train would stop for the same reason."
    return Check("set up", symptom, remedy, lambda _: failure(error))


def about() -> dict[str, dict[str, Any]]:
    """Return what every report begins with: `hardware` and `versions`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = {"processor": devices.describe(torch.device("cpu")), "memory": f"{memory:.1f} GiB"}
    for index in range(torch.cuda.device_count()):
        has = torch.cuda.get_device_properties(index)
        size = f"{has.total_memory / 2**30:.1f} GiB"
        hardware[f"cuda:{index}"] = f"{has.name}, compute capability {has.major}.{has.minor}, {size}"
    return {"hardware": hardware, "versions": devices.versions()}
