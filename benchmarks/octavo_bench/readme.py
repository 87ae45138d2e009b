"""The tables of the README: headline figures, where peers win, and at most 15 rows of results with their commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from octavo_bench import ladder, results
from octavo_bench.evidence import over_seeds
from octavo_bench.implementations import BF16
from octavo_bench.render import grouped, table
from octavo_bench.results import Result, Row

TORCHAO, FOLDED, FAST = "torchao tensorwise", "octavo folded", "octavo folded_fast"
FASTEST = f"{FAST} + fp8 head, octavo.optim"
ENGINE = "transformer engine"
BLOCKS, WHOLE, IMAGES = "llama-8b-stack", "llama-1b", "resnet50"
TITLES = {
    "llama-8b-stack": "Llama-3-8B blocks",
    "llama-70b-stack": "Llama-3-70B blocks",
    "175b-stack": "blocks of a Llama of 175 B",
    "llama-1b": "Llama-1B with head and AdamW",
    "llama-3-8b": "Llama-3-8B, FSDP2",
    "resnet50": "ResNet-50",
}
MOST_ROWS = 15


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The newest results, by kind."""

    found: Mapping[str, Result]
    steps: Sequence[Result]
    """Steps, the newest session of each workload first, and behind them older sessions."""
    pairs: Sequence[Row] = ()
    """Runs of the parity study."""

    @classmethod
    def read(cls, directory: Path) -> Measured:
        """Read the results under a directory; kinds that were never measured are absent."""
        kinds = ("moe", "hf", "distributed", "parity", "ladder")
        found = {kind: result for kind in kinds if (result := results.latest(kind, directory))}
        whole = [own for own in results.newest("memory", directory) if _having(own.rows, {"workload": WHOLE})]
        found |= {"memory": whole[0]} if whole else {}
        return cls(found=found, steps=results.history("step", directory), pairs=ladder.read_rows(directory))

    def rows(self, kind: str, **keys: str) -> list[Row]:
        """Return the rows of a kind that have these values and did not fail."""
        return _having(self.found[kind].rows, keys) if kind in self.found else []

    def row(self, kind: str, **keys: str) -> Row | None:
        """Return the first of `rows`."""
        return next(iter(self.rows(kind, **keys)), None)

    def step(self, workload: str, implementation: str) -> Step | None:
        """Return the newest step of an implementation, beside the others of its session."""
        for result in self.steps:
            if own := _having(result.rows, {"workload": workload, "implementation": implementation}):
                return Step(own=own[0], rows=_having(result.rows, {"workload": workload}), result=result)
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step, and those of the same workload in its session."""

    own: Row
    rows: Sequence[Row]
    result: Result

    def peer(self, implementation: str) -> Row | None:
        """Return the step of another implementation."""
        return next(iter(_having(self.rows, {"implementation": implementation})), None)

    @property
    def engine(self) -> Row | None:
        """The fastest step of Transformer Engine, by any of its recipes."""
        rows = [row for row in self.rows if row["implementation"].startswith(ENGINE)]
        return min(rows, key=lambda row: float(row["ms"]), default=None)


def _having(rows: Iterable[Row], keys: Mapping[str, str]) -> list[Row]:
    return [row for row in rows if "error" not in row and all(row.get(k) == v for k, v in keys.items())]


def headline(directory: Path) -> str:
    """Return what FP8 gains and what it costs, one line each."""
    measured = Measured.read(directory)
    lines = [_speed(measured), _several(measured), _accuracy(measured), _memory(measured), _costs(measured)]
    return "\n".join(f"- {line}" for line in lines if line)


def _speed(measured: Measured) -> str:
    step = measured.step(BLOCKS, FOLDED)
    if step is None:
        return ""
    fast = step.peer(FAST)
    said = f"**{step.own['ratio_to_bf16']:.2f} times the speed of BF16"
    said += f", {fast['ratio_to_bf16']:.2f} with `folded_fast`**" if fast else "**"
    peers = {"torchao": step.peer(TORCHAO), "Transformer Engine": step.engine}
    beside = " and ".join(f"{name}'s {row['ratio_to_bf16']:.2f}" for name, row in peers.items() if row)
    said += f", beside {beside}" if beside else ""
    return f"{said}: {TITLES[BLOCKS]}, compiled, on one {_machine(step.result)}."


def _several(measured: Measured) -> str:
    rows = measured.rows("distributed", workload="llama-3-8b")
    rows = [row for row in rows if row["layout"].startswith("data") and row["implementation"].startswith("octavo ")]
    rows = [row for row in rows if "head" not in row["implementation"]]
    if not rows:
        return ""
    own = max(rows, key=lambda row: float(row["ratio_to_bf16"]))
    how = f"`{_recipe(own['implementation'])}`" + (", a step as one CUDA graph" if "graph" in own["layout"] else "")
    rate = f"{own['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
    ratio = f"**{own['ratio_to_bf16']:.2f} times BF16 on {own['ranks']} GPUs**"
    return f"{ratio}: a whole Llama-3-8B with FSDP2, {rate} ({how})."


def _accuracy(measured: Measured) -> str:
    """Return the gap of the largest Llama whose interval is bounded, of the parity study or of pairs of seeds."""
    if study := _study(measured):
        gap, rows = study
        within = f" ± {gap.half_width:.2f} % (95 % over {len(gap.differences)} pairs)"
        half = ", FP8 from half of the run on," if rows[0]["condition"] == "half" else ""
        loss = f"{_loss_of(rows).capitalize()}{half}"
        return _gap_line(gap.mean, within, rows[0]["model"], rows[0]["tokens"], loss)
    studies = _pairs(measured)
    if not studies:
        return ""
    model, tokens, pairs = studies[-1]
    interval = over_seeds(_gaps(pairs))
    within = "" if interval.half_width is None else f" ± {interval.half_width:.2f} % (95 % over {len(pairs)} seeds)"
    return _gap_line(interval.mean, within, model, tokens)


def _study(measured: Measured) -> tuple[ladder.Gap, Sequence[Row]] | None:
    """Return the gap of `folded` in the largest Llama's study whose interval is bounded, and its runs."""
    for rows in reversed(ladder.studies(measured.pairs)):
        if rows[0]["condition"] in ("half", "whole") and rows[0]["model"].startswith("llama"):
            for gap in ladder.gaps(rows):
                if gap.arm == "folded" and gap.half_width is not None:
                    return gap, rows
    return None


