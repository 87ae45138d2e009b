"""`octavo bench pictures`: the pictures of README and docs, from committed results and real pages.

`docs/pictures/manifest.json` holds, per picture, a digest of everything it was made from: the rows it shows and the
code that draws it. `--check` compares, so that no picture is older than its data.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from octavo._util import config_reader
from octavo._util.terminal import quantity
from octavo.conversion import Plan
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.train.config import RunConfig
from octavo.lab.train.control import study_of
from octavo.recipes import DEFAULT
from octavo_bench import ladder, ladder_plots, readme, results
from octavo_bench.kind import known
from octavo_bench.results import Row

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "octavo" / "lab" / "monitor" / "dashboard" / "static"
VERDICT = (STATIC.parent / "verdict.py", STATIC.parents[1] / "gap.py")
THEMES = {
    theme: dict(zip(("text", "quiet", "line", "fp8", "bf16", "peer"), tones.split(), strict=True))
    for theme, tones in {
        "light": "#18202b #566274 #d8dde5 #0072b2 #c65500 #aab4c2",
        "dark": "#e6ebf2 #9aa7b8 #303a47 #56b4e9 #f0883e #5b6675",
    }.items()
}
"""The colours of the dashboard."""
SHOWN = ("bf16", "torchao tensorwise", readme.OWN, f"{readme.OWN}_fast", "octavo folded", "octavo folded_fast")
"""Bars of the hero plot, besides the fastest of Transformer Engine, if measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture, or one in several themes."""

    data: Callable[[Path], Any]
    """The figures it shows, from the directory of results."""
    sources: Sequence[Path]
    """The code that draws it."""
    draw: Callable[[Any, Path, Path], None]
    """(data, directory to write to, run of the demo)"""

    def digest(self, directory: Path) -> str:
        """Return a digest of the data and the code of the picture."""
        found = hashlib.sha256(json.dumps(self.data(directory), sort_keys=True).encode())
        for source in sorted(self.sources):
            found.update(source.name.encode() + source.read_bytes())
        return found.hexdigest()[:16]


# --- the plot at the top of the README -------------------------------------------------------------------------------


def hero_data(directory: Path) -> dict[str, Any]:
    """Return the bars and the two loss curves.

    Raises:
        ConfigError: nothing of the kind has been measured.
    """
    measured = readme.Measured.read(directory)
    step = measured.step(readme.BLOCKS, readme.OWN) or measured.step(readme.BLOCKS, readme.FOLDED)
    if step is None:
        raise ConfigError(f"{directory}: no step of {readme.BLOCKS} has been measured.")
    rows = [row for row in step.rows if row["implementation"] in SHOWN]
    engine, where = measured.engine(step)
    if engine:
        rows.append(engine | {"implementation": f"{engine['implementation']}\n({where})"} if where else engine)
    keys = ("implementation", "tokens_per_s", "ratio_to_bf16")
    bars = sorted(({key: row[key] for key in keys} for row in rows), key=lambda bar: float(bar["ratio_to_bf16"]))
    return {"hardware": step.result.hardware, "shape": step.own["shape"], "bars": bars, **curves(directory)}


def curves(directory: Path) -> dict[str, Any]:
    """Return the losses of a run in FP8 and of its BF16 baseline: the largest Llama of the parity study, or the demo.

    By the default recipe, or by `folded` where no model was trained by it.
    """
    studies = [own for own in ladder.studies(ladder.read_rows(directory)) if own[0]["model"].startswith("llama")]
    for arm in (DEFAULT, "folded"):
        drawn = [(own, pair) for own in studies if (pair := _drawn_pair(own, arm))]
        if drawn:
            own, pair = max(drawn, key=lambda found: (_parameters(found[0]), int(found[0][0]["tokens"])))
            return _pair_curves(own, pair, arm)
    demo = max(demo_rows(directory), key=lambda row: row["tokens"])
    lines = [line for line in demo["history"] if line.get("loss_fp8") is not None]
    at = {
        lane: {"tokens": [line["tokens"] for line in lines], "loss": [line[f"loss_{lane}"] for line in lines]}
        for lane in ("fp8", "bf16")
    }
    model = f"demo, Llama of {demo['parameters'] / 1e6:.1f} M"
    return {
        "model": model,
        "gap": f"held-out loss {demo['gap_percent']:+z.2f} % beside BF16, one pair",
        "recipe": demo["recipe"],
        **at,
    }


def _parameters(own: Sequence[Row]) -> int:
    """Return the parameters of a study's model; 0 of one that is no size of the ladder any more."""
    size = ladder.sizes_by_model().get(own[0]["model"])
    return size.parameters if size else 0


