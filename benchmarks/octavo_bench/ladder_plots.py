"""Pictures of the parity ladder, for `pictures`: gaps by size, gaps of all arms, and differences over time."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo._util.terminal import quantity
from octavo.lab.models.factory import model_name
from octavo.recipes import DEFAULT
from octavo_bench import ladder
from octavo_bench.evidence import over_seeds
from octavo_bench.lanes import BF16, CONTROL
from octavo_bench.results import Row

TEXT, LINE, FP8, CONTROL_TONE = "#6b7787", "#98a3b1", "#0a84c6", "#d9722b"
"""Colours legible on white and on black."""
FEWEST = 4
"""Minimum number of blocks for a band, and for an arm's own curve: with fewer they hide the others."""
ENDING, ENDING_TONES = re.compile(r"[a-z_]+\+run\.last_share=[0-9.]+"), {"0.2": "#2f9e6e", "0.3": "#8c6bb1"}
"""Arms that end with fprop in BF16, and the colours of their curves by that share."""
LADDER = {DEFAULT: "#c2357a", "folded": FP8, "folded+run.last_share=0.3": ENDING_TONES["0.3"], CONTROL: CONTROL_TONE}
"""Arms drawn by size, and their colours."""
CONDITIONS = {
    "half": "half: eight bits from the middle of the run on",
    "half+short": "half+short: the same with a quarter of the tokens, or fewer",
}
"""Titles of conditions for readers who do not know the protocol."""
FEWEST_SIZES = 3
"""Minimum number of sizes to draw a condition."""
Data = list[dict[str, Any]]


def shown_studies(directory: Path) -> list[tuple[str, list[Row]]]:
    """Return the studies of the protocol and those of its pilot, each with a title."""
    found = []
    for mark, pilot in (("", False), ("pilot: ", True)):
        for own in ladder.studies(ladder.read_rows(directory, pilot=pilot)):
            condition = "" if own[0]["condition"] == "whole" else f", {own[0]['condition']}"
            found.append((f"{mark}{own[0]['model']}{condition}", own))
    return found


def ladder_data(directory: Path) -> Data:
    """Return, per condition with several sizes, the gaps of some arms by size, smaller sizes first.

    `short` and `short` given twice share a panel; labels give the tokens per parameter.
    """
    known, found = ladder.sizes_by_model(), dict[str, list[dict[str, Any]]]()
    for own in ladder.studies(ladder.read_rows(directory)):
        if size := known.get(own[0]["model"]):
            active = size.active
            label = f"{model_name(size.model.architecture, active)}\n{own[0]['tokens'] / active:.2g}"
            by_arm = {bar["arm"]: bar for bar in _bars(own)}
            bars = [by_arm[arm] for arm in LADDER if arm in by_arm]
            condition = "+".join(dict.fromkeys(own[0]["condition"].split("+")))
            found.setdefault(condition, []).append({"label": label, "active": active, "gaps": bars})
    by_size = {condition: sorted(sizes, key=itemgetter("active")) for condition, sizes in found.items()}
    return [{"title": name, "sizes": sizes} for name, sizes in sorted(by_size.items()) if len(sizes) >= FEWEST_SIZES]


def gaps_data(directory: Path) -> Data:
    """Return, per study, each arm's gap with both intervals, in percent."""
    studies = shown_studies(directory)
    return [{"title": f"{title}\n{ladder.LOSSES[ladder.decisive(own)]}", "gaps": _bars(own)} for title, own in studies]


