"""`octavo bench phases`: BF16, FP16 and FP8 by phase of a step, per batch and sequence; a pilot per shape.

Then exports in eight bits and in BF16 are decoded (`octavo_bench.decoding`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from octavo.errors import RunError
from octavo.lab.pilot import Settings, open_subject, run_pilot
from octavo.lab.pilot.judging import Pilot
from octavo.lab.pilot.report import to_text
from octavo.lab.train.subject import Shape
from octavo_bench.decoding import decoding_rows
from octavo_bench.kind import TO_STDOUT, Kind, Output, numbers
from octavo_bench.results import Row

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 6, "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
"""Llama-3.2-1B's widths, 6 of its 16 layers."""
NAME = "llama-1b, 6 layers"
KIND = Kind(
    name="phases",
    keys={
        "workload": str, "implementation": str, "ms": float, "ratio_to_bf16": float, "phases": dict, "speedups": dict,
    },
    columns=(
        ("workload", "{workload}"),
        ("implementation", "{implementation}"),
        ("ms", "{ms:.2f}"),
        ("times BF16's speed", "{ratio_to_bf16:.2f}"),
        ("mJ per token", "{mj_per_token:.2f}"),
    ),
    names=2,
)  # fmt: skip


def rows_of(pilot: Pilot, shape: Shape) -> Iterator[Row]:
    """Yield a row per precision: ms per step, and the speedup over BF16."""
    for name, found in pilot.measured.items():
        row: Row = {"workload": f"{NAME}, {shape.batch} x {shape.sequence}", "implementation": name}
        if found.failed:
            yield row | {"error": found.failed}
            continue
        rounded = {key: round(value, 4) for key, value in asdict(found).items() if isinstance(value, float)}
        times = {kind: round(ms, 4) for kind, ms in found.times.items()}
        gains = {kind: round(ratio, 3) for kind, ratio in pilot.speedups(name).items()}
        row |= {"batch": shape.batch, "sequence": shape.sequence, **rounded, "allocations": found.allocations}
        row |= {"phases": times, "speedups": gains, "ms": row.pop("step_ms"), "ratio_to_bf16": pilot.speedup(name)}
        if (joules := row.pop("joules_per_token", None)) is not None:
            row["mj_per_token"] = round(1e3 * joules, 4)
        if (gap := pilot.gap(name)) is not None:
            row |= {"gap_percent": gap[0], "gap_error": gap[1]}
        yield row


def command(
    *,
    batch: str = "1,4,16",
    sequence: str = "512,2048",
    recipes: str = "folded",
    steps: int = 20,
    decode: str = "1,16,64,256",
    output: Output = TO_STDOUT,
) -> int:
    """Train a Llama of 1B widths for a few steps per batch, sequence and precision: phases, energy, memory, decoding.

    Its exports are decoded too, in BF16 and by each recipe.

    Needs a CUDA device; `octavo pilot` predicts without one.

    Examples:

        octavo bench phases --batch 1,8 --sequence 1024 --write benchmarks/results
        octavo bench phases --batch "" --recipes folded,rotated

    Parameters
    ----------
    batch
        Sequences per step; empty: only decode exports.
    sequence
        Tokens per sequence.
    recipes
        Octavo's recipes.
    steps
        Steps of each training; the last 10 are timed.
    decode
        Sequences that exports are decoded for at once, 512 tokens each; empty: none.
    """
    if not torch.cuda.is_available():
        raise RunError("bench phases needs a CUDA device, and there is none here. `octavo pilot` predicts without one.")
    settings = Settings(recipes=tuple(recipes.split(",")), precisions=("bf16", "fp16"), steps=steps)
    batches = numbers(batch) if batch else ()
    shapes = [Shape(one, tokens) for tokens in numbers(sequence) for one in batches]

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            for shape in shapes:
                pilot = run_pilot(open_subject(Path(folder), shape=shape), settings)
                output.say(f"\n{to_text(pilot)}")
                yield from rows_of(pilot, shape)
            if decode:
                subject, device = open_subject(Path(folder), shape=Shape()), torch.device("cuda")
                yield from decoding_rows(NAME, subject, settings.recipes, numbers(decode), device)

    flags = {"batch": batch, "sequence": sequence, "recipes": recipes, "steps": steps, "decode": decode}
    return output.finish(KIND, rows(), device="cuda", **flags)
