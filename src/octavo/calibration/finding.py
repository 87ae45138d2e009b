"""`octavo.calibrate`: run representative batches through a model, and find the scales of its linear layers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import strict
from octavo.calibration.choice import FLUSHED, SATURATED, Choice
from octavo.calibration.layers import Wanted, wanted
from octavo.calibration.provenance import DataHash
from octavo.calibration.spectrum import Spectrum
from octavo.calibration.watching import watched
from octavo.conversion import Policy
from octavo.errors import ConfigError, NonFiniteError
from octavo.nn import calibration
from octavo.nn.calibration import Calibrated, Origin, full_name
from octavo.recipes import RecipeLike

Loss = Callable[[Any, Any], Any]
"""(model, batch) to the loss, a tensor of one element."""

_MEASURES = ("scales that fit", "spare bits", "flushed", "saturated", "suggested")
HEADER = ("layer", "role", "format", "scale", "amax", *_MEASURES)


class Row(NamedTuple):
    """A line of the table: one scale, and what it does to its tensor."""

    layer: str
    role: str
    """`input` or `grad_output`."""
    scale: Calibrated

    @property
    def spare_bits(self) -> float | None:
        """Between the smallest and the largest recommended scale; negative: the format is too narrow. None: no end."""
        statistics = self._statistics
        if statistics.highest is None:
            return None
        return math.log2(statistics.highest / statistics.lowest)

    @property
    def fits(self) -> bool:
        """Whether the scale flushes and saturates few elements only."""
        return self._statistics.flushed <= FLUSHED and self._statistics.saturated <= SATURATED

    def cells(self) -> tuple[str, ...]:
        """Return what `print` shows of it, under `HEADER`."""
        found, seen, spare = self.scale, self._statistics, self.spare_bits
        highest = "" if seen.highest is None else f" {seen.highest:.3g}"
        span = f"{seen.lowest:.3g} to{highest}" if spare is None or spare >= 0 else "none"
        shares = (f"{100 * share:.2g} %" for share in (seen.flushed, seen.saturated))
        spare_shown = "-" if spare is None else f"{spare:.1f}"
        sizes = f"{found.scale:.4g}", f"{found.amax:.4g}", span, spare_shown
        return self.layer, self.role, found.format, *sizes, *shares, seen.suggested

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        entry = strict.to_dict(replace(self.scale, previous=(), origin=None))
        statistics = {**entry.pop("statistics"), "spare_bits": self.spare_bits}
        kept = {key: entry[key] for key in ("format", "scaling", "scale", "amax")}
        return {"layer": self.layer, "role": self.role, **kept, **statistics, "fits": self.fits}

    @property
    def _statistics(self) -> calibration.Statistics:
        assert self.scale.statistics is not None  # `calibrate` measures them all
        return self.scale.statistics


@dataclass(frozen=True)
class Calibration:
    """The scales that `octavo.calibrate` found. `print` shows a table, `save` writes them to a file."""

    scales: Mapping[str, Calibrated]
    """By `<layer>.input` or `<layer>.grad_output`, as in a file."""
    origin: Origin
    """Where they come from."""
    not_found: tuple[str, ...] = ()
    """Scales that were looked for, and whose tensors were never met, or all zero."""

    def rows(self) -> list[Row]:
        """Return a line for each scale, in the order of the layers."""
        return [Row(*_parts(name), scale) for name, scale in self.scales.items()]

    @property
    def fits(self) -> bool:
        """Whether all scales were found and fit their tensors."""
        return not self.not_found and all(row.fits for row in self.rows())

    def save(self, path: str | Path) -> None:
        """Write the scales to a calibration file (JSON), for `octavo.convert(model, "static", scales=path)`.

        A file that is there is updated: what it held of these layers is kept as previous values, which
        `octavo calibrate --undo` brings back; what it holds of others stays.

        Raises:
            ConfigError: no scale was found, or the file cannot be written, or is not a calibration file.
        """
        calibration.update(Path(path), self.scales)

    def to_json(self) -> str:
        """Return the lines of the table, where they come from, and what was not found, as JSON."""
        rows = [row.to_dict() for row in self.rows()]
        content = {"scales": rows, "not_found": self.not_found, "origin": strict.to_dict(self.origin)}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        cells = [HEADER, *(row.cells() for row in self.rows())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
        outside = [row for row in self.rows() if not row.fits]
        notes = [f"not found (never read, or all zero): {name}" for name in self.not_found]
        notes += [_advice(row) for row in outside]
        verdict = f"{len(self.scales) - len(outside)} of {len(self.scales)} scales fit their tensors"
        return "\n".join([*(line.rstrip() for line in lines), "", verdict, *notes])


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    recipe: RecipeLike | None = None,
    policy: Policy | None = None,
    layers: str | Sequence[str] = (),
    backward: bool = True,
    choice: Choice | None = None,
    source: str = "",
) -> Calibration:
    """Find the scales of a model's linear layers from representative batches.

    The model computes in its own precision, in the mode (`train`, `eval`) that it is in; parameters, their gradients
    and scales that it keeps stay as they are. Counting needs a pass over each tensor and 256 KiB for each scale. A
    forward that is recomputed counts twice.

    Args:
        model: any module with `nn.Linear` layers, converted or not.
        batches: what is run: a few, like those to come, in size too, on the model's device.
        loss: what is run on a batch, and gives the loss. By default the model is called with the batch, with its parts
            if it is a tuple, a list or a mapping; what it returns is the loss, or has it as `loss`. Multiply it by a
            loss scale that training will use: gradients have it too.
        recipe: whose formats and scaling are used; by default those that the model's layers keep scales by, else
            `static`.
        policy: which layers are converted, as `octavo.convert` will be told; `min_gain` does not matter here.
        layers: a pattern of layers (`layers.0.*`) or scales (`*.grad_output`), or several; by default all.
        backward: whether gradients are calibrated too. Without, forward alone runs.
        choice: how a scale is chosen of what was seen.
        source: what the file will say of the model and the data.

    Raises:
        ConfigError: nothing to calibrate, no batch, no loss, or a pattern that matches nothing.
        NonFiniteError: a tensor held a NaN or an infinity.
    """
    choice, data = choice or Choice(), DataHash()
    goal = wanted(model, recipe, policy, [layers] if isinstance(layers, str) else layers, backward)
    with watched(model, goal) as seen, nullcontext() if backward else torch.no_grad():
        for batch in batches:
            data.add(batch)
            _run(model, batch, loss, backward)
    if not seen:
        raise ConfigError("octavo.calibrate: no batch was given, or none of the layers ran. Give a few batches.")
    _check_finite(seen)
    first = next(iter(goal.values()))
    return _result(goal, seen, choice, Origin(recipe=first.recipe.name, how=str(choice), source=source, data=str(data)))


def _result(goal: Mapping[str, Wanted], seen: Mapping[str, Spectrum], choice: Choice, origin: Origin) -> Calibration:
    scales: dict[str, Calibrated] = {}
    for name, one in goal.items():
        together = Spectrum.of([seen[other] for other in one.together if other in seen])
        found = choice.scale(seen[name], one.operand, together) if name in seen else None
        if found is not None:
            scales[name] = replace(found, origin=replace(origin, recipe=one.recipe.name))
    return Calibration(scales, origin, tuple(name for name in goal if name not in scales))


def _run(model: nn.Module, batch: Any, loss: Loss | None, backward: bool) -> None:
    result = _call(model, batch) if loss is None else loss(model, batch)
    if not backward:
        return
    found = _loss_in(result)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if found is None or not found.requires_grad or not parameters:
        raise ConfigError(
            f"octavo.calibrate: running a batch gave {_described(result)}, and no loss that gradients can be taken of. "
            "Give loss=lambda model, batch: ...; or backward=False, which calibrates inputs alone."
        )
    torch.autograd.grad(found, parameters, allow_unused=True)  # leaves the parameters' own gradients alone


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _loss_in(result: Any) -> Tensor | None:
    found = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if isinstance(result, Mapping):
        found = result.get("loss")
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def _described(result: Any) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"


def _check_finite(seen: Mapping[str, Spectrum]) -> None:
    for name, spectrum in seen.items():
        if count := spectrum.non_finite:
            layer, role = _parts(name)
            raise NonFiniteError(
                f"octavo.calibrate: {count} of {spectrum.elements} elements of the {role} of '{layer}' are NaN or "
                "infinite, of all layers the first. Look for the batch or the weight that they come from."
            )


def _advice(row: Row) -> str:
    """Say what to do about a scale that does not fit."""
    spare = row.spare_bits
    where = f"{full_name(row.layer, row.role)}: "
    if spare is not None and spare < 0 and row.scale.statistics is not None:
        return where + f"no scale holds it in {row.scale.format}; suggested: {row.scale.statistics.suggested}"
    return where + "another margin or choice would hold it: take a scale among those that fit"


def _parts(name: str) -> tuple[str, str]:
    layer, _, role = name.rpartition(".")
    return layer, role
