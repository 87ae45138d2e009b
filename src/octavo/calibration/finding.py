"""`octavo.calibrate`: find the scales of linear layers from representative batches."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from octavo._util import config_reader
from octavo._util.terminal import columns
from octavo.calibration.histogram import FEWEST, MagnitudeHistogram
from octavo.calibration.scale_policy import FLUSHED, SATURATED, ScalePolicy
from octavo.calibration.targets import CalibrationTarget, count_magnitudes, find_targets
from octavo.conversion import Policy
from octavo.errors import ConfigError, NonFiniteError
from octavo.nn import calibration_file
from octavo.nn.calibration_file import Calibrated, Provenance
from octavo.nn.modules import full_name
from octavo.recipes import RecipeLike

Loss = Callable[[Any, Any], Any]
"""(model, batch) -> loss, a tensor of one element."""

_MEASURES = ("scales that fit", "spare bits", "flushed", "saturated", "suggested")
HEADER = ("layer", "role", "format", "scale", "amax", *_MEASURES)


class Row(NamedTuple):
    """A row of the table: one scale and its effect on its tensor."""

    layer: str
    role: str
    """`input` or `grad_output`."""
    scale: Calibrated

    @property
    def spare_bits(self) -> float | None:
        """Bits from the smallest to the largest recommended scale; negative: format too narrow; None: no limit."""
        statistics = self._statistics
        if statistics.highest is None:
            return None
        return math.log2(statistics.highest / statistics.lowest)

    @property
    def fits(self) -> bool:
        """True if the scale flushes and saturates few elements only."""
        return self._statistics.flushed <= FLUSHED and self._statistics.saturated <= SATURATED

    def cells(self) -> tuple[str, ...]:
        """Return its cells under `HEADER`."""
        found, seen, spare = self.scale, self._statistics, self.spare_bits
        highest = "" if seen.highest is None else f" {seen.highest:.3g}"
        span = f"{seen.lowest:.3g} to{highest}" if spare is None or spare >= 0 else "none"
        shares = (f"{100 * share:.2g} %" for share in (seen.flushed, seen.saturated))
        spare_shown = "-" if spare is None else f"{spare:.1f}"
        sizes = f"{found.scale:.4g}", f"{found.amax:.4g}", span, spare_shown
        return self.layer, self.role, found.format, *sizes, *shares, seen.suggested

    def to_dict(self) -> dict[str, Any]:
        """Return its content as plain values."""
        entry = config_reader.to_dict(replace(self.scale, previous=(), origin=None))
        statistics = {**entry.pop("statistics"), "spare_bits": self.spare_bits}
        kept = {key: entry[key] for key in ("format", "scaling", "scale", "amax")}
        return {"layer": self.layer, "role": self.role, **kept, **statistics, "fits": self.fits}

    @property
    def _statistics(self) -> calibration_file.Statistics:
        assert self.scale.statistics is not None  # set by `calibrate`
        return self.scale.statistics


@dataclass(frozen=True)
class Calibration:
    """The result of `octavo.calibrate`. `print` shows a table, `save` writes a calibration file."""

    scales: Mapping[str, Calibrated]
    """By `<layer>.input` or `<layer>.grad_output`, as in a file."""
    origin: Provenance
    """Their provenance."""
    not_found: tuple[str, ...] = ()
    """Scales whose tensors never occurred, or were all zero."""

    def described(self, source: str) -> Calibration:
        """Return the same with a description of model and data, for the file."""
        scales = {
            name: replace(found, origin=None if found.origin is None else replace(found.origin, source=source))
            for name, found in self.scales.items()
        }
        return replace(self, scales=scales, origin=replace(self.origin, source=source))

    def rows(self) -> list[Row]:
        """Return a row per scale, in the order of the layers."""
        return [Row(*_parts(name), scale) for name, scale in self.scales.items()]

    @property
    def fits(self) -> bool:
        """True if all scales were found and fit their tensors."""
        return not self.not_found and all(row.fits for row in self.rows())

    def save(self, path: str | Path) -> None:
        """Write the scales to a calibration file (JSON), for `octavo.convert(model, "static", scales=path)`.

        An existing file is updated: its former values of these layers are kept as previous ones, which
        `octavo calibrate --undo` restores; other layers stay unchanged.

        Raises:
            ConfigError: no scale was found, or the file cannot be written, or is not a calibration file.
        """
        calibration_file.update(Path(path), self.scales)

    def to_json(self) -> str:
        """Return rows, provenance and missing scales as JSON."""
        rows = [row.to_dict() for row in self.rows()]
        content = {"scales": rows, "not_found": self.not_found, "origin": config_reader.to_dict(self.origin)}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        lines = columns([HEADER, *(row.cells() for row in self.rows())])
        outside = [row for row in self.rows() if not row.fits]
        notes = [f"not found (never computed, or all zero): {name}" for name in self.not_found]
        notes += [_advice(row) for row in outside]
        verdict = f"{len(self.scales) - len(outside)} of {len(self.scales)} scales fit their tensors"
        return "\n".join([*lines, "", verdict, *notes])


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    recipe: RecipeLike | None = None,
    policy: Policy | None = None,
    layers: str | Sequence[str] = (),
    backward: bool = True,
    scale_policy: ScalePolicy | None = None,
) -> Calibration:
    """Find the scales of a model's linear layers from representative batches.

    The model computes in its own precision, in its current mode (`train`, `eval`); parameters, gradients and stored
    scales stay unchanged. Counting needs one pass over each tensor and 256 KiB per scale. A recomputed forward counts
    twice. Of several ranks each counts its own batches: call it on one, and let all read the file that it saves.

    Args:
        model: any module with `nn.Linear` layers, converted or not.
        batches: a few representative batches of the size used later, on the model's device.
        loss: runs a batch and returns the loss. By default the model is called with the batch, unpacked if it is a
            tuple, list or mapping; it returns the loss, or an object with it as `loss`. Multiply it by the loss
            scale of training, if there is one: it scales gradients too.
        recipe: decides formats and scaling; by default the recipes of the model's layers that store scales, else
            `static`.
        policy: the conversion policy, as for `octavo.convert`; `min_gain` is ignored.
        layers: one or several patterns of layers (`layers.0.*`) or scales (`*.grad_output`); by default all.
        backward: calibrate gradients too; otherwise only forward runs.
        scale_policy: how scales are derived from the observed magnitudes.

    Raises:
        ConfigError: nothing to calibrate, no batch, no loss, or a pattern without match.
        NonFiniteError: a tensor contained a NaN or infinity.
    """
    scale_policy, data = scale_policy or ScalePolicy(), DataHash()
    patterns = [layers] if isinstance(layers, str) else layers
    targets = find_targets(model, recipe, policy, patterns, backward)
    with count_magnitudes(model, targets) as seen, nullcontext() if backward else torch.no_grad():
        for batch in batches:
            data.add(batch)
            _run(model, batch, loss, backward)
    if not seen:
        raise ConfigError("octavo.calibrate: no batch was given, or none of the layers ran. Give a few batches.")
    _check_finite(seen)
    first = next(iter(targets.values()))
    if scale_policy.by == "percentile" and backward:
        warnings.warn(
            "calibrate: a percentile lets the largest gradients saturate, which costs 12 to 19 dB of their precision."
            " Choose by 'max', or leave gradients out (backward=False).",
            stacklevel=2,
        )
    if scale_policy.by == "extreme" and all(each.batches < FEWEST for each in seen.values()):
        raise ConfigError(
            f"calibrate: a scale by 'extreme' needs {FEWEST} batches to see how their largest values vary. Give"
            " more, or choose by 'max'."
        )
    origin = Provenance(recipe=first.recipe.name, how=str(scale_policy), data=str(data))
    return _result(targets, seen, scale_policy, origin)


def _result(
    targets: Mapping[str, CalibrationTarget],
    seen: Mapping[str, MagnitudeHistogram],
    scale_policy: ScalePolicy,
    origin: Provenance,
) -> Calibration:
    scales: dict[str, Calibrated] = {}
    for name, target in targets.items():
        shared = MagnitudeHistogram.of([seen[other] for other in target.group if other in seen])
        found = scale_policy.scale(seen[name], target.operand, shared) if name in seen else None
        if found is not None:
            scales[name] = replace(found, origin=replace(origin, recipe=target.recipe.name))
    return Calibration(scales, origin, tuple(name for name in targets if name not in scales))


def _run(model: nn.Module, batch: Any, loss: Loss | None, backward: bool) -> None:
    result = _call(model, batch) if loss is None else loss(model, batch)
    if not backward:
        return
    found = _loss_in(result)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if found is None or not found.requires_grad or not parameters:
        raise ConfigError(
            f"octavo.calibrate: running a batch returned {_described(result)}, which is no loss with gradients. "
            "Give loss=lambda model, batch: ...; or backward=False to calibrate inputs only."
        )
    torch.autograd.grad(found, parameters, allow_unused=True)  # leaves `parameter.grad` alone


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


def _check_finite(seen: Mapping[str, MagnitudeHistogram]) -> None:
    for name, histogram in seen.items():
        if count := histogram.non_finite:
            layer, role = _parts(name)
            raise NonFiniteError(
                f"octavo.calibrate: {count} of {histogram.elements} elements of the {role} of '{layer}', the first such"
                " layer, are NaN or infinite. Check the batch and the weights."
            )


def _advice(row: Row) -> str:
    """Return advice on a scale that does not fit."""
    spare = row.spare_bits
    where = f"{full_name(row.layer, row.role)}: "
    if spare is not None and spare < 0 and row.scale.statistics is not None:
        return where + f"no scale fits it in {row.scale.format}; suggested: {row.scale.statistics.suggested}"
    return where + "another margin or scale policy would fit: take a scale among those that fit"


def _parts(name: str) -> tuple[str, str]:
    layer, _, role = name.rpartition(".")
    return layer, role


class DataHash:
    """SHA-256 of batches: shapes, dtypes and bytes of tensors, and plain values."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: Any) -> None:
        """Add a batch: tensors, arrays, numbers and strings, in lists, tuples and mappings.

        Other objects contribute their type only.
        """
        for part in _bytes_of(batch):
            self._hash.update(part)

    def __str__(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype} {tuple(plain.shape)}".encode()
        yield plain.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key).encode()
            yield from _bytes_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _bytes_of(part)
    else:
        plain_kinds = (str, bytes, int, float, bool, type(None))
        yield (repr(value) if isinstance(value, plain_kinds) else type(value).__qualname__).encode()
