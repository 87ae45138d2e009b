"""A figure in words is checked like one in digits: a fraction in prose is measured, set, or links to the log.

Digits cannot be typed (`test_docs.py`), so a figure that no table has is written as a word, and would stay when the
results change. `MEASURED` has what result files and constants must say, `DEFINED` what is arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo_bench import distributed, ladder, results

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log")
ORDINALS = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|thirteenth|sixteenth|twentieth|fortieth"
ORDINALS += "|hundredth|thousandth"
FRACTION = re.compile(
    rf"\b(?:an?|one|two|three|four|five|six|seven|eight|nine|some)(?: to (?:an?|two|three|four|five|six|nine))?"
    rf" (?:{ORDINALS})s?\b"
)


def prose(page: Path) -> str:
    """Return a page on one line, without code, generated tables, and what was tried: a digest of the log."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- (?:table|closed): .*?^<!-- end -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^## What was tried$.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[[^\]]*\]\([^)]*log/experiments\.md[^)]*\)", "", text)  # the log is the source
    return re.sub(r"\s+", " ", text)


class Measured(NamedTuple):
    """A phrase of a page, and the values that it describes: all lie within the bounds."""

    page: str
    phrase: str
    low: float
    high: float
    values: Callable[[], Iterable[float]]


@cache
def gaps() -> dict[tuple[str, str, str], ladder.Gap]:
    """Return the gaps of the ladder by model, condition and arm, of the most tokens."""
    studies = sorted(ladder.studies(ladder.read_rows(DIRECTORY)), key=lambda rows: rows[0]["tokens"])
    return {(r[0]["model"], r[0]["condition"], gap.arm): gap for r in studies for gap in ladder.gaps(r)}


def means(arm: str, *conditions: str, without: str = "nothing", passing: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the study and the mean gap of an arm, in percent."""
    for (model, condition, name), gap in gaps().items():
        if (
            name == arm
            and condition in conditions
            and without not in model
            and (not passing or gap.verdict == "passes")
        ):
            yield f"{model} {condition}", gap.mean


def remaining(arm: str, *conditions: str, passing: bool = False) -> Iterator[float]:
    """Yield the gap of an arm in units of `folded`'s in the same study."""
    of_folded = dict(means("folded", *conditions))
    yield from (gap / of_folded[study] for study, gap in means(arm, *conditions, passing=passing) if study in of_folded)


def tokens_per_parameter(model: str, condition: str) -> float:
    """Return the tokens that a model of the ladder is trained on, per parameter."""
    training = ladder.under(condition, ladder.sizes_by_model()[model])
    return training.tokens_per_parameter


def shares_of_tokens(change: str) -> Iterator[float]:
    """Yield the tokens of the sizes of the ladder under a change of the condition, in units of those without."""
    for model in ladder.sizes_by_model():
        yield tokens_per_parameter(model, f"half+{change}") / tokens_per_parameter(model, "half")


def rows(kind: str) -> Iterator[results.Row]:
    """Yield the rows of all results of a kind that did not fail."""
    yield from (row for result in results.every(kind, DIRECTORY) for row in result.rows if "error" not in row)


def lead_lost(layout: str) -> Iterator[float]:
    """Yield how much longer FP8 steps of some layouts take if the host waits for each."""
    for row in rows("distributed"):
        if row.get("waited_ms") and row["implementation"].startswith("octavo") and re.search(layout, row["layout"]):
            yield row["waited_ms"] / row["ms"] - 1


def memory_error() -> Iterator[float]:
    """Yield the relative errors of the peak memory that `octavo bench scaling` computes for four GPUs."""
    from octavo_bench.tables import render

    for line in render("scaling-check", DIRECTORY).splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1]:
            yield abs(float(cells[-2]) / float(cells[-1]) - 1)


