"""The reference rotation against complex multiplication in float64."""

import pytest
import torch

from octavo.kernels.rotary.reference import rotate


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Channel i and i + E/2 as one complex number, times exp(i angle)."""
    first, second = x.double().chunk(2, dim=-1)
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_pair_is_a_complex_number_that_turns(conjugate, batches):
    x = torch.randn(2, 5, 3, 12)
    angles = 10 * torch.randn(batches, 5, 6, dtype=torch.float64)
    y = rotate(x, angles.cos().float(), angles.sin().float(), conjugate)
    torch.testing.assert_close(y.double(), turned(x, -angles if conjugate else angles), rtol=1e-6, atol=1e-6)
