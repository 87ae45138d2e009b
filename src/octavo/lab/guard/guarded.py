"""`Guarded`, the base of what a loop with guardrails trains: what `Guard` needs of it.

`octavo train` and `octavo.lab.guard.Loop` have one each. It defines how its state is copied, where its batches come
from and how they are computed. Rollback, probes and conversion are built on that here.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo._util.rng import generator_states, restore_generators, untouched_generators
from octavo.conversion import disabled
from octavo.errors import ConfigError, OctavoError
from octavo.lab.guard.alarms import GuardEvent, Row
from octavo.lab.guard.buffers import untouched_buffers
from octavo.lab.guard.diagnosis import Probe
from octavo.lab.guard.locate import NonFinite, locate_nonfinite, weight_diff
from octavo.nn.scaling_state import restore_scales, stored_scales
from octavo.nn.telemetry import Telemetry
from octavo.nn.telemetry_rows import module_of
from octavo.recipes import Recipe


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that a step changes."""

    step: int
    """Number of steps made."""
    position: int
    """Position of the next batch."""
    state: Any
    """Result of `Guarded._copy_state`."""
    scales: Sequence[Mapping[str, Tensor]]
    """Stored scales of each model."""
    generators: Mapping[str, Tensor]
    rules: Mapping[str, Any] = field(default_factory=dict)
    """History of the rules (`AlarmRules.state_dict`), set by `Guard`."""


class BatchesEnd(ConfigError):
    """There is no next batch."""


