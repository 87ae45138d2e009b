"""`octavo bench finetune`: fine-tuning in FP8 and in BF16, from one pretrained model.

A small model is pretrained on text that repeats random words unchanged, in capitals, or with spaces. It is fine-tuned
on conversations that ask for these by other verbs: all weights or LoRA, each in FP8 and in BF16 from the same weights
on the same batches. A held-out answer is correct if greedy decoding reproduces it exactly.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.config import DataConfig, LoopConfig, LoraConfig, OptimizerConfig, RunConfig
from octavo_bench.kind import TO_STDOUT, Kind, Output, numbers
from octavo_bench.results import Row

TASKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "say": ("copy", lambda word: word),
    "shout": ("capitals", str.upper),
    "spell": ("spaces", " ".join),
}
"""Verb of the fine-tuning -> its name in pretraining, and the answer."""
METHODS: dict[str, dict[str, Any]] = {
    "all weights": {"lr": 2e-3},
    "LoRA": {"lora": LoraConfig(rank=8, alpha=16.0), "weights": "fp8", "lr": 5e-3},
}
"""Changes of the run by method; LoRA has frozen one-byte weights."""
LETTERS, LENGTHS = "abcdefghijklmnop", (3, 8)
"""Alphabet and lengths of words: long ones are hard enough that neither precision answers everything."""
SEQUENCE = 128


def within_error(row: Row) -> bool:
    """Return whether the accuracies of a row differ by at most two standard errors of their difference.

    If all answers agree the error is 0; one conversation is then taken as the error.
    """
    error = max(row["difference_error"], 100 / row["samples"])
    return math.isclose(row["difference"], 0) or abs(row["difference"]) <= 2 * error


def within(row: Row) -> Row:
    """Return the value of `within_error` for a line of progress."""
    return {"within": "yes" if within_error(row) else "no"}


def in_percent(found: Mapping[str, float]) -> Row:
    """Return accuracies, errors and difference in percent; samples as they are."""
    return {key: value if key == "samples" else 100 * value for key, value in found.items()}


ACCURACIES: Mapping[str, type] = {
    "samples": int, "fp8": float, "fp8_error": float, "bf16": float, "bf16_error": float, "difference": float,
    "difference_error": float,
}  # fmt: skip
"""Keys of a row: accuracies in eight bits and in BF16 and their paired difference, percent, with standard errors."""
ACCURACY_COLUMNS = (
    ("FP8", "{fp8:.1f} ± {fp8_error:.1f} %"),
    ("BF16", "{bf16:.1f} ± {bf16_error:.1f} %"),
    ("difference", "{difference:+z.1f} ± {difference_error:.1f} %"),
    ("held-out answers", "{samples}"),
)
KIND = Kind(
    name="finetune",
    keys={"method": str, "task": str, "seed": int, **ACCURACIES},
    columns=(("trained", "{method}"), ("task", "{task}"), ("seed", "{seed}"), *ACCURACY_COLUMNS),
    names=3,
    told=(("within two standard errors:", "{within}"),),
    derived=within,
    may_fail=False,
)
MODEL = {"dim": 64, "layers": 2, "heads": 4, "vocab": 272, "sequence": SEQUENCE}


def words(seed: int, count: int) -> Iterator[str]:
    """Yield random words."""
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(LETTERS, k=rng.randint(*LENGTHS)))


def write_texts(folder: Path, count: int) -> tuple[Path, Path]:
    """Write the pretraining text and the conversations; return their files."""
    text, chat = folder / "text.jsonl", folder / "chat.jsonl"
    rng = random.Random(2)
    with text.open("w", encoding="utf-8") as file:  # one word per line, so that copying is learned early
        for word in words(0, 10 * count):
            order = rng.sample(list(TASKS.values()), len(TASKS))
            said = [f"user:\n{known} {word}\nassistant:\n{change(word)}\n" for known, change in order]
            file.write(json.dumps({"text": "".join(said)}) + "\n")
    with chat.open("w", encoding="utf-8") as file:
        for number, word in enumerate(words(1, count)):
            task = [*TASKS][number % len(TASKS)]
            asked = {"role": "user", "content": f"{task} {word}"}
            answer = {"role": "assistant", "content": TASKS[task][1](word)}
            file.write(json.dumps({"messages": [asked, answer], "task": task}) + "\n")
    return text, chat


def pretrain(folder: Path, text: Path, steps: int) -> Path:
    """Train the model in BF16 and export it; return the directory of the export."""
    from octavo.lab.train import train
    from octavo.lab.train.export import export_run

    config = RunConfig(
        model=ModelConfig(**MODEL),  # type: ignore[arg-type]
        data=DataConfig(source=str(text), sequence=SEQUENCE, cache=folder / "cache"),
        optimizer=OptimizerConfig(lr=3e-3, betas=(0.9, 0.99)),
        run=LoopConfig(steps=steps, batch=16, recipe="bf16", telemetry_every=0, out=folder / "base", device="cpu"),
    )
    train(config)
    return Path(export_run(folder / "base", folder / "export", "plain").directory)


def finetune(folder: Path, base: Path, chat: Path, method: str, seed: int, steps: int) -> dict[str, Any]:
    """Fine-tune in FP8 and BF16; return the summary."""
    from octavo.lab.models.hugging_face import read_settings
    from octavo.lab.train import train

    change = METHODS[method]
    config = RunConfig(
        model=ModelConfig(**{**read_settings(base), "documents": "separate"}),
        data=DataConfig(
            source=str(chat), format="chat", tokenizer=str(base / "tokenizer.json"), sequence=SEQUENCE, heldout=0.25,
            cache=folder / "cache",
        ),
        optimizer=OptimizerConfig(lr=change["lr"], weight_decay=0.0),
        lora=change.get("lora", LoraConfig()),
        run=LoopConfig(
            start_from=str(base), steps=steps, batch=8, seed=seed, weights=change.get("weights", "fp32"), device="cpu",
            recipe="folded", min_gain=0.0, telemetry_every=0, out=folder / f"{method}-{seed}".replace(" ", "-"),
            eval_tokens=2**20,
        ),
    )  # fmt: skip
    return train(config)


def rows_of(summary: dict[str, Any], method: str, seed: int) -> Iterator[Row]:
    """Yield a row per task: accuracies in percent with standard errors, and FP8 minus BF16, paired by conversation."""
    for task, found in summary["tasks"].items():
        losses = {key: summary[key] for key in ("heldout_loss_fp8", "heldout_loss_bf16")}
        yield {"method": method, "task": task, "seed": seed, **in_percent(found), **losses}


def command(
    *, seeds: str = "0,1", pretraining: int = 1200, steps: int = 300, count: int = 1200, output: Output = TO_STDOUT
) -> int:
    """Fine-tune a small model in FP8 and in BF16, on a CPU in about half an hour, and compare accuracies by task.

    Examples:

        octavo bench finetune --write benchmarks/results

    Parameters
    ----------
    seeds
        Seeds of the fine-tuning.
    pretraining
        Steps of pretraining.
    steps
        Steps of each fine-tuning.
    count
        Conversations, of which a quarter is held out.
    """
    if min(pretraining, steps, count) < 1:
        raise ConfigError("--pretraining, --steps, --count: must be positive.")

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text, chat = write_texts(folder, count)
            base = pretrain(folder, text, pretraining)
            for method, seed in product(METHODS, numbers(seeds)):
                yield from rows_of(finetune(folder, base, chat, method, seed, steps), method, seed)

    flags = {"seeds": seeds, "pretraining": pretraining, "steps": steps, "count": count}
    return output.finish(KIND, rows(), device="cpu", **flags)
