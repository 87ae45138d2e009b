"""`Loop`: a training loop with guardrails, for models that `octavo train` does not train.

plan = octavo.convert(model)
with Loop(model, optimizer, loss_of, batches, plan=plan, config=GuardConfig(mode="act")) as loop:
    for step, loss in loop.steps(1000):
        print(step, float(loss))
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from octavo.conversion import Plan, convert
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab import loop
from octavo.lab.guard.alarms import GuardEvent
from octavo.lab.guard.buffers import overwrite, tensors_of
from octavo.lab.guard.config import GuardConfig
from octavo.lab.guard.diagnosis import Probe
from octavo.lab.guard.guard import Guard
from octavo.lab.guard.guarded import BatchesEnd, Guarded
from octavo.lab.guard.locate import clip
from octavo.lab.guard.parameters import ParameterCheck
from octavo.lab.loop import Step
from octavo.nn.telemetry import Telemetry
from octavo.optim import Optimizer
from octavo.recipes import Recipe

LossOf = Callable[[nn.Module, Any], Tensor]


def warn(event: GuardEvent) -> None:
    """Issue an event as a Python warning, unless its level is `info`."""
    if event.level != "info":
        cause = f"[{event.cause}] " if event.cause else ""
        action = f" -> {event.action}" if event.action else ""
        warnings.warn(f"step {event.step}: {cause}{event.text}{action}", stacklevel=2)


@dataclass(frozen=True, slots=True)
class Update:
    """Optimizer, clipping and learning-rate schedule of a loop."""

    optimizer: torch.optim.Optimizer
    """Optimizer of all parameters of the model."""
    clip: float | None = None
    """Limit of the global gradient norm; None: not clipped. With FP8 gradients, set `clip` of the optimizer."""
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    """Stepped after each update."""


class _State(NamedTuple):
    model: dict[str, Tensor]
    extra: dict[str, Any]
    """Result of `get_extra_state` of each module that has one."""
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None


class _Trained(Guarded):
    """Model, optimizer and batches of a loop."""

    position = 0
    """Index of the next batch."""
    models: Sequence[nn.Module] = ()

    def __init__(
        self,
        model: nn.Module,
        update: Update,
        loss_of: LossOf,
        batches: Iterable[Any],
        plan: Plan | None,
        on_event: Callable[[GuardEvent], None],
    ) -> None:
        super().__init__(on_event)
        self.model, self.models, self.update, self.plan = model, (model,), update, plan
        self._loss_of, self._batches, self._buffer = loss_of, iter(batches), deque[Any]()
        self._first = 0  # index of the first buffered batch
        self._start_telemetry()

    def make_step(self) -> Step:
        """Update the model by the next batch."""
        batch = self._next_batch()
        self.done += 1
        optimizer, scheduler = self.update.optimizer, self.update.scheduler
        with self._limited_lr() as lr:
            loss = self._loss_of(self.model, batch)
            loss.backward()
            norm = self._norm()
            clip([*self.model.parameters()], self.update.clip or float("inf"), norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        return Step(self.done, lr, loss.detach(), norm)

    def forget_before(self, position: int) -> None:
        """Drop the batches before a position."""
        while self._buffer and self._first < position:
            self._buffer.popleft()
            self._first += 1

    def _copy_state(self) -> _State:
        scheduler = self.update.scheduler
        return _State(
            {name: tensor.detach().clone() for name, tensor in tensors_of(self.model).items()},
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _with_extra_state(self.model)},
            copy.deepcopy(self.update.optimizer.state_dict()),
            None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        )

    def _load_state(self, state: _State) -> None:
        overwrite(tensors_of(self.model), state.model)
        for name, module in _with_extra_state(self.model):
            if name in state.extra:
                module.set_extra_state(copy.deepcopy(state.extra[name]))
        optimizer = self.update.optimizer
        optimizer.state.clear()  # a parameter without a gradient until then had none
        settings = [{**group} for group in optimizer.param_groups]
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            kept = {key: tensor for key, tensor in before.items() if isinstance(tensor, Tensor)}
            group.update({key: tensor.copy_(group[key]) for key, tensor in kept.items()})
        if self.update.scheduler is not None and state.scheduler is not None:
            self.update.scheduler.load_state_dict(state.scheduler)

    def _saved_weight(self, state: _State, name: str) -> Tensor | None:
        return state.model.get(name)

    def _seek(self, position: int) -> None:
        self.position = position

    def _next_batch(self) -> Any:
        while self.position >= self._first + len(self._buffer):
            try:
                self._buffer.append(next(self._batches))
            except StopIteration:
                text = f"the batches end after {self.position}, and step {self.done + 1} needs one more"
                raise BatchesEnd(
                    f"octavo.lab.guard.Loop: {text}. Give an endless iterator, such as itertools.cycle(batches)."
                ) from None
        self.position += 1
        return self._buffer[self.position - 1 - self._first]

    def _compute(self, batch: Any, *, backward: bool = True, whole: bool = False) -> Probe:
        with torch.set_grad_enabled(backward):
            loss = self._loss_of(self.model, batch)
            if backward:
                loss.backward()
        probe = Probe(float(loss.detach()), float(self._norm()))
        self.update.optimizer.zero_grad(set_to_none=True)
        return probe

    def _convert(self, recipe: Recipe) -> None:
        plan = self.plan
        if plan is None:
            raise ConfigError(
                "this octavo.lab.guard.Loop has no plan: pass the return value of octavo.convert as `plan`."
            )
        allow = plan.allow_reference
        self.plan = convert(self.model, recipe, policy=plan.policy, tokens=plan.tokens, allow_reference=allow)

    def _make_telemetry(self) -> Telemetry | None:
        telemetry = Telemetry(self.model)
        return telemetry if telemetry.rows else None

    def _norm(self) -> Tensor:
        """Return the norm of all gradients, also of those that the optimizer stores in FP8, shape ()."""
        parameters, optimizer = [*self.model.parameters()], self.update.optimizer
        parts = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if isinstance(optimizer, Optimizer) and optimizer.stored_gradients:
            stored = optimizer.gradients(p for p in parameters if p.requires_grad and p.grad is None)
            parts += [nn.utils.get_total_norm([each]) for each in stored if each is not None]  # one FP32 copy at a time
        return nn.utils.get_total_norm(parts)

    @contextmanager
    def _limited_lr(self) -> Iterator[float]:
        """Limit the learning rates of the optimizer inside the block; yield the largest."""
        groups = self.update.optimizer.param_groups
        scheduled = [float(group["lr"]) for group in groups]
        above = [(group, lr) for group, lr in zip(groups, scheduled, strict=True) if lr > self.lr_limit]
        try:
            for group, _ in above:
                _set_lr(group, self.lr_limit)
            yield min(max(scheduled), self.lr_limit)
        finally:
            for group, lr in above:
                _set_lr(group, lr)


class Loop:
    """Trains a model on batches, with rollback and diagnosis by guardrails. A context manager; `close` ends it.

    Args:
        model: converted or not. One `Loop` or `Monitor` at a time measures its layers; a `Monitor` with
            `telemetry=None` may record beside it, with `on_event=monitor.guard_event`.
        update: the optimizer of all its parameters, or an `Update`.
        loss_of: `loss_of(model, batch)` returns the loss, shape (); it may use autocast.
        batches: the training batches in order; those since the older snapshot are kept, if there is one.
        plan: the return value of `octavo.convert`; None: layers are never refined.
        config: limits and mode of the guardrails.
        on_event: called with each event; by default events become Python warnings.

    Raises:
        ConfigError: another `Loop` or `Monitor` measures the model; an optimizer of `octavo.optim` steps during
            backward (`release`), or stores gradients in FP8 where `Update.clip` cannot reach them.
    """

    def __init__(
        self,
        model: nn.Module,
        update: torch.optim.Optimizer | Update,
        loss_of: LossOf,
        batches: Iterable[Any],
        *,
        plan: Plan | None = None,
        config: GuardConfig | None = None,
        on_event: Callable[[GuardEvent], None] = warn,
    ) -> None:
        update = update if isinstance(update, Update) else Update(update)
        _check_update(update)
        config = config or GuardConfig()
        self.state = _Trained(model, update, loss_of, batches, plan, on_event)
        check = ParameterCheck(model, update.optimizer, config.parameters_every)
        self.guard = Guard(self.state, None if plan is None else plan.recipe, config, check)
        self._loop = loop.Loop(self.state, [self.guard])

    @property
    def done(self) -> int:
        """Number of steps made."""
        return self.state.done

    def steps(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield number and loss of each step until `count` steps are made. After a rollback, numbers repeat.

        Raises:
            ConfigError: there are too few batches.
            RunError: a NaN or infinity that nothing removes.
        """
        while self.done < count:
            loss = self.step()
            if loss is not None:
                yield self.done, loss

    def step(self) -> Tensor | None:
        """Make a step and return its loss, shape (); None if the run was rolled back."""
        made = self._loop.step()
        return None if made is None else made.loss

    def close(self) -> None:
        """Stop measuring the model, so that another `Loop` or `Monitor` can. Idempotent."""
        if self.state.telemetry is not None:
            self.state.telemetry.detach()
        self.state.telemetry = None

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "guard.Loop: cannot be copied or pickled with its batches and telemetry. Copy model and optimizer in one"
            " call, and make a Loop of the copies."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that keep a state besides tensors, with their names."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _check_update(update: Update) -> None:
    """Check that a loop can measure and clip the gradients of an optimizer.

    Raises:
        ConfigError: it cannot.
    """
    optimizer = update.optimizer
    if not isinstance(optimizer, Optimizer):
        return
    if optimizer.release:
        raise ConfigError(
            "octavo.lab.guard.Loop: the optimizer has release=True and updates each parameter during backward: a probe"
            " would train the model, and no gradient is left to measure. Make the optimizer without release;"
            " gradients='fp8' saves most of the same memory."
        )
    if update.clip and any(group["gradients"] == "fp8" for group in optimizer.param_groups):
        raise ConfigError(
            f"octavo.lab.guard.Loop: Update(clip={update.clip}) cannot clip gradients that the optimizer stores in FP8."
            f" Set clip of the optimizer instead: AdamW(..., gradients='fp8', clip={update.clip})."
        )


def _set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a group; a tensor, which compiled code and CUDA graphs read, in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
