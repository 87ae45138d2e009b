"""Shares and percentiles against NumPy on the values themselves."""

import numpy as np
import pytest
import torch

from octavo.calibration import MagnitudeHistogram


def values(dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over twenty octaves, with zeros."""
    x = torch.randn(5000) * 2.0 ** (torch.rand(5000) * 20 - 10)
    x[::17] = 0
    return x.to(dtype)


def spectrum_of(*tensors: torch.Tensor) -> MagnitudeHistogram:
    seen = MagnitudeHistogram()
    for tensor in tensors:
        seen.add(tensor)
    return seen


@pytest.mark.parametrize("threshold", [0.0, 1e-9, 0.0137, 1.0, 1.5, 3.14159, 1e9])
def test_shares_of_bf16_are_exact(threshold):
    x = values(torch.bfloat16).view(50, 100)
    seen, magnitude = spectrum_of(x), x.float().abs().numpy()
    assert seen.elements == 5000
    assert seen.zero == (magnitude == 0).mean()
    assert seen.above(threshold) == (magnitude > threshold).mean()
    assert seen.below(threshold) == ((magnitude > 0) & (magnitude < threshold)).mean()
    assert seen.below(threshold, inclusive=True) == ((magnitude > 0) & (magnitude <= threshold)).mean()


def test_a_bf16_value_on_the_threshold_is_neither_above_nor_below():
    seen = spectrum_of(torch.full((4,), 1.5, dtype=torch.bfloat16))
    assert (seen.above(1.5), seen.below(1.5), seen.below(1.5, inclusive=True)) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("percent", [0.1, 1.0, 50.0, 99.0, 99.99, 100.0])
def test_percentiles_are_within_a_bin_and_never_too_small(dtype, percent):
    x = values(dtype)
    magnitude = x.float().abs().numpy()
    exact = np.percentile(magnitude[magnitude > 0], percent, method="inverted_cdf")
    found = spectrum_of(x).percentile(percent)
    assert exact <= found <= exact * (1 + 2**-7)


def test_the_largest_magnitude_is_exact_in_all_and_in_each_batch():
    one, other = torch.tensor([0.1, -1 / 3]), torch.tensor([2.0 / 7, 0.0])
    seen = spectrum_of(one, other)
    assert seen.amax == float(np.float32(1 / 3))
    assert seen.batch_amax() == [float(np.float32(1 / 3)), float(np.float32(2 / 7))]
    assert seen.batches == 2


def test_counting_goes_on_after_it_was_read():
    seen = spectrum_of(torch.ones(4))
    assert seen.above(0.5) == 1
    seen.add(torch.zeros(12))
    assert (seen.elements, seen.above(0.5), seen.zero) == (16, 0.25, 0.75)


def test_what_is_not_finite_is_counted_and_counts_for_nothing():
    seen = spectrum_of(torch.tensor([torch.nan, -torch.inf, torch.inf, -torch.nan, 2.0]))
    assert (seen.non_finite, seen.amax, seen.above(1.0), seen.percentile(100)) == (4, 2.0, 0.2, 2.0)


def test_nothing_was_added():
    seen = MagnitudeHistogram()
    assert (seen.elements, seen.amax, seen.percentile(99), seen.above(0)) == (0, 0, 0, 0)
    seen.add(torch.zeros(0, 8))
    assert seen.batches == 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_the_smallest_values_up_to_a_share(share):
    x = values(torch.bfloat16)
    found = spectrum_of(x).smallest(share)
    magnitude = x.float().abs().numpy()
    small = (magnitude > 0) & (magnitude <= found)
    more = (magnitude > 0) & (magnitude <= found * (1 + 2**-6))
    assert small.mean() <= share < more.mean()


def test_too_few_differ_from_zero():
    x = torch.zeros(1000)
    x[0] = 1.0
    assert spectrum_of(x).smallest(0.01) is None
