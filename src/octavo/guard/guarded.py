"""`Guarded`, the base of training loops with guardrails, and `GuardEvent`, which guardrails emit.

`octavo train` and `octavo.guard.Loop` are such loops. A loop defines how its state is copied and its batches are
computed; rollback, probing, conversion and diagnosis on top of that are the same for all and defined here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo._util.rng import generator_states, restore_generators, untouched_generators
from octavo.conversion import disabled
from octavo.errors import OctavoError
from octavo.guard.alarms import Row
from octavo.guard.diagnosis import Probe
from octavo.guard.locate import locate_nonfinite, weight_diff
from octavo.nn.scaling_state import scales
from octavo.recipes import Recipe


class GuardEvent(NamedTuple):
    """An observation, decision or action of guardrails."""

    step: int
    level: str
    """`info`, `warning` or `error`."""
    rule: str
    """The rule of the alarm, or `guard`."""
    text: str
    """Description."""
    action: str = ""
    """The action taken; empty for none."""
    layer: str = ""
    role: str = ""
    value: float | None = None
    limit: float | None = None
    cause: str = ""
    """One of `octavo.guard.diagnosis.Cause`, if known."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that a step changes."""

    step: int
    """Number of steps made."""
    state: Any
    """Result of `Guarded._copy_state`."""
    scales: Sequence[Mapping[str, Tensor]]
    """Stored scales of each model."""
    generators: Mapping[str, Tensor]


class Guarded(ABC):
    """A training loop that guardrails can roll back, probe and convert."""

    # --- defined by the loop ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def done(self) -> int:
        """Number of steps made."""

    @property
    @abstractmethod
    def models(self) -> Sequence[nn.Module]:
        """The models in training. The first one is guarded."""

    @property
    @abstractmethod
    def telemetry(self) -> Any:
        """Telemetry of the guarded model, an `octavo.nn.telemetry.Telemetry`; None without FP8 layers."""

    @abstractmethod
    def _copy_state(self) -> Any:
        """Return a copy of weights, optimizer states and data position."""

    @abstractmethod
    def _load_state(self, step: int, state: Any) -> None:
        """Load the result of `_copy_state`, made after `step` steps; `state` stays unchanged."""

    @abstractmethod
    def _saved_weight(self, state: Any, name: str) -> Tensor | None:
        """Return a weight of the guarded model from `_copy_state`; None if it cannot be compared."""

    @abstractmethod
    def _peek(self, state: Any = None) -> Any:
        """Return the next batch, or the one that followed `_copy_state`, without moving on."""

    @abstractmethod
    def _compute(self, batch: Any, *, backward: bool = True, whole: bool = False) -> Probe:
        """Run forward and backward without an update and drop the gradients.

        Args:
            batch: result of `_peek`.
            backward: compute gradients.
            whole: do not split the batch for gradient accumulation.
        """

    @abstractmethod
    def _convert(self, recipe: Recipe) -> None:
        """Convert the guarded model to another recipe."""

    @abstractmethod
    def _start_telemetry(self) -> None:
        """Replace the telemetry of the guarded model: its layers have changed."""

    @abstractmethod
    def skip(self) -> None:
        """Skip the next batch."""

    @abstractmethod
    def emit(self, event: GuardEvent) -> None:
        """Pass on an event."""

    def _collect_telemetry(self) -> None:  # noqa: B027 - optional
        """Collect pending measurements, before a probe drops them."""

    # --- used by guardrails -----------------------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Row]:
        """The tensor that each row of telemetry describes."""
        rows: Sequence[Row] = () if self.telemetry is None else self.telemetry.rows
        return rows

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that a step changes."""
        return Snapshot(self.done, self._copy_state(), [stored_scales(m) for m in self.models], generator_states())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, which stays unchanged."""
        self._load_state(snapshot.step, snapshot.state)
        for model, stored in zip(self.models, snapshot.scales, strict=True):
            restore_scales(model, stored)
        restore_generators(snapshot.generators)
        if self.telemetry is not None:
            self.telemetry.restart(snapshot.step)

    def probe(self, *, fp8: bool, earlier: Snapshot | None = None, backward: bool = True) -> Probe:
        """Compute the next batch, or the first one after a snapshot, without any lasting change."""
        batch = self._peek(None if earlier is None else earlier.state)
        with self._untouched(), nullcontext() if fp8 else disabled(self.models[0]):
            return self._compute(batch, backward=backward)

    def refine(self, recipe: Recipe) -> str:
        """Convert the guarded model to another recipe; return why that is impossible, or an empty string."""
        stored = stored_scales(self.models[0])
        if self.telemetry is not None:
            self.telemetry.detach()
        try:
            self._convert(recipe)
        except OctavoError as error:
            return str(error)
        finally:
            restore_scales(self.models[0], stored)
            self._start_telemetry()
        return ""

    def locate(self) -> str:
        """Return layer, role and token of the first non-finite tensor for the next batch; empty if there is none."""
        batch = self._peek()
        with self._untouched():
            found = locate_nonfinite(self.models[0], lambda: self._compute(batch, whole=True))
        return "" if found is None else str(found)

    def weight_diff(self, layer: str, snapshot: Snapshot, reach: float) -> str:
        """Describe the elements of a weight that changed by more than `reach` since a snapshot; empty for none."""
        before = self._saved_weight(snapshot.state, f"{layer}.weight")
        found = None if before is None else weight_diff(before, self.models[0].get_parameter(f"{layer}.weight"), reach)
        return "" if found is None else str(found)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Restore random generators, stored scales and telemetry after the block."""
        stored = stored_scales(self.models[0])
        self._collect_telemetry()
        try:
            with untouched_generators():
                yield
        finally:
            restore_scales(self.models[0], stored)
            if self.telemetry is not None:
                self.telemetry.restart(self.done)


def stored_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the scales that a model stores between steps, by name."""
    state = scales(model)
    return {} if state is None else state.state_dict()


def restore_scales(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Load the result of `stored_scales`, also after some layers changed their recipe.

    A scale that was not stored then, or has another history length now, keeps its value.
    """
    state = scales(model)
    if state is None:
        return
    now = state.state_dict()
    fits = {name: tensor for name, tensor in stored.items() if name in now and tensor.shape == now[name].shape}
    state.load_state_dict({**now, **fits})
