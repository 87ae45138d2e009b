"""An examination: the checks of a machine, of a model on it, and of a run, one after another."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from octavo.errors import ConfigError, OctavoError, did_you_mean
from octavo.lab.doctor import accuracy, collectives, data, hardware, kernels, run, software, speed, subjects
from octavo.lab.doctor.check import Check, Result, Verdict, failure, run_check
from octavo.lab.doctor.software import relevant
from octavo.lab.doctor.subjects import Machine
from octavo.lab.monitor.store import FILE, RunReader
from octavo.lab.monitor.store.writer import plain
from octavo.lab.monitor.system import versions
from octavo.lab.train import device as devices
from octavo.lab.train.config import assemble, load_file, load_preset
from octavo.lab.train.opening import is_run_file

Kind = Literal["machine", "model", "run"]
_MODULES: dict[Kind, tuple[ModuleType, ...]] = {
    "machine": (software, hardware, kernels, collectives),
    "model": (data, speed, accuracy),
    "run": (run,),
}
CHECKS: dict[Kind, tuple[Check[Any], ...]] = {
    kind: tuple(each for module in modules for each in vars(module).values() if isinstance(each, Check))
    for kind, modules in _MODULES.items()
}
"""All checks in order, by kind of subject: `Machine`, `Trial`, `RunReader`. To add one, write it in one of these."""


_SUBJECTS: dict[Kind, str] = {
    "machine": "leave out the run, file or preset to check this machine",
    "model": "name a run file, a Python file, or a run that is not training now",
    "run": "name the directory of a run",
}
"""How each subject is named."""


@dataclass
class Examination:
    """The subjects to examine, and the results so far."""

    subjects: dict[Kind, Callable[[], Any]]
    """Factory of each subject, called when its checks begin."""
    only: Sequence[str] = ()
    """Names of the checks to run; empty for all."""
    results: list[tuple[Kind, Result]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = {check.name: kind for kind, checks in CHECKS.items() for check in checks}
        for name in self.only:
            if name not in known:
                near = did_you_mean(name, known)
                raise ConfigError(f"--only: unknown check '{name}'.{near} Checks: {', '.join(known)}.")
            if known[name] not in self.subjects:
                raise ConfigError(f"--only: '{name}' is a check of a {known[name]}: {_SUBJECTS[known[name]]}.")

    def begin(self) -> Iterator[tuple[Kind, Check[Any], Callable[[], Result]]]:
        """Yield each check with a function that runs it and keeps its result."""
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
                yield kind, check, partial(self._run, kind, check, subject)

    def run(self) -> Examination:
        """Run all checks."""
        for _, _, execute in self.begin():
            execute()
        return self

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.count[Verdict.FAILURE]

    @property
    def count(self) -> Counter[Verdict]:
        """Number of checks per verdict."""
        return Counter(result.finding.verdict for _, result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as data of strict JSON, None for NaN and infinities."""
        checks = [{"of": kind, **result.to_dict()} for kind, result in self.results]
        found: dict[str, Any] = plain({"passed": self.passed, **system_info(), "checks": checks})
        return found

    def _checks(self, kind: Kind) -> list[Check[Any]]:
        return [check for check in CHECKS[kind] if not self.only or check.name in self.only]

    def _run(self, kind: Kind, check: Check[Any], subject: Any) -> Result:
        result = run_check(check, subject)
        self.results.append((kind, result))
        return result


def _set_up(error: str) -> Check[Any]:
    """Return a failing check that replaces those of a subject that cannot be set up."""
    symptom = "octavo train stops before its first step"
    remedy = "Fix what the message names: octavo train would stop for the same reason."
    return Check("set up", symptom, remedy, lambda _: failure(error))