def _loss_of(rows: Sequence[Row]) -> str:
    return ladder.LOSSES[ladder.decisive(rows)]


def _gap_line(mean: float, within: str, model: str, tokens: int, loss: str = "Held-out loss") -> str:
    trained = f"a Llama of {_parameters(model)}, {tokens / 1e6:.0f} M tokens"
    return f"**{loss} {mean:+z.2f} %{within} beside BF16**: {trained}."


def _memory(measured: Measured) -> str:
    rows = measured.rows("memory", workload=WHOLE)
    if len(rows) < 2:
        return ""
    least = min(rows, key=lambda row: float(row["peak_gib"]))
    less = 1 - least["peak_gib"] / rows[0]["peak_gib"]
    what = f"a Llama of {least['parameters'] / 1e9:.1f} B parameters trains in {least['peak_gib']:.1f} GiB"
    return f"**{100 * less:.0f} % less memory** than BF16 with FP32 Adam states: {what} ({least['implementation']})."


def _costs(measured: Measured) -> str:
    step, said = measured.step(BLOCKS, FOLDED), []
    peers = {"torchao": step.peer(TORCHAO), "Transformer Engine": step.engine} if step else {}
    if step and any(row and row["peak_gib"] < step.own["peak_gib"] for row in peers.values()):
        beside = " and ".join(f"{name} {row['peak_gib']:.1f}" for name, row in peers.items() if row)
        said.append(f"{step.own['peak_gib']:.1f} GiB where {beside.replace(' ', ' takes ', 1)}")
    images = measured.step(IMAGES, FOLDED)
    if images and images.own["ratio_to_bf16"] < 1:
        said.append(
            f"a {TITLES[IMAGES]} with FP8 convolutions runs at {images.own['ratio_to_bf16']:.2f} times BF16's speed"
        )
    launched, graph = (
        measured.row("distributed", layout=f"tensor 2{how}", implementation=FOLDED) for how in ("", ", graph")
    )
    if launched and launched["ratio_to_bf16"] < 1:
        said.append(f"tensor parallelism launched kernel by kernel at {launched['ratio_to_bf16']:.2f} times")
        said[-1] += f", as a CUDA graph at {graph['ratio_to_bf16']:.2f}" if graph else ""
    return f"**What it costs**: {'; '.join(said)}." if said else ""


