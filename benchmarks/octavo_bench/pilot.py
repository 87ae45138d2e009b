"""`octavo bench pilot`: the recommendation of `octavo pilot` for public models, against a full measurement.

Nothing is downloaded: the models have random weights.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.lab.monitor.dashboard import page
from octavo.lab.pilot import Settings, open_subject, run_pilot
from octavo.lab.pilot.judging import ALIKE, Pilot
from octavo.lab.pilot.report import to_dict, to_html
from octavo.lab.train.subject import Shape
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, positive
from octavo_bench.results import Row
from octavo_bench.timing import attempts

_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[dict[str, Any], Shape]] = {
    "qwen3-0.6b, 6 of 28 layers": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 6, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, **_HEADS},
        Shape(8, 1024),
    ),
    "llama-3.2-1b, 4 of 16 layers": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 4, "vocab_size": 32000, **_HEADS, "num_attention_heads": 32},
        Shape(16, 1024),
    ),
    "vit-s": (
        {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 384,
         "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 224,
         "patch_size": 16, "num_labels": 1000},
        Shape(128, 197),
    ),
}  # fmt: skip
"""Hugging Face configs with the widths of the published models and fewer layers; weights are random."""
NOISE = 1.03
"""Ratio within which the full measurement cannot distinguish speeds."""


def _derived(row: Row) -> Row:
    return {
        "measured": ", ".join(f"`{name}` {speed:.2f}" for name, speed in row["full"].items()),
        "verdict": "yes" if row["right"] else "no",
        "recommended": f"`{row['recipe']}`" if row["adopts"] else "not yet",
    }


KIND = Kind(
    name="pilot",
    keys={"model": str, "seconds": float, "adopts": bool, "full": dict, "right": bool},
    columns=(
        ("model", "{model}"),
        ("seconds", "{seconds:.0f}"),
        ("recommended", "{recommended}"),
        ("speed-up expected", "{speedup:.2f}"),
        ("full measurement, times BF16's speed", "{measured}"),
        ("right", "{verdict}"),
    ),
    derived=_derived,
)


def check(name: str, directory: Path, steps: int, html: bool = False) -> Row:
    """Return the figures of a model: the recommendation of a pilot of 8 steps, and whether a full measurement agrees.

    The pilot's report is written to a folder of `directory`, as JSON and, if `html`, as a page.
    """
    config, shape = MODELS[name]
    folder = directory / name.partition(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    subject = open_subject(folder, shape=shape)
    start = time.perf_counter()
    small = run_pilot(subject, Settings(steps=8, precisions=("bf16",)))
    seconds = time.perf_counter() - start
    (folder / "report.json").write_text(json.dumps(to_dict(small)), encoding="utf-8")
    if html:
        to_html(small, folder / "report.html")
    full = run_pilot(replace(subject, decode=None), Settings(steps=steps, precisions=("bf16",)))
    row: Row = {"seconds": round(seconds, 1), "adopts": small.adopts, "recipe": small.best or "none"}
    if small.best:
        row["speedup"] = round(small.speedup(small.best), 3)
    timed = [each for each in full.plans if full.plans[each].fp8_layers and full.trains(each)]
    return row | {
        "full": {each: round(full.speedup(each), 3) for each in timed},
        "right": is_right(small, full),
    }


def is_right(small: Pilot, full: Pilot) -> bool:
    """Return whether a full measurement confirms the decision and the recipe of a small one, within its noise."""
    fit = [name for name in full.plans if full.plans[name].fp8_layers and full.trains(name)]
    fastest = max((full.speedup(name) for name in fit), default=0.0)
    if small.best is None or not small.adopts:
        return not full.adopts or fastest < NOISE * 1.05
    return small.best in fit and full.speedup(small.best) >= max(fastest / (ALIKE * NOISE), 1.05 / NOISE)


def command(
    *,
    only: Names = (),
    steps: int = 24,
    reports: Annotated[Path | None, Parameter(negative=())] = None,
    output: Output = TO_STDOUT,
) -> int:
    """Check `octavo pilot` on a GPU: its recommendation for three public models, against a full measurement.

    Examples:

        octavo bench pilot --write benchmarks/results

    Parameters
    ----------
    only
        Models to check; all by default.
    steps
        Steps of the full measurement.
    reports
        Directory for the report of each pilot.
    """
    if reports is not None:
        page.plotly()
    chosen = [known("--only", name, list(MODELS), "model") for name in only] or list(MODELS)
    steps = positive("--steps", steps)
    with tempfile.TemporaryDirectory() as scratch:
        measure = partial(check, directory=reports or Path(scratch), steps=steps, html=reports is not None)
        rows = attempts(({"model": name}, partial(measure, name)) for name in chosen)
        return output.finish(KIND, rows, only=only, steps=steps)
