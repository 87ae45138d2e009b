"""A lane: one model and its optimizer, stepped on whatever batches it is handed.

A run has one lane or two. Two lanes see the same batches in lockstep: the model in FP8 and its BF16 twin.
Shapes: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import RunError
from octavo.guard.diagnosis import Probe
from octavo.kernels.dispatch import is_plain
from octavo.models import count_parameters
from octavo.optim import AdamW, Lion, Muon, Optimizer, keep_small
from octavo.tensor import local
from octavo.train.config import OptimizerConfig
from octavo.train.loss_scale import LossScale
from octavo.train.parallel import ALONE, Ranks, whole
from octavo.train.patterns import groups_of, value_of
from octavo.train.replay import Graphs


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a step measured, still on the device: reading it with `float()` waits for the step."""

    loss: Tensor
    """Mean loss over the batch in nats a token, before the update; FP32, shape ()."""
    gradient_norm: Tensor
    """Global L2 norm of the gradient before clipping; FP32, shape ()."""


class Lane:
    """One model being trained.

    Parameters are what the model has: FP32, BF16 or FP8. Forward and backward run under BF16 autocast unless `autocast`
    is false. On several ranks the model is cut and sharded over them here. Each rank steps on its part of a batch, and
    losses and norms are those of all. With `graphs` they are replayed as one of them (`Replay`).
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        autocast: bool = True,
        seed: int = 0,
        ranks: Ranks = ALONE,
        graphs: Graphs | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.device = next(model.parameters()).device
        self.autocast = autocast
        self.size = count_parameters(model)
        trained_by_all = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        lr_factors = value_of(trained_by_all, config.lr_factors, "optimizer.lr_factors")
        groups = groups_of(trained_by_all, config.clip_per_group, "optimizer.clip_per_group")
        self._take(model)  # before the optimizer, which steps what a rank keeps
        self.clip = config.clip
        self.parameters = dict(self.model.named_parameters())
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self._trained = list(trained.values())
        self._clipped = [(limit, [trained[name] for name in names if name in trained]) for limit, names in groups]
        self.loss_scale = LossScale(
            config.loss_scale,
            start=config.loss_scale_start,
            window=config.loss_scale_window,
            device=self.device,
            group=ranks.stages,
        )
        self.optimizer = _optimizer(trained, config, lr_factors, seed)
        self._clips_in_step = config.gradients == "fp8"
        self._graphs = graphs
        passes = self._train, self.model, self._trained, self.optimizer
        self.replay = None if graphs is None else graphs.replay(*passes)
        # Where the loss first stopped being finite. On the device, so that no step has to wait for it.
        self._broken_at = torch.full((), -1, dtype=torch.int64, device=self.device)

    def _take(self, model: nn.Module) -> None:
        """Keep of a converted model what this rank has of it: cut, and sharded."""
        self.model = model
        self.pipeline: dict[str, Any] | None = None
        self.cut = self.ranks.cut(model)
        self.reduction = self.ranks.reduction()
        self.sharding = self.ranks.shard(model, self.reduction)

    def holds(self, name: str) -> bool:
        """Return whether this rank has a tensor of the lane's state, or some of it; by its name in checkpoints."""
        return True

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, *, step: int, lr: float, accumulate: int = 1) -> Measured:
        """Make one update from a batch, split into `accumulate` equal parts whose gradients are averaged."""
        self.model.train()
        loss = (self.replay or self._train)(inputs_BT, targets_BT, accumulate)
        self.loss_scale.unscale(self._trained, loss)
        norm = None if self._clips_in_step else self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.loss_scale.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        norm = self.optimizer.grad_norm if norm is None else whole(norm)  # type: ignore[attr-defined]
        self._note(step, loss, norm)
        return Measured(loss, norm)

    def probe(self, inputs_BT: Tensor, targets_BT: Tensor, accumulate: int = 1, *, backward: bool = True) -> Probe:
        """Return loss and gradient norm of a batch, 0 without `backward`; nothing changes. Waits for the device."""
        self.make_room()
        reduces = {} if self.reduction is None else self.reduction.state_dict()
        with torch.set_grad_enabled(backward):
            loss = self._pass(inputs_BT, targets_BT, accumulate, _as_it_is)
        norm = self._norm(self._gradients())
        self.optimizer.zero_grad(set_to_none=True)
        if self.reduction is not None:  # one that has seen these gradients
            self.reduction.load_state_dict(reduces)
        return Probe(float(loss), float(whole(norm)))

    def make_room(self) -> None:
        """Have as much memory as a step takes for something else: where there is too little, graphs are dropped."""
        if self._graphs is not None:
            self._graphs.make_room()

    def _train(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> Tensor:
        return self._pass(inputs_BT, targets_BT, parts, self.loss_scale.scaled)

    def _pass(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Go through a batch part by part, and backward where gradients are enabled; return the loss of all ranks."""
        loss = torch.zeros((), device=self.device)
        with self._accumulating(parts):
            for inputs, targets in _parts(inputs_BT, targets_BT, parts):
                part = self.loss(inputs, targets) / parts
                if torch.is_grad_enabled():
                    scaled(part).backward()
                loss += part.detach().float()
        return self.ranks.mean(loss)

    def _gradients(self) -> list[Tensor | None]:
        if isinstance(self.optimizer, Optimizer):
            return [self.optimizer.gradient(parameter) for parameter in self._trained]
        return [parameter.grad for parameter in self._trained]

    def forget_faults(self) -> None:
        """Forget what `check` would stop the run for: the run went back to before it."""
        self._broken_at.fill_(-1)

    def _accumulating(self, parts: int) -> AbstractContextManager[None]:
        if parts > 1 and isinstance(self.optimizer, Optimizer):
            return self.optimizer.accumulating()
        return nullcontext()

    def _clip(self) -> Tensor:
        """Clip the groups of gradients that have a limit of their own, then all; return the global norm before both."""
        norm = self._norm(self._gradients())
        for limit, parameters in self._clipped:
            group = self._norm(parameter.grad for parameter in parameters)
            nn.utils.clip_grads_with_norm_(parameters, limit, group)
        left = self._norm(self._gradients()) if self._clipped else norm
        nn.utils.clip_grads_with_norm_(self._trained, self.clip or float("inf"), left)
        return norm

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """Return the L2 norm of the gradients of all ranks, shape ()."""
        return nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, **options: bool) -> Tensor:
        """Return the model's mean loss in nats a token, shape (); with `by_sequence` or `hits` as the model has it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(inputs_BT, targets_BT, **options)
        return loss

    def weight_bytes(self) -> float:
        """Return the bytes a parameter that the weights take, with their scales."""
        weights = [local(weight) for weight in self.parameters.values()]
        return sum(weight.nbytes for weight in weights) / sum(weight.numel() for weight in weights)

    def state_bytes(self) -> float:
        """Return the bytes a trained parameter that the optimizer's moments and masters take, with their scales."""
        states = self.optimizer.state.values()
        taken: int = sum(local(tensor).nbytes for state in states for name, tensor in state.items() if name != "step")
        return taken / sum(local(parameter).numel() for parameter in self._trained)

    def check(self, last_checkpoint: str) -> None:
        """Stop the run if any step met a loss or a gradient that is not finite. Waits for the device.

        With dynamic loss scaling such steps are skipped, and only many in a row stop the run.

        Raises:
            RunError: names the lane, the step, and `last_checkpoint`, the way back.
        """
        broken_at = int(self._broken_at)
        if broken_at >= 0:
            raise RunError(
                f"the loss or the gradient norm of the {self.name.upper()} model is no longer finite at step"
                f" {broken_at}. {last_checkpoint} Try a lower --lr, or --recipe bf16 to compare."
            )

    def _note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        scale = self.loss_scale
        broken = scale.has_given_up if scale.skips else ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._broken_at = torch.where(broken & (self._broken_at < 0), step, self._broken_at)


def _parts(inputs_BT: Tensor, targets_BT: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(inputs_BT.chunk(count), targets_BT.chunk(count), strict=True)


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _optimizer(
    trained: Mapping[str, nn.Parameter], config: OptimizerConfig, lr_factors: Mapping[str, float], seed: int
) -> torch.optim.Optimizer:
    """Build the optimizer: PyTorch's fused AdamW where weights and moments are FP32, else that of `octavo.optim`.

    PyTorch's has no master: in BF16 it would round away every update of less than half a unit of its weight.
    """
    groups = _groups(trained, config.weight_decay, lr_factors)
    lr, betas, eps = config.lr, config.betas, config.eps
    is_fp32 = all(is_plain(local(weight)) and weight.dtype == torch.float32 for weight in trained.values())
    if is_fp32 and (config.name, config.states, config.gradients) == ("adamw", "fp32", "wide"):
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    # Of wide gradients the lane clips, and sees what is not finite: reading them once more would find nothing new.
    fp8 = config.gradients == "fp8"
    settings: dict[str, Any] = {"gradients": config.gradients, "clip": config.clip or None if fp8 else None}
    settings |= {"states": config.states, "seed": seed, "skip_nonfinite": fp8}
    settings |= {"keep": _keep_fp32} if config.states == "fp32" else {}
    if config.name == "lion":
        return Lion(groups, lr=lr, betas=betas, **settings)
    if config.name == "muon":
        return Muon(groups, lr=lr, momentum=config.momentum, adamw={"betas": betas, "eps": eps}, **settings)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, **settings)


def _keep_fp32(name: str, parameter: Tensor) -> str | None:
    """Return `fp32` for embeddings too, which would be `exact`. As of all that is small, their gradients stay wide."""
    return "fp32" if keep_small(name, parameter) else None


def _groups(
    trained: Mapping[str, nn.Parameter], weight_decay: float, lr_factors: Mapping[str, float]
) -> list[dict[str, object]]:
    """Split off what is not decayed: norms and biases set a level, and shrinking that does not regularise.

    What has another factor on the learning rate is a group of its own. Parameters are in it with their names.
    """
    groups: dict[tuple[bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trained.items():
        groups.setdefault((parameter.ndim < 2, lr_factors.get(name, 1.0)), []).append((name, parameter))
    return [
        {"params": named, "weight_decay": 0.0 if is_level else weight_decay, "lr_factor": factor}
        for (is_level, factor), named in sorted(groups.items(), key=lambda item: item[0])
    ]