def summary(directory: Path) -> str:
    """Return the results in at most `MOST_ROWS` rows, and the commands that measure them in a fold."""
    measured = Measured.read(directory)
    parts = (_speeds, _experts, _trainer, _distributed, _sizes, _losses)
    rows = [row for part in parts for row in part(measured)][:MOST_ROWS]
    shown = table(("measured", "BF16", "torchao", "TE", "Octavo", "Octavo beside BF16"), rows)
    return f"{shown}\n\n{_commands(measured)}"


def _steps(measured: Measured) -> list[Step]:
    shown = [
        (BLOCKS, FOLDED),
        (BLOCKS, FAST),
        ("llama-70b-stack", FOLDED),
        ("175b-stack", FAST),
        (WHOLE, FOLDED),
        (WHOLE, FASTEST),
        (IMAGES, FOLDED),
    ]
    return [step for workload, implementation in shown if (step := measured.step(workload, implementation))]


def _speeds(measured: Measured) -> Iterator[Sequence[str]]:
    for step in _steps(measured):
        compared = (step.peer(BF16), step.peer(TORCHAO), step.engine, step.own)
        name = f"{TITLES[step.own['workload']]}, ms per step, `{_recipe(step.own['implementation'])}`"
        times = (f"{row['ms']:.1f}" if row else "" for row in compared)
        yield name, *times, f"{step.own['ratio_to_bf16']:.2f} x"


def _experts(measured: Measured) -> Iterator[Sequence[str]]:
    layers = [rows for _, rows in grouped(measured.rows("moe"), "workload").items() if "kept_mib" in rows[0]]
    for rows in layers[-1:]:
        bf16 = min((row for row in rows if row["implementation"].startswith(BF16)), key=lambda row: float(row["ms"]))
        own = next(row for row in rows if row["implementation"] == FOLDED)
        kept = _percent((own["kept_mib"] + own["kept_weight_codes_mib"]) / bf16["kept_mib"])
        name = f"experts, {own['workload']}, ms, `{_recipe(FOLDED)}`"
        yield (
            name,
            f"{bf16['ms']:.1f}",
            "",
            "",
            f"{own['ms']:.1f}",
            f"{own['ratio_to_bf16']:.2f} x, {kept} kept for backward",
        )


def _trainer(measured: Measured) -> Iterator[Sequence[str]]:
    titles = {"eager": "eager", "torch_compile": "compiled", "torch_compile_causal": "compiled, causal attention"}
    for mode, title in titles.items():
        bf16, peer, row = (measured.row("hf", mode=mode, implementation=name) for name in (BF16, TORCHAO, FOLDED))
        if row and bf16:
            times = (f"{each['tokens_per_s']:,.0f}" if each else "" for each in (bf16, peer, None, row))
            ratio = f"{row['ratio_to_bf16']:.2f} x, {_percent(row['peak_gib'] / bf16['peak_gib'])} memory"
            yield f"transformers' Trainer, Qwen3-1.7B blocks, {title}, tokens/s, `{_recipe(FOLDED)}`", *times, ratio


def _distributed(measured: Measured) -> Iterator[Sequence[str]]:
    rows = measured.rows("distributed", workload="llama-3-8b", layout="data")
    peer = next((row for row in rows if row["implementation"].startswith(TORCHAO)), None)
    bf16: Row | None = None
    for row in rows:
        if row["implementation"] == BF16:
            bf16 = row
        name = row["implementation"].removeprefix("octavo ")
        if bf16 and name in ("folded", "folded, bf16 gradients, fp8 states", "folded, fp8-block (lean)"):
            beside = peer if bf16 is rows[0] else None
            speeds = (f"{each['tokens_per_s_per_gpu']:,.0f}" if each else "" for each in (bf16, beside, None, row))
            ratio = f"{row['ratio_to_bf16']:.2f} x, {_percent(row['peak_gib'] / bf16['peak_gib'])} memory"
            yield f"{TITLES['llama-3-8b']}, {row['ranks']} GPUs, tokens/s per GPU, `{name}`", *speeds, ratio


