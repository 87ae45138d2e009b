"""A localisation as a table: a line a layer and GEMM, and what it adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.sensitivity.result import Localisation

_HEADER = ("layer", "N x K", "GEMM", "loss change", "", "1 - cosine", "costs", "ms saved", "chosen")
_RIGHT = (3, 5, 6, 7)


def table(found: Localisation) -> Iterator[str]:
    """Yield the lines of a table; the layer is named in its first."""
    rows = [_HEADER, *(_cells(row, row["gemm"] == found.layers[0].all[0]) for row in found.rows())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        yield "  ".join(cell.rjust(w) if i in _RIGHT else cell.ljust(w) for cell, w, i in cells).rstrip()
    yield ""
    yield from _totals(found)


def _cells(row: Mapping[str, Any], is_first: bool) -> tuple[str, ...]:
    forward = row["gemm"] == "fprop"
    return (
        row["layer"] if is_first else "",
        "{} x {}".format(*row["shape"]) if is_first else "",
        row["gemm"],
        f"{row['loss_change']:+.1e}" if forward else "",
        f"± {row['loss_error']:.0e}" if forward else "",
        f"{1 - row['cosine']:.1e}",
        f"{row['cost']:.1e}",
        f"{row['ms_saved']:.2g}",
        "fp8" if row["chosen"] else "bf16",
    )


def _totals(found: Localisation) -> Iterator[str]:
    gemms = [gemm for layer in found.layers for gemm in layer.all]
    chosen = sum(len(layer.chosen) for layer in found.layers)
    yield f"{chosen} of {len(gemms)} GEMMs in FP8 by recipe {found.recipe.name}"
    yield (
        f"costs {found.cost:.2e} of {found.budget:.2e} nats a token ({_share(found.cost, found)} of {found.loss:.4f}); "
        f"loss change of these weights {found.loss_change:+.2e}"
    )
    where = f"measured on {found.device}" if found.timing == "measured" else "predicted for an H200, not measured"
    yield f"saves {found.saved:.3g} of {found.offered:.3g} ms of linear layers a forward and backward, {where}"


def _share(cost: float, found: Localisation) -> str:
    return f"{100 * cost / found.loss:.3g} %" if found.loss else "0 %"
