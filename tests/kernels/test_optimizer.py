"""The definition of a step, against AdamW in FP64 and against what storage promises."""

import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.optimizer import squares, update
from octavo.kernels.reference import optimizer as reference
from octavo.kernels.reference.storage import from_groups
from octavo.kernels.uploads import Uploads

sys.path.insert(0, str(Path(__file__).parent))
import optimizer_cases as cases

SHAPE = (24, 300)
BOUNDS = {
    "fp32": 2e-6,
    "fp32 master apart": 2e-6,
    "exact": 6e-3,
    "fp8-lm": 0.08,
    "fp8": 0.08,
    "fp8, fp32 weight": 0.08,
    "fp8, fp8 weight": 0.08,
}
"""Largest error of 20 updates together, a root mean square, as a share of the updates themselves."""


def adamw_fp64(weight, gradients, lr=1e-3, eps=1e-8):
    w, m, v = weight.double(), 0.0, 0.0
    for step, g in enumerate(gradients, start=1):
        g = g.double() * 0.7
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        u = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + eps)
        w = w * 0.9999 - lr * u
    return w


def master(slot, layout):
    return from_groups(reference.read_weight(slot, layout), *slot.weight.shape)


@pytest.mark.parametrize("kind", BOUNDS)
def test_twenty_steps_are_those_of_fp64(kind):
    torch.manual_seed(0)
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, SHAPE, 0)
    before = master(slot, layout)
    spread = torch.exp(torch.randn(SHAPE))  # of each element's gradients, which keep their order of magnitude
    gradients = [1e-3 * spread * torch.randn(SHAPE) for _ in range(20)]
    for step, g in enumerate(gradients, start=1):
        update([slot._replace(gradient=g)], layout, cases.control(step, 1, largest_update=10.0), Uploads())
    expected = adamw_fp64(before, gradients)
    moved = (expected - before).square().mean().sqrt()
    error = (master(slot, layout) - expected).square().mean().sqrt() / moved
    assert error < BOUNDS[kind]
    assert error > BOUNDS[kind] / 3  # a bound that says nothing would be none


def test_exact_is_an_fp32_master_with_bf16_moments():
    torch.manual_seed(0)
    exact, apart = cases.layout_of("exact"), cases.layout_of("exact")._replace(weight=torch.float32, remainder_bits=0)
    one = cases.slot(exact, SHAPE, 0)
    other = cases.slot(apart, SHAPE, 0)._replace(weight=master(one, exact).clone())
    for step in range(1, 6):
        g = cases.gradient(exact, SHAPE)
        for slot, layout in ((one, exact), (other, apart)):
            update([slot._replace(gradient=g)], layout, cases.control(step, 1), Uploads())
        assert torch.equal(master(one, exact), other.weight)
        nearest = other.weight.bfloat16()
        tie = (other.weight.view(torch.int32) & 0xFFFF) == 0x8000  # to even there, away from zero here
        assert torch.equal(one.weight[~tie], nearest[~tie])


@pytest.mark.parametrize("kind", ["fp8", "fp8-min"])
def test_a_second_moment_is_never_lost(kind):
    """The smallest of a group is 2^60 below the largest, and still not zero; so no update is m / eps."""
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, (4, 256), 0)
    gradient = torch.exp2(-torch.linspace(0, 60, 256)).repeat(4, 1)
    update([slot._replace(gradient=gradient)], layout, cases.control(1, 1), Uploads())
    assert (slot.second > 0).all()
    untouched = torch.zeros(4, 256)
    for step in range(2, 40):
        control = cases.control(step, 1, largest_update=10.0)
        update([slot._replace(gradient=untouched)], layout, control, Uploads())
        assert int(control.clamped) == 0


def test_only_stochastic_rounding_follows_a_slow_decay():
    """The dead zone: with beta2 = 0.999, a step is less than half of what a code can say."""
    decayed = {}
    for rounding in (True, False):
        layout = cases.layout_of("fp8", stochastic=rounding)
        slot = cases.slot(layout, (8, 1024), 0)
        values = {"second_decay": 0.999, "second_share": 0.001, "factor": 1.0, "lr": 0.0}
        g = torch.ones(8, 1024) * torch.linspace(0.5, 1.0, 1024)
        for step in range(1, 301):
            slot = slot._replace(gradient=g if step == 1 else torch.zeros_like(g))
            update([slot], layout, cases.control(step, 1, **values), Uploads())
        second = from_groups(reference.read(slot.second, slot.second_scale, layout.second), 8, 1024)
        expected = (0.001 * g.double().square()) * 0.999**299
        decayed[rounding] = float(second.double().sum() / expected.sum())
    assert abs(decayed[True] - 1) < 0.03
    assert decayed[False] > 1.25  # it has not moved at all: 0.999^-299 is 1.35


def test_rounding_depends_on_seed_step_and_number_alone():
    layout = cases.layout_of("fp8")
    torch.manual_seed(0)
    slot = cases.slot(layout, SHAPE, 0)
    g = cases.gradient(layout, SHAPE)

    def codes(number=0, step=1, seed=5):
        new = cases.copy(slot)._replace(number=number, gradient=g)
        update([new], layout, cases.control(1, 1)._replace(seed=seed, steps=torch.tensor([step])), Uploads())
        return new.first.view(torch.uint8)

    assert torch.equal(codes(), codes())
    for other in (codes(number=1), codes(step=2), codes(seed=6)):
        assert 0 < (codes() != other).float().mean() < 1


def test_squares():
    tensors = [torch.tensor([3.0, 4.0]), torch.ones(2, 2).bfloat16(), torch.zeros(0)]
    assert squares(tensors, Uploads()).tolist() == [25.0, 4.0, 0.0]
    with pytest.raises(ValueError, match="no tensors"):
        squares([], Uploads())
