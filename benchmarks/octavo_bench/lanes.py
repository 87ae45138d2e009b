"""Packed training runs: each arm of a study is one model whose whole step is captured once and replayed for every seed.

A small model's step is a few milliseconds of small kernels, so that a run can afford neither Python nor compilation. A
`Lane` keeps model, optimizer, text and order of windows on the device. A step reads its batch and learning rate there
by a step counter, so that a replay needs nothing from the host. Another seed overwrites weights, moments and order in
place. Lanes replay concurrently, each on its own stream with its own memory; those of a large model replay one by one
per GPU, and share a stream and its memory.

Shapes: B sequences of a batch, T tokens of a sequence, S held-out sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import recipes
from octavo._util.collector import no_collection
from octavo.conversion import Policy, convert, disabled, enable
from octavo.conversion.policy import DEFAULTS, SAVED
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.data.loader import permutation
from octavo.lab.models import build, count_parameters
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.moe import MoE
from octavo.lab.train.config import LoopConfig
from octavo.lab.train.setup import cast_weights
from octavo.nn import Linear
from octavo.nn.lora import add_lora
from octavo.nn.scaling_state import ScalingState
from octavo.numerics import block_for
from octavo.optim import AdamW, states_named
from octavo.recipes import OPERANDS, Recipe
from octavo_bench.installed_text import InstalledText
from octavo_bench.kind import known

BF16 = "bf16"
CONTROL = "bf16 + 1 ulp"
"""BF16 with every initial weight moved by one unit in the last place: the effect of chaos alone on a loss."""
ULP_SEED = 2**20
"""Added to a run's seed for the directions of that move."""
BASE_LR, RANK = 2e-3, 8
"""Peak learning rate of the base model of a fine-tuning, and rank of the updates of LoRA."""
FEW = 64
"""One in so many trained weights is moved in the control of a fine-tuning: an ulp of each of a trained model's weights
would itself raise its loss, as a fiftieth of E4M3's variance."""
UNTRAINED = -100
"""Target without a loss: in a fine-tuning those of the first half of a window, the prompt."""
WARM = 3
"""Uncaptured steps before a capture, which compile, autotune, and create the optimizer's state."""


