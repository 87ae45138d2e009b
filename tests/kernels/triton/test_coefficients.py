"""The launch makes what the reference makes, to the bit in FP32."""

import math

import pytest
import torch

from octavo.kernels.coefficients import ParamSettings, StepInputs, reference
from octavo.kernels.runtime.transfers import PinnedStaging

fast = pytest.importorskip("octavo.kernels.coefficients.triton")


def settings(groups, parameters, device):
    """Return tables of random settings, sums of squares, and counts."""
    torch.manual_seed(0)
    low = torch.tensor([1e-5, 0.0, 0.9, 1e-10, 0.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    high = torch.tensor([1e-2, 0.99, 0.9999, 1e-6, 0.3, 1.0, 4.0, 2.0], dtype=torch.float64)
    hyper = low + (high - low) * torch.rand(groups, 8, dtype=torch.float64)
    own = torch.tensor([
        ParamSettings(i * 7 % groups, math.inf if i % 3 else 10.0, 0.2 + i % 5, i % 2 == 1) for i in range(parameters)
    ], dtype=torch.float64).reshape(-1, 4)  # fmt: skip
    counts = [torch.tensor(float(i * i)) for i in range(parameters)]
    squares = torch.rand(parameters, dtype=torch.float64)
    return (t.to(device) for t in (hyper, own, squares)), [count.to(device) for count in counts]


def both(groups, parameters, device, squares_are=1.0, normed=True, decays_weights=True, **amp):
    """Return what kernel and reference return: all of `StepCoefficients`, the counts, what was skipped."""
    found = []
    for module, where in ((reference, "cpu"), (fast, device)):
        (hyper, own, squares), counts = settings(groups, parameters, where)
        sums = module.group_squares(squares * squares_are, own, groups) if normed else None
        factors = {name: torch.tensor(x).to(where) for name, x in amp.items()}
        told = StepInputs(hyper, own, sums, decays_weights, **factors)
        skipped = torch.full((1,), 3, dtype=torch.int32, device=where)
        more = () if module is reference else (PinnedStaging(), 0)
        for _ in range(2):
            made = module.coefficients(told, counts, skipped, *more)
        found.append([None if t is None else t.cpu() for t in (*made, skipped, *counts)])
    return found


def same(here, there):
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
        for a, b in zip(here, there, strict=True)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("amp", [{}, {"grad_scale": 3.0, "found_inf": 0.0}, {"found_inf": 1.0}], ids=str)
@pytest.mark.parametrize(("groups", "parameters"), [(1, 1), (3, 300), (1, 0), (20, 130)])
def test_it_is_the_reference(groups, parameters, amp, device):
    for normed in (True, False):
        assert same(*both(groups, parameters, device, normed=normed, **amp))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_skipped(bad, device):
    here, there = both(2, 5, device, squares_are=bad)
    assert same(here, there) and here[2].item() == 1 and here[4].item() == 5


def test_adam_decays_no_weights(device):
    here, there = both(2, 5, device, decays_weights=False)
    assert same(here, there) and (here[0][:, 8] == 1).all()
