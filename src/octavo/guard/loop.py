"""`Loop`: a training loop with guardrails, for models that `octavo train` does not train.

loop = Loop(model, optimizer, loss_of, batches, recipe="folded", config=GuardConfig(mode="act"))
for step, loss in loop.steps(1000):
    print(step, float(loss))
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.conversion import Policy, convert
from octavo.errors import ConfigError
from octavo.guard.alarms import Observation
from octavo.guard.config import GuardConfig
from octavo.guard.diagnosis import Probe
from octavo.guard.guard import SNAPSHOTS, Guard
from octavo.guard.guarded import Guarded, GuardEvent
from octavo.nn.telemetry import Telemetry
from octavo.recipes import Recipe, RecipeLike, load

LossOf = Callable[[nn.Module, Any], Tensor]


def warn(event: GuardEvent) -> None:
    """Issue an event as a Python warning, unless its level is `info`."""
    if event.level != "info":
        cause = f"[{event.cause}] " if event.cause else ""
        action = f" -> {event.action}" if event.action else ""
        warnings.warn(f"step {event.step}: {cause}{event.text}{action}", stacklevel=2)


class _State(NamedTuple):
    position: int
    """Index of the next batch."""
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None


class Loop(Guarded):
    """Trains a model on batches, with rollback and diagnosis by guardrails.

    Args:
        model: converted to `recipe`, or trained as it is.
        optimizer: of all its parameters.
        loss_of: `loss_of(model, batch)` returns the loss, shape (); it may use autocast.
        batches: the training batches in order; those since the older snapshot are kept.
        recipe: the recipe that the model was converted to; None: layers are never refined.
        policy: the policy that it was converted with.
        tokens: tokens of one forward pass, as for `octavo.convert`.
        clip: largest global norm of the gradient.
        scheduler: learning-rate scheduler, stepped after the optimizer.
        config: limits and mode.
        on_event: called with each event; by default events become Python warnings.
    """

    done = 0
    """Number of steps made."""
    models: Sequence[nn.Module] = ()
    telemetry: Telemetry | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOf,
        batches: Iterable[Any],
        *,
        recipe: RecipeLike | None = None,
        policy: Policy | None = None,
        tokens: int = 8192,
        clip: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        config: GuardConfig | None = None,
        on_event: Callable[[GuardEvent], None] = warn,
    ) -> None:
        self.model, self.models, self.optimizer, self.scheduler = model, (model,), optimizer, scheduler
        self._loss_of, self._batches, self._buffer = loss_of, iter(batches), deque[Any]()
        self._first = self._position = 0  # indices of the first buffered batch and of the next one
        self._positions: deque[int] = deque(maxlen=SNAPSHOTS)  # of the snapshots that guardrails keep
        self._policy, self._tokens, self._clip, self._on_event = policy, tokens, clip, on_event
        self._start_telemetry()
        self.guard = Guard(self, None if recipe is None else load(recipe), config)

    def steps(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield number and loss of each step until `count` steps are made. After a rollback, numbers repeat.

        Raises:
            ConfigError: there are too few batches.
            RunError: rolling back did not help.
        """
        while self.done < count:
            loss = self.step()
            if loss is not None:
                yield self.done, loss

    def step(self) -> Tensor | None:
        """Make a step and return its loss, shape (); None if the run was rolled back."""
        self.guard.before()
        batch = self._peek()
        self._position += 1
        self.done += 1
        with self._limited_lr() as lr:
            loss = self._loss_of(self.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip or float("inf"))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        observation = Observation(self.done, float(loss.detach()), float(norm), lr, self._measurements())
        return None if self.guard.after(observation) else loss.detach()

    # --- `octavo.guard.Guarded` -------------------------------------------------------------------------------------

    def _copy_state(self) -> _State:
        self._positions.append(self._position)
        while self._first < self._positions[0] and self._buffer:
            self._buffer.popleft()
            self._first += 1
        return _State(
            self._position,
            {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()},
            copy.deepcopy(self.optimizer.state_dict()),
            None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
        )

    def _load_state(self, step: int, state: _State) -> None:
        self.done, self._position = step, state.position
        while self._positions[-1] > state.position:
            self._positions.pop()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(state.model[name])
        if not state.optimizer["state"]:  # a copy from before the first step
            self.optimizer.state.clear()
        self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        if self.scheduler is not None and state.scheduler is not None:
            self.scheduler.load_state_dict(state.scheduler)

    def _saved_weight(self, state: _State, name: str) -> Tensor:
        return state.model[name]

    def _peek(self, state: _State | None = None) -> Any:
        position = self._position if state is None else state.position
        while position >= self._first + len(self._buffer):
            try:
                self._buffer.append(next(self._batches))
            except StopIteration:
                text = f"there are {position} batches, and step {self.done + 1} needs one more"
                raise ConfigError(
                    f"octavo.guard.Loop: {text}. Give an endless iterator, such as itertools.cycle(batches)."
                ) from None
        return self._buffer[position - self._first]

    def _compute(self, batch: Any, *, backward: bool = True, whole: bool = False) -> Probe:
        with torch.set_grad_enabled(backward):
            loss = self._loss_of(self.model, batch)
            if backward:
                loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        probe = Probe(float(loss.detach()), float(nn.utils.get_total_norm(gradients)))
        self.optimizer.zero_grad(set_to_none=True)
        return probe

    def _convert(self, recipe: Recipe) -> None:
        convert(self.model, recipe, policy=self._policy, tokens=self._tokens)

    def _start_telemetry(self) -> None:
        telemetry = Telemetry(self.model)
        self.telemetry = telemetry if telemetry.rows else None
        if self.telemetry is not None and self.done:
            self.telemetry.restart(self.done)

    def skip(self) -> None:
        """Skip the next batch."""
        self._peek()
        self._position += 1

    def emit(self, event: GuardEvent) -> None:
        """Call `on_event`."""
        self._on_event(event)

    # --- parts of a step --------------------------------------------------------------------------------------------

    @contextmanager
    def _limited_lr(self) -> Iterator[float]:
        """Limit the learning rates of the optimizer inside the block; yield the largest."""
        scheduled = [float(group["lr"]) for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = self.guard.lr(lr)
        yield self.guard.lr(max(scheduled))
        for group, lr in zip(self.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = lr

    def _measurements(self) -> NDArray[np.float32] | None:
        if self.telemetry is None:
            return None
        self.telemetry.wait()
        found = None
        while (measured := self.telemetry.snapshot()) is not None:
            found = measured[1] if measured[0] == self.done else None
        return found