@cache  # tables ask 200 times for those of a dozen models
def _parameters_of(model: ModelConfig) -> int:
    with torch.device("meta"):
        return count_parameters(build(model, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A size of the ladder: the model and its training settings."""

    model: ModelConfig
    batch: int
    """Sequences per step."""
    lr: float
    """Peak learning rate: reached after `warmup` of the steps, then linear to 0."""
    tokens_per_parameter: float = 20.0
    """Training tokens per active parameter."""
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices, decoupled."""
    clip: float = 1.0
    """Maximum norm of the gradient."""
    together: bool = True
    """Whether the arms run concurrently on one GPU. An arm of a large model fills a GPU: arms run one by one per GPU,
    and concurrently on several."""
    branch: float = 0.0
    """Share of the steps made by BF16 for all arms, which start from its weights and moments."""
    outliers: float = 1.0
    """Factor of the outliers in the initial weights, see `add_outliers`; 1: none."""
    tuned: Literal["", "all weights", "LoRA"] = ""
    """What a fine-tuning trains, of a base model with BF16 weights; empty: no fine-tuning."""

    @property
    def base(self) -> Training:
        """The training of the base model of a fine-tuning."""
        return replace(self, tuned="", lr=BASE_LR, tokens_per_parameter=2.5 * self.tokens_per_parameter)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return _parameters_of(self.model)

    @property
    def active(self) -> int:
        """Number of parameters used per token: all but those of experts that it is not routed to."""
        own = self.model
        idle = own.experts - own.experts_per_token if own.architecture == "moe" else 0
        return self.parameters - 3 * own.layers * idle * own.dim * own.ffn_dim

    @property
    def steps(self) -> int:
        """Number of steps: the tokens of `tokens_per_parameter`, in whole batches."""
        return max(1, round(self.tokens_per_parameter * self.active / (self.batch * self.model.sequence)))

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return self.steps * self.batch * self.model.sequence

    @property
    def first(self) -> int:
        """First step made by each arm itself."""
        return round(self.branch * self.steps)

    def of_steps(self, steps: int) -> Training:
        """Return this training shortened to a number of steps."""
        tokens = steps * self.batch * self.model.sequence
        return replace(self, tokens_per_parameter=tokens / self.active)

    def rates(self) -> Tensor:
        """Return the learning rate of every step, FP32: linear up to the peak, then linear to 0 after the last step."""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = max(1, round(self.warmup * self.steps))
        falling = (self.steps - step) / max(1, self.steps - rising)
        return (self.lr * torch.minimum((step + 1) / rising, falling)).float()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A BF16 run at a step, which every arm of a block continues."""

    weights: list[Tensor]
    buffers: dict[str, Tensor]
    moments: list[dict[str, Tensor]]
    losses: Tensor
    at: Tensor


class GraphMemory:
    """Stream and memory pool of graphs. Lanes that share one use the same memory, and must not replay concurrently.

    PyTorch's allocator reuses memory only within one pool and one stream. Warm-up steps allocate from the pool as well:
    outside it they would need the same memory a second time. Replays of graphs captured before overwrite what a warm-up
    leaves there: it may only be what every run resets, such as moments.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.MemPool()
        self.handle: Any = self.pool.id
        """Pool id for `torch.cuda.graph`."""

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate from the pool without a capture, in the calling thread only; backward runs in that thread too."""
        with torch.cuda.use_mem_pool(self.pool), torch.autograd.set_multithreading_enabled(False):
            yield


class Lane:
    """One arm: `start` a seed, `step` to its end, then read `losses` and `heldout`.

    Args:
        arm: `BF16`, `CONTROL`, or a recipe.
        training: the size; may be replaced later by one that differs only in rates, branch and outliers.
        text: the text, shared by lanes if it is already on the device.
        device: device of the lane.
        compiled: compile every block.
        memory: memory of the graphs, its own by default; on a GPU only.
    """

    def __init__(
        self,
        arm: str,
        training: Training,
        text: InstalledText,
        device: torch.device,
        *,
        compiled: bool = False,
        memory: GraphMemory | None = None,
    ) -> None:
        self.arm, self.training, self.device = arm, training, device
        self._memory = GraphMemory(device) if memory is None and device.type == "cuda" else memory
        self.stream = self._memory.stream if self._memory else None
        self.model = _model_of(training).to(device)
        self.base: Mapping[str, Tensor] | None = None
        """Weights that a fine-tuning starts from; None: the initial ones of a seed."""
        self._answers = training.model.sequence // 2 if training.tuned else 0
        self._buffers = {name: (own, own.clone()) for name, own in self.model.named_buffers()}
        self._schedule = schedule_of(arm, training.steps)
        self._recipe: Recipe | None = None
        self._scales: list[ScalingState] = []  # a graph reads those of its recipe, even after the model has another
        if arm not in (BF16, CONTROL):
            with self._streamed():  # the lane's GPU is the current one, as in every step
                self._convert(recipe_of(arm))
        self._parameters = dict(self.model.named_parameters())
        self._updates = {name: p.detach().clone() for name, p in self._parameters.items() if ".lora." in name}
        self._make_optimizer()
        self._make_buffers(text)
        if compiled:
            for block in self.model.get_submodule("layers").children():
                block.compile(fullgraph=True)
        self._graphs: dict[str, Callable[[], None]] = {}
        self._prepare()

    def _make_optimizer(self) -> None:
        own, named = self.training, [(name, p) for name, p in self._parameters.items() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": own.weight_decay},
            {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]  # of LoRA's updates all are matrices
        self._lr = torch.zeros((), device=self.device)
        states = states_of(self.arm) or ("fp32" if own.tuned else None)  # BF16 weights: with the bits of an FP32 master
        self.optimizer: torch.optim.Optimizer
        if states is None:
            self.optimizer = torch.optim.AdamW(groups, lr=self._lr, betas=own.betas, fused=True, capturable=True)
        else:
            self.optimizer = AdamW(groups, lr=self._lr, betas=own.betas, states=states, skip_nonfinite=False)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr  # a step writes it

    def _make_buffers(self, text: InstalledText) -> None:
        own, device = self.training, self.device
        sequence = own.model.sequence
        self._text = text.train.to(device)
        self._windows = (len(self._text) - 1) // sequence
        self._offsets = torch.arange(sequence + 1, device=device)
        self._order = torch.zeros(own.steps, own.batch, dtype=torch.int64, device=device)
        self._rates = torch.zeros(own.steps, device=device)
        self._losses = torch.zeros(own.steps, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        windows = {name: ids.unfold(0, sequence + 1, sequence) for name, ids in text.heldout.items()}
        self._languages = [name for name, ids in windows.items() for _ in range(len(ids))]
        heldout = torch.cat([*windows.values()])
        short = -len(heldout) % own.batch
        self._heldout = torch.cat([heldout, heldout[:1].expand(short, -1)]).to(device)
        self._scores = torch.zeros(len(self._heldout), dtype=torch.float32, device=device)

    def _prepare(self) -> None:
        """Warm up and capture the step and the evaluation; for FP8 arms also the evaluation in BF16.

        An arm that ends with another recipe has both for each: `heldout` by the last, `heldout_fp8` by the first.
        """
        if self.stream is not None:
            torch.cuda.synchronize(self.device)  # buffers were filled on another stream
        self.start(0)
        own, last = self._recipe, self._schedule.last_recipe if self._schedule.last_share else None
        with self._streamed():
            self._capture("step", own, self._step, WARM)
            self._capture("heldout_fp8" if last else "heldout", own, self._evaluate, 1)
            if own is not None:
                self._capture("heldout_bf16", own, self._in_bf16(self._evaluate), 1)
            if last:
                ending = recipes.load(last)
                self._capture("step_last", ending, self._step, WARM)
                self._capture("heldout", ending, self._evaluate, 1)

    def _convert(self, recipe: Recipe) -> None:
        convert_by(self.model, self.arm, recipe, self.training.batch * self.training.model.sequence)
        enable(self.model, not is_disabled(self.arm))
        self._recipe = recipe
        self._scales += [stored for m in self.model.modules() if (stored := vars(m).get("scaling_state")) is not None]

    def _by(self, recipe: Recipe | None, work: Callable[[], None]) -> Callable[[], None]:
        """Return work by a recipe, to which the model is converted first unless it has it."""

        def by_recipe() -> None:
            if recipe is not None and recipe is not self._recipe:
                self._convert(recipe)
            work()

        return by_recipe

    def _streamed(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _in_bf16(self, work: Callable[[], None]) -> Callable[[], None]:
        def in_bf16() -> None:
            with disabled(self.model):
                work()

        return in_bf16

    def _capture(self, name: str, recipe: Recipe | None, work: Callable[[], None], warm_up: int) -> None:
        memory = self._memory
        if memory is None:
            self._graphs[name] = self._by(recipe, work)
            return
        self._by(recipe, lambda: None)()
        # A tier keeps tables of addresses, which replays read: not where graphs captured before have intermediates.
        with memory.allocating() if states_of(self.arm) is None else nullcontext():
            for _ in range(warm_up):
                self._at.zero_()  # a training may have fewer steps than the warm-up
                work()
                self._clear()
        self._at.zero_()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # On the lane's stream: BLAS workspaces are per stream, and concurrent replays would overwrite a shared one.
        with (
            no_collection(),
            torch.cuda.graph(graph, pool=memory.handle, stream=memory.stream, capture_error_mode="thread_local"),
        ):
            work()
        self._graphs[name] = graph.replay
        self._clear()  # each replay rewrites its gradients, so the next graph may reuse their memory

    def _step(self) -> None:
        starts_B = self._order.index_select(0, self._at).squeeze(0)
        inputs_BT, targets_BT = _split(self._text[starts_B[:, None] + self._offsets])
        if self._answers:
            targets_BT[:, : self._answers] = UNTRAINED
        self._lr.copy_(self._rates.index_select(0, self._at).squeeze(0))
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(inputs_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters.values(), self.training.clip, foreach=True)
        self.optimizer.step()
        if isinstance(self.model, MoE):
            self.model.balance(lambda counts_X: counts_X)
        self._losses.index_copy_(0, self._at, loss.detach().float().reshape(1))
        self._at += 1
        if self.stream is None:
            self._clear()  # a graph overwrites its gradients

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Score the held-out batch at the counter. Eager, so that evaluation compiles nothing."""
        self.model.eval()
        rows_B = self._at * self.training.batch + torch.arange(self.training.batch, device=self.device)
        inputs_BT, targets_BT = _split(self._heldout.index_select(0, rows_B))
        with torch.compiler.set_stance("force_eager"), torch.autocast(self.device.type, torch.bfloat16):
            logits_BTV = self.model(inputs_BT)
        losses_BT = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
        self._scores.index_copy_(0, rows_B, losses_BT.view_as(targets_BT)[:, self._answers :].mean(1))
        self._at += 1
        self.model.train()

    def start(self, seed: int, snapshot: Snapshot | None = None) -> None:
        """Start the run of a seed: initial weights, order of windows, zero moments.

        Args:
            snapshot: a run of this seed to continue instead.
        """
        with torch.no_grad(), self._streamed():
            self._order.copy_(order(self.training, self._windows, seed))
            self._rates.copy_(self.training.rates())
            self._restore(snapshot) if snapshot else self._reset(seed)
            if self.arm == CONTROL:
                trained = [p for p in self._parameters.values() if p.requires_grad]
                one_in = FEW if self.training.tuned else 1
                move(trained, torch.Generator().manual_seed(ULP_SEED + seed), one_in)
        self._clear() if self.stream is None else None

    def _reset(self, seed: int) -> None:
        weights = self.base or initial_weights(self.training.model, seed, self.training.outliers)
        for name, weight in {**weights, **self._updates}.items():
            self._parameters[name].copy_(weight)
        for buffer, initial in self._buffers.values():
            buffer.copy_(initial)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()  # as before the first step: counts, moments, and a tier's codes and scales
        self._losses.zero_()
        self._at.zero_()

    def _restore(self, snapshot: Snapshot) -> None:
        torch._foreach_copy_([*self._parameters.values()], snapshot.weights)
        for name, value in snapshot.buffers.items():
            self._buffers[name][0].copy_(value)
        moved = [{name: value.to(self.device) for name, value in own.items()} for own in snapshot.moments]
        known = dict(zip(self._parameters.values(), moved, strict=True))
        if isinstance(self.optimizer, AdamW):
            _import_in_place(self.optimizer, known)
        else:
            for parameter, moments in known.items():
                state = self.optimizer.state[parameter]
                for name, value in moments.items():
                    state[name].copy_(value) if name in state else state.__setitem__(name, value.clone())
        self._losses.copy_(snapshot.losses)
        self._at.copy_(snapshot.at)

    def snapshot(self) -> Snapshot:
        """Return a copy of the run's current state; waits for the stream of the lane."""
        with self._streamed():
            own = Snapshot(
                [p.detach().clone() for p in self._parameters.values()],
                {name: buffer.clone() for name, (buffer, _) in self._buffers.items()},
                [{k: v.clone() for k, v in self.optimizer.state[p].items()} for p in self._parameters.values()],
                self._losses.clone(),
                self._at.clone(),
            )
        _wait([self])
        return own

    def step(self, at: int) -> None:
        """Make the next step, number `at` of the run, on the stream of the lane."""
        with self._streamed():
            self._graphs["step_last" if self._schedule.is_last(at) else "step"]()

    @property
    def losses(self) -> Tensor:
        """Training loss of every step, in nats per token; waits for the stream of the lane."""
        with self._streamed():
            return self._losses.double().cpu()

    def heldout(self, name: str = "heldout") -> dict[str, float]:
        """Return the held-out loss per language in nats per token.

        Args:
            name: `heldout`: computed as in the last step; `heldout_bf16`: in BF16 with the same weights; `heldout_fp8`:
                by the initial recipe, if the run ends with another.
        """
        self.score(name)
        return self.scores()

    def score(self, name: str) -> None:
        """Score the held-out text on the stream of the lane."""
        with self._streamed():
            self._at.zero_()
            for _ in range(len(self._heldout) // self.training.batch):
                self._graphs[name]()

    def scores(self) -> dict[str, float]:
        """Return the last scores per language, in nats per token; waits for the stream of the lane."""
        with self._streamed():
            scores = self._scores.double().cpu()
        return mean_by(self._languages, scores.tolist())

    @property
    def evaluations(self) -> list[str]:
        """Names accepted by `heldout`."""
        return [name for name in self._graphs if name.startswith("heldout")]

    @property
    def rotations(self) -> list[int]:
        """Sizes of the blocks by which linear layers are rotated, if they are not that of the recipe."""
        operands = [(m.in_features, m.recipe.fprop.input) for m in self.model.modules() if isinstance(m, Linear)]
        blocks = {abs(block_for(features, operand.signed_rotation)) for features, operand in operands}
        return sorted(blocks) if blocks - {operand.rotation or 1 for _, operand in operands} else []

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights by name; waits for the stream of the lane."""
        _wait([self])
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def take_weights(self, source: Lane) -> None:
        """Overwrite the weights with those of a lane of the same size, whose stream must be synchronised."""
        with torch.no_grad(), self._streamed():
            torch._foreach_copy_([*self._parameters.values()], [*source._parameters.values()])
            for name, (buffer, _) in self._buffers.items():
                buffer.copy_(source._buffers[name][0])


def _model_of(training: Training) -> nn.Module:
    """Return the model of a size; of a fine-tuning with BF16 weights, frozen ones beside the updates of LoRA."""
    model = build(training.model, 0)
    cast_weights("bf16" if training.tuned else "fp32", model)
    if training.tuned == "LoRA":
        add_lora(model, RANK, alpha=2.0 * RANK, layers="layers.*")
    return model


def _import_in_place(optimizer: AdamW, moments: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Round FP32 moments of `torch.optim.AdamW` to the tiers of an optimizer, at the addresses used by graphs.

    Rounds to nearest, as `import_state_dict` does, which replaces the state tensors.
    """
    numbers = {entry.parameter: entry.number for entry in optimizer.entries()}
    held = {parameter: dict(optimizer.state[parameter]) for parameter in moments}
    state = {numbers[parameter]: own for parameter, own in moments.items()}
    optimizer.import_state_dict({**optimizer.state_dict(), "state": state})
    for parameter, tensors in held.items():
        for name, tensor in tensors.items():
            tensor.copy_(optimizer.state[parameter][name])
        optimizer.state[parameter] = tensors or optimizer.state[parameter]  # none before the first step


def _split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B,T) of windows (B,T+1)."""
    ids = ids.long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mean_by(labels: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the values of each label."""
    groups: dict[str, list[float]] = {}
    for label, value in zip(labels, values, strict=False):  # the padding of the last batch has no label
        groups.setdefault(label, []).append(value)
    return {label: sum(group) / len(group) for label, group in groups.items()}


@lru_cache(maxsize=1)  # all lanes of a seed start from the same ones
def initial_weights(config: ModelConfig, seed: int, outliers: float = 1.0) -> dict[str, Tensor]:
    """Return the initial weights of a seed by name, with outliers of this factor."""
    model = build(config, seed)
    if outliers != 1.0:
        add_outliers(model, outliers)
    return {name: value.detach() for name, value in model.named_parameters()}


@torch.no_grad()
def move(weights: Iterable[Tensor], generator: torch.Generator, one_in: int = 1) -> None:
    """Move every weight, or one in so many at random, by one unit in the last place of BF16, up or down at random.

    A unit of FP32 suffices for a whole run, whose first steps magnify it a millionfold, but not for the second half of
    one, where differences hardly grow.
    """
    for weight in weights:
        up = torch.rand(weight.shape, generator=generator) < 0.5
        moved = weight.ne(0)
        if one_in > 1:
            moved &= (torch.rand(weight.shape, generator=generator) < 1 / one_in).to(weight.device)
        exponent = torch.frexp(weight.float()).exponent  # |weight| < 2^exponent, and BF16 has 8 bits
        weight += torch.where(up, 1.0, -1.0).to(weight.device).ldexp(exponent - 8) * moved


OUTLIERS_EVERY = 64
"""Channels per outlier channel."""


@torch.no_grad()
def add_outliers(model: nn.Module, factor: float) -> None:
    """Give the activations of a Llama the outliers of late training.

    One channel in `OUTLIERS_EVERY` of every norm's gain is multiplied by `factor`, and divided by it in the weights
    that read it, the inverse of SmoothQuant (arXiv 2211.10438): inputs of the linear layers get channels larger by
    `factor` in every token, and the function is unchanged. In one unit in `OUTLIERS_EVERY` of a SwiGLU, the gate's
    weights are set to those of `up`, as long training with weight decay aligns them (arXiv 2409.12517); its product is
    then quadratic in the input.

    Raises:
        ConfigError: a mixture of experts.
    """
    if isinstance(model, MoE):
        raise ConfigError("--conditions: 'outliers' is for dense models. Train a mixture of experts under another.")
    for block in model.get_submodule("layers").children():
        attention, mlp = block.get_submodule("attention"), block.get_submodule("feed_forward")
        for norm, readers in (
            (block.get_submodule("attention_norm"), [attention.get_submodule(name) for name in ("wq", "wk", "wv")]),
            (block.get_submodule("ffn_norm"), [mlp.get_submodule(name) for name in ("w1", "w3")]),
        ):
            norm.get_parameter("weight")[::OUTLIERS_EVERY] *= factor
            for reader in readers:
                reader.get_parameter("weight")[:, ::OUTLIERS_EVERY] /= factor
        mlp.get_parameter("w1.weight")[::OUTLIERS_EVERY] = mlp.get_parameter("w3.weight")[::OUTLIERS_EVERY]


OPTIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("memory", *SAVED), str),
    "bf16_blocks": lambda text: tuple(int(count) if count.isdigit() else -1 for count in text.split("/")),
    "keep": lambda text: dict.fromkeys(text.split("/"), KEPT),
}
"""Policy options that an arm may change, with their parsers: `policy.bf16_blocks=1/1`, `policy.keep=*.wo`."""
KEPT = "kept by the arm"
DISABLED = "disabled"
"""Option of `run` with the value `yes`: the arm is converted, and all its layers compute in BF16."""
OUTSIDE = {
    "policy": (*OPTIONS,),
    "run": ("last_share", "last_recipe", DISABLED),
    "optimizer": ("states",),
}
"""Tables outside the recipe that an arm may change, and the options of each."""