def _drawn_pair(own: Sequence[Row], arm: str) -> dict[str, Row] | None:
    """Return the first block of a study that has the training loss of an arm and of BF16."""
    blocks = ladder.blocks([row for row in own if "training_loss" in row])
    return next((block for block in blocks if {arm, "bf16"} <= block.keys()), None)


def _pair_curves(own: Sequence[Row], pair: Mapping[str, Row], arm: str) -> dict[str, Any]:
    """Return the curves of a pair, and the gap of its study."""
    tokens, condition = int(pair["bf16"]["tokens"]), own[0]["condition"]
    gap = next(gap for gap in ladder.gaps(own) if gap.arm == arm)
    within = "" if gap.half_width is None else f" ± {gap.half_width:.2f} %"
    half = "; eight bits from half on" if condition.startswith("half") else ""
    said = f"last fifth {gap.mean:+z.2f} %{within} beside BF16, {quantity(len(gap.differences), 'pair')}{half}"
    found: dict[str, Any] = {"model": pair["bf16"]["model"], "gap": said, "recipe": arm}
    for lane, recipe in (("fp8", arm), ("bf16", "bf16")):
        losses = pair[recipe]["training_loss"]
        found[lane] = {"tokens": [(i + 0.5) * tokens / len(losses) for i in range(len(losses))], "loss": losses}
    return found


def demo_rows(directory: Path) -> list[Row]:
    """Return the newest demo of each machine that has its log, the newest first.

    Raises:
        ConfigError: there is none.
    """
    found = results.newest("demo", directory)
    rows = [row for result in found for row in result.rows if "history" in row]
    if not rows:
        raise ConfigError(f"{directory}: no demo with its log; `octavo bench demo --write {directory}` stores one.")
    return rows


def draw_hero(data: dict[str, Any], out: Path, run: Path) -> None:
    """Write hero-light and hero-dark, as SVG and PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    for theme, tones in THEMES.items():
        style: Any = {
            "svg.hashsalt": "octavo",
            "font.family": "DejaVu Sans",
            "font.size": 11,
            "text.color": tones["text"],
        }
        style |= {"axes.edgecolor": tones["line"], "xtick.color": tones["quiet"], "ytick.color": tones["text"]}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(12.4, 4.3), width_ratios=(1.25, 1))
            _bars(left, data, tones)
            _curves(right, data, tones)
            figure.subplots_adjust(left=0.145, right=0.985, top=0.74, bottom=0.13, wspace=0.12)
            for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
                figure.savefig(out / f"hero-{theme}.{suffix}", transparent=True, dpi=160, metadata=metadata)
            plt.close(figure)


def _title(axes: Any, title: str, about: str, tones: dict[str, str]) -> None:
    axes.annotate(title, (0, 1.24), xycoords="axes fraction", fontsize=14, fontweight="bold")
    axes.annotate(about, (0, 1.06), xycoords="axes fraction", fontsize=10, color=tones["quiet"], linespacing=1.45)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, data: dict[str, Any], tones: dict[str, str]) -> None:
    names = [_shown(bar["implementation"]) for bar in data["bars"]]
    speeds = [bar["tokens_per_s"] for bar in data["bars"]]
    colours = [tones["fp8"] if name.startswith("Octavo") else tones["peer"] for name in names]
    axes.barh(names, speeds, color=colours, height=0.62)
    for place, bar in enumerate(data["bars"]):
        inside = {"ha": "right", "va": "center", "color": "#ffffff" if tones["text"] != "#e6ebf2" else "#0e1217"}
        own = _shown(bar["implementation"]).startswith("Octavo")
        tone = inside if own else inside | {"color": tones["text"]}
        axes.text(bar["tokens_per_s"] * 0.985, place, f"{bar['tokens_per_s']:,}", **tone)
        ratio = {"ha": "left", "va": "center", "fontweight": "bold" if own else "normal"}
        axes.text(bar["tokens_per_s"] + 0.015 * max(speeds), place, f"{bar['ratio_to_bf16']:.2f}×", **ratio)
    axes.set_xlim(0, 1.1 * max(speeds))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.spines["bottom"].set_visible(False)
    shape, machine = data["shape"], data["hardware"].removeprefix("nvidia-").upper()
    work = f"{shape['layers']} Llama-3-8B blocks, {shape['batch']} x {shape['sequence']:,} tokens, one {machine}"
    _title(axes, "Faster", f"tokens/s, forward and backward, times BF16\n{work}", tones)


def _shown(implementation: str) -> str:
    if implementation.startswith(readme.ENGINE):
        return "Transformer Engine" + implementation[len(implementation.partition("\n")[0]) :]
    return implementation.replace("bf16", "BF16").replace("octavo", "Octavo")


def _curves(axes: Any, data: dict[str, Any], tones: dict[str, str]) -> None:
    for lane, style in (("fp8", {"lw": 3.2}), ("bf16", {"lw": 1.6, "ls": (0, (4, 2.5))})):
        tokens = [count / 1e6 for count in data[lane]["tokens"]]
        label = f"Octavo {data['recipe']}" if lane == "fp8" else "BF16, same batches"
        axes.plot(tokens, data[lane]["loss"], color=tones[lane], label=label, **style)
    axes.set_xlabel("million tokens", color=tones["quiet"], fontsize=10)
    axes.tick_params(colors=tones["quiet"], labelsize=9.5, length=3)
    axes.grid(axis="y", color=tones["line"], lw=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=11, labelcolor=tones["text"])
    about = "\n".join(filter(None, (f"{data['model']}, training loss, nats per token", data["gap"])))
    _title(axes, "Loss beside BF16", about, tones)


# --- the demo in a terminal ------------------------------------------------------------------------------------------

WIDTH = 118
"""Columns of the terminal; longer lines are cut."""


def terminal_data(directory: Path) -> dict[str, Any]:
    """Return the demo's newest run and its output."""
    row = demo_rows(directory)[0]
    return {"row": row, "text": printed(row).export_text()}


