"""Check `octavo pilot`: its recommendation for three models of others, from a few steps, against a full measurement.

    python -m octavo_bench.pilot --out DIRECTORY

A GPU takes about three minutes; nothing is downloaded. Writes pilot.json and one report per model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from octavo.pilot import Settings, load_workload, run_pilot
from octavo.pilot.judging import ALIKE, Pilot
from octavo.pilot.report import to_dict, to_html, to_text
from octavo.pilot.workload import Shape

_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[dict[str, Any], Shape]] = {
    "qwen3-0.6b, 8 of 28 layers": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, **_HEADS},
        Shape(8, 1024),
    ),
    "llama-3.2-1b, 6 of 16 layers": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 6, "vocab_size": 32000, **_HEADS, "num_attention_heads": 32},
        Shape(16, 1024),
    ),
    "vit-s": (
        {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 384,
         "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 224,
         "patch_size": 16, "num_labels": 1000},
        Shape(128, 197),
    ),
}  # fmt: skip
"""Configs as Hugging Face's, random weights: widths of the published models, fewer layers."""
NOISE = 1.03
"""Speeds within this ratio are not told apart by the full measurement."""


def check(name: str, directory: Path, steps: int) -> dict[str, Any]:
    """Return a row: the recommendation of a small pilot, and whether the full measurement agrees."""
    config, shape = MODELS[name]
    folder = directory / name.partition(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    workload = load_workload(folder, shape)
    start = time.perf_counter()
    small = run_pilot(workload, Settings(steps=8, precisions=("bf16", "fp16")))
    seconds = time.perf_counter() - start
    print(f"\n{to_text(small)}\n", flush=True)
    (folder / "report.json").write_text(json.dumps(to_dict(small)))
    to_html(small, folder / "report.html")
    full = run_pilot(workload, Settings(steps=steps, precisions=("bf16",)))
    return {
        "model": name,
        "seconds": round(seconds, 1),
        "adopts": small.adopts,
        "recipe": small.best,
        "speedup": round(small.speedup(small.best), 3) if small.best else None,
        "full": {each: round(full.speedup(each), 3) for each in full.plans},
        "right": is_right(small, full),
    }


def is_right(small: Pilot, full: Pilot) -> bool:
    """Return whether a full measurement confirms the decision and the recipe of a small one, within its noise."""
    fit = [name for name in full.plans if full.plans[name].fp8_layers and full.trains(name)]
    fastest = max((full.speedup(name) for name in fit), default=0.0)
    if small.best is None or not small.adopts:
        return not full.adopts or fastest < NOISE * 1.05
    return small.best in fit and full.speedup(small.best) >= max(fastest / (ALIKE * NOISE), 1.05 / NOISE)


def main() -> None:
    """Check all models and print a short table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    rows = [check(name, given.out, given.steps) for name in given.models]
    (given.out / "pilot.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        full = ", ".join(f"{name} {speed:.2f}" for name, speed in row["full"].items())
        said = f"{'adopt' if row['adopts'] else 'not yet'} {row['recipe']} {row['speedup']}"
        print(f"{row['model']:<32} {said:<28} full: {full:<48} {'right' if row['right'] else 'WRONG'}")


if __name__ == "__main__":
    main()
