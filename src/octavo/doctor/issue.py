"""A block to paste into a bug report: what was found, in Markdown, and nothing that is nobody's business.

Paths are cut to their last part. Of the environment only variables that decide numbers or speed are told, and their
values only where they are words and numbers: no path, no address, nothing that looks like a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from octavo.doctor.check import Verdict
from octavo.doctor.examination import Examination, about
from octavo.doctor.machine.variables import SLOW
from octavo.monitor.environment import PREFIXES

MARKS = {Verdict.OK: "ok", Verdict.WARNING: "WARNING", Verdict.FAILURE: "FAILURE", Verdict.SKIPPED: "-"}
_PATH = re.compile(r"(?<![\w/])(?P<start>~?|[\w.@+-]+)/(?:[\w.@+ -]*/)*(?P<name>[\w.@+-]+)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.,:;=+%-]{0,60}")


def block(examination: Examination, environ: Mapping[str, str] | None = None) -> str:
    """Return the Markdown."""
    found = about()
    facts = {**found["hardware"], **{k: v for k, v in found["versions"].items() if v is not None}}
    lines = ["### octavo doctor", "", *(f"- {key}: {value}" for key, value in facts.items())]
    if told := variables(os.environ if environ is None else environ):
        lines.append(f"- environment: {', '.join(told)}")
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
    """Return the variables that matter as `NAME=value`; where a value is not plain, that it is set."""
    mine = {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIXES) or name in SLOW}
    told = {name: value for name, value in mine.items() if not _SECRET.search(name)}
    return [f"{name}={value}" if _PLAIN.fullmatch(value) else f"{name} is set" for name, value in told.items()]


def without_paths(text: str) -> str:
    """Return a text whose paths are cut to their last part."""
    return _PATH.sub(_cut, text)


def _cut(found: re.Match[str]) -> str:
    """Return the last part of a path; what may be no path, such as `BF16/FP8`, stays."""
    is_path = found["start"] in ("", "~", ".", "..") or "." in found["name"]
    return f".../{found['name']}" if is_path else found[0]


def _row(row: Mapping[str, Any]) -> str:
    cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    return "  ".join(cell for cell in cells if cell)
