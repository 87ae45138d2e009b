"""`TrainState`: one model and its optimizer, stepped on the batches it is given.

A run trains one model, or two on the same batches: the FP8 model and its BF16 baseline (`run.baseline`).
Shapes: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import DivergedError
from octavo.lab.guard.diagnosis import Probe
from octavo.lab.guard.locate import clip
from octavo.lab.loop import Step
from octavo.lab.models import count_parameters
from octavo.lab.models.moe import MoE
from octavo.lab.train.config import OptimizerConfig
from octavo.lab.train.loss_scale import LossScale
from octavo.lab.train.parallel import SINGLE_PROCESS, Ranks, whole
from octavo.lab.train.param_groups import groups_of, make_optimizer, value_of
from octavo.lab.train.replay import Graphs
from octavo.lab.train.sharding import make_reduction, shard_model, shard_tp, share_tokens
from octavo.lab.train.timing import Stopwatch
from octavo.nn.cross_entropy import count_targets, weighted
from octavo.optim import Optimizer
from octavo.tensor import local


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """Measurements of a step, still on the device: `float()` waits for the step."""

    loss: Tensor
    """Mean loss over the batch in nats per token, before the update; FP32, shape ()."""
    gradient_norm: Tensor
    """Global L2 norm of the gradient before clipping; FP32, shape ()."""


@dataclasses.dataclass(kw_only=True, slots=True)
class RunStep(Step):
    """A step of all models of a run; `loss` and `gradient_norm` are the first one's."""

    metrics: Mapping[str, StepMetrics]
    """By model."""
    watch: Stopwatch
    """Has the time of each model."""
    inputs_BT: Tensor
    """This rank's part of the batch, on the CPU."""


