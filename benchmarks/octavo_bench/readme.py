"""Tables of the README: headline figures, and the effect of FP8 on speed, memory and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from octavo.recipes import DEFAULT
from octavo_bench import ladder, results
from octavo_bench.evidence import over_seeds
from octavo_bench.hf import FUSIONS, LOSS
from octavo_bench.implementations import BF16, ONCE
from octavo_bench.render import grouped, table
from octavo_bench.results import Result, Row

OWN = f"octavo {DEFAULT}"
TORCHAO, FOLDED, FAST = "torchao tensorwise", "octavo folded", "octavo folded_fast"
FASTEST = f"{FAST} + fp8 head, octavo.optim"
ENGINE = "transformer engine"
BLOCKS, WHOLE, IMAGES = "llama-8b-stack", "llama-1b", "resnet50"
STEPS = {
    BLOCKS: ("Llama-3-8B blocks", FAST),
    "llama-70b-stack": ("Llama-3-70B blocks", FAST),
    "175b-stack": ("blocks of a Llama of 175 B parameters", FAST),
    WHOLE: ("Llama-1B with head and AdamW", FASTEST),
    IMAGES: ("ResNet-50, FP8 convolutions", FAST),
}
"""Title of each workload shown, and Octavo's fastest implementation."""
SHARDED = "Llama-3-8B, FSDP2"
ELSEWHERE = "another session"
"""Where a step is from that was not measured beside the others of its row."""
MACHINE, SECOND = "nvidia-h200", "nvidia-h100-80gb-hbm3"
"""Machine of all figures that do not name another, as README says; and the one that blocks are shown on besides."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements shown in the README, newest first."""

    found: Mapping[str, Sequence[Result]]
    """The newest sessions, by kind."""
    steps: Sequence[Result]
    """All sessions of steps."""
    pairs: Sequence[Row] = ()
    """Runs of the parity study."""

    @classmethod
    def read(cls, directory: Path, machine: str = MACHINE) -> Measured:
        """Read the results of a machine under a directory, and the losses of all."""
        kinds = ("moe", "hf", "distributed", "memory")
        found = {kind: _on_machine(results.newest(kind, directory), machine) for kind in kinds}
        found["parity"] = results.newest("parity", directory)
        steps = _on_machine(results.every("step", directory), machine)
        return cls(found=found, steps=steps, pairs=ladder.read_rows(directory))

    def rows(self, kind: str, **keys: object) -> list[Row]:
        """Return the rows of a kind that have these values and did not fail."""
        return [row for result in self.found[kind] for row in _having(result.rows, keys)]

    def row(self, kind: str, **keys: object) -> Row | None:
        """Return the first of `rows`."""
        return next(iter(self.rows(kind, **keys)), None)

    def step(self, workload: str, implementation: str) -> Step | None:
        """Return a step from the session with most of the steps shown beside it in README; of several, the newest."""
        found = []
        for result in self.steps:
            if own := _having(result.rows, {"workload": workload, "implementation": implementation}):
                found.append(Step(own=own[0], rows=_having(result.rows, {"workload": workload}), result=result))
        beside = TORCHAO, OWN, FOLDED, STEPS.get(workload, ("", FAST))[1]
        return max(found, key=lambda step: sum(map(bool, (step.engine, *map(step.peer, beside)))), default=None)

    def engine(self, step: Step) -> tuple[Row | None, str]:
        """Return Transformer Engine's fastest step of a workload, beside BF16 of its session, and where it is from.

        Of the session of a step, with no word about it; else of the newest that has one, which is said.
        """
        if step.engine:
            return step.engine, ""
        for result in self.steps:
            rows = _having(result.rows, {"workload": step.own["workload"]})
            if rows and (other := Step(own=rows[0], rows=rows, result=result).engine):
                return other, ELSEWHERE
        return None, ""


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


def _on_machine(found: Iterable[Result], machine: str) -> list[Result]:
    return [result for result in found if result.hardware == machine]


def _having(rows: Iterable[Row], keys: Mapping[str, object]) -> list[Row]:
    return [row for row in rows if "error" not in row and all(row.get(k) == v for k, v in keys.items())]


