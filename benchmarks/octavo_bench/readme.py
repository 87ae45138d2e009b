"""Tables of the README: headline figures, and the effect of FP8 on speed, memory and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from octavo_bench import ladder, results
from octavo_bench.evidence import over_seeds
from octavo_bench.implementations import BF16, ONCE
from octavo_bench.render import grouped, table
from octavo_bench.results import Result, Row

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
MACHINE = "nvidia-h200"
"""Machine of all figures except losses, as README says."""


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
    def read(cls, directory: Path) -> Measured:
        """Read the results under a directory."""
        found = {kind: _on_machine(results.newest(kind, directory)) for kind in ("moe", "hf", "distributed", "memory")}
        found["parity"] = results.newest("parity", directory)
        steps = _on_machine(results.every("step", directory))
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
        beside = TORCHAO, FOLDED, STEPS.get(workload, ("", FAST))[1]
        return max(found, key=lambda step: sum(map(bool, (step.engine, *map(step.peer, beside)))), default=None)


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


def _on_machine(found: Iterable[Result]) -> list[Result]:
    return [result for result in found if result.hardware == MACHINE]


def _having(rows: Iterable[Row], keys: Mapping[str, object]) -> list[Row]:
    return [row for row in rows if "error" not in row and all(row.get(k) == v for k, v in keys.items())]


def headline(directory: Path) -> str:
    """Return the gains and costs of FP8, one line each."""
    measured = Measured.read(directory)
    lines = [_speed(measured), _several(measured), _memory(measured), _accuracy(measured), _costs(measured)]
    return "\n".join(f"- {line}" for line in lines if line)


def _speed(measured: Measured) -> str:
    step = measured.step(BLOCKS, FOLDED)
    if step is None:
        return ""
    fast, title = step.peer(FAST), STEPS[BLOCKS][0]
    said = f"**{step.own['ratio_to_bf16']:.2f} times the speed of BF16**"
    said += f", {fast['ratio_to_bf16']:.2f} times with recipe `folded_fast`" if fast else ""
    peers = {"torchao": step.peer(TORCHAO), "Transformer Engine": step.engine}
    beside = ", ".join(f"{name} {row['ratio_to_bf16']:.2f}" for name, row in peers.items() if row)
    return f"{said}: {title}, compiled, on one {_machine(MACHINE)}{f' ({beside})' if beside else ''}."


def _several(measured: Measured) -> str:
    own = _fastest_sharded(measured)
    return f"**{own['ratio_to_bf16']:.2f} times BF16 on {own['ranks']} GPUs**: a whole {SHARDED}." if own else ""


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
        half = ", in FP8 from half of the run on" if rows[0]["condition"] == "half" else ""
        return f"{_gap_line(gap.mean, gap.half_width, len(gap.differences), model, tokens)}{half}."
    studies = _pairs(measured)
    if not studies:
        return ""
    model, tokens, pairs = studies[-1]
    interval = over_seeds(_gaps(pairs))
    return f"{_gap_line(interval.mean, interval.half_width, len(pairs), model, tokens)}."


def _study(measured: Measured) -> tuple[Sequence[ladder.Gap], Sequence[Row]] | None:
    """Return the gaps of `folded` and its main remedy in the largest Llama's study that bounds them, and its runs."""
    for rows in reversed(ladder.studies(measured.pairs)):
        if rows[0]["condition"] in ("half", "whole") and rows[0]["model"].startswith("llama"):
            bounded = {gap.arm: gap for gap in ladder.gaps(rows) if gap.half_width is not None}
            if ladder.SUMMARY[0] in bounded:
                return [bounded[arm] for arm in ladder.SUMMARY if arm in bounded], rows
    return None


def _gap_line(mean: float, half_width: float | None, pairs: int, model: str, tokens: int) -> str:
    within = "" if half_width is None else f" ± {half_width:.2f} %"
    trained = f"{pairs} pairs of a Llama of {_parameters(model)} on {tokens / 1e6:.0f} M tokens"
    return f"**Loss {mean:+z.2f} %{within} relative to BF16**: {trained}"


def _memory(measured: Measured) -> str:
    rows = measured.rows("memory", workload=WHOLE)
    if len(rows) < 2:
        return ""
    least = min(rows, key=lambda row: float(row["peak_gib"]))
    change = _percent(least["peak_gib"] / rows[0]["peak_gib"])
    what = f"a Llama of {least['parameters'] / 1e9:.1f} B parameters trains in {least['peak_gib']:.1f} GiB"
    less = f"**{change.removeprefix('-')} less memory**"
    return f"{less} with weights, optimizer states and saved activations in FP8: {what}."


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
    measured = Measured.read(directory)
    parts = (_steps, _sharded, _tensor, _trainer, _experts, _images)
    rows = [(name, *map(_times, own[:3]), _times(own[3], how)) for part in parts for name, *own, how in part(measured)]
    return table(("training step", "torchao", "Transformer Engine", "Octavo", "Octavo at its fastest"), rows)


Speeds = Iterator[tuple[str, Row | None, Row | None, Row | None, Row | None, str]]
"""Title; steps of torchao, of Transformer Engine, of `folded`, and of the fastest; how the fastest is computed."""


def _times(row: Row | None, how: str = "") -> str:
    return f"{row['ratio_to_bf16']:.2f} x{how and f', {how}'}" if row else ""


def _steps(measured: Measured, workloads: Iterable[str] = tuple(STEPS)[:-1]) -> Speeds:
    for workload in workloads:
        title, fastest = STEPS[workload]
        own, fast = (measured.step(workload, implementation) for implementation in (FOLDED, fastest))
        if beside := own or fast:
            how = f"`{_recipe(fastest)}`"
            shown = own.own if own else None, fast.own if fast else None
            yield title, beside.peer(TORCHAO), beside.engine, *shown, how


