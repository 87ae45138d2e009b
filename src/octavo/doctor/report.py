"""Markdown block for a bug report, without private information.

Paths are cut to their last part. Only environment variables that affect numbers or speed are listed, with their value
only if it is plain words and numbers: no path, no address, nothing that looks like a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from octavo.doctor.check import Verdict
from octavo.doctor.examination import Examination, system_info
from octavo.doctor.software import SLOW
from octavo.monitor.system import PREFIXES

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
    mine = {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIXES) or name in SLOW}
    listed = {name: value for name, value in mine.items() if not _SECRET.search(name)}
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
