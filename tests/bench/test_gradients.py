"""The cosine of two gradients; a whole study uses it in test_parity."""

from __future__ import annotations

import pytest
import torch

from octavo_bench.evidence import compare


def test_the_whole_and_the_worst_matrix() -> None:
    reference = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[0.0, 4.0]]), "norm": torch.tensor([1.0, 0.0])}
    turned = {**reference, "b": torch.tensor([[4.0, 0.0]]), "norm": torch.tensor([-1.0, 0.0])}
    whole, worst = compare(turned, reference)
    assert (whole, worst) == (pytest.approx((9 + 0 - 1) / 26), 0)
    assert compare(reference, reference) == (pytest.approx(1), 1)


def test_a_gradient_of_zeros_points_as_one_of_zeros_does() -> None:
    zero, one = {"a": torch.zeros(2, 2)}, {"a": torch.ones(2, 2)}
    assert compare(zero, zero) == (1, 1)
    assert compare(zero, one) == (0, 0)