def _images(measured: Measured) -> Speeds:
    return _steps(measured, (IMAGES,))


def _sharded(measured: Measured) -> Speeds:
    rows = _having(_sharded_rows(measured), {"layout": "data"})
    own = next((row for row in rows if row["implementation"] == FOLDED), None)
    peer = next((row for row in rows if row["implementation"].startswith(TORCHAO)), None)
    fast = _fastest_sharded(measured)
    if own and fast:
        how = f"`{_recipe(fast['implementation'])}`" + (", CUDA graph" if "graph" in fast["layout"] else "")
        yield f"{SHARDED}, {own['ranks']} GPUs", peer, None, own, fast, how


def _tensor(measured: Measured) -> Speeds:
    launched, graph = _tensor_parallel(measured)
    if launched:
        name = f"{STEPS[BLOCKS][0]}, tensor parallel, {launched['ranks']} GPUs"
        yield name, None, None, launched, graph, "CUDA graph"


TRAINER = "transformers' Trainer, Qwen3-1.7B blocks"


def _trained(measured: Measured, mode: str, implementation: str) -> Row | None:
    return measured.row("hf", model="qwen3-2048", mode=mode, implementation=implementation)


def _trainer(measured: Measured) -> Speeds:
    for mode, title in {"eager": "eager", "torch_compile": "compiled"}.items():
        peer, own, fast = (_trained(measured, mode, name) for name in (TORCHAO, FOLDED, FAST))
        if own:
            yield f"{TRAINER}, {title}", peer, None, own, fast, f"`{_recipe(FAST)}`"


def _layer_of_experts(measured: Measured) -> Sequence[Row]:
    """Return the rows of the largest layer of experts."""
    layers = [rows for rows in grouped(measured.rows("moe"), "workload").values() if "kept_mib" in rows[0]]
    return max(layers, key=lambda rows: float(rows[0]["kept_mib"]), default=())


def _experts(measured: Measured) -> Speeds:
    rows = {row["implementation"]: row for row in _layer_of_experts(measured)}
    if own := rows.get(FOLDED):
        yield f"layer of experts, {own['workload']}", None, None, own, rows.get(FAST), f"`{_recipe(FAST)}`"


def memory(directory: Path) -> str:
    """Return the memory of training in BF16 and with Octavo."""
    measured = Measured.read(directory)
    rows = [row for part in (_sizes, _peaks, _kept) for row in part(measured)]
    return table(("memory", "BF16", "Octavo", "", "with"), rows)


def _sizes(measured: Measured) -> Iterator[Sequence[str]]:
    for workload in (WHOLE, f"largest {WHOLE}"):
        rows = measured.rows("memory", workload=workload)
        if not rows:
            continue
        first, least = rows[0], rows[-1]
        how = f"`{least['implementation']}`"
        if "largest" in workload:
            sizes = (f"{row['parameters'] / 1e9:.1f} B parameters" for row in (first, least))
            name = f"largest Llama on one {_machine(MACHINE)}"
            yield name, *sizes, f"{least['parameters'] / first['parameters']:.1f} x", how
        elif first is not least:
            name = f"Llama of {first['parameters'] / 1e9:.1f} B parameters, AdamW"
            yield name, *_gib(first["peak_gib"], least["peak_gib"]), how


def _peaks(measured: Measured) -> Iterator[Sequence[str]]:
    sharded = {row["implementation"]: row for row in _having(_sharded_rows(measured), {"layout": "data"})}
    pairs = {TRAINER: [_trained(measured, "eager", name) for name in (BF16, FOLDED)]}
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
    return table(("loss", "BF16", "Octavo `folded`", "difference", "from"), rows)


_REMEDY = {"folded+run.last_share=0.3": "the same, last three tenths with fprop in BF16"}


def _losses(measured: Measured) -> Iterator[Sequence[str]]:
    if study := _study(measured):
        gaps, rows = study
        loss = ladder.decisive(rows)
        name = f"{ladder.LOSSES[loss]}, {_parameters(rows[0]['model'])}, {rows[0]['tokens'] / 1e6:.0f} M tokens"
        for gap in gaps:
            found = [(block[BF16][loss], block[gap.arm][loss]) for block in ladder.blocks(rows) if gap.arm in block]
            change = f"{gap.mean:+z.2f} % ± {gap.half_width:.2f} %"
            yield _REMEDY.get(gap.arm, name), *_means(found), change, f"{len(gap.differences)} pairs"
    for model, tokens, pairs in _pairs(measured)[-1:]:
        interval, each = over_seeds(_gaps(pairs)), [f"{gap:+z.2f} %" for gap in _gaps(pairs)]
        change = f"{interval.mean:+z.2f} % ± {interval.half_width:.2f} %" if len(pairs) > 2 else ", ".join(each)
        name = f"held-out loss, {_parameters(model)}, {tokens / 1e6:.0f} M tokens"
        yield name, *_means(pairs), change, f"{len(pairs)} seeds"


def _means(pairs: Pairs) -> Iterator[str]:
    return (f"{fmean(losses):.4f}" for losses in zip(*pairs, strict=True))


Pairs = Sequence[tuple[float, float]]
"""Held-out losses of one seed in BF16 and in the default recipe."""


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
    return hardware.removeprefix("nvidia-").upper()


def _parameters(model: str) -> str:
    """Return the size in the name of a model: `llama-129m` has 129 M."""
    return model.rpartition("-")[2].replace("m", " M").replace("b", " B") + " parameters"


TABLES = {"headline": headline, "readme-speed": speed, "readme-memory": memory, "readme-loss": losses}