def draw_terminal(data: dict[str, Any], out: Path, run: Path) -> None:
    """Write terminal.svg."""
    from rich.terminal_theme import MONOKAI

    svg = printed(data["row"]).export_svg(title="make demo", theme=MONOKAI, unique_id="octavo")
    (out / "terminal.svg").write_text(svg, encoding="utf-8")


def printed(row: Row) -> Console:
    """Return a recording of the demo's output, made by its reporter."""
    from octavo.lab.train.console import ConsoleReporter
    from octavo.lab.train.events import Finished, Logged, Preparing, Started

    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, color_system="truecolor")
    console.print("$ make demo", markup=False)
    reporter = ConsoleReporter(console, export_flags=lambda run: "")
    config = config_reader.read(RunConfig, row["config"], "demo")
    config = replace(config, run=replace(config.run, out=Path("runs/demo")))  # where `make demo` writes
    lanes = ("fp8", "bf16")
    reporter.report(Preparing(config=config))
    facts = {"device": row["device"], "parameters": row["parameters"], "corpus": row["corpus"]}
    reporter.report(Started(config=config, models=lanes, plan=_plan_of(row, config), first_step=0, **facts))
    lines = [line for line in row["history"] if line.get("loss_fp8") is not None]
    for line in lines[:: max(1, len(lines) // 10)]:
        keys = ("loss", "gradient_norm", "milliseconds")
        by_lane: Any = {key: {lane: line[f"{key}_{lane}"] for lane in lanes} for key in keys}
        rest = {key: line[key] for key in ("step", "lr", "tokens", "tokens_per_second")}
        reporter.report(Logged(**by_lane, **rest))
    summary = {**row, **study_of(config)}  # a result of earlier code lacks it
    reporter.report(Finished(summary=summary, history=row["history"], directory=config.run.out))
    return console


def _plan_of(row: Row, config: RunConfig) -> Plan:
    """Return the plan of the FP8 model, for the GPU of the run if it had one."""
    import torch

    from octavo.conversion import make_plan
    from octavo.lab.models import build

    with torch.device("meta"):
        model = build(config.model, config.run.seed)
    return make_plan(
        model, row["recipe"], device="cpu" if row["peak_gib"] is None else row["device"].split()[-1].lower()
    )


# --- the dashboard ---------------------------------------------------------------------------------------------------

PAGES = {"dashboard": "overview?run={run}", "heat-maps": "layers?run={run}"}
"""Name of the picture, and the view."""


def dashboard_data(directory: Path) -> list[str]:
    """Return the figure that identifies the pictured run: the smallest demo, which any machine can make."""
    smallest = min(demo_rows(directory), key=lambda row: row["tokens"])
    return [repr(smallest["heldout_loss_fp8"])]


def draw_dashboard(data: list[str], out: Path, run: Path) -> None:
    """Write a picture per page and theme, of a run that is a committed result.

    Raises:
        ConfigError: `run` is another one.
        UnsupportedError: no browser.
    """
    summary = config_reader.read_file(run / "summary.json")
    if repr(summary["heldout_loss_fp8"]) not in data:
        raise ConfigError(f"{run}: not the smallest demo of all results; `octavo bench demo {run} --write` stores it.")
    with served(run) as address, browser() as chromium:
        for theme in THEMES:
            context = chromium.new_context(
                viewport={"width": 1360, "height": 860}, color_scheme=theme, device_scale_factor=1.5
            )
            page = context.new_page()
            for name, view in PAGES.items():
                page.goto(f"{address}/#/{view.format(run='.')}")
                page.wait_for_selector(f"main[aria-busy=false][data-view={view.split('?')[0]}]", timeout=60_000)
                page.wait_for_timeout(800)
                page.screenshot(path=str(out / f"{name}-{theme}.png"), animations="disabled")
            context.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder of runs and yield the address.

    Raises:
        UnsupportedError: the server does not start within 20 seconds.
    """
    import threading
    import time

    import uvicorn

    from octavo.lab.monitor.dashboard.server import application, bound

    with bound(0) as listener:
        server = uvicorn.Server(uvicorn.Config(application(folder), log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started:
            if time.monotonic() > end:
                raise UnsupportedError("the dashboard's server did not start within 20 seconds.")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def browser() -> Iterator[Any]:
    """Yield the Chromium of this machine.

    Raises:
        UnsupportedError: there is none.
    """
    import shutil

    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise UnsupportedError(f"the dashboard's pictures need a browser: {', '.join(names)}.")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# --- all of them -----------------------------------------------------------------------------------------------------

HERE = Path(__file__)
PICTURES = {
    "hero": Picture(data=hero_data, sources=[HERE], draw=draw_hero),
    "terminal": Picture(data=terminal_data, sources=[], draw=draw_terminal),
    "dashboard": Picture(data=dashboard_data, sources=[*STATIC.glob("*.*"), *VERDICT], draw=draw_dashboard),
    **{
        name: Picture(data=data, sources=[], draw=partial(ladder_plots.draw, name))
        for name, (data, _) in ladder_plots.PLOTS.items()
    },
}


def outdated(root: Path) -> list[str]:
    """Return the names of the pictures that are older than their data or their code."""
    manifest = root / "docs" / "pictures" / "manifest.json"
    made = json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else {}
    directory = root / "benchmarks" / "results"
    return [name for name, picture in PICTURES.items() if made.get(name) != picture.digest(directory)]


def make(names: Sequence[str], root: Path, run: Path) -> None:
    """Draw pictures and record their digests in the manifest."""
    out, directory = root / "docs" / "pictures", root / "benchmarks" / "results"
    out.mkdir(parents=True, exist_ok=True)
    manifest = out / "manifest.json"
    made = json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else {}
    for name in names:
        PICTURES[name].draw(PICTURES[name].data(directory), out, run)
        made[name] = PICTURES[name].digest(directory)
        manifest.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def command(
    *only: Annotated[str, Parameter(show=True)],
    check: Annotated[bool, Parameter(negative=())] = False,
    run: Path = Path("runs/demo"),
    root: Path = ROOT,
) -> int:
    """Draw the pictures of README and docs that are older than their data.

    Examples:

        octavo bench pictures
        octavo bench pictures hero terminal
        octavo bench pictures --check

    Parameters
    ----------
    only
        hero, terminal, dashboard, parity-ladder, parity-gaps or parity-over-time, even if current; by default those
        that are not.
    check
        Draw nothing; exit with 1 if a picture is older than its data.
    run
        For the dashboard's pictures: a run that `octavo bench demo` has stored.
    root
        The repository.
    """
    names = [known("pictures", name, [*PICTURES], "picture") for name in only] or outdated(root)
    if not check:
        make(names, root, run)
    for name in names:
        print(f"{name}: {'older than its data; run octavo bench pictures' if check else 'drawn'}")
    return int(check and bool(names))
