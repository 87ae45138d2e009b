"""A training loop with guardrails, for models that `octavo train` does not train.

    loop = Loop(model, optimizer, loss_of, batches, recipe="folded", config=GuardConfig(mode="act"))
    for step, loss in loop.steps(1000):
        print(step, float(loss))

`octavo train` has the same guardrails over its own loop.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.conversion import Policy, convert, disabled
from octavo.errors import ConfigError, OctavoError
from octavo.generators import generator_states, restore_generators, untouched_generators
from octavo.guard.config import GuardConfig
from octavo.guard.damage import damage
from octavo.guard.diagnosis import Probe
from octavo.guard.guard import SNAPSHOTS, Guard
from octavo.guard.guarded import Note
from octavo.guard.kept_scales import kept_scales, take_over
from octavo.guard.locate import locate
from octavo.guard.watch import Observation
from octavo.nn.telemetry import Telemetry
from octavo.recipes import Recipe, RecipeLike, load

LossOf = Callable[[nn.Module, Any], Tensor]


def warn(note: Note) -> None:
    """Say a note as a Python warning, unless it is for information only."""
    if note.level != "info":
        cause = f"[{note.cause}] " if note.cause else ""
        action = f" -> {note.action}" if note.action else ""
        warnings.warn(f"step {note.step}: {cause}{note.text}{action}", stacklevel=2)


@dataclass(frozen=True)
class _Taken:
    """All that a step changes."""

    done: int
    position: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    scales: dict[str, Tensor]
    generators: dict[str, Tensor]


class Loop:
    """Steps a model over batches, and goes back where that is better.

    Args:
        model: converted to `recipe`, or to be trained as it is.
        optimizer: of all its parameters.
        loss_of: computes the loss (shape ()) of a batch: `loss_of(model, batch)`; under autocast, if you want it.
        batches: what is trained on, in order; kept since the snapshot before the last one.
        recipe: by which the model was converted; None: no layer is moved to a finer one.
        policy: with which it was converted.
        tokens: of one forward, as `octavo.convert` takes them.
        clip: largest global norm of the gradient.
        scheduler: of the learning rate; stepped after the optimizer.
        config: limits, and whether to act.
        note: is told what guardrails saw and did; by default as Python warnings.
    """

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
        note: Callable[[Note], None] = warn,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._loss_of, self._batches, self._kept = loss_of, iter(batches), deque[Any]()
        self._first = self._position = 0  # of the batches that are kept, and of the next one
        self._positions: deque[int] = deque(maxlen=SNAPSHOTS)  # of the snapshots that guardrails keep
        self._policy, self._tokens, self._clip, self._tell = policy, tokens, clip, note
        self._done = 0
        self._telemetry = _watched(model)
        self.guard = Guard(self, None if recipe is None else load(recipe), config)

    def steps(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield number and loss of each step, until `count` are made. After a roll back the numbers begin again.

        Raises:
            ConfigError: there are too few batches.
            RunError: going back did not help.
        """
        while self._done < count:
            loss = self.step()
            if loss is not None:
                yield self._done, loss

    def step(self) -> Tensor | None:
        """Make a step and return its loss, of shape (); None where the run went back."""
        self.guard.before()
        batch = self._next()
        self._done += 1
        with self._held_lr() as lr:
            loss = self._loss_of(self.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip or float("inf"))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        seen = Observation(self._done, float(loss.detach()), float(norm), lr, self._values())
        return None if self.guard.after(seen) else loss.detach()

    # --- what guardrails ask (`octavo.guard.Guarded`) ---------------------------------------------------------------

    @property
    def done(self) -> int:
        """Steps made."""
        return self._done

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """What the rows of telemetry are about."""
        return () if self._telemetry is None else self._telemetry.rows

    def take(self) -> _Taken:
        """Return a copy of model, optimizer, scheduler, kept scales, generators and the position in the batches."""
        taken = _Taken(
            self._done,
            self._position,
            {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()},
            copy.deepcopy(self.optimizer.state_dict()),
            None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            kept_scales(self.model),
            generator_states(),
        )
        self._positions.append(self._position)
        self._forget_batches(before=self._positions[0])
        return taken

    def restore(self, taken: _Taken) -> None:
        """Go back to a snapshot."""
        self._done, self._position = taken.done, taken.position
        while self._positions[-1] > taken.position:
            self._positions.pop()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(taken.model[name])
        _restore_optimizer(self.optimizer, taken.optimizer)
        if self.scheduler is not None and taken.scheduler is not None:
            self.scheduler.load_state_dict(taken.scheduler)
        take_over(self.model, taken.scales)
        restore_generators(taken.generators)
        if self._telemetry is not None:
            self._telemetry.restart(self._done)

    def probe(self, *, fp8: bool, earlier: _Taken | None = None, backward: bool = True) -> Probe:
        """Try the next batch, or the one after a snapshot, without an update."""
        batch = self._batch(self._position if earlier is None else earlier.position)
        with self._untouched(), nullcontext() if fp8 else disabled(self.model), torch.set_grad_enabled(backward):
            loss = self._loss_of(self.model, batch)
            if backward:
                loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            probe = Probe(float(loss.detach()), float(nn.utils.get_total_norm(gradients)))
            self.optimizer.zero_grad(set_to_none=True)
        return probe

    def skip(self) -> None:
        """Pass over the next batch."""
        self._next()

    def refine(self, recipe: Recipe) -> str:
        """Convert the model anew; return why that is not possible, empty where it is done."""
        kept = kept_scales(self.model)
        if self._telemetry is not None:
            self._telemetry.detach()
        try:
            convert(self.model, recipe, policy=self._policy, tokens=self._tokens)
        except OctavoError as error:
            return str(error)
        finally:
            take_over(self.model, kept)
            self._telemetry = _watched(self.model)
            if self._telemetry is not None:
                self._telemetry.restart(self._done)
        return ""

    def locate(self) -> str:
        """Say which layer, role and token of the next batch is not finite first; empty for none."""
        batch = self._batch(self._position)
        with self._untouched():
            found = locate(self.model, lambda: self._loss_of(self.model, batch).backward())
            self.optimizer.zero_grad(set_to_none=True)
        return "" if found is None else str(found)

    def damage(self, layer: str, taken: _Taken, reach: float) -> str:
        """Say what of a layer's weight changed by more than `reach` since a snapshot; empty for nothing."""
        found = damage(taken.model[f"{layer}.weight"], self.model.get_parameter(f"{layer}.weight"), reach)
        return "" if found is None else str(found)

    def note(self, note: Note) -> None:
        """Tell whoever was named."""
        self._tell(note)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        batch = self._batch(self._position)
        self._position += 1
        return batch

    def _batch(self, position: int) -> Any:
        while position >= self._first + len(self._kept):
            try:
                self._kept.append(next(self._batches))
            except StopIteration:
                text = f"there are {position} batches, and step {self._done + 1} needs one more"
                raise ConfigError(
                    f"octavo.guard.Loop: {text}. Give an iterator that goes on, as itertools.cycle does."
                ) from None
        return self._kept[position - self._first]

    def _forget_batches(self, before: int) -> None:
        while self._first < before and self._kept:
            self._kept.popleft()
            self._first += 1

    # --- parts of a step --------------------------------------------------------------------------------------------

    @contextmanager
    def _held_lr(self) -> Iterator[float]:
        """Hold the learning rates of the optimizer inside the block; give the largest."""
        wanted = [float(group["lr"]) for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, wanted, strict=True):
            group["lr"] = self.guard.lr(lr)
        yield self.guard.lr(max(wanted))
        for group, lr in zip(self.optimizer.param_groups, wanted, strict=True):
            group["lr"] = lr

    def _values(self) -> NDArray[np.float32] | None:
        if self._telemetry is None:
            return None
        self._telemetry.wait()
        found = None
        while (taken := self._telemetry.snapshot()) is not None:
            found = taken[1] if taken[0] == self._done else None
        return found

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave generators, kept scales and telemetry as they were before the block."""
        kept = kept_scales(self.model)
        try:
            with untouched_generators():
                yield
        finally:
            take_over(self.model, kept)
            if self._telemetry is not None:
                self._telemetry.restart(self._done)


def _watched(model: nn.Module) -> Telemetry | None:
    telemetry = Telemetry(model)
    return telemetry if telemetry.rows else None


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if not state["state"]:  # before the first step there was none
        optimizer.state.clear()
    optimizer.load_state_dict(copy.deepcopy(state))