class TrainState:
    """A model in training: parameters (FP32, BF16 or FP8), optimizer, loss scale.

    Forward and backward run under BF16 autocast unless `autocast` is false. On several ranks the model is split and
    sharded here; each rank steps on its part of a batch, and losses and norms are those of all ranks. With `graphs`,
    forward and backward are replayed as a CUDA graph (`Replay`).
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        autocast: bool = True,
        seed: int = 0,
        ranks: Ranks = SINGLE_PROCESS,
        graphs: Graphs | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.device = next(model.parameters()).device
        self.autocast = autocast
        self.size = count_parameters(model)
        all_trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        lr_factors = value_of(all_trained, config.lr_factors, "optimizer.lr_factors")
        groups = groups_of(all_trained, config.clip_per_group, "optimizer.clip_per_group")
        self._distribute(model)  # before the optimizer, which steps this rank's parameters
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
            group=ranks.pipeline_group,
        )
        self.optimizer = make_optimizer(trained, config, lr_factors, seed, clips=ranks.is_greedy)
        self._clips_in_step = config.gradients == "fp8" or ranks.is_greedy
        self._stepped = self._spread_states()
        self._graphs = graphs
        passes = self._forward_backward, self.model, self._trained, self.optimizer
        self.replay = None if graphs is None else graphs.replay(*passes)
        # First step whose loss was not finite, -1 for none; on the device, so that no step waits for it.
        self._broken_at = torch.full((), -1, dtype=torch.int64, device=self.device)

    def _distribute(self, model: nn.Module) -> None:
        """Split and shard a converted model; keep this rank's part as `model`."""
        self.model = model
        self.pipeline: dict[str, Any] | None = None
        self.context = share_tokens(self.ranks, model)
        self.tensor_plan = shard_tp(self.ranks, model)
        self.reduction = make_reduction(self.ranks)
        self.shard_plan = shard_model(self.ranks, model, self.reduction)

    def _spread_states(self) -> torch.optim.Optimizer:
        """Return what steps: the optimizer, or with `parallel.zero = "greedy"` its wrapper over the ranks."""
        if not self.ranks.is_greedy or not isinstance(self.optimizer, Optimizer):
            return self.optimizer
        from octavo.distributed import GreedyZeRO

        return GreedyZeRO(self.optimizer, reduction=self.reduction)

    def holds(self, name: str) -> bool:
        """Return True if this rank has some of the tensor of this name in checkpoints."""
        return True

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, *, step: int, lr: float, accumulate: int = 1) -> StepMetrics:
        """Make one update from a batch, split into `accumulate` equal parts whose gradients are averaged."""
        self.model.train()
        loss = (self.replay or self._forward_backward)(inputs_BT, targets_BT, accumulate)
        self.loss_scale.unscale(self._trained, loss)
        norm = None if self._clips_in_step else self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.loss_scale.step(self._stepped)
        if isinstance(self.model, MoE):
            self.model.balance(self.ranks.mean)
        self.optimizer.zero_grad(set_to_none=True)
        norm = self.optimizer.grad_norm if norm is None else whole(norm)  # type: ignore[attr-defined]
        scale = self.loss_scale
        broken = scale.has_given_up if scale.skips else ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._broken_at = torch.where(broken & (self._broken_at < 0), step, self._broken_at)
        return StepMetrics(loss, norm)

    def probe(self, inputs_BT: Tensor, targets_BT: Tensor, accumulate: int = 1, *, backward: bool = True) -> Probe:
        """Return loss and gradient norm (0 without `backward`) of a batch without an update. Waits for the device."""
        self.make_room()
        reduction = {} if self.reduction is None else self.reduction.state_dict()
        with torch.set_grad_enabled(backward):
            loss = self._forward_backward(inputs_BT, targets_BT, accumulate, is_scaled=False)
        gradients = self._gradients()
        if self.ranks.is_greedy:  # reduced by no hook
            gradients = [None if each is None else self.ranks.mean(each) for each in gradients]
        norm = self._norm(gradients)
        self.optimizer.zero_grad(set_to_none=True)
        if self.reduction is not None:  # its error feedback has seen these gradients
            self.reduction.load_state_dict(reduction)
        return Probe(float(loss), float(whole(norm)))

    def make_room(self) -> None:
        """Drop CUDA graphs if the memory for other work of the size of a step is short."""
        if self._graphs is not None:
            self._graphs.make_room()

    def drop_graph(self) -> None:
        """Drop the CUDA graph for good: a process group that it holds collectives of waits for that before it ends."""
        if self._graphs is not None and self.replay is not None:
            self._graphs.remove(self.replay)
            self.replay = None

    def _forward_backward(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int, *, is_scaled: bool = True) -> Tensor:
        """Run forward, and backward if gradients are enabled, part by part; return the mean loss of all ranks.

        Args:
            is_scaled: backward starts from the loss times the loss scale.
        """
        loss = torch.zeros((), device=self.device)
        with self._accumulating(parts), self._attending(inputs_BT):
            shares = self.shares(targets_BT, parts)
            halves = inputs_BT.chunk(parts), targets_BT.chunk(parts)
            for index, (inputs, targets) in enumerate(zip(*halves, strict=True)):
                part = weighted(self.loss(inputs, targets), shares[index])
                if torch.is_grad_enabled():
                    (self.loss_scale.scaled(part) if is_scaled else part).backward()
                loss += part.detach().float()
        return self.ranks.mean(loss)

    def shares(self, targets_BT: Tensor, parts: int) -> Sequence[float] | Tensor:
        """Return the number of targets of each part that count, as a share of those of a rank's mean batch.

        The mean over the ranks of the sum of losses times shares is the mean over all targets.
        """
        if self.model.config.documents == "joined":  # type: ignore[union-attr]  # all targets count
            return [1 / parts] * parts
        counts = count_targets(targets_BT, parts)
        return counts / self.ranks.mean(counts.sum())

    def _gradients(self) -> list[Tensor | None]:
        if isinstance(self.optimizer, Optimizer):
            return [*self.optimizer.gradients(self._trained)]
        return [parameter.grad for parameter in self._trained]

    def _accumulating(self, parts: int) -> AbstractContextManager[None]:
        if parts > 1 and isinstance(self.optimizer, Optimizer):
            return self.optimizer.accumulating()
        return nullcontext()

    def _attending(self, inputs_BT: Tensor) -> AbstractContextManager[None]:
        """Return the block in which attention is over the tokens of other ranks; it may be within another."""
        return nullcontext() if self.context is None else self.context.attending(inputs_BT)

    def _clip(self) -> Tensor:
        """Clip the groups with a limit of their own, then all gradients; return the global norm before both."""
        norm = self._norm(self._gradients())
        for limit, parameters in self._clipped:
            group = self._norm(parameter.grad for parameter in parameters)
            clip(parameters, limit, group)
        remaining = self._norm(self._gradients()) if self._clipped else norm
        clip(self._trained, self.clip or float("inf"), remaining)
        return norm

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """Return the L2 norm of the gradients of all ranks, shape ()."""
        return nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, **options: bool) -> Tensor:
        """Return the model's mean loss in nats per token, shape (); `by_sequence` and `hits` go to the model.

        With `parallel.context` it is the mean over this rank's tokens.
        """
        with self._attending(inputs_BT), torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(inputs_BT, targets_BT, **options)
        return loss

    def logits(self, inputs_BT: Tensor) -> Tensor:
        """Return the model's logits (B, T, V)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits_BTV: Tensor = self.model(inputs_BT)
        return logits_BTV

    def weight_bytes(self) -> float:
        """Return the bytes per parameter of the weights, scales included."""
        weights = [local(weight) for weight in self.parameters.values()]
        return sum(weight.nbytes for weight in weights) / sum(weight.numel() for weight in weights)

    def state_bytes(self) -> float:
        """Return the bytes per trained parameter of the optimizer's moments and masters, scales included."""
        states = self.optimizer.state.values()
        total: int = sum(local(tensor).nbytes for state in states for name, tensor in state.items() if name != "step")
        return total / sum(local(parameter).numel() for parameter in self._trained)

    def check(self, last_checkpoint: str) -> None:
        """Stop the run if a loss or gradient norm of any step was not finite. Waits for the device.

        With dynamic loss scaling such steps are skipped, and only many in a row stop the run.

        Raises:
            DivergedError: names the model, the step, and `last_checkpoint` to resume from.
        """
        broken_at = int(self._broken_at)
        if broken_at >= 0:
            raise DivergedError(
                f"the loss or the gradient norm of the {self.name.upper()} model is no longer finite at step"
                f" {broken_at}. {last_checkpoint} The events of the run say what was seen first; `--guard.mode act`"
                " finds the cause."
            )

    def clear_failure(self) -> None:
        """Clear the failure that `check` would report: the run was rolled back to a step before it."""
        self._broken_at.fill_(-1)