class Guarded(ABC):
    """What a loop trains, so that guardrails can check, roll back, probe and convert it.

    Args:
        on_event: called with each event of guardrails; one with `back_to` precedes the rollback.
    """

    done = 0
    """Number of steps made."""
    telemetry: Telemetry | None = None
    """Telemetry of the guarded model; None without FP8 layers."""
    lr_limit = math.inf
    """Limit on the learning rate of the next step, set by guardrails."""
    lag = 0
    """Steps that may be queued before the first of them is checked, so that a GPU is not waited for."""
    cannot_refine = ""
    """Why guardrails cannot convert layers to finer recipes; empty if they can."""
    conversions = 0
    """Number of conversions of the guarded model; each may change the rows of telemetry."""

    def __init__(self, on_event: Callable[[GuardEvent], None]) -> None:
        self.emit = on_event
        self._values: dict[int, NDArray[np.float32]] = {}
        """Telemetry that has arrived, of steps that are not checked yet."""

    # --- defined by each of them ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def models(self) -> Sequence[nn.Module]:
        """The models in training. The first one is guarded."""

    @property
    @abstractmethod
    def position(self) -> int:
        """Position of the next batch in the data, growing with each batch."""

    @abstractmethod
    def _seek(self, position: int) -> None:
        """Set the position of the next batch."""

    @abstractmethod
    def _next_batch(self) -> Any:
        """Return the next batch, on the device, and move on."""

    @abstractmethod
    def _copy_state(self) -> Any:
        """Return a copy of weights and optimizer states."""

    @abstractmethod
    def _load_state(self, state: Any) -> None:
        """Load the result of `_copy_state`, made after `done` steps; `state` stays unchanged."""

    @abstractmethod
    def _saved_weight(self, state: Any, name: str) -> Tensor | None:
        """Return a weight of the guarded model from `_copy_state`; None if it cannot be compared."""

    @abstractmethod
    def _compute(self, batch: Any, *, backward: bool = True, whole: bool = False) -> Probe:
        """Run forward and backward without an update and drop the gradients.

        Args:
            batch: result of `_next_batch`.
            backward: compute gradients.
            whole: do not split the batch for gradient accumulation.
        """

    @abstractmethod
    def _convert(self, recipe: Recipe) -> None:
        """Convert the guarded model to another recipe."""

    @abstractmethod
    def _make_telemetry(self) -> Telemetry | None:
        """Return telemetry of the FP8 layers of the guarded model as they are now; None without any."""

    def forget_before(self, position: int) -> None:  # noqa: B027
        """Release the batches before a position: no rollback goes further back."""

    def was_skipped(self, loss: float, gradient_norm: float) -> bool:
        """Return True if dynamic loss scaling skipped a step with these measurements."""
        return False

    def _start_telemetry(self) -> None:
        """Measure the FP8 layers of the guarded model as they are now, from the next step on."""
        self.telemetry = self._make_telemetry()
        if self.telemetry is not None:
            self.telemetry.restart(self.done)

    def collect_telemetry(self, *, wait: bool = False) -> None:
        """Collect the telemetry that has arrived; with `wait`, that of all steps made."""
        if self.telemetry is None:
            return
        if wait:
            self.telemetry.wait()
        while (arrived := self.telemetry.snapshot()) is not None:
            self._measured(*arrived)

    def _measured(self, step: int, values: NDArray[np.float32]) -> None:
        """Keep the telemetry of a step until the step is checked."""
        self._values[step] = values

    # --- used by guardrails -----------------------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Row]:
        """The tensor that each row of telemetry describes."""
        return () if self.telemetry is None else self.telemetry.rows

    def telemetry_at(self, step: int) -> NDArray[np.float32] | None:
        """Return the telemetry of a step; None if it was not sampled. Call it for steps in order.

        Waits for this step, and not for later ones that are queued.
        """
        self.collect_telemetry()
        while self.telemetry is not None and self.telemetry.is_coming(step):
            time.sleep(1e-4)
            self.collect_telemetry()
        found = self._values.pop(step, None)
        self._values = {known: values for known, values in self._values.items() if known > step}
        return found

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that a step changes."""
        stored = [stored_scales(model) for model in self.models]
        return Snapshot(self.done, self.position, self._copy_state(), stored, generator_states())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, which stays unchanged."""
        self.done = snapshot.step
        self._values.clear()
        if self.telemetry is not None:  # first: what was measured after the snapshot is not to arrive any more
            self.telemetry.restart(self.done)
        self._load_state(snapshot.state)
        self._seek(snapshot.position)
        for model, stored in zip(self.models, snapshot.scales, strict=False):  # the baseline may be gone
            restore_scales(model, stored)
        restore_generators(snapshot.generators)

    def skip(self) -> None:
        """Skip the next batch."""
        self._next_batch()

    def probe(
        self,
        *,
        fp8: bool = True,
        without: Collection[str] = (),
        earlier: Snapshot | None = None,
        backward: bool = True,
    ) -> Probe:
        """Compute the next batch without any lasting change.

        Args:
            fp8: in FP8, or all in high precision.
            without: names of FP8 layers that compute in high precision.
            earlier: compute the first batch after this snapshot.
            backward: compute gradients.
        """
        batch = self._peek(self.position if earlier is None else earlier.position)
        model = self.models[0]
        with ExitStack() as stack:
            stack.enter_context(self._untouched())
            for off in [model] if not fp8 else [module_of(model, name) for name in without]:
                stack.enter_context(disabled(off))
            return self._compute(batch, backward=backward)

    def probe_following(self, count: int, *, fp8: bool, backward: bool = True) -> list[Probe]:
        """Compute the batches after the next one, each like `probe`; fewer where the data end."""
        found: list[Probe] = []
        now = self.position
        try:
            for _ in range(count):
                self._next_batch()
                found.append(self.probe(fp8=fp8, backward=backward))
        except BatchesEnd:
            pass
        finally:
            self._seek(now)
        return found

    def change_recipe(self, recipe: Recipe) -> str:
        """Convert the guarded model to another recipe; return why that is impossible, or an empty string."""
        stored = stored_scales(self.models[0])
        self.collect_telemetry(wait=True)
        if self.telemetry is not None:
            self.telemetry.detach()
        try:
            self._convert(recipe)
            self.conversions += 1
        except OctavoError as error:
            return str(error)
        finally:
            restore_scales(self.models[0], stored)
            self._start_telemetry()
        return ""

    def locate(self) -> NonFinite | None:
        """Return the first non-finite tensor for the next batch; None if there is none."""
        batch = self._peek(self.position)
        with self._untouched():
            return locate_nonfinite(self.models[0], lambda: self._compute(batch, whole=True))

    def weight_diff(self, layer: str, snapshot: Snapshot, reach: float) -> str:
        """Describe the elements of a weight that changed by more than `reach` since a snapshot; empty for none."""
        before = self._saved_weight(snapshot.state, f"{layer}.weight")
        return "" if before is None else weight_diff(before, self.models[0].get_parameter(f"{layer}.weight"), reach)

    def _peek(self, position: int) -> Any:
        """Return the batch at a position, without moving on."""
        now = self.position
        self._seek(position)
        try:
            return self._next_batch()
        finally:
            self._seek(now)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Restore random generators, buffers, stored scales and telemetry after the block."""
        stored = stored_scales(self.models[0])
        self.collect_telemetry(wait=True)
        try:
            with untouched_generators(), untouched_buffers(self.models[0]):
                yield
        finally:
            restore_scales(self.models[0], stored)
            if self.telemetry is not None:
                self.telemetry.restart(self.done)
