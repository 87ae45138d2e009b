"""Each cause, from what was tried."""

from __future__ import annotations

import math

import pytest

from octavo.lab.guard.diagnosis import Evidence, Probe, diagnose, wellness

WELL, SPIKE, NAN = Probe(2.0, 1.0), Probe(9.0, 1.0), Probe(math.nan, math.nan)


@pytest.mark.parametrize(
    ("fp8", "bf16", "earlier", "cause"),
    [
        (WELL, WELL, WELL, None),
        (WELL, SPIKE, WELL, None),
        (SPIKE, WELL, WELL, "precision"),
        (NAN, WELL, WELL, "precision"),
        (Probe(2.0, 100.0), WELL, WELL, "precision"),
        (Probe(2.0, math.inf), WELL, WELL, "precision"),
        (SPIKE, SPIKE, WELL, "data"),
        (Probe(2.0, 30.1), Probe(2.0, 29.9), WELL, "data"),
        (NAN, NAN, WELL, "data"),
        (NAN, NAN, None, "data"),
        (SPIKE, SPIKE, Probe(2.2, 1.0), "optimizer"),
        (SPIKE, NAN, NAN, "optimizer"),
    ],
)
def test_causes(fp8: Probe, bf16: Probe, earlier: Probe | None, cause: str | None) -> None:
    assert diagnose(Evidence(fp8, bf16, 3.0, 30.0, earlier, Probe(2.1, 1.0))) == cause


@pytest.mark.parametrize(
    ("rule", "fp8", "well", "not_well"),
    [
        ("layer shift", Probe(2.001, 11.0), Probe(2.01, 1.2), Probe(2.0, 9.0)),  # gradients; the loss is noise
        ("layer shift", Probe(2.001, 0.1), Probe(2.0, 0.8), Probe(2.0, 0.12)),  # of the other sign
        ("layer shift", Probe(2.4, 1.0), Probe(2.1, 1.0), Probe(2.3, 1.0)),
        ("layer shift", NAN, Probe(2.01, 1.0), NAN),
        ("gap", Probe(2.01, 1.0), Probe(2.004, 3.0), Probe(2.008, 1.0)),
    ],
)
def test_a_batch_is_well_by_what_was_harmed(rule: str, fp8: Probe, well: Probe, not_well: Probe) -> None:
    is_well = wellness(rule, fp8, Probe(2.0, 1.0))
    assert is_well(well) and not is_well(not_well)
