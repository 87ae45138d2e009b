"""Tables of facts that the code already states: recipes, errors, the keys of a run file, dependencies."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo import errors, recipes
from octavo.calibration.scale_policy import FINER, FLUSHED, SATURATED
from octavo.conversion import Operators
from octavo.errors import ConfigError
from octavo.kernels.runtime.devices import ARCHITECTURES, mode_of
from octavo.kernels.sample import limits
from octavo.lab.cli.flags import field_docs
from octavo.lab.monitor.dashboard import verdict
from octavo.lab.monitor.gap import GAP_LIMIT
from octavo.lab.monitor.store.schema import TABLES as RUN_STORE
from octavo.lab.monitor.system import SYSTEM_KEYS
from octavo.lab.monitor.trackers import AGGREGATES
from octavo.lab.train.config import LEVELS, RunConfig
from octavo.nn.calibration_file import Calibrated, Provenance, Statistics
from octavo.numerics import E4M3, E5M2, Format
from octavo.recipes import Recipe
from octavo.recipes.spec import MOST_MARGIN
from octavo_bench import api, ladder, results
from octavo_bench.passes import (
    Pass,
    Shape,
    block_kept,
    kept_bytes,
    kept_weight_bytes,
    operand_names,
    operand_of,
    passes,
    recomputed,
)
from octavo_bench.render import table
from octavo_bench.support import support_table

FIELD_HEADER = ("key", "type or choices", "default", "meaning")


def recipe_table() -> str:
    """Return the presets: each operand of each GEMM, and the tensors that a layer keeps for backward."""
    header = (
        "recipe",
        "fprop: input, weight",
        "dgrad: grad_output, weight",
        "wgrad: grad_output, input",
        "kept",
    )
    rows = []
    for name in recipes.names():
        recipe = recipes.load(name)
        operands = {gemm: f"{left}, {right}" for gemm, left, right in recipe.gemms()}
        kept = "; ".join(recipes.kept_for_backward(recipe))
        rows.append((f"`{name}`", *(operands.get(gemm, "BF16") for gemm in recipes.GEMMS), kept))
    return table(header, rows)


def alias_table() -> str:
    """Return the aliases of presets."""
    rows = [(f"`{alias}`", f"`{name}`", recipes.about(name)) for alias, name in recipes.ALIASES.items()]
    return table(("alias", "recipe", "what it is"), rows)


def preset_table() -> str:
    """Return the presets, each with the first paragraph of its docstring."""
    from octavo.recipes.presets import PRESETS

    return table(("recipe", "what it does"), [(f"`{name}`", _sentence(make)) for name, make in PRESETS.items()])


def operator_table() -> str:
    """Return the white and the black list of operators, one line per reason."""
    lists, rows = Operators(), []
    for which, names in (("white", lists.white), ("black", lists.black)):
        for why in dict.fromkeys(names.values()):
            rows.append((which, ", ".join(f"`{name}`" for name in names if names[name] == why), why))
    return table(("list", "operators", "why"), rows)


def operator_rule_table() -> str:
    """Return the rules that leave small products unchanged."""
    lists = {f"`{name}`" for name in ("white", "black")}
    return table(FIELD_HEADER, [row for row in _field_rows(Operators) if row[0] not in lists])


def error_table() -> str:
    """Return the exceptions, each with its docstring and its bases."""
    found = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    rows = [
        (f"`{cls.__name__}`", ", ".join(f"`{base.__name__}`" for base in cls.__bases__), _sentence(cls))
        for cls in found
    ]
    return table(("exception", "is a", "when"), rows)


def field_table(cls: type, prefix: str = "") -> str:
    """Return the fields of a dataclass: key, type, default and the docstring below it, nested ones in full.

    `prefix` precedes each key: the enclosing table and a dot.
    """
    return table(FIELD_HEADER, _field_rows(cls, prefix))


def _field_rows(cls: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            rows += _field_rows(hint, f"{key}.")
            continue
        rows.append((f"`{key}`", _type(field, hint), _default(field), " ".join(docs.get(field.name, "").split())))
    return rows


def _type(field: dataclasses.Field[Any], hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    return f"`{field.type}`"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default}`"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()}`"


def _sentence(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def run_file_table() -> str:
    """Return every key of a run file."""
    return field_table(RunConfig)


def recipe_key_table() -> str:
    """Return the keys of a recipe file; GEMM stands for each of the three, OPERAND for each of its two."""
    rows = [row for row in _field_rows(recipes.Recipe) if "." not in row[0]]
    rows += _field_rows(recipes.History, "history.")
    rows += _field_rows(recipes.Gemm, "GEMM.") + _field_rows(recipes.Operand, "GEMM.OPERAND.")
    return table(("key", "type or choices", "meaning"), [(key, choices, text) for key, choices, _, text in rows])


def calibration_file_table() -> str:
    """Return the keys of an entry of a calibration file."""
    parts = (("", Calibrated), ("statistics.", Statistics), ("origin.", Provenance))
    rows = [
        row for prefix, cls in parts for row in _field_rows(cls, prefix) if row[0] not in ("`statistics`", "`origin`")
    ]
    return table(("key", "type or choices", "meaning"), [(key, choices, text) for key, choices, _, text in rows])


def result_kind_table() -> str:
    """Return, for each kind of result, the keys that a row must have."""
    rows = [
        (f"`{name}`", ", ".join(f"`{key}` ({required.__name__})" for key, required in kind.keys.items()))
        for name, kind in results.schemas().items()
    ]
    return table(("kind", "keys of a row"), rows)


def optimizer_state_table() -> str:
    """Return the bytes per parameter by tier and dtype of the weight, for a matrix of 4096 x 4096."""
    from octavo.optim import TIERS, bytes_per_parameter

    kinds = ("weight", "gradient", "master", "first", "second", "total")
    weights = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}
    rows = []
    for name, states in TIERS.items():
        for weight, dtype in weights.items():
            gradient = torch.float32 if weight == "FP32" else torch.bfloat16
            taken = bytes_per_parameter(name, weight=dtype, gradient=gradient)
            eight = bytes_per_parameter(name, weight=dtype, gradient=torch.float8_e4m3fn)["total"]
            released = taken["total"] - taken["gradient"]
            cells = [f"{taken.get(kind, 0):.3g}" for kind in kinds]
            rows.append((f"`{name}`", states.about, weight, *cells, f"{eight:.3g}", f"{released:.3g}"))
    titles = ("weight", "gradient", "master", "first", "second", "total", "gradient in FP8", "gradient released")
    return table(("states", "what is kept", "weight in", *titles), rows)


def activation_table() -> str:
    """Return the bytes per token in a block of Llama-3-8B by option, and the share that each option recomputes."""
    from octavo.conversion import Policy
    from octavo_bench.workloads import WORKLOADS

    config = WORKLOADS["llama-8b-stack"].config
    fp8: dict[str, Any] = {"activation_inputs": "fp8", "attention_output": "fp8", "norm_inputs": "fp8"}
    policies = {"as converted": {}} | {f'`{name} = "fp8"`': {name: "fp8"} for name in fp8} | {"all three": fp8}
    rows = []
    for what, chosen in policies.items():
        sizes = (sum(block_kept(config, Policy(**chosen), compiled=way).values()) for way in (False, True))
        rows.append((what, *sizes, 0.0))
    for keep, lowest in (("products", 1.0), ("5000", 5000.0), ("nothing", float("inf"))):
        shown, (size, share) = keep if keep.isdigit() else f'"{keep}"', recomputed(config, lowest)
        rows.append((f"`recompute(model, {shown})`", size, size, share))
    first = rows[0][2]
    lines = [(w, f"{e:,}", f"{c:,}", f"{c / first:.2f}", f"{share:.0%}" if share else "-") for w, e, c, share in rows]
    return table(
        (
            "option",
            "bytes per token and block, eager",
            "compiled",
            "of the first line's",
            "of the forward, computed again",
        ),
        lines,
    )


def run_store_table() -> str:
    """Return the tables of the run store, each with its columns below it."""
    rows = []
    for stored in RUN_STORE:
        key = f" Key: {stored.key}." if stored.key else ""
        rows.append((f"**{stored.name}**", "", f"{stored.about[0].upper()}{stored.about[1:]}.{key}"))
        rows += [(f"`{name}`", kind, meaning) for name, kind, meaning in stored.columns]
    return table(("column", "type", "meaning"), rows)


def system_key_table() -> str:
    """Return the keys of machine metrics."""
    return table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in SYSTEM_KEYS.items()])


def aggregate_table() -> str:
    """Return the aggregates of a snapshot that are sent to trackers."""
    return table(("name", "meaning"), [(f"`{key}`", meaning) for key, meaning in AGGREGATES.items()])


def verdict_table() -> str:
    """Return the limits of the dashboard's verdict."""
    share = f"share of a tensor's elements, mean of the newest {verdict.SNAPSHOTS} snapshots"
    rows = []
    for name, limit in verdict.LIMITS.items():
        stat, _, role = name.partition(" ")
        shown = f"`{stat}` of `{role}`" if role else f"`{stat}`"
        rows.append((shown, share, verdict.percent(limit) if limit else "none"))
    late = f"mean of the newest {verdict.GAP_STEPS} recorded, or on held-out text at the end"
    rows.append(("gap", f"loss above the BF16 baseline's, {late}", f"{GAP_LIMIT:g} %, or the gap's noise if larger"))
    rows.append(("rise", "loss above its minimum, medians of several steps", f"{verdict.RISE_LIMIT:g} %"))
    rows.append(("events", "warnings and errors", f"none in the last {verdict.percent(verdict.SHARE)} of the steps"))
    return table(("finding", "measurement", "limit"), rows)


