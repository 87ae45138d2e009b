from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo._util.terminal import silent
from octavo.lab.evaluation.result import Score, evaluation, mean_and_error, measure
from octavo.lab.evaluation.text import EvalText, SequenceLayout

TEXT = EvalText(
    source="notes.txt",
    is_heldout=False,
    ids=np.arange(33, dtype=np.uint16),
    layout=SequenceLayout(sequence=8, rows=2),
    sequences=4,
    bytes=64,
)


def measured(computed: str, *losses: float) -> Score:
    losses_S = torch.tensor(losses, dtype=torch.float64)
    gemms = {"scaled_mm.row": 7} if computed == "FP8" else {}
    score = measure(computed, lambda _: torch.stack([losses_S, losses_S.nan_to_num() / 10], 1), TEXT, silent)
    return replace(score, fp8_gemms=gemms)


def of(*found: Score, notes=()):
    return evaluation({"directory": "runs/a", "step": 3}, TEXT, "a CPU", found, notes)


def test_means_and_their_errors():
    values = torch.rand(50, dtype=torch.float64)
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values.numpy()))
    assert error == pytest.approx(np.std(values.numpy(), ddof=1) / math.sqrt(50))
    assert mean_and_error(values[:1]) == (pytest.approx(float(values[0])), None)


def test_a_row_for_each_way_and_what_two_differ_by():
    found = of(measured("FP8", 1.0, 2.0, 3.0, 4.0), measured("high precision", 1.0, 2.0, 3.0, 3.6))
    fp8, _ = found.scores
    assert (fp8.loss, fp8.perplexity, fp8.accuracy) == pytest.approx((2.5, math.exp(2.5), 0.25))
    assert fp8.bits_per_byte == pytest.approx(2.5 * 32 / 64 / math.log(2))
    (difference,) = found.differences
    assert (difference.computed, difference.reference) == ("FP8", "high precision")
    assert (difference.loss, difference.loss_error) == pytest.approx((0.1, 0.1))


def test_as_a_table_of_80_columns():
    found = of(measured("served", 1, 2, 3, 4), measured("FP8", 1, 2, 3, 4), measured("high precision", 1, 2, 3, 3))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert "FP8             2.5000 ± 0.6455         12.182        1.8034    25.00 %" in lines
    assert "served - FP8             +0.000000 ± 0.000000" in lines
    assert "8-bit GEMMs 7 scaled_mm.row" in lines


def test_what_is_not_finite_is_no_number_of_json():
    found = of(measured("FP8", math.nan, 2.0), measured("high precision", 1.0, 2.0))
    said = json.loads(found.to_json())
    assert not found.is_finite and said["scores"][0]["loss"] is None and said["scores"][1]["loss"] == 1.5
    assert said["differences"][0]["loss"] is None
    assert "not finite" in str(found)
    assert of(measured("BF16", 800.0, 800.0)).scores[0].perplexity is None


def test_one_sequence_has_no_error():
    (score,) = of(measured("BF16", 2.0)).scores
    assert (score.loss, score.loss_error) == (2.0, None)
    assert "±" not in str(of(measured("BF16", 2.0))).splitlines()[-3]


def test_notes_are_told():
    assert "note        the text has changed" in str(of(measured("BF16", 1.0), notes=["the text has changed"]))


def test_kernels_that_ran_are_counted():
    from octavo.kernels.runtime.ledger import count, fall_back

    def score(batches):
        for _ in batches:
            count("a kernel")
            fall_back("a reason")
        return torch.zeros(4, 2)

    found = measure("FP8", score, TEXT, silent)
    assert (found.fp8_gemms, found.fallbacks) == ({"a kernel": 2}, ("a reason",))
