"""A lane: one model and its optimizer, stepped on whatever batches it is handed.

A run has one lane or two. Two lanes see the same batches in lockstep: the model in FP8 and its BF16 twin.
Shapes: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from octavo.errors import RunError
from octavo.train.config import OptimizerConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a step measured, still on the device: reading it with `float()` waits for the step."""

    loss: Tensor
    """Mean loss over the batch in nats a token, before the update; FP32, shape ()."""
    gradient_norm: Tensor
    """Global L2 norm of the gradient before clipping; FP32, shape ()."""


class Lane:
    """One model being trained.

    Parameters stay in FP32; forward and backward run under BF16 autocast unless `autocast` is false.
    """

    def __init__(self, name: str, model: nn.Module, config: OptimizerConfig, *, autocast: bool = True) -> None:
        self.name = name
        self.model = model
        self.clip = config.clip
        self.autocast = autocast
        self.parameters = dict(model.named_parameters())
        self._trained = [p for p in self.parameters.values() if p.requires_grad]
        self.device = self._trained[0].device
        self.optimizer = torch.optim.AdamW(
            _groups(self._trained, config.weight_decay),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        # Where the loss first stopped being finite. On the device, so that no step has to wait for it.
        self._broken_at = torch.full((), -1, dtype=torch.int64, device=self.device)

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, *, step: int, lr: float, accumulate: int = 1) -> Measured:
        """Make one update from a batch, split into `accumulate` equal parts whose gradients are averaged."""
        self.model.train()
        loss = torch.zeros((), device=self.device)
        for inputs, targets in _parts(inputs_BT, targets_BT, accumulate):
            part = self.loss(inputs, targets) / accumulate
            part.backward()
            loss += part.detach().float()
        norm = nn.utils.clip_grad_norm_(self._trained, self.clip or float("inf"))
        self._note(step, loss, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Measured(loss, norm)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the model's mean loss in nats a token, shape ()."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(inputs_BT, targets_BT)
        return loss

    def check(self, last_checkpoint: str) -> None:
        """Stop the run if any step met a loss or a gradient that is not finite. Waits for the device.

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
        broken = ~(torch.isfinite(loss) & torch.isfinite(norm)) & (self._broken_at < 0)
        self._broken_at = torch.where(broken, step, self._broken_at)


def _parts(inputs_BT: Tensor, targets_BT: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(inputs_BT.chunk(count), targets_BT.chunk(count), strict=True)


def _groups(trained: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Split off what is not decayed: norms and biases set a level, and shrinking that does not regularise."""
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
