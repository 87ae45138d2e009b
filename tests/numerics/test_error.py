"""Error measures against figures worked out by hand."""

import math

import pytest
import torch

from octavo.numerics import (
    cosine_of,
    inner_products,
    sqnr_db,
    sqnr_per_row_db,
)


def test_sqnr_of_known_noise():
    # signal 3^2 + 4^2 = 25, noise 0.5^2 = 0.25: a ratio of 100 is 20 dB
    assert sqnr_db(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])) == pytest.approx(20.0, abs=1e-12)


def test_sqnr_of_equal_tensors_is_infinite():
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf


def test_sqnr_of_nothing_left_is_zero():
    assert sqnr_db(torch.tensor([2.0, -1.0]), torch.zeros(2)) == 0.0


def test_sqnr_per_row_shows_the_row_that_the_global_figure_hides():
    reference = torch.tensor([[1000.0, 0.0], [1.0, 0.0]])
    approximation = torch.tensor([[1001.0, 0.0], [0.0, 0.0]])
    # row 0: 10^6 / 1 = 60 dB; row 1: 1 / 1 = 0 dB; together (10^6 + 1) / 2 = 57 dB
    assert sqnr_per_row_db(reference, approximation).tolist() == pytest.approx([60.0, 0.0], abs=1e-9)
    assert sqnr_db(reference, approximation) == pytest.approx(10 * math.log10((1e6 + 1) / 2), abs=1e-9)


def test_sqnr_does_not_overflow_in_low_precision():
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    assert sqnr_db(x, x * 0.5) == pytest.approx(10 * math.log10(4), abs=1e-6)


def test_the_cosine_of_a_whole_is_that_of_the_sum_of_its_parts():
    a, b = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 7.0]], dtype=torch.bfloat16)
    parts = torch.stack([inner_products(*rows) for rows in zip(a, b, strict=True)])
    assert parts.tolist() == [[3, 9, 2], [0, 16, 49]] and parts.dtype == torch.float64
    assert cosine_of(parts.sum(0)) == pytest.approx(3 / (25 * 51) ** 0.5, rel=1e-15) and cosine_of(parts[1]) == 0


@pytest.mark.parametrize(("a", "b", "cosine"), [(0.0, 0.0, 1.0), (0.0, 2.0, 0.0), (-1.0, 2.0, -1.0)])
def test_the_cosine_with_zeros(a, b, cosine):
    assert cosine_of(inner_products(torch.tensor([a]), torch.tensor([b]))) == cosine
    assert math.isnan(cosine_of(inner_products(torch.tensor([a]), torch.tensor([math.nan]))))
