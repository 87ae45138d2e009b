"""Host syncs: where a step makes the host wait for the device, and in which line of code."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.doctor.check import Finding, check, ok, warning
from octavo.doctor.subjects import Trial, a_gpu

_WARNING = "called a synchronizing"
_TORCH, _PYTHON = (str(Path(module.__file__ or "").parent) for module in (torch, traceback))


class Place(NamedTuple):
    """A line of code that waits."""

    file: str
    """Its full path."""
    line: int
    code: str


@check(
    "host syncs",
    symptom="the GPU is idle between steps, or in the middle of one",
    remedy="Keep values on the device, and read them (.item(), .cpu(), print, if) only where a step is logged.",
    needs=a_gpu,
)
def syncs(trial: Trial) -> Finding:
    """Make a step while PyTorch tells of every wait. It does not tell of torch.cuda.synchronize()."""
    trial.step()  # what is made once, in the first step, may wait
    with told_of_waits() as places:
        trial.step()
    return judge(places)


def judge(places: Counter[Place]) -> Finding:
    """Return the finding for places of one step, with how often each waited."""
    if not places:
        return ok("a step waits nowhere", waits=0)
    rows = [{"place": f"{p.file}:{p.line}", "code": p.code, "waits": count} for p, count in places.most_common()]
    place, _ = places.most_common(1)[0]
    where = f"{'/'.join(Path(place.file).parts[-2:])}:{place.line}: {place.code}"
    seen = f"a step waits {places.total()} times, most in {where}"
    return warning(seen, rows=rows, waits=places.total())


@contextmanager
def told_of_waits() -> Iterator[Counter[Place]]:
    """Collect every line inside the block that makes the host wait for a CUDA device."""
    places: Counter[Place] = Counter()
    before = torch.cuda.get_sync_debug_mode()

    def hear(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if _WARNING in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _place() -> Place:
    """Return the innermost line of the caller's that is neither PyTorch's, Python's nor this file's."""
    stack = traceback.extract_stack()
    frame = ([frame for frame in stack if _says_something(frame.filename)] or stack)[-1]
    return Place(frame.filename, frame.lineno or 0, frame.line or "")


def _says_something(file: str) -> bool:
    is_pythons = file.startswith(_PYTHON) and "site-packages" not in file
    return file != __file__ and not file.startswith(_TORCH) and not is_pythons
