"""Check of the text of a run."""

from __future__ import annotations

from octavo._util.terminal import quantity
from octavo.lab.data.quality import judge
from octavo.lab.doctor.check import Finding, check, ok, warning
from octavo.lab.doctor.subjects import Trial


@check(
    "data",
    symptom="the loss is low on held-out text and high in use, or a model repeats itself",
    remedy="Remove duplicates and documents that do not belong, or split long ones, then prepare the text again.",
    needs=lambda trial: "" if trial.corpus else "the model has no text; name a run or a run file",
)
def data(trial: Trial) -> Finding:
    """Check for duplicates, leaks into held-out text, empty, foreign and overlong documents."""
    found = [{"finding": text, "share": share, "limit": limit} for text, share, limit in judge(trial.corpus)]
    scripts = ", ".join(f"{100 * share:.0f} % {name}" for name, share in [*trial.corpus["scripts"].items()][:3])
    documents = quantity(trial.corpus["documents"], "document")
    about = f"{documents}, {trial.corpus['tokens']:,} tokens, {scripts or 'no letters'}"
    return warning(str(found[0]["finding"]), rows=found) if found else ok(about)
