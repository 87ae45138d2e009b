"""The configuration of a run from a preset, a file and flags, each read strictly on top of the one before.

This module does not import torch: the command line reads it for `--help`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from octavo._util import config_reader
from octavo._util.config_reader import merge, shown
from octavo._util.last_share import in_last_share
from octavo._util.recipe_names import BASE, DEFAULT, FALLBACK
from octavo.errors import ConfigError, did_you_mean
from octavo.lab.guard.config import GuardConfig
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.hugging_face import read_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text, tokenizer and split."""

    source: str = "python"
    """`python` (standard library), `python-packages` (and installed packages), `english`, or a file or folder."""
    format: Literal["text", "chat"] = "text"
    """`chat`: lines of .jsonl with `messages`; loss on answers only, whole conversations packed into sequences."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe-SIZE` for a byte-pair encoding trained on the source, or a tokenizer's .json file."""
    sequence: int = 256
    """Tokens per training sequence."""
    heldout: float = 0.05
    """Share of the documents held out for evaluation."""
    cache: Path = Path("~/.cache/octavo")
    """Cache directory for tokenized text."""

    def __post_init__(self) -> None:
        _positive("data", self, "sequence")
        _within("data", self, "heldout", low=0, high=0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, its schedule and gradient clipping."""

    name: Literal["adamw", "lion", "muon"] = "adamw"
    """Update rule. `muon` updates hidden matrices, and other parameters by AdamW at the same learning rate."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 0.1
    """Learning rate at the last step, as a share of the peak. Guides give an absolute rate, such as 1e-5: set this to
    that over `lr`; a tenth, as in Llama and Chinchilla, does not depend on the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment; for Lion, of the interpolation and the momentum."""
    momentum: float = 0.95
    """Decay of Muon's momentum."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only. 0.1 is that of Llama, GPT-3 and DeepSeek-V3 for training from nothing;
    the 0.01 to 0.02 of guides is for fine-tuning, and at a learning rate of 1e-3 decays almost nothing."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""
    clip_per_group: dict[str, float] = field(default_factory=dict)
    """Name pattern -> largest norm of the gradients of all matching parameters, applied before the global limit."""
    warmup: float = 0.07
    """Share of the steps over which the learning rate rises. Guides take 0.06 to 0.08."""
    lr_schedule: Literal["cosine", "linear", "wsd", "plateau"] = "cosine"
    """After warm-up: half a cosine or a line down to `min_lr`; `wsd`: the peak, then a line down over the last `decay`;
    `plateau`: the peak, halved whenever the held-out loss stops falling."""
    decay: float = 0.2
    """With `wsd`: share of the steps, at the end, over which the learning rate falls."""
    patience: int = 3
    """With `plateau`: evaluations (`run.eval_every`) without a loss 0.1 % lower, after which the rate is halved."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Name pattern -> factor on the learning rate of matching parameters."""
    states: Literal["fp32", "exact", "fp8-lm", "fp8", "fp8-min"] = "fp32"
    """Storage of moments: tiers of `octavo.optim`; `fp32` with AdamW is PyTorch's optimizer."""
    gradients: Literal["wide", "fp8"] = "wide"
    """`fp8` stores gradients of large matrices in one byte from backward to the step; not with a loss scale."""
    loss_scale: Literal["none", "constant", "dynamic"] = "none"
    """`dynamic` skips steps whose gradient overflows and halves the scale. Guides start with it, for FP16: BF16 has the
    range of FP32, and FP8 operands have scales of their own, so that `none` is the default."""
    loss_scale_start: float = 256.0
    """Initial loss scale, a power of two."""
    loss_scale_window: int = 2000
    """Steps without overflow after which `dynamic` doubles the scale."""

    def __post_init__(self) -> None:
        _positive("optimizer", self, "lr", "eps", "patience", "loss_scale_start", "loss_scale_window")
        _within("optimizer", self, "min_lr", "warmup", "decay", low=0, high=1)
        _within("optimizer", self, "weight_decay", "clip", low=0, high=math.inf)
        if self.lr_schedule == "wsd" and self.warmup + self.decay > 1:
            raise ConfigError(
                f"optimizer.decay: {self.decay} and optimizer.warmup {self.warmup} are more than the whole run: 'wsd'"
                " rises, stays and falls. Take less of one."
            )
        if math.frexp(self.loss_scale_start)[0] != 0.5:
            raise ConfigError(f"optimizer.loss_scale_start: {self.loss_scale_start} is not a power of two.")
        _positive_values("optimizer.clip_per_group", self.clip_per_group)
        _positive_values("optimizer.lr_factors", self.lr_factors, or_zero=True)
        if not all(0 <= beta < 1 for beta in (*self.betas, self.momentum)):
            told = f"{list(self.betas)}, and optimizer.momentum, {self.momentum},"
            raise ConfigError(f"optimizer.betas: {told} must all be at least 0 and below 1.")
        if self.gradients == "fp8" and (self.loss_scale != "none" or self.clip_per_group):
            raise ConfigError(
                "optimizer.gradients: 'fp8' does not go with optimizer.loss_scale or optimizer.clip_per_group: both"
                " change gradients between backward and the step, when they are FP8 codes. Take 'wide', or leave both"
                " out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Length, batch, precision, device and output of a run."""

    start_from: str = ""
    """Directory of the initial weights, tokenizer and shape: safetensors of a Llama, Mistral or Qwen, or an export."""
    steps: int = 300
    """Number of optimizer steps."""
    batch: int = 16
    """Sequences per step."""
    accumulate: int = 1
    """Number of parts that a batch is split into to save memory; their gradients are averaged."""
    recipe: str = DEFAULT
    """Recipe: a name listed by `octavo recipes`, or the path of a recipe file. Where a run names none: `rotated`, or
    `folded` for weights in FP8, for experts, and where no rotation divides a tensor-parallel rank's inputs."""
    defaults: Literal["octavo", "guides"] = "octavo"
    """`guides` starts a run as guides on FP8 do: `delayed` (not with `weights = "fp8"`), a dynamic loss scale (not with
    FP8 gradients, which have scales of their own), `optimizer.weight_decay` 0.01 and `optimizer.min_lr` 0.01 as
    defaults of those keys. What a file or a flag sets itself stays."""
    level: Literal[0, 1, 2, 3] = 0
    """FP8-LM's levels as defaults of other keys, each with those before it. 1: gradients and their reduction; 2: the
    optimizer's states; 3: weights, and what ranks send. What a file or a flag sets itself stays."""
    weights: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Storage of weights: FP32 under autocast; BF16; or `fp8`, BF16 with FP8 layers' weights in one byte.

    With the last two the optimizer is always one of `octavo.optim`, with master weights. The baseline's are FP32.
    """
    memory: Literal["exact", "low"] = "exact"
    """Tensors that FP8 layers save for backward: `exact`, or `low`: activations in FP8 too, gradients rounded again."""
    scales: str = ""
    """Calibration file: required by the recipe `static`, initial scales for `delayed`."""
    recalibrate_every: int = 0
    """Steps between updates of static scales from the largest values since, in `calibration.json`; 0: never."""
    recalibrate_above: float = 0.0
    """Saturated share of a tensor above which its static scale is updated, checked every ten steps; 0: never."""
    min_gain: float = 1.0
    """On a GPU, layers with a smaller predicted speedup stay in BF16; 0 converts all layers."""
    allow_reference: bool = False
    """On a GPU without FP8, or without a fast kernel for the recipe, run the reference kernels, slowly."""
    bf16_blocks: tuple[int, int] = (0, 0)
    """Numbers of blocks at the start and at the end of the FP8 model that stay in BF16."""
    bf16_first_steps: int = 0
    """Number of initial steps that the FP8 model makes in BF16."""
    last_share: float = 0.0
    """Share of the steps, at the end, that the FP8 model makes by `last_recipe`."""
    last_recipe: str = "rowwise_bf16_fprop"
    """Recipe of the last share of the steps: by default only fprop is in BF16. `bf16` for all three GEMMs."""
    baseline: bool = True
    """Train a BF16 baseline as well, on the same batches from the same initial weights."""
    seed: int = 0
    """Seed of initial weights, batch order and stochastic rounding in the optimizer."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:INDEX`."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile per block; `auto`: on with CUDA, off on the CPU."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Replay forward and backward as a CUDA graph; `auto`: on a single GPU; `on`: sharded by FSDP2 as well."""
    log_every: int = 10
    """Steps between lines of the log."""
    telemetry_every: int = 1
    """Steps between samples of FP8 tensor statistics, stored in `run.sqlite`; 0: never."""
    histograms_every: int = 100
    """Steps between histograms of the exponents and noise of those tensors; 0: never."""
    groups_every: int = 0
    """Steps between mean, variance and largest magnitude of weights and gradients per parameter group of the optimizer,
    in `run.sqlite`; 0: never. Not of parameters that ranks share; on a GPU such a step is waited for."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; 0: only at the end."""
    eval_tokens: int = 65536
    """Largest number of held-out tokens per evaluation, rounded up to a sequence."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    checkpoint_write: Literal["wait", "background"] = "wait"
    """`background`: a step waits for a copy in host memory, as large as the checkpoint, which a thread writes while
    training goes on. An error of the write ends the run in a following step."""
    keep: int = 2
    """Number of checkpoints to keep."""
    price_per_kwh: float = 0.0
    """Price of a kilowatt-hour, for the cost of the GPUs' energy in the summary and the dashboard; 0: none."""
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    """Experiment tracker that gets a few aggregates per step; `run.sqlite` has everything."""
    tracker_tensors: int = 0
    """Steps between statistics of all FP8 tensors sent to the tracker, a series each; 0: aggregates only."""
    out: Path = Path("runs/run")
    """Output directory of the run."""

    def __post_init__(self) -> None:
        _positive("run", self, "steps", "batch", "accumulate", "log_every", "eval_tokens", "keep")
        _within("run", self, "min_gain", "price_per_kwh", low=0, high=math.inf)
        every = "eval_every checkpoint_every telemetry_every histograms_every groups_every recalibrate_every"
        counts = "tracker_tensors", "seed", "bf16_first_steps"
        _within("run", self, *every.split(), *counts, low=0, high=2**63 - 1)
        _within("run", self, "recalibrate_above", "last_share", low=0, high=1)
        if self.last_share and self.weights == "fp8":
            raise ConfigError(
                "run.last_share: with run.weights = 'fp8' a weight has the format of run.recipe to the end. Take"
                " run.weights = 'bf16', or leave run.last_share at 0."
            )
        if self.batch % self.accumulate:
            raise ConfigError(f"run.accumulate: {self.accumulate} does not divide run.batch {self.batch}.")

    def is_bf16(self, step: int) -> bool:
        """Return True if the FP8 model makes `step`, counted from 0, in BF16: one of the first, which change most."""
        return 0 <= step < self.bf16_first_steps

    def is_last(self, step: int) -> bool:
        """Return True if the FP8 model makes `step`, counted from 0, by `last_recipe`, which recovers loss of FP8."""
        return in_last_share(step, self.steps, self.last_share)

    def recipe_of(self, step: int) -> str:
        """Return the recipe that the FP8 model is converted to in `step`, counted from 0."""
        return self.last_recipe if self.is_last(step) else self.recipe

    @property
    def leaves_recipe(self) -> bool:
        """Whether the FP8 model makes some steps in BF16, or by `last_recipe`."""
        return bool(self.bf16_first_steps or self.last_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Text that the models write on from a prompt during the run, which stays bit for bit as it is without."""

    every: int = 0
    """Steps between samples, and one at the end, shown by the dashboard; 0: never."""
    prompt: str = ""
    """Text to continue, or with chat data a question to answer. Empty: the first 32 tokens of the held-out text."""
    tokens: int = 64
    """Number of tokens to write."""
    temperature: float = 0.8
    """Divides the logits that tokens are drawn by, from a generator of their own seeded by `run.seed` and the step; 0:
    the likeliest token, which small models repeat for ever."""

    def __post_init__(self) -> None:
        _positive("sample", self, "tokens")
        if any("\ud800" <= each <= "\udfff" for each in self.prompt):
            raise ConfigError(f"sample.prompt: {self.prompt!a} is not text: bytes in it are not UTF-8.")
        _within("sample", self, "every", "temperature", low=0, high=2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank updates of frozen weights (LoRA)."""

    rank: int = 0
    """Rank of the updates; 0 trains all weights."""
    alpha: float = 16.0
    """Updates are multiplied by alpha / rank."""
    layers: str = "layers.*"
    """Name pattern of the linear layers with updates."""

    def __post_init__(self) -> None:
        _within("lora", self, "rank", low=0, high=2**31)
        _positive("lora", self, "alpha")
        for name in ("alpha", "layers") if self.rank == 0 else ():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"lora.{name}: has no effect while lora.rank is 0, which trains all weights.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityConfig:
    """Layers that leave FP8 during a run because it costs the loss most there, and come back."""

    every: int = 0
    """Steps between measurements, each a forward and backward in eager mode; 0: never."""
    share: float = 0.1
    """Largest share of the FLOPs of FP8 layers that measurements move to BF16."""
    above: float = 2.0
    """A layer moves if FP8 costs more than this many times the mean per FLOP; back below two thirds of that."""

    def __post_init__(self) -> None:
        _within("sensitivity", self, "every", low=0, high=2**63 - 1)
        _within("sensitivity", self, "share", low=0, high=0.9)
        _within("sensitivity", self, "above", low=1, high=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallelism of a run started by torchrun; unused in a single process."""

    data: int = 1
    """Replicas of the model, each sharded over `shard` ranks; a batch is split over all ranks of both."""
    shard: int = 0
    """Ranks that a replica is sharded over by FSDP2, with other sequences each; 0: all ranks divided by `data`,
    `context`, `tensor` and `pipeline`."""
    context: int = 1
    """Ranks that share the tokens of each sequence (`octavo.distributed.context_parallel`), for a Llama on sequences
    longer than a rank's memory; a replica is sharded over them too."""
    attention: Literal["auto", "ring", "gather"] = "auto"
    """Attention with `context`: PyTorch's `ring`, on GPUs only, or each rank gathers keys and values; `auto`: `ring` on
    GPUs."""
    tensor: int = 1
    """Tensor-parallel ranks, which share each layer of a Llama and the tokens of the same part of a batch."""
    pipeline: int = 1
    """Pipeline ranks, over which the blocks of a Llama are split; `run.accumulate` is the number of micro-batches."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] = "1f1b"
    """Pipeline schedule; all but `1f1b` have two stages per rank."""
    activations: Literal["bf16", "fp8", "stored"] = "bf16"
    """Format of activations sent between stages; `fp8` with a scale per token, `stored` unchanged."""
    reduce: Literal["fp32", "bf16", "bf16-plain", "fp8-block", "fp8-lm", "two-level"] | None = None
    """Gradient reduction over the ranks that share a replica; by default `bf16` where that loses nothing."""
    zero: Literal["fsdp", "greedy"] = "fsdp"
    """Optimizer states: `fsdp`: sharded with the weights; `greedy`: each whole on one rank, and weights on every rank
    (`octavo.distributed.GreedyZeRO`; `data` is the number of ranks)."""
    gather: Literal["bf16", "int8", "stored"] = "bf16"
    """Format in which parameters that are not FP8 codes are gathered; `stored`: as in a single process; `int8`: as
    `bf16`, and weights that fprop reads in INT8 as these codes, which rounds dgrad's twice."""
    reshard: bool = True
    """Free gathered weights after forward and gather them again for backward. `false` keeps them: faster, with less
    communication, but a block in FP8 then takes one byte per weight until its backward. Pipelines always keep them."""
    embedding: Literal["whole", "rows"] = "whole"
    """Gather of the token embedding: `rows` sends only the looked-up rows, which is less for few tokens."""
    timeout: float = 600.0
    """Seconds without progress after which all ranks stop and name the missing one; must exceed the longest step."""

    def __post_init__(self) -> None:
        _positive("parallel", self, "data", "context", "tensor", "pipeline", "timeout")
        _within("parallel", self, "shard", low=0, high=2**31)

    def sizes(self, ranks: int) -> dict[str, int]:
        """Return the size of each dimension of the mesh of a run on `ranks` ranks, from the outermost.

        Ranks of `context` are neighbours in the dimension `shard`.
        """
        shard = self.shard or max(ranks // (self.data * self.context * self.tensor * self.pipeline), 1)
        return {"pipeline": self.pipeline, "data": self.data, "shard": shard * self.context, "tensor": self.tensor}

    @property
    def reduction(self) -> str:
        """Gradient reduction over the ranks that share a replica, with its default.

        If parameters are gathered in BF16, gradients are computed in BF16, and a reduction in BF16 loses nothing. In a
        pipeline, sums of several gradients are sent, so that it would.
        """
        if self.reduce is not None:
            return self.reduce
        return "bf16" if self.gather != "stored" and self.pipeline == 1 else "fp32"

    @property
    def splits_model(self) -> bool:
        """True if a rank has parts of layers, only some layers, or parts of sequences."""
        return self.tensor > 1 or self.pipeline > 1 or self.context > 1

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed at separate times."""
        return self.pipeline > 1 and self.schedule.startswith("zero-bubble")

    @property
    def last(self) -> int:
        """Pipeline rank of the last stage."""
        return 0 if self.schedule == "zero-bubble-v" else self.pipeline - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The complete configuration of a run."""

    model: ModelConfig
    """The shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text, tokenizer and split."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer, its schedule and gradient clipping."""
    run: LoopConfig = field(default_factory=LoopConfig)
    """Length, batch, precision, device and output."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank updates of frozen weights, in place of training all."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallelism over ranks started by torchrun."""
    sensitivity: SensitivityConfig = field(default_factory=SensitivityConfig)
    """Layers that leave FP8 where it costs most."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Limits and mode of the guardrails."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text that the models write during the run."""

    def __post_init__(self) -> None:
        if self.model.sequence < self.data.sequence:
            raise ConfigError(f"data.sequence: {self.data.sequence} exceeds model.sequence {self.model.sequence}.")
        if self.optimizer.lr_schedule == "plateau" and not self.run.eval_every:
            raise ConfigError(
                "optimizer.lr_schedule: 'plateau' looks at the held-out loss: set run.eval_every to the steps between"
                " evaluations, some hundred in a run of thousands."
            )
        if self.data.format == "chat" and self.model.documents != "separate":
            raise ConfigError("data.format: 'chat' needs model.documents 'separate', its default.")
        if self.sensitivity.every and self.run.weights == "fp8":
            raise ConfigError(
                "sensitivity.every: with run.weights = 'fp8' a weight has the format of its recipe to the end. Take"
                " run.weights = 'bf16', or leave sensitivity.every at 0."
            )
        if self.sample.every and self.data.format == "chat" and not self.sample.prompt:
            raise ConfigError(
                "sample.prompt: is empty, and chat data need a question. Set one, or leave out sample.every."
            )
        if self.sample.every and (self.parallel.pipeline > 1 or self.parallel.context > 1):
            raise ConfigError(
                "sample.every: models split over parallel.pipeline or parallel.context write no text. Leave it at 0;"
                " `octavo eval` and an export take their checkpoints."
            )
        if self.run.start_from and self.model.architecture != "llama":
            raise ConfigError("run.start_from: needs model.architecture 'llama'.")

    @property
    def separates_text(self) -> bool:
        """True if documents of text are packed into sequences, and attention does not leave them."""
        return self.model.documents == "separate" and self.data.format == "text"

    @property
    def tokens(self) -> int:
        """Number of training tokens per model."""
        return self.run.steps * self.run.batch * self.data.sequence

    def tokens_per_pass(self, parts: int = 1) -> int:
        """Return the number of tokens of one forward pass, of batches that `parts` ranks share."""
        return self.run.batch // (self.run.accumulate * parts) * self.data.sequence

    def with_run(self, **changes: Any) -> RunConfig:
        """Return the configuration with changes to its section `run`."""
        return replace(self, run=replace(self.run, **changes))


def assemble(*layers: tuple[str, Mapping[str, Any]]) -> RunConfig:
    """Merge `(where, settings)` layers, later over earlier: a preset, then a file, then flags.

    Each layer is validated on top of those before it, so that an error names the layer that caused it.

    Raises:
        ConfigError: unknown key, wrong type or impossible value; the message says which and where.
    """
    merged: dict[str, Any] = {}
    config: RunConfig | None = None
    for where, settings in layers:
        before, merged = merged, merge(merged, settings)
        try:
            config = _with_recipe(config_reader.read(RunConfig, _with_defaults(merged, where), where), merged)
        except ConfigError as error:
            raise ConfigError(f"{error}{_set_by(merged, str(error))}") from error
        _refuse_without_effect(before, config, where)
    if config is None:
        raise ConfigError(f"no configuration given: name a file or a preset ({', '.join(presets())}).")
    return config


def presets() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def load_preset(name: str, *, cuda: bool) -> tuple[str, dict[str, Any]]:
    """Return a preset as a layer for `assemble`. `demo` is `demo-cuda` or `demo-cpu`, depending on `cuda`.

    Raises:
        ConfigError: no preset has this name.
    """
    resolved = f"demo-{'cuda' if cuda else 'cpu'}" if name == "demo" else name
    if resolved not in presets():
        known = ["demo", *presets()]
        near = did_you_mean(name, known)
        raise ConfigError(f"--preset: there is no preset '{name}'.{near} Presets: {', '.join(known)}.")
    with resources.as_file(_presets() / f"{resolved}.toml") as path:
        return f"preset '{resolved}'", config_reader.read_file(path)


def load_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a run file as a layer for `assemble`. The default output directory is `runs/<name of the file>`."""
    settings = config_reader.read_file(path)
    if "model_type" in settings and "model" not in settings:
        raise ConfigError(
            f"{path}: is a Hugging Face config, not a run file. `octavo plan`, `octavo pilot` and `octavo doctor` take"
            f" it; `octavo train --from {path.parent}` trains a Llama, Mistral or Qwen from the weights beside it."
        )
    return str(path), merge({"run": {"out": f"runs/{path.stem}"}}, settings)


def _presets() -> Any:
    return resources.files("octavo.lab.train") / "presets"


LEVELS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"run": {"weights": "bf16"}, "optimizer": {"gradients": "fp8"}, "parallel": {"reduce": "fp8-lm"}},
    2: {"optimizer": {"states": "fp8-lm"}},
    3: {"run": {"weights": "fp8"}, "parallel": {"activations": "fp8"}},
}
"""Settings that each level of FP8-LM (arXiv 2310.18313, section 2) adds: section -> key -> value."""


GUIDES: dict[str, dict[str, Any]] = {
    "run": {"recipe": "delayed"},
    "optimizer": {"loss_scale": "dynamic", "weight_decay": 0.01, "min_lr": 0.01},
}
"""Initial settings in guides on FP8 training, where Octavo's defaults differ: section -> key -> value."""


def _with_defaults(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fill in the keys of `run.level` and `run.defaults`, and those of the model that data or `start_from` decide."""
    for section in fields(RunConfig):
        if not isinstance(value := settings.get(section.name, {}), Mapping):
            raise ConfigError(f"{where}: {section.name}: expected a table of settings, got {shown(value)}.")
    run = settings.get("run", {})
    level, defaults = run.get("level", 0), run.get("defaults")
    for each in sorted((each for each in LEVELS if each <= level), reverse=True) if isinstance(level, int) else ():
        settings = merge(LEVELS[each], settings)
    settings = merge(_of_guides(settings), settings) if defaults == "guides" else settings
    settings = _started(settings, where)
    data = config_reader.read(DataConfig, settings.get("data", {}), f"{where}: data")
    documents = "separate" if data.format == "chat" else "joined"
    decided: dict[str, Any] = {"sequence": data.sequence, "documents": documents}
    if "vocab" not in settings.get("model", {}):  # that of a complete configuration needs the tokenizer no longer
        decided["vocab"] = _vocabulary(data.tokenizer)
    return merge({"model": decided}, settings)


def _of_guides(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return `GUIDES` for these settings, without the keys that one byte per gradient or weight rules out.

    FP8 gradients have a scale per tensor, which does what a loss scale is for: FP8-LM (section 2.1) has it in its
    place. FP8 weights need scales that their codes can keep for a step, so the recipe stays Octavo's.
    """
    left_out = set()
    if settings.get("optimizer", {}).get("gradients") == "fp8":
        left_out.add(("optimizer", "loss_scale"))
    if settings.get("run", {}).get("weights") == "fp8":
        left_out.add(("run", "recipe"))
    return {
        section: {key: value for key, value in values.items() if (section, key) not in left_out}
        for section, values in GUIDES.items()
    }


def _with_recipe(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the recipe of a run that names none."""
    run = settings.get("run", {})
    if "recipe" in run or config.run.recipe != DEFAULT:  # `run.defaults` has a recipe
        return config
    if run.keys() >= _WRITTEN:
        return config.with_run(recipe=BASE)
    return config.with_run(recipe=FALLBACK) if _reason_against_default(config) else config


_WRITTEN = {"steps", "batch", "accumulate", "weights", "seed", "device", "compile", "out"}
"""Keys of the section `run` that are together in a configuration that a run has written, and in no other."""


def reason_for_fallback(config: RunConfig) -> str:
    """Return why a run by `FALLBACK` has not the default recipe; empty if it could have it."""
    reason = _reason_against_default(config) if config.run.recipe == FALLBACK else ""
    return f"recipe '{FALLBACK}' in place of the default, '{DEFAULT}': {reason}" if reason else ""


def _reason_against_default(config: RunConfig) -> str:
    """Return why the default recipe would be refused, in training or by an export; empty if it is not."""
    model, ranks = config.model, config.parallel.tensor
    if config.run.weights == "fp8":
        return "weights stored in FP8 have no INT8 codes"
    if model.architecture == "moe":
        return "inference engines rotate the inputs of linear layers, not of experts"
    if ranks == 1:
        return ""
    from octavo.numerics import SMALLEST_ROTATION, is_rotatable

    for inputs in (model.heads * model.head_dim, model.ffn_dim):  # of the layers whose inputs ranks share
        if is_rotatable(inputs) and not is_rotatable(inputs // ranks):
            return f"no rotation by {SMALLEST_ROTATION} or more divides the {inputs // ranks} inputs of a rank"
    return ""


def _set_by(settings: Mapping[str, Any], message: str) -> str:
    """Return which keys in a message `run.level` or `run.defaults` sets, so that a user who did not knows why."""
    run = settings.get("run")
    level, defaults = (run.get("level"), run.get("defaults")) if isinstance(run, Mapping) else (None, None)
    levels = [(f"run.level = {level}", LEVELS[each]) for each in LEVELS if isinstance(level, int) and each <= level]
    said = []
    for name, sets in [*levels, *([("run.defaults = 'guides'", GUIDES)] if defaults == "guides" else [])]:
        keys = [(section, key) for section, values in sets.items() for key in values]
        said += [
            f"{section}.{key} is set by {name}"
            for section, key in keys
            if f"{section}.{key}" in message and key not in settings.get(section, {})
        ]
    return f" ({'; '.join(said)}; set it yourself to change it.)" if said else ""


def _refuse_without_effect(before: Mapping[str, Any], config: RunConfig, where: str) -> None:
    """Refuse a new level, or new defaults, of which all keys are set: as in the stored configuration of a run."""
    known, run = before.get("run", {}), config.run
    levels = [LEVELS[each] for each in LEVELS if known.get("level", 0) < each <= run.level]
    guides = [GUIDES] if run.defaults == "guides" != known.get("defaults") else []
    for name, value, sets in (("level", run.level, levels), ("defaults", run.defaults, guides)):
        keys = [(section, key) for each in sets for section, settings in each.items() for key in settings]
        if keys and all(key in before.get(section, {}) for section, key in keys):
            named = ", ".join(f"{section}.{key}" for section, key in keys)
            raise ConfigError(
                f"{where}: run.{name}: {value!r} has no effect: the configuration before sets {named} itself. Set these"
                " keys instead."
            )


def _started(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the settings with the shape and the tokenizer of the weights that a run starts from, if it does.

    They replace those given: no others fit. A complete configuration, that of a run, needs the directory no longer.
    """
    given = settings.get("run", {}).get("start_from")
    if not given or not isinstance(given, str):
        return settings
    directory = Path(given).expanduser()
    is_complete = settings.get("model", {}).keys() >= {"vocab", "dim", "layers", "heads"}
    if is_complete and not (directory / "config.json").exists():
        return settings
    shape = read_settings(directory)
    tokenizer, named = directory / "tokenizer.json", settings.get("data", {}).get("tokenizer", "")
    if not tokenizer.is_file() and not str(named).endswith(".json"):
        raise ConfigError(
            f"{where}: {directory}: has no tokenizer.json, and its weights know the ids of no other tokenizer. Save one"
            " there (transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or set data.tokenizer."
        )
    own = {"data": {"tokenizer": str(tokenizer)}} if tokenizer.is_file() else {}
    return merge(settings, {"model": shape, **own})


def _vocabulary(tokenizer: str) -> int:
    from octavo.lab.data.tokenizer import ByteTokenizer, load_tokenizer

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
