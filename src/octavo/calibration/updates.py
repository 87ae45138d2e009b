"""Recalibration of static scales during training.

    with Recalibration(model, Updates(every=1000, saturated_above=1e-3), "calibration.json") as recalibration:
        for batch in batches:
            ...
            optimizer.step()
            recalibration.step()

New scales come from the largest values in training since the previous update. Decisions depend on the step only and
are equal on all ranks: a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from torch import nn

from octavo._util.dist import gather, on_first_rank
from octavo.errors import ConfigError
from octavo.nn import calibration_file
from octavo.nn.calibration_file import Calibrated
from octavo.nn.modules import full_name
from octavo.nn.scaling_state import scales
from octavo.nn.telemetry import STATS, Telemetry
from octavo.recipes import STORED_SCALE_ROLES
from octavo.recipes.spec import MOST_MARGIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Updates:
    """When static scales are updated, and with how much headroom."""

    every: int = 0
    """Optimizer steps between updates of all scales; 0: never."""
    saturated_above: float | None = None
    """Saturated share of a tensor above which its scale is updated. None: never."""
    look_every: int = 10
    """Steps between checks for saturation. A check waits for the device."""
    margin: int = 1
    """Bits of headroom above the largest value."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.look_every < 1:
            raise ConfigError(f"{self}: `every` must be 0 or more, and `look_every` 1 or more.")
        if self.saturated_above is not None and not 0 <= self.saturated_above < 1:
            raise ConfigError(f"saturated_above = {self.saturated_above}: it must be a share, 0 or more and below 1.")
        if not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(f"margin = {self.margin}: it must be bits of headroom, 0 to {MOST_MARGIN}.")

    def is_due(self, step: int) -> bool:
        """Return True if all scales are updated after a step."""
        return self.every > 0 and step % self.every == 0

    def looks(self, step: int) -> bool:
        """Return True if saturation is checked after a step."""
        return self.saturated_above is not None and step % self.look_every == 0

    def broken(self, rows: Sequence[Any], values: NDArray[Any]) -> dict[str, float]:
        """Return the tensors that exceed the saturation limit, with their shares.

        Args:
            rows, values: of `octavo.nn.telemetry.Telemetry`, of one step.
        """
        if self.saturated_above is None:
            return {}
        shares = zip(rows, values[:, STATS.index("saturated")].tolist(), strict=True)
        kept = ((full_name(row.layer, row.role), share) for row, share in shares if row.role in STORED_SCALE_ROLES)
        return {name: share for name, share in kept if share > self.saturated_above}


class Recalibration:
    """Updates static scales as `Updates` specifies. Call `step` after each optimizer step.

    Args:
        model: converted with static scales.
        updates: when to update.
        path: the calibration file. Each update is a change of it, which `octavo calibrate --undo` reverts. If it does
            not exist, it is created with the model's current scales.
        rows: rows of a `Telemetry` that measures the model already; `step` then takes its values. By default this
            class creates one if needed.
        done: optimizer steps made, in a resumed run.

    Raises:
        ConfigError: the model has no static scales, or is measured already and no `rows` are given.
    """

    done: int
    """Optimizer steps made. Set it after a rollback."""
    rows: Sequence[Any]
    """Rows of the telemetry values. Set it if that telemetry is replaced."""

    def __init__(
        self, model: nn.Module, updates: Updates, path: str | Path, *, rows: Sequence[Any] | None = None, done: int = 0
    ) -> None:
        scaling_state = scales(model)
        if scaling_state is None or not scaling_state.has_static:
            raise ConfigError("Recalibration: the model has no static scales. Convert it with the recipe 'static'.")
        self.updates, self.done = updates, done
        self._model, self._path = model, Path(path)
        own = rows is None and updates.saturated_above is not None
        self._telemetry = Telemetry(model, updates.look_every) if own else None
        self.rows = self._telemetry.rows if self._telemetry is not None else tuple(rows or ())
        if self._telemetry is not None:
            self._telemetry.restart(done)

    def step(self, values: NDArray[Any] | None = None) -> dict[str, Calibrated]:
        """Count a step and update scales if due; return the updated ones, with their previous ones.

        All ranks call it.

        Args:
            values: if `rows` were given, the values of this step, whenever `updates.looks` returns True for it.

        Raises:
            ConfigError: `values` are missing; or the file cannot be written, which all ranks raise. The scales may be
                updated by then.
        """
        self.done += 1
        updates, names, why = self.updates, None, f"every {self.updates.every} steps"
        if not updates.is_due(self.done):
            if not updates.looks(self.done):
                return {}
            broken = _of_all_ranks(updates.broken(self.rows, self._values(values)))
            if not broken:
                return {}
            worst = max(broken, key=lambda name: broken[name])
            names, why = set(broken), f"{broken[worst]:.2g} of {worst} saturated, above {updates.saturated_above:g}"
        return self._renew(names, f"step {self.done}: {why}; max, margin {updates.margin}")

    def _renew(self, names: Collection[str] | None, how: str) -> dict[str, Calibrated]:
        scaling_state = scales(self._model)  # not cached: converting the model again replaces it
        if scaling_state is None:
            return {}
        on_first_rank(lambda: None if self._path.exists() else scaling_state.save(self._path))
        made = scaling_state.recalibrate(names, self.updates.margin, how)
        if not made:
            return {}
        written = on_first_rank(lambda: calibration_file.update(self._path, made))
        return {name: (written or made)[name] for name in made}

    def close(self) -> None:
        """Stop measuring the model."""
        if self._telemetry is not None:
            self._telemetry.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _values(self, given: NDArray[Any] | None) -> NDArray[Any]:
        if self._telemetry is not None:
            self._telemetry.wait()
            while (taken := self._telemetry.snapshot()) is not None:
                given = taken[1]
        if given is None:
            raise ConfigError(f"Recalibration.step: the telemetry of step {self.done} is missing; `looks` asks for it.")
        return given


def _of_all_ranks(broken: dict[str, float]) -> dict[str, float]:
    """Return the tensors above the limit on any rank, with the largest share."""
    gathered = gather(broken)
    names = sorted({name for found in gathered for name in found})
    return {name: max(found.get(name, 0.0) for found in gathered) for name in names}