def _bars(own: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the gaps of a study's arms, in percent."""
    return [
        {
            "arm": gap.arm,
            "pairs": len(gap.differences),
            "mean": gap.mean,
            "once": gap.half_width_once,
            "any": gap.half_width,
        }
        for gap in ladder.gaps(own)
        if gap.differences
    ]


def time_data(directory: Path) -> Data:
    """Return, per study, the difference of training losses by share of the run: controls, and means of FP8 arms.

    The arms are the recipes together, and each that ends with fprop in BF16.
    """
    panels = []
    for title, own in shown_studies(directory):
        controls, mean, ending = [], [], dict[str, list[list[float]]]()
        for block in ladder.blocks(own):
            curves = {arm: row["training_loss"] for arm, row in block.items() if "error" not in row}
            if BF16 not in curves:
                continue
            base = [
                fmean(values) for values in zip(*(curves[arm] for arm in (BF16, CONTROL) if arm in curves), strict=True)
            ]
            if CONTROL in curves:
                controls.append(_percent(curves[CONTROL], curves[BF16]))
            recipes = [_percent(curve, base) for arm, curve in curves.items() if "+" not in arm and arm != BF16]
            if recipes:
                mean.append(_mean(recipes))
            for arm in sorted(arm for arm in curves if ENDING.fullmatch(arm)):
                ending.setdefault(arm, []).append(_percent(curves[arm], base))
        points = [over_seeds(values) for values in zip(*mean, strict=True)]
        band = [[point.mean, point.half_width if len(mean) >= FEWEST else None] for point in points]
        ends = {label_of(arm): _mean(parts) for arm, parts in ending.items() if len(parts) >= FEWEST}
        panels.append({"title": title, "null": controls, "recipes": band, "pairs": len(mean), "ending": ends})
    return panels


def label_of(arm: str) -> str:
    """Return an arm's name without the tables of its keys, which are redundant."""
    return re.sub(r" ?\+ ?(run\.|policy\.)?", " + ", arm)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*curves, strict=True)]