def system_info() -> dict[str, dict[str, Any]]:
    """Return the header of every report: `hardware` and `versions`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = {"processor": devices.describe(torch.device("cpu")), "memory": f"{memory:.1f} GiB"}
    for index in range(torch.cuda.device_count()):
        has = torch.cuda.get_device_properties(index)
        size = f"{has.total_memory / 2**30:.1f} GiB"
        hardware[f"cuda:{index}"] = f"{has.name}, compute capability {has.major}.{has.minor}, {size}"
    return {"hardware": hardware, "versions": versions()}


def examination(
    target: Path | None = None,
    *,
    preset: str | None = None,
    recipe: str | None = None,
    device: str = "auto",
    only: Sequence[str] = (),
    trace: Path | None = None,
) -> Examination:
    """Return the examination of a run file, a run, a preset or a user's model; without any, of the machine.

    Args:
        target: a run file, the directory of a run, a Python file or a Hugging Face config (`open_subject`).
        recipe: replaces the run's; of a Python file or a Hugging Face config by default `octavo.recipes.DEFAULT`.
        only: names of the checks to run.
        trace: directory for a trace of a few steps.

    Raises:
        ConfigError: there is no such file, preset, device, recipe or check.
    """
    where = devices.use(device)
    if target is not None and target.is_dir():
        return Examination(_of_run(target, _flags(recipe, str(where)), trace), only)
    if target is not None and not is_run_file(target):
        made = partial(subjects.trial_of_file, target, recipe=recipe, device=where, trace=trace)
        return Examination({"model": made}, only)
    if target is None and preset is None:
        if recipe is not None or trace is not None:
            raise ConfigError("--recipe and --trace need a model: name a run, a run file, a Python file or --preset.")
        return Examination({"machine": partial(Machine, where, Path("runs"))}, only)
    layer = load_file(target) if target is not None else load_preset(str(preset), cuda=where.type == "cuda")
    config = assemble(layer, _flags(recipe, str(where)))
    return Examination({"model": partial(subjects.trial_of_config, config, trace=trace)}, only)


def _of_run(directory: Path, flags: tuple[str, dict[str, Any]], trace: Path | None) -> dict[Kind, Callable[[], Any]]:
    """Return the record of a run, and its model unless it is still training."""
    if not (directory / FILE).exists():
        raise ConfigError(f"{directory}: contains no run ({FILE}). Name the directory of a run, or a run file.")
    reader, file = RunReader(directory), directory / "config.json"
    found: dict[Kind, Callable[[], Any]] = {"run": lambda: reader}
    if file.exists() and reader.state() != "running":
        config = assemble(load_file(file), flags).with_run(out=directory)  # to which it may have been moved
        found["model"] = partial(subjects.trial_of_config, config, trace=trace)
    return found


def _flags(recipe: str | None, device: str) -> tuple[str, dict[str, Any]]:
    run = {"device": device} | ({"recipe": recipe} if recipe is not None else {})
    return "command line", {"run": run}


# The block for a bug report has no private information. Paths are cut to their last part. Only environment variables
# that affect numbers or speed are listed, with their value only if it is plain words and numbers: no path, no address,
# nothing that looks like a secret.
MARKS = {Verdict.OK: "ok", Verdict.WARNING: "WARNING", Verdict.FAILURE: "FAILURE", Verdict.SKIPPED: "-"}
_PATH = re.compile(r"(?<![\w/])(?P<start>~?|[\w.@+-]+)/(?:[\w.@+ -]*/)*(?P<name>[\w.@+-]+)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.,:;=+%-]{0,60}")


def markdown(examination: Examination, environ: Mapping[str, str] | None = None) -> str:
    """Return the report of an examination."""
    found = system_info()
    facts = {**found["hardware"], **{k: v for k, v in found["versions"].items() if v is not None}}
    lines = ["### octavo doctor", "", *(f"- {key}: {value}" for key, value in facts.items())]
    if listed := variables(os.environ if environ is None else environ):
        lines.append(f"- environment: {', '.join(listed)}")
    lines += ["", "| check | verdict | seen |", "| --- | --- | --- |"]
    for kind, result in examination.results:
        seen = without_paths(result.finding.seen).replace("|", "\\|")
        lines.append(f"| {kind}: {result.check.name} | {MARKS[result.finding.verdict]} | {seen} |")
    for _, result in examination.results:
        if result.finding.verdict in (Verdict.WARNING, Verdict.FAILURE) and result.finding.rows:
            lines += ["", f"<details><summary>{result.check.name}</summary>", "", "```text"]
            lines += [without_paths(_row(row)) for row in result.finding.rows[:40]]
            lines += ["```", "", "</details>"]
    return "\n".join(lines)


def variables(environ: Mapping[str, str]) -> list[str]:
    """Return relevant variables as `NAME=value`, or `NAME is set` if the value is not plain."""
    listed = {name: value for name, value in relevant(environ).items() if not _SECRET.search(name)}
    return [f"{name}={value}" if _PLAIN.fullmatch(value) else f"{name} is set" for name, value in listed.items()]


def without_paths(text: str) -> str:
    """Cut the paths in a text to their last part."""
    return _PATH.sub(_cut, text)


def _cut(found: re.Match[str]) -> str:
    """Return the last part of a path; text that may be no path, such as `BF16/FP8`, is kept."""
    is_path = found["start"] in ("", "~", ".", "..") or "." in found["name"]
    return f".../{found['name']}" if is_path else found[0]


def _row(row: Mapping[str, Any]) -> str:
    cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    return "  ".join(cell for cell in cells if cell)