def _sizes(measured: Measured) -> Iterator[Sequence[str]]:
    for (workload,), rows in grouped(measured.rows("memory"), "workload").items():
        first, least = rows[0], rows[-1]
        if "largest" in workload:
            bf16, own = (f"{row['parameters'] / 1e9:.1f} B" for row in (first, least))
            yield (
                "largest Llama on one GPU, parameters",
                bf16,
                "",
                "",
                own,
                f"{least['parameters'] / first['parameters']:.1f} x",
            )
        elif first is not least:
            bf16, own = (f"{row['peak_gib']:.1f}" for row in (first, least))
            less = _percent(least["peak_gib"] / first["peak_gib"])
            yield f"Llama of {first['parameters'] / 1e9:.1f} B, peak GiB", bf16, "", "", own, less


def _losses(measured: Measured) -> Iterator[Sequence[str]]:
    if study := _study(measured):
        gap, rows = study
        blocks = [block for block in ladder.blocks(rows) if "folded" in block]
        bf16, own = (f"{fmean(block[arm][ladder.decisive(rows)] for block in blocks):.4f}" for arm in (BF16, "folded"))
        name = f"{_loss_of(rows)}, {_parameters(rows[0]['model'])}, {rows[0]['tokens'] / 1e6:.0f} M tokens"
        yield name, bf16, "", "", own, f"{gap.mean:+z.2f} % ± {gap.half_width:.2f} %, {len(gap.differences)} pairs"
    for model, tokens, pairs in _pairs(measured)[-1:]:
        bf16, own = (f"{fmean(losses):.4f}" for losses in zip(*pairs, strict=True))
        found = over_seeds(_gaps(pairs))
        within = "" if found.half_width is None else f" ± {found.half_width:.2f} %"
        name = f"held-out loss, {_parameters(model)}, {tokens / 1e6:.0f} M tokens"
        yield name, bf16, "", "", own, f"{found.mean:+z.2f} %{within}, {len(pairs)} seeds"


Pairs = Sequence[tuple[float, float]]
"""Held-out losses of one seed in BF16 and in the default recipe."""


def _pairs(measured: Measured) -> list[tuple[str, int, Pairs]]:
    """Return the pairs of each study, that of the slowest steps last: the largest model."""
    found = []
    for (model, tokens), rows in grouped(measured.rows("parity"), "model", "tokens").items():
        by_recipe = grouped(rows, "recipe")
        bf16, own = ({row["seed"]: row["heldout_loss"] for row in by_recipe.get((r,), [])} for r in (BF16, "folded"))
        if pairs := [(bf16[seed], own[seed]) for seed in own if seed in bf16]:
            found.append((max(row.get("step_ms", 0.0) for row in rows), model, tokens, pairs))
    return [(model, tokens, pairs) for _, model, tokens, pairs in sorted(found)]


def _gaps(pairs: Pairs) -> list[float]:
    return [100 * (own / bf16 - 1) for bf16, own in pairs]


def _commands(measured: Measured) -> str:
    lines = []
    shown = {step.result.file_name: step.result for step in _steps(measured)}
    for result in (*shown.values(), *measured.found.values()):
        lines += [f"- `{result.file_name}`, {result.hardware}, torch {result.versions['torch']}:", "", "  ```text"]
        lines += [*(f"  {command}" for command in result.command.split("; ")), "  ```", ""]
    summary = "<summary>Commands that measure these figures</summary>"
    return "\n".join(["<details>", summary, "", *lines, "</details>"])


def _percent(ratio: float) -> str:
    """Return by how many percent something has changed."""
    return f"{100 * (ratio - 1):+z.0f} %"


def _recipe(implementation: str) -> str:
    return implementation.removeprefix("octavo ").removesuffix(" (as planned)")


def _machine(result: Result) -> str:
    return result.hardware.removeprefix("nvidia-").upper()


def _parameters(model: str) -> str:
    """Return the size in the name of a model: `llama-129m` has 129 M."""
    return model.rpartition("-")[2].replace("m", " M").replace("b", " B") + " parameters"


TABLES = {"headline": headline, "readme": summary}
