"""The configuration of a run, from a preset, a file and flags, each read strictly on top of the one before.

No torch here: the command line reads this file to answer `--help`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from octavo import strict
from octavo.errors import ConfigError, did_you_mean
from octavo.guard.config import GuardConfig
from octavo.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text and how it is cut."""

    source: str = "python"
    """`python` (standard library), `python-packages` (and what is installed), `english`, or a file or folder."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe-SIZE` for a byte-pair encoding trained on the source, or a tokenizer's .json file."""
    sequence: int = 256
    """Tokens in a training sequence."""
    heldout: float = 0.05
    """Share of the documents kept for evaluation, never trained on."""
    cache: Path = Path("~/.cache/octavo")
    """Where tokenized text is kept between runs."""

    def __post_init__(self) -> None:
        _positive("data", self, "sequence")
        _within("data", self, "heldout", low=0, high=0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, its schedule and the clipping before it."""

    name: Literal["adamw", "lion", "muon"] = "adamw"
    """Rule of the update. `muon` steps hidden matrices, and everything else by AdamW at the same learning rate."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and of the second moment; of Lion, of the interpolation and of the momentum."""
    momentum: float = 0.95
    """Decay of Muon's momentum."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 leaves it as it is."""
    clip_per_group: dict[str, float] = field(default_factory=dict)
    """Name pattern -> largest norm of the gradients of all parameters it matches, before the global one."""
    warmup: float = 0.07
    """Share of the steps over which the learning rate rises."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Name pattern -> factor on the learning rate of the parameters it matches."""
    states: Literal["fp32", "exact", "fp8-lm", "fp8", "fp8-min"] = "fp32"
    """What moments are kept in: tiers of `octavo.optim`; `fp32` with AdamW is PyTorch's."""
    gradients: Literal["wide", "fp8"] = "wide"
    """`fp8` keeps gradients of large matrices in one byte from backward to the step; without a loss scale."""
    loss_scale: Literal["none", "constant", "dynamic"] = "none"
    """`dynamic` skips steps whose gradient overflows and halves the scale; BF16 needs none."""
    loss_scale_start: float = 256.0
    """First loss scale, a power of two."""
    loss_scale_window: int = 2000
    """Steps without an overflow after which `dynamic` doubles the scale."""

    def __post_init__(self) -> None:
        _positive("optimizer", self, "lr", "eps")
        _within("optimizer", self, "min_lr", low=0, high=1)
        _within("optimizer", self, "warmup", low=0, high=1)
        _within("optimizer", self, "weight_decay", "clip", low=0, high=math.inf)
        _positive("optimizer", self, "loss_scale_start", "loss_scale_window")
        if math.frexp(self.loss_scale_start)[0] != 0.5:
            raise ConfigError(f"optimizer.loss_scale_start: {self.loss_scale_start} is no power of two.")
        _positive_values("optimizer.clip_per_group", self.clip_per_group)
        _positive_values("optimizer.lr_factors", self.lr_factors, or_zero=True)
        if not all(0 <= beta < 1 for beta in (*self.betas, self.momentum)):
            told = f"{list(self.betas)}, and optimizer.momentum, {self.momentum},"
            raise ConfigError(f"optimizer.betas: {told} must all be at least 0 and below 1.")
        if self.gradients == "fp8" and (self.loss_scale != "none" or self.clip_per_group):
            raise ConfigError(
                "optimizer.gradients: 'fp8' goes neither with a loss scale nor with clip_per_group: both change them"
                " between backward and the step, where these are codes. Take 'wide'; or leave both out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """What is trained for how long, where, and what is kept."""

    steps: int = 300
    """Updates of the weights."""
    batch: int = 16
    """Sequences an update sees."""
    accumulate: int = 1
    """Parts that a batch is split into, to fit in memory; their gradients are averaged."""
    recipe: str = "folded"
    """FP8 recipe: a name that `octavo recipes` lists, or the path of a recipe file."""
    weights: Literal["fp32", "bf16", "fp8"] = "fp32"
    """What weights are stored in: FP32 under autocast; BF16; or `fp8`, BF16 with the FP8 layers' in one byte.

    With the last two the optimizer is always that of `octavo.optim`, and keeps the master. The twin's are FP32.
    """
    scales: str = ""
    """Calibration file: the scales that the recipe `static` needs, and `delayed` may start from."""
    recalibrate_every: int = 0
    """Steps between two updates of static scales, of the largest values since, in `calibration.json`; 0: never."""
    recalibrate_above: float = 0.0
    """Share of a tensor above which saturation updates its static scale, looked at every ten steps; 0: never."""
    min_gain: float = 1.0
    """On a GPU, layers that are predicted to gain less than this stay in BF16; 0 converts them all."""
    bf16_first_steps: int = 0
    """Steps at the beginning that the FP8 model makes in BF16."""
    bf16_last_share: float = 0.0
    """Share of the steps, at the end, that the FP8 model makes in BF16."""
    twin: bool = True
    """Train the BF16 twin beside it, on the same batches from the same weights."""
    seed: int = 0
    """Seed of the weights, of the order of the batches and of stochastic rounding in the optimizer."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:INDEX`."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile a block at a time; `auto`: on with CUDA, off on the CPU."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Replay forward and backward as a CUDA graph; `auto`: on one GPU, where no other rank takes part."""
    log_every: int = 10
    """Steps between two lines of the log."""
    telemetry_every: int = 1
    """Steps between two looks at the tensors of the FP8 layers, kept in `run.sqlite`; 0 never looks."""
    histograms_every: int = 100
    """Steps between two histograms of the exponents of those tensors, and their noise; 0: none."""
    eval_every: int = 0
    """Steps between two evaluations on held-out text; 0: only at the end."""
    eval_tokens: int = 65536
    """Held-out tokens of an evaluation, at most."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    """Where a few aggregates a step are sent, too; everything is in `run.sqlite`."""
    out: Path = Path("runs/run")
    """Directory of the run."""

    def __post_init__(self) -> None:
        _positive("run", self, "steps", "batch", "accumulate", "log_every", "eval_tokens", "keep")
        _within("run", self, "min_gain", low=0, high=math.inf)
        _within("run", self, "recalibrate_every", low=0, high=2**63 - 1)
        _within("run", self, "recalibrate_above", low=0, high=1)
        or_zero = "eval_every", "checkpoint_every", "telemetry_every", "histograms_every", "seed", "bf16_first_steps"
        _within("run", self, *or_zero, low=0, high=2**63 - 1)
        _within("run", self, "bf16_last_share", low=0, high=1)
        if self.batch % self.accumulate:
            raise ConfigError(f"run.accumulate: {self.accumulate} does not divide run.batch {self.batch}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a run that torchrun started is spread over its ranks; one process alone needs none of it."""

    data: int = 1
    """Copies of the model, each sharded over `shard` ranks; a batch is split over all ranks of both."""
    shard: int = 0
    """Ranks that a copy is sharded over by FSDP2; 0: all that there are, divided by `data`, `tensor` and `pipeline`."""
    tensor: int = 1
    """Ranks that share each layer of a Llama, and its tokens, on the same part of a batch."""
    pipeline: int = 1
    """Ranks that the blocks of a Llama are split over, in stages; the parts of `run.accumulate` go through them."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] = "1f1b"
    """Order of the passes in a pipeline; all but `1f1b` have two stages a rank."""
    activations: Literal["bf16", "fp8", "stored"] = "bf16"
    """What activations are sent as between stages; `fp8` with a scale a token, `stored` as they are."""
    reduce: Literal["fp32", "bf16", "bf16-plain", "fp8-block", "fp8-lm", "two-level"] | None = None
    """How gradients are summed over the ranks that share a copy; by default `bf16` where that loses nothing."""
    gather: Literal["bf16", "stored"] = "bf16"
    """What parameters are gathered in that do not travel as FP8 codes; `stored`: as one process has them."""
    embedding: Literal["whole", "rows"] = "whole"
    """What of the token embedding is sent: `rows` that are looked up, which is less where a rank has few tokens."""
    timeout: float = 600.0
    """Seconds without progress after which all ranks stop and name the one that is missing. No step may take longer."""

    def __post_init__(self) -> None:
        _positive("parallel", self, "data", "tensor", "pipeline", "timeout")
        _within("parallel", self, "shard", low=0, high=2**31)

    @property
    def reduction(self) -> str:
        """How gradients are summed over the ranks that share a copy, whether `reduce` says it or not.

        Where parameters are gathered in BF16 gradients are computed in BF16, and summed in FP32 they lose nothing on
        their way. In a pipeline it is sums of several that travel.
        """
        if self.reduce is not None:
            return self.reduce
        return "bf16" if self.gather == "bf16" and self.pipeline == 1 else "fp32"

    @property
    def splits_model(self) -> bool:
        """Whether a rank has parts of layers, or some of them only."""
        return self.tensor > 1 or self.pipeline > 1

    @property
    def goes_backward_by_parts(self) -> bool:
        """Whether gradients of inputs and of weights are computed at separate times."""
        return self.pipeline > 1 and self.schedule.startswith("zero-bubble")

    @property
    def last(self) -> int:
        """Which rank of a pipeline has the last stage."""
        return 0 if self.schedule == "zero-bubble-v" else self.pipeline - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run."""

    model: ModelConfig
    """The shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text and how it is cut."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer, its schedule and the clipping before it."""
    run: LoopConfig = field(default_factory=LoopConfig)
    """What is trained for how long, where, and what is kept."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How a run that torchrun started is spread over its ranks."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What guardrails watch, and whether they act."""

    def __post_init__(self) -> None:
        if self.model.sequence < self.data.sequence:
            raise ConfigError(f"data.sequence: {self.data.sequence} is more than model.sequence {self.model.sequence}.")

    @property
    def tokens(self) -> int:
        """Tokens trained on, by each model."""
        return self.run.steps * self.run.batch * self.data.sequence


def assemble(*layers: tuple[str, Mapping[str, Any]]) -> RunConfig:
    """Read `(where, settings)` layers, a later one over an earlier one: a preset, then a file, then flags.

    Each layer is read on top of those before it, so that an error names the layer that brought it in.

    Raises:
        ConfigError: an unknown key, a wrong type, an impossible value; the message says which and where.
    """
    merged: dict[str, Any] = {}
    config: RunConfig | None = None
    for where, settings in layers:
        merged = _merge(merged, settings)
        config = strict.read(RunConfig, _with_defaults(merged, where), where)
    if config is None:
        raise ConfigError(f"no configuration given: name a file or a preset ({', '.join(presets())}).")
    return config


def presets() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def load_preset(name: str, *, cuda: bool) -> tuple[str, dict[str, Any]]:
    """Return a preset as a layer for `assemble`. `demo` stands for `demo-cuda` or `demo-cpu`, as `cuda` says.

    Raises:
        ConfigError: no preset has this name.
    """
    resolved = f"demo-{'cuda' if cuda else 'cpu'}" if name == "demo" else name
    if resolved not in presets():
        known = ["demo", *presets()]
        near = did_you_mean(name, known)
        raise ConfigError(f"--preset: there is no preset '{name}'.{near} Presets: {', '.join(known)}.")
    with resources.as_file(_presets() / f"{resolved}.toml") as path:
        return f"preset '{resolved}'", strict.read_file(path)


def load_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a run file as a layer for `assemble`. By default the run goes to `runs/<name of the file>`."""
    settings = strict.read_file(path)
    return str(path), _merge({"run": {"out": f"runs/{path.stem}"}}, settings)


def _presets() -> Any:
    return resources.files("octavo.train") / "presets"


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _with_defaults(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fill in what the data decides about the model: its vocabulary and its longest sequence."""
    data = strict.read(DataConfig, settings.get("data", {}), f"{where}: data")
    decided = {"vocab": _vocabulary(data.tokenizer), "sequence": data.sequence}
    return _merge({"model": decided}, settings)


def _vocabulary(tokenizer: str) -> int:
    from octavo.data.tokenizer import ByteTokenizer, load_tokenizer

    if tokenizer.endswith(".json"):
        return load_tokenizer(tokenizer).vocab
    kind, _, size = tokenizer.partition("-")
    return int(size) if kind == "bpe" and size.isdigit() else ByteTokenizer.vocab


def _positive(section: str, config: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{section}.{name}: {getattr(config, name)} is not a positive number.")


def _positive_values(where: str, values: Mapping[str, float], *, or_zero: bool = False) -> None:
    for pattern, value in values.items():
        if not 0 <= value < math.inf or (value == 0 and not or_zero):
            raise ConfigError(f"{where}.'{pattern}': {value} is not a positive number{' or 0' if or_zero else ''}.")


def _within(section: str, config: object, *names: str, low: float, high: float) -> None:
    for name in names:
        if not low <= getattr(config, name) <= high:
            raise ConfigError(f"{section}.{name}: {getattr(config, name)} is not between {low} and {high}.")
