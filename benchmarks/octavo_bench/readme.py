"""The tables of the README: headline figures, where peers win, and at most 15 rows of results with their commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from octavo_bench import ladder, results
from octavo_bench.evidence import over_seeds
from octavo_bench.implementations import BF16
from octavo_bench.render import grouped, table
from octavo_bench.results import Result, Row

TORCHAO, FOLDED, FAST, BLOCK = "torchao tensorwise", "octavo folded", "octavo folded_fast", "octavo block"
ENGINE = "transformer engine"
BLOCKS, WHOLE, IMAGES = "llama-8b-stack", "llama-1b", "resnet50"
TITLES = {
    "llama-8b-stack": "Llama-3-8B blocks",
    "llama-1b-stack": "Llama-1B blocks",
    "llama-1b": "Llama-1B with head and AdamW",
    "llama-3-8b": "Llama-3-8B, FSDP2",
    "resnet50": "ResNet-50",
}
MOST_ROWS = 15


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The newest results, by kind."""

    found: Mapping[str, Result]

    @classmethod
    def read(cls, directory: Path) -> Measured:
        """Read the results under a directory; kinds that were never measured are absent."""
        kinds = ("step", "hf", "distributed", "memory", "parity")
        return cls(found={kind: result for kind in kinds if (result := results.latest(kind, directory))})

    def rows(self, kind: str, **keys: str) -> list[Row]:
        """Return the rows of a kind that have these values and did not fail."""
        rows = self.found[kind].rows if kind in self.found else ()
        return [row for row in rows if "error" not in row and all(row.get(k) == v for k, v in keys.items())]

    def row(self, kind: str, **keys: str) -> Row | None:
        """Return the first of `rows`."""
        return next(iter(self.rows(kind, **keys)), None)

    def engine(self, workload: str) -> Row | None:
        """Return the fastest step of Transformer Engine, of any of its recipes."""
        rows = [row for row in self.rows("step", workload=workload) if row["implementation"].startswith(ENGINE)]
        return min(rows, key=lambda row: float(row["ms"]), default=None)


def headline(directory: Path) -> str:
    """Return what FP8 gains and what it costs, one line each."""
    measured = Measured.read(directory)
    lines = [_speed(measured), _several(measured), _accuracy(measured, directory), _memory(measured), _costs(measured)]
    return "\n".join(f"- {line}" for line in lines if line)


def _speed(measured: Measured) -> str:
    own, peer = (measured.row("step", workload=BLOCKS, implementation=name) for name in (FOLDED, TORCHAO))
    if own is None:
        return ""
    said = f"**{own['ratio_to_bf16']:.2f} times the speed of BF16**"
    said += f", {peer['ms'] / own['ms']:.2f} times torchao's" if peer else ""
    engine = measured.engine(BLOCKS)
    said += f" and {engine['ms'] / own['ms']:.2f} times Transformer Engine's" if engine else ""
    return f"{said}: {TITLES[BLOCKS]}, compiled, on one {_machine(measured.found['step'])}."


def _several(measured: Measured) -> str:
    rows = measured.rows("distributed", workload="llama-3-8b", layout="data")
    own = next((row for row in rows if row["implementation"] == f"{FOLDED}, bf16 gradients"), None)
    if own is None:
        return ""
    rate = f"{own['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
    return f"**{own['ratio_to_bf16']:.2f} times BF16 on {own['ranks']} GPUs**: a whole Llama-3-8B with FSDP2, {rate}."


def _accuracy(measured: Measured, directory: Path) -> str:
    """Return the gap of the largest model whose interval is bounded, of the parity study or of pairs of seeds."""
    for own in reversed(ladder.studies(ladder.read_rows(directory))):
        model, tokens = own[0]["model"], own[0]["tokens"]
        found = next((gap for gap in ladder.gaps(own) if gap.arm == "folded"), None)
        if found is not None and found.half_width is not None:
            within = f"± {found.half_width:.2f} % (95 % over {len(found.differences)} pairs)"
            loss = ladder.LOSSES[ladder.decisive(own)].capitalize()
            return _gap_line(found.mean, f" {within}", model, tokens, loss)
    studies = _pairs(measured)
    if not studies:
        return ""
    model, tokens, pairs = studies[-1]
    interval = over_seeds(_gaps(pairs))
    within = "" if interval.half_width is None else f" ± {interval.half_width:.2f} % (95 % over {len(pairs)} seeds)"
    return _gap_line(interval.mean, within, model, tokens)


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
    return f"**{less:.0%} less memory** than BF16 with FP32 Adam states: {what} ({least['implementation']})."