MEASURED = (
    Measured("accuracy", "up to three tenths of a percent above BF16 in small dense models", 0.0, 0.32,
             lambda: (gap for study, gap in means("folded", "half", "half+short", without="moe")
                      if not re.search("129m|347m|1029m", study))),
    Measured("accuracy", "trained on a quarter of a token per parameter", 0.24, 0.26,
             lambda: [tokens_per_parameter("llama-347m", "half+short+short")]),
    Measured("accuracy", "347 M a quarter, 1 B a thirteenth", 0.07, 0.26,
             lambda: [tokens_per_parameter(f"llama-{size}m", "half+short+short") for size in (347, 1029)]),
    Measured("accuracy", "(`memory=\"low\"`) add about a sixth to the gap", 0.13, 0.21,
             lambda: (more - 1 for more in remaining("folded+policy.memory=low", "half"))),
    Measured("accuracy", "About a tenth to three tenths of `folded`'s gap remains", 0.08, 0.32,
             lambda: remaining("folded+run.last_share=0.3", "half", "half+short", "half+short+short", passing=True)),
    Measured("accuracy", "a fifth to a quarter of the gap remains", 0.18, 0.27,
             lambda: remaining("folded+run.last_share=0.2", "half")),
    Measured("scaling", "lose up to a tenth by this where kernels are launched one by one", -0.05, 0.1,
             lambda: lead_lost("^(?!.*graph)")),
    Measured("scaling", "next to nothing where a CUDA graph is replayed", -0.02, 0.02, lambda: lead_lost("graph")),
    Measured("accuracy", "within the margin of a tenth", 0.1, 0.1, lambda: [ladder.MARGIN]),
    Measured("accuracy", "a gap of a tenth of a percent", 0.1, 0.1, lambda: [ladder.MARGIN]),
    Measured("accuracy", "a tenth of a percent, and fails", 0.1, 0.1, lambda: [ladder.MARGIN]),
    Measured("accuracy", "*short* has a quarter of the tokens", 0.25, 0.25, lambda: shares_of_tokens("short")),
    Measured("accuracy", "smaller at a quarter of the tokens (*short*)", 0.25, 0.25, lambda: shares_of_tokens("short")),
    Measured("accuracy", "have a quarter of the usual tokens", 0.25, 0.25, lambda: shares_of_tokens("short")),
    Measured("accuracy", "at a quarter of them (347 M and 1 B at a sixteenth)", 0.0625, 0.25,
             lambda: (*shares_of_tokens("short"), *shares_of_tokens("short+short"))),
    Measured("parity-protocol", "`short` is a quarter of the tokens, and twice a sixteenth", 0.0625, 0.25,
             lambda: (*shares_of_tokens("short"), *shares_of_tokens("short+short"))),
    Measured("scaling", "has a quarter of the blocks", 0.25, 0.25, lambda: [
        distributed.WORKLOADS["llama-8b-blocks"].model.layers / distributed.WORKLOADS["llama-3-8b"].model.layers]),
    Measured("scaling", "Predicted memory is within a tenth of the measurement", 0.0, 0.1, memory_error),
)  # fmt: skip

DEFINED = {
    "accuracy": (
        "the last three tenths of the steps (`last_share = 0.3`)",
        "the last share of three tenths",
        "a last share of three tenths",
        "A last share of three tenths",
        "whether FP8 starts at a quarter or at half",
        "leaves a fifth of the run in FP8",  # 1 - 0.5 - 0.3
        "The share of three tenths was",
        "(rotated-int8.md) has a ninth",  # by the formula there
    ),
    "parity-protocol": (
        "a third held-out loss",  # an ordinal
        "between a fifth and a half of the run",  # of the pilot, before this version: in its log
        "differ after a tenth of the steps",
        "on a quarter of its tokens of code, is continued by all arms on a tenth of its tokens",  # of conditions
        "by some thousandths of a percent",
    ),
    "rotated-int8": (
        "INT8's variance is then a ninth of E4M3's",  # by the formula above it
        "spread over its block, a sixteenth as large",  # a Hadamard block of 256
    ),
    "convolutions-and-experts": ("A step sends an eighth less",),  # 7 D of 8 D, by the table beside it
    "scaling": ("three quarters on 4",),  # (n - 1) / n
    "steady-a-run": ("did not fall by a thousandth", "For the last three tenths of the steps"),  # the file above it
    "troubleshoot": ("`--share 0.1` a tenth of them",),
    "will-it-fit": ("Leave a twentieth free",),  # advice
    "capabilities": ("half or a quarter of the storage", "a quarter of FP32's bytes"),  # one byte of two, of four
    "optimizer": ("is a seventh byte",),  # an ordinal
}
"""Page -> phrases that are settings, definitions or arithmetic."""


def phrases(page: str) -> list[str]:
    return [*DEFINED.get(page, ()), *(each.phrase for each in MEASURED if each.page == page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_fraction_in_words_has_a_source(page: Path) -> None:
    text = prose(page)
    spans = [m.span() for phrase in phrases(page.stem) for m in re.finditer(re.escape(phrase), text)]
    unknown = [
        text[max(0, match.start() - 60) : match.end() + 40]
        for match in FRACTION.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in spans)
    ]
    assert unknown == [], "measure it in tests/test_worded_figures.py, or link to the log"


@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim.phrase)
def test_what_is_measured_is_so(claim: Measured) -> None:
    values = [*claim.values()]
    assert values and [value for value in values if not claim.low <= value <= claim.high] == []


def test_every_phrase_is_on_its_page() -> None:
    pages = {page.stem: prose(page) for page in PAGES}
    named = chain(
        ((each.page, each.phrase) for each in MEASURED), ((p, phrase) for p in DEFINED for phrase in DEFINED[p])
    )
    assert [(page, phrase) for page, phrase in named if phrase not in pages[page]] == []


@pytest.mark.parametrize("text", ["a quarter faster", "two thirds of it", "two to three tenths", "a hundredth"])
def test_a_fraction_is_seen(text: str) -> None:
    assert FRACTION.search(text) and not FRACTION.search("the last fifth of a fourth run, a quarterly")