def _percent(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [round(100 * (a / b - 1), 4) for a, b in zip(losses, reference, strict=True)]


INTERVALS = "95 % intervals: fixed n (thick), anytime-valid (thin)"


def _draw_gap(
    axes: Any, bar: dict[str, Any], at: float, tone: str, *, upright: bool = False, label: str | None = None
) -> None:
    """Draw a gap with both intervals at a position on the other axis."""

    def plot(gaps: list[float], **style: Any) -> None:
        places = [at] * len(gaps)
        axes.plot(*((places, gaps) if upright else (gaps, places)), color=tone, **style)

    mean = bar["mean"]
    for width, line in ((bar["any"], 1.2), (bar["once"], 4.0)):
        if width is not None:
            plot([mean - width, mean + width], lw=line, alpha=0.8)
    plot([mean], marker="o", ls="", ms=5, label=label)


def _ladder_panel(axes: Any, panel: dict[str, Any]) -> None:
    axes.set_title(CONDITIONS.get(panel["title"], panel["title"]), fontsize=9.5)
    axes.axhspan(-ladder.MARGIN, ladder.MARGIN, color=LINE, alpha=0.3, lw=0)
    named = set()
    for place, size in enumerate(panel["sizes"]):
        for bar in size["gaps"]:
            arm = bar["arm"]
            at = place + 0.2 * ([*LADDER].index(arm) - (len(LADDER) - 1) / 2)
            title = "control: BF16 again" if arm == CONTROL else label_of(arm)
            label = None if arm in named else title
            _draw_gap(axes, bar, at, LADDER[arm], upright=True, label=label)
            named.add(arm)
    axes.set_xticks(range(len(panel["sizes"])), [size["label"].replace("-", "\n") for size in panel["sizes"]])
    axes.set_xlabel(f"active parameters; tokens per active parameter\n{INTERVALS}")
    axes.set_ylabel("gap to BF16, % (shaded: margin)")
    axes.set_ylim(bottom=-2 * ladder.MARGIN)  # room for the legend
    axes.legend(frameon=False, fontsize=7.5, labelcolor=TEXT, loc="lower left", ncols=len(LADDER))


def _gap_panel(axes: Any, panel: dict[str, Any]) -> None:
    axes.axvspan(-ladder.MARGIN, ladder.MARGIN, color=LINE, alpha=0.3, lw=0)
    for place, gap in enumerate(reversed(panel["gaps"])):
        tone = CONTROL_TONE if gap["arm"] == CONTROL else FP8
        _draw_gap(axes, gap, place, tone)
    labels = [f"{label_of(gap['arm'])} ({gap['pairs']})" for gap in reversed(panel["gaps"])]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel(f"gap to BF16, % (shaded: equivalence margin)\n{INTERVALS}")


def _time_panel(axes: Any, panel: dict[str, Any]) -> None:
    points = len(panel["recipes"]) or len(panel["null"][0])
    share = [100 * (at + 0.5) / points for at in range(points)]
    for index, pair in enumerate(panel["null"]):
        axes.plot(
            share,
            pair,
            color=CONTROL_TONE,
            lw=0.9,
            alpha=0.7,
            label="control (BF16 + 1 ulp), each pair" if not index else None,
        )
    if panel["recipes"]:
        means, widths = zip(*panel["recipes"], strict=True)
        label = f"FP8 recipes, mean of {quantity(panel['pairs'], 'block')}"
        axes.plot(share, means, color=FP8, lw=2.2, label=label)
        if widths[0] is not None:
            low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
            axes.fill_between(share, low, high, color=FP8, alpha=0.25, lw=0, label="95 % at each point")
    for arm, curve in sorted(panel["ending"].items()):
        axes.plot(share, curve, color=ENDING_TONES.get(arm.rpartition("=")[2], TEXT), lw=1.4, label=arm)
    axes.axhline(0, color=LINE, lw=0.8)
    axes.set_xlabel("% of the run")
    axes.set_ylabel("training loss relative to BF16, %")
    axes.legend(frameon=False, fontsize=7.5, labelcolor=TEXT)


PLOTS: dict[str, tuple[Callable[[Path], Data], Callable[[Any, dict[str, Any]], None]]] = {
    "parity-ladder": (ladder_data, _ladder_panel),
    "parity-gaps": (gaps_data, _gap_panel),
    "parity-over-time": (time_data, _time_panel),
}
"""Data and drawing of a panel, by file name."""


def draw(name: str, panels: Data, out: Path, run: Path | None = None) -> None:
    """Draw a picture of some panels as SVG; nothing without any."""
    import matplotlib

    if not panels:
        return
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    tones = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    # Text as text, not as a path per letter: a third of the bytes, and it can be searched and read out.
    text = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana"], "font.size": 9}
    style: dict[Any, Any] = {"svg.hashsalt": "octavo", **text, **dict.fromkeys(tones, TEXT)}
    columns = min(2, len(panels))
    wanted = [1.3 + 0.22 * len(panel["gaps"]) if "gaps" in panel else 3.0 for panel in panels]
    heights = [max(wanted[at : at + columns]) for at in range(0, len(panels), columns)]
    with plt.rc_context(style):
        size = 6.2 * columns, sum(heights)
        figure, grid = plt.subplots(len(heights), columns, figsize=size, height_ratios=heights, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.set_title(panel["title"], fontsize=9.5)
            PLOTS[name][1](axes, panel)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.tight_layout()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    (out / f"{name}.svg").write_text(compact(drawn.getvalue()), encoding="utf-8")


def compact(svg: str) -> str:
    """Return a picture with coordinates to a tenth of a point, no indentation, and paths of lines without their L."""

    def path(found: re.Match[str]) -> str:
        d = " ".join(found[1].split())
        # Pairs after the first of an M are lines too; after a curve they would be curves.
        return f' d="{d}"' if set(re.findall("[A-Za-z]", d)) - {*"MLz"} else f' d="{d.replace(" L ", " ")}"'

    def tag(found: re.Match[str]) -> str:  # the numbers that a reader sees are outside of tags
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 1):g}", found[0])

    rounded = re.sub(r"<[a-z][^>]*>", tag, svg)
    return re.sub(r"\n +", "\n", re.sub(r' d="([^"]*)"', path, rounded))