def _costs(measured: Measured) -> str:
    own, peer = (measured.row("step", workload=BLOCKS, implementation=name) for name in (FOLDED, TORCHAO))
    said = []
    if own and peer and own["peak_gib"] > peer["peak_gib"]:
        said.append(f"{own['peak_gib']:.1f} GiB where torchao takes {peer['peak_gib']:.1f}")
    images = measured.row("step", workload=IMAGES, implementation=FOLDED)
    if images and images["ratio_to_bf16"] < 1:
        said.append(
            f"convolutions of a {TITLES[IMAGES]} in FP8 run at {images['ratio_to_bf16']:.2f} times BF16's speed"
        )
    split = measured.row("distributed", layout="tensor 2", implementation=f"{FOLDED}, bf16 gradients")
    if split and split["ratio_to_bf16"] < 1:
        said.append(f"tensor parallelism with few tokens per GPU, at {split['ratio_to_bf16']:.2f} times")
    return f"**What it costs**: {'; '.join(said)}." if said else ""


def summary(directory: Path) -> str:
    """Return the results in at most `MOST_ROWS` rows, and the commands that measure them in a fold."""
    measured = Measured.read(directory)
    rows = [*_speeds(measured), *_trainer(measured), *_distributed(measured), *_sizes(measured), *_losses(measured)][
        :MOST_ROWS
    ]
    shown = table(("measured", "BF16", "torchao", "TE", "Octavo", "Octavo beside BF16"), rows)
    return f"{shown}\n\n{_commands(measured)}"


def _speeds(measured: Measured) -> Iterator[Sequence[str]]:
    shown = [(BLOCKS, FOLDED), (BLOCKS, FAST), (BLOCKS, BLOCK), ("llama-1b-stack", FOLDED), (WHOLE, FOLDED)]
    for workload, implementation in [*shown, (IMAGES, FOLDED)]:
        names = (BF16, TORCHAO, implementation)
        bf16, peer, row = (measured.row("step", workload=workload, implementation=name) for name in names)
        if row and bf16:
            times = (f"{each['ms']:.1f}" if each else "" for each in (bf16, peer, measured.engine(workload), row))
            yield (
                f"{TITLES[workload]}, ms per step, `{_recipe(implementation)}`",
                *times,
                f"{row['ratio_to_bf16']:.2f} x",
            )


def _trainer(measured: Measured) -> Iterator[Sequence[str]]:
    for mode, title in (("eager", "eager"), ("torch_compile", "compiled")):
        bf16, peer, row = (measured.row("hf", mode=mode, implementation=name) for name in (BF16, TORCHAO, FOLDED))
        if row and bf16:
            times = (f"{each['tokens_per_s']:,.0f}" if each else "" for each in (bf16, peer, None, row))
            ratio = f"{row['ratio_to_bf16']:.2f} x, {row['peak_gib'] / bf16['peak_gib'] - 1:+z.0%} memory"
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
            ratio = f"{row['ratio_to_bf16']:.2f} x, {row['peak_gib'] / bf16['peak_gib'] - 1:+z.0%} memory"
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
            less = f"{least['peak_gib'] / first['peak_gib'] - 1:+z.0%}"
            yield f"Llama of {first['parameters'] / 1e9:.1f} B, peak GiB", bf16, "", "", own, less


def _losses(measured: Measured) -> Iterator[Sequence[str]]:
    for model, tokens, pairs in _pairs(measured):
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
    for result in measured.found.values():
        lines += [f"- `{result.file_name}`, {result.hardware}, torch {result.versions['torch']}:", "", "  ```text"]
        lines += [*(f"  {command}" for command in result.command.split("; ")), "  ```", ""]
    summary = "<summary>Commands that measure these figures</summary>"
    return "\n".join(["<details>", summary, "", *lines, "</details>"])


def _recipe(implementation: str) -> str:
    return implementation.removeprefix("octavo ").removesuffix(" (as planned)")


def _machine(result: Result) -> str:
    return result.hardware.removeprefix("nvidia-").upper()


def _parameters(model: str) -> str:
    """Return the size in the name of a model: `llama-129m` has 129 M."""
    return model.rpartition("-")[2].replace("m", " M").replace("b", " B") + " parameters"


TABLES = {"headline": headline, "readme": summary}