def headline(directory: Path) -> str:
    """Return the gains and costs of FP8, one line each."""
    measured = Measured.read(directory)
    lines = [
        _speed(measured, Measured.read(directory, SECOND)),
        _several(measured),
        _memory(measured),
        _accuracy(measured),
        _costs(measured),
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def _speed(measured: Measured, second: Measured) -> str:
    own = OWN if measured.step(BLOCKS, OWN) else FOLDED
    step = measured.step(BLOCKS, own)
    other = second.step(BLOCKS, own) or second.step(BLOCKS, FOLDED)
    if step is None:
        return ""
    said = f"**{step.own['ratio_to_bf16']:.2f} times the speed of BF16** with recipe `{_recipe(own)}` on one"
    said += f" {_machine(MACHINE)}{_beside(measured, step)}: {STEPS[BLOCKS][0]}, BF16 weights, compiled."
    fast = [row for name in (f"{OWN}_fast", FAST) if (row := step.peer(name))]
    if faster := [f"`{_recipe(row['implementation'])}` {row['ratio_to_bf16']:.2f}" for row in fast]:
        said += f" With fast accumulation: {', '.join(faster)}."
    if other:
        recipe = f"`{_recipe(other.own['implementation'])}` {other.own['ratio_to_bf16']:.2f}"
        said += f" On one {_machine(SECOND)}: {recipe}{_beside(second, other)}."
    return said


def _beside(measured: Measured, step: Step) -> str:
    """Return the speeds of the other libraries beside a step, in brackets; empty without one."""
    engine, where = measured.engine(step)
    peers = {"torchao": step.peer(TORCHAO), "Transformer Engine": engine}
    shown = {name: f"{row['ratio_to_bf16']:.2f}" for name, row in peers.items() if row}
    if where:
        shown["Transformer Engine"] += f", in {where}"
    beside = ", ".join(f"{name} {ratio}" for name, ratio in shown.items())
    return f" ({beside})" if beside else ""


def _several(measured: Measured) -> str:
    own = _fastest_sharded(measured)
    peer = next((row for row in _sharded_rows(measured) if row["implementation"].startswith(TORCHAO)), None)
    beside = f" (torchao {peer['ratio_to_bf16']:.2f})" if peer else ""
    if own is None:
        return ""
    how = f"`{own['implementation'].removeprefix('octavo ')}`{', as a CUDA graph' if 'graph' in own['layout'] else ''}"
    return f"**{own['ratio_to_bf16']:.2f} times BF16 on {own['ranks']} GPUs**: a whole {SHARDED}, {how}{beside}."


def _sharded_rows(measured: Measured) -> list[Row]:
    """Return the rows of the newest sharded step, over one number of ranks."""
    rows = [row for row in measured.rows("distributed", workload="llama-3-8b") if row["layout"].startswith("data")]
    return [row for row in rows if row["ranks"] == rows[0]["ranks"]]


def _fastest_sharded(measured: Measured) -> Row | None:
    rows = [row for row in _sharded_rows(measured) if row["implementation"].startswith("octavo ")]
    rows = [row for row in rows if "head" not in row["implementation"]]
    rows = [row for row in rows if not row["implementation"].endswith(ONCE)]  # the BF16 beside it gathers twice
    return max(rows, key=lambda row: float(row["ratio_to_bf16"]), default=None)


def _accuracy(measured: Measured) -> str:
    """Return the gap of the largest Llama whose interval is bounded, of the parity study or of pairs of seeds."""
    if study := _study(measured):
        (gap, *_), rows = study
        model, tokens = rows[0]["model"], rows[0]["tokens"]
        half = ", in eight bits from half of the run on" if rows[0]["condition"] == "half" else ""
        line = _gap_line(gap.arm, gap.mean, gap.half_width, len(gap.differences), model, tokens)
        return f"{line}{half}, {_on(rows)}."
    studies = _pairs(measured)
    if not studies:
        return ""
    model, tokens, pairs = studies[-1]
    interval = over_seeds(_gaps(pairs))
    return f"{_gap_line('folded', interval.mean, interval.half_width, len(pairs), model, tokens)}."


def _on(rows: Sequence[Row]) -> str:
    """Return the machines that runs of the parity study were made on."""
    return f"on one {' or '.join(sorted({_machine(row['machine']) for row in rows}))}"


def _study(measured: Measured) -> tuple[Sequence[ladder.Gap], Sequence[Row]] | None:
    """Return the gaps of `ladder.SUMMARY` in the largest Llama's study that bounds the first, and the runs of it.

    Without a study that bounds the default's, one that bounds that of `folded`.
    """
    studies = [
        (rows, {gap.arm: gap for gap in ladder.gaps(rows) if gap.half_width is not None})
        for rows in reversed(ladder.studies(measured.pairs))
        if rows[0]["condition"] in ("half", "whole") and rows[0]["model"].startswith("llama")
    ]
    for first in (DEFAULT, "folded"):
        for rows, bounded in studies:
            if first in bounded:
                return [bounded[arm] for arm in ladder.SUMMARY if arm in bounded], rows
    return None


def studies(directory: Path) -> dict[str, dict[str, object]]:
    """Return by recipe the gap of the study that README quotes, for the package: a run's verdict quotes it too."""
    gaps, rows = _study(Measured.read(directory)) or ((), [{}])
    return {
        gap.arm: {
            "arm": _ARMS.get(gap.arm, gap.arm).replace("`", ""),
            "percent": round(gap.mean, 4),
            "half_width": round(gap.half_width or 0.0, 4),
            "pairs": len(gap.differences),
            "parameters": _parameters(rows[0]["model"]),
            "tokens": rows[0]["tokens"],
        }
        for gap in gaps
    }


def _gap_line(recipe: str, mean: float, half_width: float | None, pairs: int, model: str, tokens: int) -> str:
    within = "" if half_width is None else f" ± {half_width:.2f} %"
    trained = f"{pairs} pairs of a Llama of {_parameters(model)} on {tokens / 1e6:.0f} M tokens"
    return f"**Loss {mean:+z.2f} %{within} relative to BF16** with recipe `{recipe}`: {trained}"


def _memory(measured: Measured) -> str:
    rows = measured.rows("memory", workload=WHOLE)
    if len(rows) < 2:
        return ""
    least = min(rows, key=lambda row: float(row["peak_gib"]))
    baselines = [f"{_less(least, row)} than with {title} ({row['peak_gib']:.1f} GiB)" for title, row in _bf16(measured)]
    trains = f"**{least['peak_gib']:.1f} GiB to train a Llama of {least['parameters'] / 1e9:.1f} B parameters**"
    return f"{trains}: {', '.join(baselines)}. Weights, optimizer states and saved activations are in FP8."


def _bf16(measured: Measured) -> Iterator[tuple[str, Row]]:
    """Yield the BF16 steps of the whole Llama with AdamW, least memory first, each with its name."""
    step = measured.step(WHOLE, FOLDED)
    if step and (own := step.peer(BF16)) and "peak_gib" in own:
        yield "BF16 weights and states", own
    yield "FP32 masters and states", measured.rows("memory", workload=WHOLE)[0]


def _less(own: Row, than: Row) -> str:
    return f"{_percent(own['peak_gib'] / than['peak_gib']).removeprefix('-')} less"


def _costs(measured: Measured) -> str:
    step, said = measured.step(BLOCKS, FOLDED), []
    peers = {"torchao": step.peer(TORCHAO), "Transformer Engine": step.engine} if step else {}
    if step and any(row and row["peak_gib"] < step.own["peak_gib"] for row in peers.values()):
        beside = ", ".join(f"{name} {row['peak_gib']:.1f}" for name, row in peers.items() if row)
        said.append(f"{STEPS[BLOCKS][0]} take {step.own['peak_gib']:.1f} GiB ({beside})")
    images = measured.step(IMAGES, FOLDED)
    if images and images.own["ratio_to_bf16"] < 1:
        said.append(
            f"convolutions forced into FP8 run at {images.own['ratio_to_bf16']:.2f} times the speed of BF16 (ResNet-50)"
        )
    launched, graph = _tensor_parallel(measured)
    if launched and launched["ratio_to_bf16"] < 1:
        said.append(f"tensor parallelism at {launched['ratio_to_bf16']:.2f} times")
        said[-1] += f", as a CUDA graph at {graph['ratio_to_bf16']:.2f} times" if graph else ""
    return f"**Where it loses**: {'; '.join(said)}." if said else ""


def _tensor_parallel(measured: Measured) -> tuple[Row | None, Row | None]:
    """Return the steps over two ranks, launched kernel by kernel and as a CUDA graph."""
    launched = measured.row("distributed", layout="tensor 2", implementation=FOLDED)
    ranks = launched and launched["ranks"]
    return launched, measured.row("distributed", layout="tensor 2, graph", implementation=FOLDED, ranks=ranks)


def speed(directory: Path) -> str:
    """Return the speed relative to BF16 of the other libraries and of Octavo, one row per workload."""
    measured, second = Measured.read(directory), Measured.read(directory, SECOND)
    found = [*_steps(measured, tuple(STEPS)[:1]), *_on_second(second), *_steps(measured, tuple(STEPS)[1:-1])]
    found += [row for part in (_sharded, _tensor, _trainer, _experts, _images) for row in part(measured)]
    rows = [
        (
            *(row.name, row.bf16, _times(row.torchao), _times(row.engine, row.where), _times(row.default)),
            *(_times(row.own), _times(row.fast, row.how)),
        )
        for row in found
    ]
    own = (f"Octavo `{_recipe(implementation)}`" for implementation in (OWN, FOLDED))
    return table(("training step", "BF16", "torchao", "Transformer Engine", *own, "Octavo at its fastest"), rows)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A row of the table: one workload, by everything that was measured in its session."""

    name: str
    bf16: str
    """Absolute speed of BF16, with its unit."""
    torchao: Row | None = None
    engine: Row | None = None
    where: str = ""
    """Where `engine` is from, if not of the session."""
    default: Row | None = None
    """The default recipe, `OWN`."""
    own: Row | None = None
    """`FOLDED`."""
    fast: Row | None = None
    how: str = ""
    """How the fastest is computed."""


def _times(row: Row | None, how: str = "") -> str:
    return f"{row['ratio_to_bf16']:.2f} x{how and f', {how}'}" if row else ""


def _rate(row: Row | None, key: str = "tokens_per_s", unit: str = "tokens/s") -> str:
    return f"{row[key]:,.0f} {unit}" if row and key in row else ""


def _steps(measured: Measured, workloads: Iterable[str], unit: str = "tokens/s", where: str = "") -> Iterator[Speed]:
    for workload in workloads:
        title, fastest = STEPS[workload]
        default, own, fast = (measured.step(workload, implementation) for implementation in (OWN, FOLDED, fastest))
        if beside := own or fast:
            engine, elsewhere = measured.engine(beside)
            yield Speed(
                name=title + where,
                bf16=_rate(beside.peer(BF16), unit=unit),
                torchao=beside.peer(TORCHAO),
                engine=engine,
                where=elsewhere,
                default=default.own if default else None,
                own=own.own if own else None,
                fast=fast.own if fast else None,
                how=f"`{_recipe(fastest)}`",
            )


def _on_second(second: Measured) -> Iterator[Speed]:
    return _steps(second, (BLOCKS,), where=f", on one {_machine(SECOND)}")


def _images(measured: Measured) -> Iterator[Speed]:
    return _steps(measured, (IMAGES,), unit="images/s")


PER_GPU = "tokens_per_s_per_gpu", "tokens/s per GPU"


def _sharded(measured: Measured) -> Iterator[Speed]:
    rows = _having(_sharded_rows(measured), {"layout": "data"})
    own = next((row for row in rows if row["implementation"] == FOLDED), None)
    peer = next((row for row in rows if row["implementation"].startswith(TORCHAO)), None)
    bf16 = next((row for row in rows if row["implementation"] == BF16), None)
    fast = _fastest_sharded(measured)
    if own and fast:
        how = f"`{_recipe(fast['implementation'])}`" + (", CUDA graph" if "graph" in fast["layout"] else "")
        name = f"{SHARDED}, {own['ranks']} GPUs"
        yield Speed(name=name, bf16=_rate(bf16, *PER_GPU), torchao=peer, own=own, fast=fast, how=how)


def _tensor(measured: Measured) -> Iterator[Speed]:
    launched, graph = _tensor_parallel(measured)
    if launched:
        keys = {"layout": launched["layout"], "ranks": launched["ranks"], "implementation": BF16}
        name = f"{STEPS[BLOCKS][0]}, tensor parallel, {launched['ranks']} GPUs"
        bf16, how = _rate(measured.row("distributed", **keys), *PER_GPU), "beside BF16 as a CUDA graph too"
        yield Speed(name=name, bf16=bf16, own=launched, fast=graph, how=how)


TRAINER = "transformers' Trainer, Qwen3-1.7B blocks"


FUSED = f"{OWN}{FUSIONS}{LOSS}"
"""The Trainer's fastest step in eager mode."""


def _trained(measured: Measured, mode: str, implementation: str, model: str = "qwen3-2048") -> Row | None:
    return measured.row("hf", model=model, mode=mode, implementation=implementation)


def _trainer(measured: Measured) -> Iterator[Speed]:
    compiled = "torch_compile", "qwen3-2048", "compiled", FAST
    eager = "eager", "qwen3-2048-bf16", "BF16 weights, eager", FUSED
    for mode, model, title, fastest in (compiled, eager):
        names = BF16, TORCHAO, OWN, FOLDED, fastest
        bf16, peer, default, own, fast = (_trained(measured, mode, name, model) for name in names)
        if own:
            name, how = f"{TRAINER}, {title}", f"`{_recipe(fastest)}`"
            if fast and (same := fast.get("ratio_to_bf16_alike")):
                how += f"; {same:.2f} x beside BF16 with them"
            yield Speed(name=name, bf16=_rate(bf16), torchao=peer, default=default, own=own, fast=fast, how=how)


def _layer_of_experts(measured: Measured) -> Sequence[Row]:
    """Return the rows of the largest layer of experts."""
    layers = [rows for rows in grouped(measured.rows("moe"), "workload").values() if "kept_mib" in rows[0]]
    return max(layers, key=lambda rows: float(rows[0]["kept_mib"]), default=())


def _experts(measured: Measured) -> Iterator[Speed]:
    rows = {row["implementation"]: row for row in _layer_of_experts(measured)}
    if own := rows.get(FOLDED):
        bf16 = next((row for row in rows.values() if row["ratio_to_bf16"] == 1), None)
        name, rate = f"layer of experts, {own['workload']}", _rate(bf16, "tflops", "TFLOP/s")
        yield Speed(name=name, bf16=rate, own=own, fast=rows.get(FAST), how=f"`{_recipe(FAST)}`")


def memory(directory: Path) -> str:
    """Return the memory of training in BF16 and with Octavo."""
    measured = Measured.read(directory)
    rows = [row for part in (_sizes, _peaks, _kept) for row in part(measured)]
    return table(("memory at the peak", "BF16", "Octavo", "change", "with"), rows)


def _sizes(measured: Measured) -> Iterator[Sequence[str]]:
    rows = measured.rows("memory", workload=WHOLE)
    if len(rows) > 1:
        least = rows[-1]
        name = f"Llama of {least['parameters'] / 1e9:.1f} B parameters, AdamW"
        for title, row in _bf16(measured):
            bf16, own, change = _gib(row["peak_gib"], least["peak_gib"])
            yield name, f"{bf16}, {title}", own, change, f"`{least['implementation']}`"
    if rows := measured.rows("memory", workload=f"largest {WHOLE}"):
        first, least = rows[0], rows[-1]
        bf16, own = (f"{row['parameters'] / 1e9:.1f} B parameters" for row in (first, least))
        more = f"{least['parameters'] / first['parameters']:.1f} x"
        name = f"largest Llama on one {_machine(MACHINE)}"
        yield name, f"{bf16}, FP32 masters and states", own, more, f"`{least['implementation']}`"


def _peaks(measured: Measured) -> Iterator[Sequence[str]]:
    sharded = {row["implementation"]: row for row in _having(_sharded_rows(measured), {"layout": "data"})}
    pairs = {f"{TRAINER}, eager": [_trained(measured, "eager", name) for name in (BF16, FOLDED)]}
    pairs[f"{SHARDED}, per GPU"] = [*map(sharded.get, (BF16, FOLDED))]
    for name, (bf16, own) in pairs.items():
        if bf16 and own:
            yield name, *_gib(bf16["peak_gib"], own["peak_gib"]), f"`{_recipe(FOLDED)}`"


def _kept(measured: Measured) -> Iterator[Sequence[str]]:
    if rows := _layer_of_experts(measured):
        bf16 = min((row for row in rows if row["implementation"].startswith(BF16)), key=lambda row: float(row["ms"]))
        own = next(row for row in rows if row["implementation"] == FOLDED)
        kept = own["kept_mib"] + own["kept_weight_codes_mib"]
        yield "layer of experts, kept for backward", *_gib(bf16["kept_mib"] / 1024, kept / 1024), f"`{_recipe(FOLDED)}`"


def _gib(bf16: float, own: float) -> tuple[str, str, str]:
    """Return the cells of two amounts in GiB, and their change."""
    return f"{bf16:.1f} GiB", f"{own:.1f} GiB", _percent(own / bf16)


def losses(directory: Path) -> str:
    """Return the losses in BF16 and in FP8."""
    rows = [*_losses(Measured.read(directory))]
    return table(("loss", "BF16", "Octavo", "recipe", "difference", "from"), rows)


_ARMS = {"folded+run.last_share=0.3": "`folded`, last three tenths with fprop in BF16"}


def _losses(measured: Measured) -> Iterator[Sequence[str]]:
    if study := _study(measured):
        gaps, rows = study
        loss = ladder.decisive(rows)
        name = f"{ladder.LOSSES[loss]}, {_parameters(rows[0]['model'])}, {rows[0]['tokens'] / 1e6:.0f} M tokens"
        for gap in gaps:
            found = [(block[BF16][loss], block[gap.arm][loss]) for block in ladder.blocks(rows) if gap.arm in block]
            change = f"{gap.mean:+z.2f} % ± {gap.half_width:.2f} %"
            arm = _ARMS.get(gap.arm, f"`{gap.arm}`")
            shown = name if gap is gaps[0] else "the same, in other pairs"
            yield shown, *_means(found), arm, change, f"{len(gap.differences)} pairs {_on(rows)}"
    for model, tokens, pairs in _pairs(measured)[-1:]:
        interval, each = over_seeds(_gaps(pairs)), [f"{gap:+z.2f} %" for gap in _gaps(pairs)]
        change = f"{interval.mean:+z.2f} % ± {interval.half_width:.2f} %" if len(pairs) > 2 else ", ".join(each)
        name = f"held-out loss, {_parameters(model)}, {tokens / 1e6:.0f} M tokens"
        yield name, *_means(pairs), "`folded`", change, f"{len(pairs)} seeds"


def _means(pairs: Pairs) -> Iterator[str]:
    return (f"{fmean(losses):.4f}" for losses in zip(*pairs, strict=True))


Pairs = Sequence[tuple[float, float]]
"""Held-out losses of one seed in BF16 and by `folded`."""


def _pairs(measured: Measured) -> list[tuple[str, int, Pairs]]:
    """Return the pairs of each study, that of the largest model (the slowest steps) last."""
    found = []
    for (model, tokens), rows in grouped(measured.rows("parity"), "model", "tokens").items():
        by_recipe = grouped(rows, "recipe")
        bf16, own = ({row["seed"]: row["heldout_loss"] for row in by_recipe.get((r,), [])} for r in (BF16, "folded"))
        if pairs := [(bf16[seed], own[seed]) for seed in own if seed in bf16]:
            found.append((max(row.get("step_ms", 0.0) for row in rows), model, tokens, pairs))
    return [(model, tokens, pairs) for _, model, tokens, pairs in sorted(found)]


def _gaps(pairs: Pairs) -> list[float]:
    return [100 * (own / bf16 - 1) for bf16, own in pairs]


def _percent(ratio: float) -> str:
    """Return a change in percent."""
    return f"{100 * (ratio - 1):+z.0f} %"


def _recipe(implementation: str) -> str:
    return implementation.removeprefix("octavo ").removesuffix(" (as planned)")


def _machine(hardware: str) -> str:
    """Return the short name of a GPU: H200 of `nvidia-h200, torch 2.11.0`, H100 of `nvidia-h100-80gb-hbm3`."""
    return hardware.removeprefix("nvidia-").partition(",")[0].partition("-")[0].upper()


def _parameters(model: str) -> str:
    """Return the size in the name of a model: `llama-129m` has 129 M."""
    return model.rpartition("-")[2].replace("m", " M").replace("b", " B") + " parameters"


TABLES = {"headline": headline, "readme-speed": speed, "readme-memory": memory, "readme-loss": losses}
