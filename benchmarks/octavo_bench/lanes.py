"""Packed training runs: each arm of a study is one model whose whole step is captured once and replayed for every seed.

A small model's step is a few milliseconds of small kernels, so that neither Python nor compilation may be paid per run.
A `Lane` keeps a model, its optimizer, the text and the order of its windows on the device. A step reads its batch and
its learning rate there, by a step counter, so that a replay needs nothing of the host. Another seed overwrites weights,
moments and order in place. Lanes replay at the same time, each on a stream of its own with its own memory.

Shapes: B sequences of a batch, T tokens of a sequence, S held-out sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.conversion import Policy, convert, disabled
from octavo.data.loader import permutation
from octavo.models import build, count_parameters
from octavo.models.config import ModelConfig
from octavo_bench.installed_text import InstalledText

BF16 = "bf16"
NULL = "bf16 + 1 ulp"
"""BF16 again, every initial weight moved by one unit in the last place of FP32: what chaos alone does to a loss."""
ULP_SEED = 2**20
"""Added to a run's seed for the directions of that move."""
WARM = 3
"""Uncaptured steps before a capture: they compile, autotune, and make the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A size of the ladder: the model and how it is trained."""

    model: ModelConfig
    batch: int
    """Sequences per step."""
    lr: float
    """Peak learning rate: reached after `warmup` of the steps, then linear to 0."""
    tokens_per_parameter: float = 20.0
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices, decoupled."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    together: bool = True
    """Whether the arms run at the same time; those of a large model fill a GPU, and its memory, one by one."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        with torch.device("meta"):
            return count_parameters(build(self.model, 0))

    @property
    def steps(self) -> int:
        """Number of steps: the tokens of the ratio, in whole batches."""
        return max(1, round(self.tokens_per_parameter * self.parameters / (self.batch * self.model.sequence)))

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return self.steps * self.batch * self.model.sequence

    def rates(self) -> Tensor:
        """Return the learning rate of every step, FP32: linear up to the peak, then linear to 0 after the last step."""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = max(1, round(self.warmup * self.steps))
        falling = (self.steps - step) / max(1, self.steps - rising)
        return (self.lr * torch.minimum((step + 1) / rising, falling)).float()


class Lane:
    """One arm: `start` a seed, `step` to its end, then read `losses` and `heldout`.

    Args:
        arm: `BF16`, `NULL`, or a recipe.
        training: the size.
        text: the text, which lanes share if it is on the device already.
        device: device of the lane.
        compiled: compile every block.
        pool: memory pool of the graphs, shared by lanes that never replay at the same time.
    """

    def __init__(
        self,
        arm: str,
        training: Training,
        text: InstalledText,
        device: torch.device,
        *,
        compiled: bool = False,
        pool: Any = None,
    ) -> None:
        self.arm, self.training, self.device = arm, training, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = pool or (torch.cuda.graph_pool_handle() if self.stream else None)
        self.model = build(training.model, 0).to(device)
        if arm not in (BF16, NULL):
            convert(self.model, arm, policy=Policy(min_gain=0.0), tokens=training.batch * training.model.sequence)
        self._parameters = dict(self.model.named_parameters())
        self._make_optimizer()
        self._make_buffers(text)
        if compiled:
            for block in self.model.get_submodule("layers").children():
                block.compile(fullgraph=True)
        self._graphs: dict[str, Callable[[], None]] = {}
        self._prepare()

    def _make_optimizer(self) -> None:
        own, parameters = self.training, self._parameters.values()
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": own.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._lr = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(groups, lr=self._lr, betas=own.betas, fused=True, capturable=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr  # a step writes it

    def _make_buffers(self, text: InstalledText) -> None:
        own, device = self.training, self.device
        sequence = own.model.sequence
        self._text = text.train.to(device)
        self._windows = (len(self._text) - 1) // sequence
        self._offsets = torch.arange(sequence + 1, device=device)
        self._order = torch.zeros(own.steps, own.batch, dtype=torch.int64, device=device)
        self._rates = own.rates().to(device)
        self._losses = torch.zeros(own.steps, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        windows = {name: ids.unfold(0, sequence + 1, sequence) for name, ids in text.heldout.items()}
        self._languages = [name for name, ids in windows.items() for _ in range(len(ids))]
        heldout = torch.cat([*windows.values()])
        short = -len(heldout) % own.batch
        self._heldout = torch.cat([heldout, heldout[:1].expand(short, -1)]).to(device)
        self._scores = torch.zeros(len(self._heldout), dtype=torch.float32, device=device)

    def _prepare(self) -> None:
        """Warm up and capture the step and both evaluations."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)  # buffers were filled on another stream
        self.start(0)
        with self._streamed():
            for _ in range(WARM if self.stream else 0):
                self._step()
                self._clear()
            self._capture("step", self._step)
            self._capture("heldout", self._evaluate)
            if self.arm not in (BF16, NULL):
                with disabled(self.model):
                    self._capture("heldout_bf16", self._evaluate)

    def _streamed(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _capture(self, name: str, work: Callable[[], None]) -> None:
        if self.stream is None:
            self._graphs[name] = work
            return
        self._at.zero_()
        if work == self._evaluate:
            work()
            self._at.zero_()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # On its own stream: a BLAS workspace belongs to a stream, and lanes that share one would overwrite it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        self._graphs[name] = graph.replay

    def _step(self) -> None:
        starts_B = self._order.index_select(0, self._at).squeeze(0)
        inputs_BT, targets_BT = _split(self._text[starts_B[:, None] + self._offsets])
        self._lr.copy_(self._rates.index_select(0, self._at).squeeze(0))
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(inputs_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters.values(), self.training.clip, foreach=True)
        self.optimizer.step()
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
        self._scores.index_copy_(0, rows_B, losses_BT.view_as(targets_BT).mean(1))
        self._at += 1
        self.model.train()

    def start(self, seed: int) -> None:
        """Begin the run of a seed: its initial weights, its order of windows, no moments."""
        with torch.no_grad(), self._streamed():
            for name, value in initial_weights(self.training.model, seed, moved=self.arm == NULL).items():
                self._parameters[name].copy_(value)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
            self._order.copy_(order(self.training, self._windows, seed))
            self._losses.zero_()
            self._at.zero_()
        self._clear() if self.stream is None else None

    def step(self) -> None:
        """Make the next step, on the stream of the lane."""
        with self._streamed():
            self._graphs["step"]()

    @property
    def losses(self) -> Tensor:
        """Training loss of every step, in nats per token; waits for the stream of the lane."""
        with self._streamed():
            return self._losses.double().cpu()

    def heldout(self, name: str = "heldout") -> dict[str, float]:
        """Return the held-out loss per language in nats per token.

        Args:
            name: `heldout` computes as in training, `heldout_bf16` in BF16 with the same weights.
        """
        with self._streamed():
            self._at.zero_()
            with disabled(self.model) if name != "heldout" and self.stream is None else nullcontext():
                for _ in range(len(self._heldout) // self.training.batch):
                    self._graphs[name]()
            scores = self._scores.double().cpu()
        return mean_by(self._languages, scores.tolist())

    @property
    def evaluations(self) -> list[str]:
        """Names that `heldout` knows."""
        return [name for name in self._graphs if name != "step"]


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


@lru_cache(maxsize=2)  # all lanes of a seed start from the same ones
def initial_weights(config: ModelConfig, seed: int, *, moved: bool) -> dict[str, Tensor]:
    """Return the initial weights of a seed by name; `moved` by one FP32 ulp each, up or down at random."""
    weights = {name: value.detach() for name, value in build(config, seed).named_parameters()}
    if not moved:
        return weights
    generator = torch.Generator().manual_seed(ULP_SEED + seed)
    directions = {name: torch.rand(value.shape, generator=generator) - 0.5 for name, value in weights.items()}
    return {name: torch.nextafter(value, directions[name].sign() * torch.inf) for name, value in weights.items()}


def order(training: Training, windows: int, seed: int) -> Tensor:
    """Return the first token of every window, (steps, B): passes over all windows, each in an order of its own."""
    wanted = training.steps * training.batch
    passes = [permutation(seed, epoch, windows) for epoch in range(-(-wanted // windows))]
    starts = np.concatenate(passes)[:wanted] * training.model.sequence
    return torch.from_numpy(starts).view(training.steps, training.batch)


def run_together(lanes: Sequence[Lane], seed: int, *, deadline: float = float("inf"), every: int = 128) -> bool:
    """Run a seed in all lanes, step by step beside each other; return False if the deadline came first.

    Args:
        deadline: in seconds of `time.monotonic`.
        every: steps between looks at the clock, each of which waits for the device.
    """
    for lane in lanes:
        lane.start(seed)
    for step in range(lanes[0].training.steps):
        for lane in lanes:
            lane.step()
        if step % every == 0:
            _wait(lanes)
            if time.monotonic() > deadline:
                return False
    _wait(lanes)
    return True


def _wait(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        if lane.stream is not None:
            lane.stream.synchronize()


def allow_many_compilations() -> ExitStack:
    """Let one block's code be compiled per arm and size, always with static shapes; closing it undoes that."""
    stack = ExitStack()
    config: Any = torch._dynamo.config
    stack.enter_context(
        config.patch(recompile_limit=256, accumulated_recompile_limit=4096, automatic_dynamic_shapes=False)
    )
    return stack