def doctor_table() -> str:
    """Return the checks of `octavo doctor`: the symptom of a fault, the check that finds it, and the remedy."""
    from octavo.lab.doctor.examination import CHECKS

    rows = [(check.symptom, f"`{check.name}`", kind, check.remedy) for kind in CHECKS for check in CHECKS[kind]]
    return table(("symptom", "check", "target", "remedy"), rows)


def device_table() -> str:
    """Return which recipes run on each architecture: natively, emulated at the speed of BF16, or refused."""
    mode = {name: {mode_of([a.granularity, b.granularity]) for _, a, b in recipes.load(name).gemms()}
            for name in recipes.names() if recipes.load(name).is_fp8}  # fmt: skip
    rows = []
    for each in ARCHITECTURES:
        how: dict[str, list[str]] = {"native": [], "emulated": [], "refused": []}
        for name, modes in mode.items():
            found = {each.support(one)[0] for one in modes}
            how[next(kind for kind in ("refused", "emulated", "native") if kind in found)].append(name)
        cells = [
            "all" if len(names) == len(mode) else ", ".join(f"`{n}`" for n in names) or "-" for names in how.values()
        ]
        why = "; ".join(dict.fromkeys(filter(None, (each.refused, each.no_triton, *each.unsupported.values()))))
        others = "-" if each.refused else "reference" if each.no_triton or each.backend == "cpu" else "Triton"
        ran = "yes" if each.measured else "no"
        rows.append((each.name, each.gpus or "-", *cells, others, ran, why or "-"))
    header = ("architecture", "such as", "native GEMMs", "emulated", "refused", "other kernels", "run", "why")
    return table(header, rows)