def recipe_of(arm: str) -> Recipe:
    """Return the recipe of an arm: a name and changes, as in `folded+wgrad.precision=bf16`.

    `*` stands for both operands of a GEMM: `rotated+fprop.*.rotation=64`.

    Raises:
        ConfigError: there is no such recipe or key, or no kernel could run it.
    """
    name, changes = _parse(arm)
    changes = _with_integers({key: _both(key, change) for key, change in changes.items() if key not in OUTSIDE})
    return recipes.load({"base": name, "name": arm, **changes} if changes else name, f"--recipes: {arm}")


def _both(gemm: str, change: Any) -> Any:
    """Return a change of a GEMM with both operands in place of `*`."""
    if not isinstance(change, dict) or "*" not in change or gemm not in OPERANDS:
        return change
    named = {key: value for key, value in change.items() if key != "*"}
    return {**dict.fromkeys(OPERANDS[gemm], change["*"]), **named}


def _with_integers(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a recipe, a table of tables, with numbers in place of their text."""
    pairs = ((key, _with_integers(x) if isinstance(x, Mapping) else x) for key, x in changes.items())
    return {key: int(x) if isinstance(x, str) and x.isdigit() else x for key, x in pairs}


def policy_of(arm: str) -> Policy:
    """Return the policy of an arm: every layer in FP8, and changes, as in `folded+policy.memory=low`.

    Raises:
        ConfigError: there is no such option or value.
    """
    return Policy(min_gain=0.0, **{name: OPTIONS[name](text) for name, text in _outside(arm, "policy").items()})


def schedule_of(arm: str, steps: int) -> LoopConfig:
    """Return the schedule of an arm's recipes: another one for the last fifth in `folded+run.last_share=0.2`.

    Raises:
        ConfigError: the share is not from 0 to 1, there is no such recipe, or another option of a run is changed.
    """
    changes = {name: value for name, value in _outside(arm, "run").items() if name != DISABLED}
    if is_disabled(arm) and changes:
        raise ConfigError(f"--recipes: '{arm}': disabled layers have no last share. Leave {', '.join(changes)} out.")
    recipes.load(changes.get("last_recipe", "bf16"), f"--recipes: {arm}")
    try:
        share = float(changes.pop("last_share", 0.0))
        return LoopConfig(steps=steps, last_share=share, **changes)
    except ValueError:
        raise ConfigError(f"--recipes: '{arm}': run.last_share is a number from 0 to 1.") from None


def is_disabled(arm: str) -> bool:
    """Return whether an arm is converted and then computes in BF16, as in `folded+run.disabled=yes`.

    The control of conversion itself: its difference from BF16 is that of the converted modules' own arithmetic.

    Raises:
        ConfigError: the value is not `yes`.
    """
    value = _outside(arm, "run").get(DISABLED)
    if value not in (None, "yes"):
        raise ConfigError(f"--recipes: '{arm}': run.{DISABLED} is yes, or left out.")
    return value is not None


def states_of(arm: str) -> str | None:
    """Return the tier of an arm's optimizer states, as in `folded+optimizer.states=fp8`; None for PyTorch's AdamW.

    The weights stay FP32 and are their own masters, so a tier changes only the moments: `fp8-min` is `fp8` here. Small
    parameters, embeddings, heads and routers have the tiers that `octavo.optim.keep_small` gives them, in every tier.

    Raises:
        ConfigError: there is no such tier, or another option of the optimizer is changed.
    """
    changes = _outside(arm, "optimizer")
    return states_named(changes["states"]).name if changes else None


def _outside(arm: str, table: str) -> dict[str, Any]:
    """Return the values of an arm's changes in a table of `OUTSIDE`, by option.

    Raises:
        ConfigError: there is no such option, or a change is not TABLE.OPTION=VALUE.
    """
    changes = {} if arm in (BF16, CONTROL) else _parse(arm)[1].get(table, {})
    if not isinstance(changes, dict) or any(isinstance(value, dict) for value in changes.values()):
        raise ConfigError(f"--recipes: '{arm}': write {table}.OPTION=VALUE. Options: {', '.join(OUTSIDE[table])}.")
    return {known("--recipes", name, OUTSIDE[table], f"{table} option"): value for name, value in changes.items()}


def _parse(arm: str) -> tuple[str, dict[str, Any]]:
    """Return the name of an arm's recipe, and a mapping of its changes."""
    name, *changes = arm.split("+")
    mapping: dict[str, Any] = {}
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--recipes: '{change}' in '{arm}' changes nothing. Write KEY=VALUE.")
        *outer, last = path.split(".")
        inner = mapping
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--recipes: '{change}' in '{arm}': '{key}' has a value already.")
        inner[last] = value
    return name, mapping


def convert_by(model: nn.Module, arm: str, recipe: Recipe, tokens: int) -> None:
    """Convert a model to a recipe with the policy of an arm.

    Raises:
        UnsupportedError: a layer that is neither a head nor a router, nor named by the arm, would stay in BF16, so that
            the arm's name would be wrong; or an option of the policy has no effect.
    """
    policy = policy_of(arm)
    named = {*DEFAULTS.values(), KEPT, *policy.blocks_to_keep(model).values()}
    plan = convert(model, recipe, policy=policy, tokens=tokens, strict=True)
    for layer in plan.layers:
        if recipe.is_fp8 and layer.recipe == "bf16" and layer.reason not in named:
            raise UnsupportedError(f"'{arm}' leaves {layer.name} in BF16: {layer.reason}.")


@lru_cache(maxsize=1)  # all lanes of a seed read in the same one
def order(training: Training, windows: int, seed: int) -> Tensor:
    """Return the first token of every window, (steps, B): passes over all windows, each in its own order."""
    wanted = training.steps * training.batch
    passes = [permutation(seed, epoch, windows) for epoch in range(-(-wanted // windows))]
    starts = np.concatenate(passes)[:wanted] * training.model.sequence
    return torch.from_numpy(starts).view(training.steps, training.batch)


def run_together(
    lanes: Sequence[Lane],
    seed: int,
    *,
    snapshot: Snapshot | None = None,
    deadline: float = float("inf"),
    until: int | None = None,
    every: int = 128,
) -> bool:
    """Run a seed in all lanes, interleaved step by step; return False if the deadline passed first.

    Args:
        snapshot: the BF16 run that all lanes continue; by default they start from the initial weights.
        deadline: in seconds of `time.monotonic`.
        until: the step to stop before, by default the end.
        every: steps between checks of the deadline, each of which waits for the device.
    """
    for lane in lanes:
        lane.start(seed, snapshot)
    training = lanes[0].training
    for step in range(training.first if snapshot else 0, training.steps if until is None else until):
        for lane in lanes:
            lane.step(step)
        if step % every == 0:
            _wait(lanes)
            if time.monotonic() > deadline:
                return False
    _wait(lanes)
    return True


def score_together(lanes: Sequence[Lane], source: Lane) -> list[dict[str, dict[str, float]]]:
    """Return the held-out losses of each lane by evaluation and language, scored concurrently.

    Args:
        source: the lane of BF16 at the end of its run. FP8 lanes also score its weights, as `heldout_of_bf16`, and keep
            them.
    """
    found: list[dict[str, dict[str, float]]] = [{} for _ in lanes]
    in_fp8 = [lane for lane in lanes if lane.arm not in (BF16, CONTROL)]
    for key, scored in (
        ("heldout", lanes),
        ("heldout_bf16", in_fp8),
        ("heldout_fp8", [lane for lane in in_fp8 if "heldout_fp8" in lane.evaluations]),
        ("heldout_of_bf16", in_fp8),
    ):
        for lane in scored:
            name = key
            if key == "heldout_of_bf16":
                lane.take_weights(source)
                name = "heldout_fp8" if "heldout_fp8" in lane.evaluations else "heldout"
            lane.score(name)
        for lane, own in zip(lanes, found, strict=True):
            if lane in scored:
                own[key] = lane.scores()
    return found


def _wait(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        if lane.stream is not None:
            lane.stream.synchronize()


def allow_many_compilations() -> ExitStack:
    """Let a block's code be compiled per arm and size, always with static shapes; closing it restores the limits."""
    stack = ExitStack()
    config: Any = torch._dynamo.config
    stack.enter_context(
        config.patch(recompile_limit=256, accumulated_recompile_limit=4096, automatic_dynamic_shapes=False)
    )
    return stack
