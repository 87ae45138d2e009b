"""`octavo bench downstream`: tasks of lm-eval, answered by a model trained in eight bits and by its BF16 baseline.

A small model is trained on arithmetic in words and on words said again in capitals, twice from the same weights on the
same batches. lm-eval then asks it, by task files with their data, what the text does not have: sums and products of
ten answers each, by the likelihood of each answer, and words, by greedy decoding. Needs the extra `tasks`.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from octavo._util.recipe_names import DEFAULT
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.config import DataConfig, LoopConfig, OptimizerConfig, RunConfig
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, numbers, positive
from octavo_bench.results import Row

LETTERS, LENGTHS = "abcdefghijklmnop", (3, 8)
"""Alphabet and lengths of words."""
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


KIND = Kind(
    name="downstream",
    keys={"recipe": str, "task": str, "seed": int, **ACCURACIES},
    columns=(("recipe", "{recipe}"), ("task, metric of lm-eval", "{task}"), ("seed", "{seed}"), *ACCURACY_COLUMNS),
    names=3,
    session=("recipe", "seed"),
    told=(("within two standard errors:", "{within}"),),
    derived=within,
    may_fail=False,
)
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SMALL = [*ONES.split(), "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
TERMS, CHOICES = 30, 10
"""Numbers of sums and products are below this, and a question has this many answers."""
MODEL = {"dim": 64, "layers": 2, "heads": 4, "vocab": 272, "sequence": 64}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
BY_LIKELIHOOD = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
BY_DECODING = """\
output_type: generate_until
doc_to_target: " {{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TASKS = {"sums": BY_LIKELIHOOD, "products": BY_LIKELIHOOD, "capitals": BY_DECODING}


def words(seed: int, count: int) -> Iterator[str]:
    """Yield random words."""
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(LETTERS, k=rng.randint(*LENGTHS)))


def in_words(number: int) -> str:
    """Return a number from 0 to 9,999 in words."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f" {SMALL[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = f" {in_words(number % size)}" if number % size else ""
    return f"{in_words(number // size)} {name}{rest}"


def arithmetic() -> Iterator[tuple[str, str, int]]:
    """Yield each task of arithmetic, its question and the answer."""
    for first, second in product(range(TERMS), repeat=2):
        yield "sums", f"{in_words(first)} plus {in_words(second)} is", first + second
        yield "products", f"{in_words(first)} times {in_words(second)} is", first * second


def write_texts(folder: Path, lines: int, questions: int) -> Path:
    """Write the text, and the task files with the questions, which the text does not have; return the text's file."""
    rng = random.Random(0)
    asked: dict[str, list[dict[str, object]]] = {name: [] for name in TASKS}
    told = []
    for name, question, answer in rng.sample([*arithmetic()], 2 * TERMS**2):
        if len(asked[name]) == questions:
            told.append(f"{question} {in_words(answer)}\n")
            continue
        others = sorted({other for task, _, other in arithmetic() if task == name} - {answer})
        numbers = rng.sample([*rng.sample(others, CHOICES - 1), answer], CHOICES)
        choices = [in_words(number) for number in numbers]
        asked[name].append({"question": question, "choices": choices, "answer": numbers.index(answer)})
    held = [*words(1, questions)]
    asked["capitals"] += [{"question": f"say {word} loud:", "answer": word.upper()} for word in held]
    said = (f"say {word} loud: {word.upper()}\n" for word in words(0, lines) if word not in {*held})
    for name, kind in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in asked[name]), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + kind, encoding="utf-8")
    text = folder / "text.txt"
    text.write_text("".join(line for each in said for line in (each, rng.choice(told))), encoding="utf-8")
    return text


def train_pair(folder: Path, text: Path, recipe: str, seed: int, steps: int) -> Path:
    """Train in eight bits and in BF16; return the run's directory."""
    from octavo.lab.train import train

    out = folder / f"{recipe}-{seed}"
    config = RunConfig(
        model=ModelConfig(**MODEL),  # type: ignore[arg-type]
        data=DataConfig(source=str(text), sequence=MODEL["sequence"], cache=folder / "cache"),
        optimizer=OptimizerConfig(lr=3e-3, betas=(0.9, 0.99)),
        run=LoopConfig(
            steps=steps, batch=16, seed=seed, recipe=recipe, min_gain=0.0, telemetry_every=0, out=out, device="cpu"
        ),
    )
    train(config)
    return out


def command(
    *,
    recipe: Names = (DEFAULT,),
    seeds: str = "0,1",
    steps: int = 1000,
    questions: int = 250,
    output: Output = TO_STDOUT,
) -> int:
    """Train a small model in eight bits and in BF16, on a CPU in ten minutes, and let lm-eval compare them.

    Examples:

        octavo bench downstream --write benchmarks/results

    Parameters
    ----------
    recipe
        Recipes of the eight-bit model, each beside a BF16 baseline from the same weights.
    seeds
        Seeds of the weights and batches.
    steps
        Steps of training.
    questions
        Questions per task.
    """
    positive("--steps", steps)
    positive("--questions", questions)
    from octavo.lab.evaluation.run import EvalSettings
    from octavo.lab.evaluation.tasks import evaluate_tasks

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = write_texts(folder, 40 * steps, questions)
            for one, seed in product(recipe, numbers(seeds)):
                run = train_pair(folder, text, one, seed, steps)
                found = evaluate_tasks(run, [*TASKS], EvalSettings(device="cpu"), files=folder)
                for task, figures in found.tasks.items():
                    yield {"recipe": one, "task": task, "seed": seed, **in_percent(figures)}

    flags = {"recipe": recipe, "seeds": seeds, "steps": steps, "questions": questions}
    return output.finish(KIND, rows(), device="cpu", **flags)