def level_table() -> str:
    """Return the run-file settings of each level of FP8-LM, and its bytes per parameter of large matrices."""
    from octavo.optim import bytes_per_parameter

    dtypes = {"fp32": torch.bfloat16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    keys = {"weights": "bf16", "gradients": "wide", "states": "fp32", "reduce": "bf16"}
    rows = []
    for level in (0, *LEVELS):
        added = LEVELS.get(level, {"run": {"weights": "bf16"}})
        keys |= {key: value for section in added.values() for key, value in section.items()}
        gradient = torch.float8_e4m3fn if keys["gradients"] == "fp8" else torch.bfloat16
        taken = bytes_per_parameter(keys["states"], weight=dtypes[keys["weights"]], gradient=gradient)
        states = taken["total"] - taken["weight"] - taken["gradient"]
        sent = 1 if keys["reduce"].startswith("fp8") else 2
        said = "; ".join(f'`{section}.{key} = "{value}"`' for section, of in added.items() for key, value in of.items())
        cells = (taken["weight"], taken["gradient"], states, taken["total"], sent)
        rows.append((str(level), said, *(f"{value:.3g}" for value in cells)))
    titles = ("weight", "gradient", "states and master", "total", "sent per gradient")
    return table(("level", "sets", *titles), rows)


DECADES = 4
"""Orders of magnitude below the largest value that a margin should leave at full precision."""


def range_table() -> str:
    """Return the range of each format, and the recommended margin of a tensor's largest magnitude."""
    titles = ("full precision", "in all")
    header = ("format", "largest", "smallest normal", "smallest", "zero up to", *titles, "margin", "amax / scale")
    return table(header, [_range_row(fmt) for fmt in (E4M3, E5M2)])


def _range_row(fmt: Format) -> tuple[str, ...]:
    margin = most_margin(fmt)
    powers = (fmt.smallest_normal, fmt.smallest_subnormal, limits(fmt).flushed)
    decades = (f"{math.log10(fmt.max / least):.1f} decades" for least in powers[:2])
    shown = (f"2^{round(math.log2(power))}" for power in powers)
    room = f"{fmt.max / 2**margin:g} to {fmt.max:g}"
    return (fmt.name.upper(), f"{fmt.max:g}", *shown, *decades, f"0 to {margin} bits", room)


def most_margin(fmt: Format) -> int:
    """Return the most bits of headroom that leave `DECADES` at full precision below a tensor's largest value."""
    return min(MOST_MARGIN, int(math.log2(fmt.max / fmt.smallest_normal) - DECADES * math.log2(10)))


def column_table() -> str:
    """Return the columns that `octavo calibrate` prints, with its limits for scales."""
    rows = [
        ("scales that fit", f"from that of the policy without its margin to the one that flushes {_percent(FLUSHED)}"),
        ("spare bits", "bits between the two; negative: no scale fits"),
        ("flushed", f"share of all elements that are nonzero and have a zero code; fits up to {_percent(FLUSHED)}"),
        ("saturated", f"share of elements beyond the largest code; fits up to {_percent(SATURATED)}"),
        ("suggested", f"`e4m3` if any scale fits in it, else `e5m2`, else `{FINER}`: one per row or tile"),
    ]
    return table(("column", "meaning"), rows)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


SHAPE = Shape(8192, 4096, 4096)
"""Layer for which bytes are counted."""
_SCALES = {"power_of_two": "a power of two", "float32": "FP32", "engine": "FP32, as engines"}
_HEADER = ("operand", "format", "granularity", "scale", "made", "read", "written")
_SUMMARY = ("recipe", "input", "gradient", "weight", "kept of the input", "kept of the weight")


def summary_table() -> str:
    """Return a line per recipe: bytes per element of each matrix, read and written, and kept for backward."""
    return table(_SUMMARY, [_summary(name, recipes.load(name)) for name in recipes.names()])


def operand_tables() -> str:
    """Return a table per recipe: production and cost of each operand of each GEMM. Equal tables are merged."""
    alike: dict[str, list[str]] = {}
    for name in recipes.names():
        alike.setdefault(_operand_table(recipes.load(name)), []).append(name)
    return "\n\n".join(f"**{', '.join(f'`{name}`' for name in names)}**\n\n{text}" for text, names in alike.items())


def _summary(name: str, recipe: Recipe) -> tuple[str, ...]:
    made = passes(recipe, SHAPE)
    moved = (
        _bytes(sum(one.read + sum(one.written) for one in made if one.matrix == matrix), matrix)
        for matrix in ("input", "grad_output", "weight")
    )
    return (
        f"`{name}`",
        *moved,
        _bytes(kept_bytes(recipe, SHAPE), "input"),
        _bytes(kept_weight_bytes(recipe, SHAPE), "weight"),
    )


def _operand_table(recipe: Recipe) -> str:
    return table(_HEADER, list(_operand_rows(recipe)))


def _operand_rows(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    made_in = {name: one for one in passes(recipe, SHAPE) for name in one.made}
    for name in operand_names():
        gemm, matrix = name.split(".")
        one = made_in.get(name)
        if recipe.gemm(gemm).is_fp8:
            operand = operand_of(recipe, name)
            scale = [
                _SCALES[operand.scaling],
                *([operand.scale_from.replace("_", " ")] if operand.has_stored_scale else []),
            ]
            stochastic = ", stochastic" if operand.rounding == "stochastic" else ""
            what = (operand.format.upper() + stochastic, operand.granularity, ", ".join(scale))
        else:
            what = ("BF16", "", "")
        if one is None:
            yield (f"`{name}`", *what, "as it is", "", "")
            continue
        place = one.made.index(name)
        read = _bytes(one.read, matrix) if place == 0 else ""
        yield (f"`{name}`", *what, _made(recipe, name, one), read, _bytes(one.written[place], matrix))


def _made(recipe: Recipe, name: str, one: Pass) -> str:
    """Return how and when an operand is made."""
    if one.how == "cast":
        return f"cast in {one.when}"
    if one.how == "transpose":
        folded = "; its scales go into grad_output" if operand_of(recipe, name).is_folded else ""
        return f"codes of fprop, transposed in {one.when}{folded}"
    partner = {"dgrad.grad_output": "dgrad.weight", "wgrad.grad_output": "wgrad.input"}.get(name)
    times = "" if partner is None else _folded_in(recipe, partner)
    if one.made[0] != name:
        return f"quantised in the same read{times}"
    return f"quantised in {one.when}{times}"


def _folded_in(recipe: Recipe, partner: str) -> str:
    return f", times the scales of {partner.split('.')[1]}" if operand_of(recipe, partner).is_folded else ""


def _bytes(count: int, matrix: str) -> str:
    """Return bytes per element of a matrix of the layer."""
    return f"{count / prod(SHAPE.of(matrix)):.2f}"


README = Path(__file__).parents[2] / "README.md"


def readme_plan() -> str:
    """Run the README's example up to the plan; return its output with one layer of each shape, and no fused ones."""
    code = re.search(r"^```python\n(.*?\nprint\(octavo\.plan[^\n]*\n)", README.read_text(encoding="utf-8"), re.M | re.S)
    if code is None:
        raise ConfigError(f"{README}: has no example that prints a plan.")
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, encoding="utf-8")
    if run.returncode:
        raise ConfigError(f"{README}: the example that prints a plan fails:\n{run.stderr.strip()}")
    shown: list[str] = []
    shapes: set[str] = set()
    for line in run.stdout.rstrip().splitlines():
        shape = re.search(r"\d+ x \d+ ", line)
        is_left_out = ": fused: " in line or (shape is not None and shape[0] in shapes)
        shapes |= {shape[0]} if shape else set()
        shown += [] if is_left_out else [line]
    return "\n".join(["```text", *shown, "```"])


SHOWN_RECIPES = (recipes.DEFAULT, recipes.FALLBACK, "folded_fast")
"""Recipes that README names first."""


def readme_recipes() -> str:
    """Return the recipes of README, the default first."""
    notes = {recipes.DEFAULT: ", the default", recipes.FALLBACK: ", where that is refused"}
    rows = [(f"`{name}`{notes.get(name, '')}", recipes.about(name)) for name in SHOWN_RECIPES]
    return table(("recipe", "what it does"), rows)


LOG = README.parent / "docs" / "log" / "experiments.md"


def log_index() -> str:
    """Return a line per entry of the log: its day, and its question as a link."""
    titles = re.findall(r"^## ((\d{4}-\d\d-\d\d): (.+))$", LOG.read_text(encoding="utf-8"), re.MULTILINE)
    return table(
        ("day", "question"), ((day, f"[{asked}](experiments.md#{anchor(title)})") for title, day, asked in titles)
    )


def anchor(title: str) -> str:
    """Return the anchor of a heading, as the site makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


TABLES: dict[str, Callable[[], str]] = {
    "readme-plan": readme_plan,
    "readme-recipes": readme_recipes,
    "recipes": preset_table,
    "recipe-aliases": alias_table,
    "recipe-operands": recipe_table,
    "recipe-costs": summary_table,
    "recipe-numerics": operand_tables,
    "errors": error_table,
    "devices": device_table,
    "support": support_table,
    **api.TABLES,
    "fp8-lm-levels": level_table,
    "operators": operator_table,
    "optimizer-states": optimizer_state_table,
    "activations": activation_table,
    "operator-rules": operator_rule_table,
    "run-file": run_file_table,
    "run-store": run_store_table,
    "run-store-aggregates": aggregate_table,
    "run-store-system": system_key_table,
    "recipe-keys": recipe_key_table,
    "result-kinds": result_kind_table,
    "log-index": log_index,
    "verdict": verdict_table,
    "doctor": doctor_table,
    "calibration-columns": column_table,
    "calibration-file": calibration_file_table,
    "calibration-ranges": range_table,
    "parity-constants": ladder.constant_table,
    "parity-sizes": ladder.size_table,
    "parity-intervals": ladder.interval_table,
}
"""Tables by name. To add one, write a function above and a line here."""
