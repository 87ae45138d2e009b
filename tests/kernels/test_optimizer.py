"""The definition of a step, against AdamW in FP64 and against what storage promises."""

import sys
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.optimizer import load_gradient, momentum, reference, squares, store_gradient, update
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.storage import reference as codec
from octavo.kernels.storage.reference import from_groups

sys.path.insert(0, str(Path(__file__).parent))
import optimizer_cases as cases

SHAPE = (24, 300)
BOUNDS = {
    "fp32": 2e-6,
    "fp32, bf16 weight": 2e-6,
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
        update([slot._replace(gradient=g)], layout, cases.control(step, 1, largest_update=10.0), PinnedStaging())
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
            update([slot._replace(gradient=g)], layout, cases.control(step, 1), PinnedStaging())
        assert torch.equal(master(one, exact), other.weight)
        nearest = other.weight.bfloat16()
        tie = (other.weight.view(torch.int32) & 0xFFFF) == 0x8000  # to even there, away from zero here
        assert torch.equal(one.weight[~tie], nearest[~tie])


@pytest.mark.parametrize("kind", ["fp8", "fp8-min"])
def test_a_second_moment_is_never_lost(kind):
    """The smallest of a group is 2^45 below the largest, and still not zero; so no update is m / eps."""
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, (4, 256), 0)
    gradient = torch.exp2(-torch.linspace(0, 45, 256)).repeat(4, 1)
    update([slot._replace(gradient=gradient)], layout, cases.control(1, 1), PinnedStaging())
    assert (slot.second > 0).all()
    untouched = torch.zeros(4, 256)
    for step in range(2, 40):
        control = cases.control(step, 1, largest_update=10.0)
        update([slot._replace(gradient=untouched)], layout, control, PinnedStaging())
        assert int(control.clamped) == 0


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-15, 1e-8])
@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_updates_of_gradients_of_any_size(kind, rule, eps):
    """One magnitude per row, so that scales per group fit; three equal gradients, whose update is g / (g + eps)."""
    layout = cases.layout_of(kind, rule, stochastic=False)
    powers = torch.arange(-149.0, 62.0, 1.0)
    for part in powers[::16].split(1) if layout.searches else [powers]:
        _check_updates(layout, rule, eps, part, BOUNDS[kind])


def _check_updates(layout, rule, eps, powers, bound):
    slot = cases.slot(layout, (len(powers), 128), 0)
    g = torch.exp2(powers)[:, None].expand(-1, 128).contiguous()
    settings = {"factor": 1.0, "lr": 2.0**-4, "weight_kept": 1.0, "weight_decay": 0.0, "largest_update": torch.inf}
    for step in (1, 2, 3):
        before = master(slot, layout).double()
        control = cases.control(step, 1, eps=eps, **settings)
        update([slot._replace(gradient=g)], layout, control, PinnedStaging())
        u = (before - master(slot, layout)) * 16
        expected = g.double() / (g.double() + eps)
        normal = g[:, 0] >= 2.0**-60  # below, squares are subnormal, and below 2^-70 they are 0
        error = (u - expected).abs().amax(1)
        assert (error[normal] < 0.02 + 2 * bound).all()
        assert (u >= 0).all() and (u < 3).all()
        assert (u[g[:, 0] < 2.0**-74] < 0.1).all()


def test_where_small_operands_of_an_update_are_cut():
    just_below = torch.nextafter(torch.tensor(2.0**-100), torch.tensor(0.0))
    x = torch.tensor([2.0**-100, float(just_below), -(2.0**-100), -float(just_below), 0.0])
    one = torch.full((5,), 2.0**-70)
    assert codec.quotient(x, one).tolist() == [2.0**-30, 0.0, -(2.0**-30), 0.0, 0.0]
    for by in (2.0**-70 * (1 + 2.0**-20), 2.0**-70, 2.0**-71, 2.0**-100, 2.0**-101, 0.0):
        found = codec.quotient(torch.tensor([2.0**-80]), torch.tensor([by]))
        assert float(found) == float(torch.tensor(2.0**-80) / torch.tensor(max(by, 2.0**-70)))
    roots = torch.tensor([2.0**-100, float(just_below), 2.0**-126, 2.0**-149, 3 * 2.0**-149, 0.0])
    assert torch.equal(codec.root(roots), roots.double().sqrt().float()) and (codec.root(roots)[:5] > 0).all()


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
            update([slot], layout, cases.control(step, 1, **values), PinnedStaging())
        second = from_groups(reference.read(slot.second, slot.second_scale, layout.second), 8, 1024)
        expected = (0.001 * g.double().square()) * 0.999**299
        decayed[rounding] = float(second.double().sum() / expected.sum())
    assert abs(decayed[True] - 1) < 0.03
    assert decayed[False] > 1.25  # it has not moved at all: 0.999^-299 is 1.35


@pytest.mark.parametrize("kind", cases.KINDS)
def test_no_random_bits_are_drawn_where_fp32_is_stored(kind, monkeypatch):
    layout, drawn = cases.layout_of(kind), []
    monkeypatch.setattr(reference, "_random", lambda *_: drawn.append(1) or (None, None, None))
    reference.update([cases.slot(layout, (2, 128), 0)], layout, cases.control(1, rows=1))
    assert bool(drawn) == layout.draws == (kind not in ("fp32", "fp32 master apart"))


def test_a_second_moment_of_one_byte_has_no_bias():
    """With beta2 = 0.999 it is read and written a thousand times: rounding the root itself gained 1.9 % on the way."""
    layout = cases.layout_of("fp8")._replace(first=cases.storage("fp32"))
    slot = cases.slot(layout, (16, 1024), 0)
    values = {"second_decay": 0.999, "second_share": 0.001, "factor": 1.0, "lr": 0.0}
    torch.manual_seed(0)
    size, expected, ratios = torch.exp(torch.randn(16, 1024)), torch.zeros(16, 1024).double(), []
    for step in range(1, 1401):
        g = size * torch.randn(16, 1024)
        expected = 0.999 * expected + 0.001 * g.double().square()
        update([slot._replace(gradient=g)], layout, cases.control(step, 1, **values), PinnedStaging())
        if step > 900 and step % 100 == 0:
            second = from_groups(reference.read(slot.second, slot.second_scale, layout.second), 16, 1024)
            ratios.append((second / expected).mean())
    # Elements err by 20 % each (a standard deviation), independently; the average of 16,384 of them by 0.16 %.
    assert abs(float(torch.stack(ratios).mean()) - 1) < 0.006


def test_rounding_depends_on_seed_step_and_number_alone():
    layout = cases.layout_of("fp8")
    torch.manual_seed(0)
    slot = cases.slot(layout, SHAPE, 0)
    g = cases.gradient(layout, SHAPE)

    def codes(number=0, step=1, seed=5):
        new = cases.copy(slot)._replace(number=number, gradient=g)
        update([new], layout, cases.control(1, 1)._replace(seed=seed, steps=torch.tensor([step])), PinnedStaging())
        return new.first.view(torch.uint8)

    assert torch.equal(codes(), codes())
    for other in (codes(number=1), codes(step=2), codes(seed=6)):
        assert 0 < (codes() != other).float().mean() < 1


@pytest.mark.parametrize("kind", ["fp32", "exact", "fp8", "fp8, fp8 weight"])
def test_a_given_update_is_subtracted(kind):
    torch.manual_seed(0)
    layout = cases.layout_of(kind, "given")
    slot = cases.slot(layout, SHAPE, 0)
    before, given = master(slot, layout), torch.randn(SHAPE)
    update([slot._replace(gradient=given)], layout, cases.control(1, 1, largest_update=torch.inf), PinnedStaging())
    expected = before.double() * 0.9999 - 1e-3 * 0.7 * given.double()
    error = (master(slot, layout) - expected).abs().max()
    assert error < {"fp32": 1e-8, "exact": 1e-8, "fp8": 2e-6, "fp8, fp8 weight": 1e-6}[kind]


@pytest.mark.parametrize(("nesterov", "expected"), [(True, [2.66, 1.26]), (False, [1.4, 1.26])])
def test_momentum(nesterov, expected):
    """Of gradients 2 and 0, multiplied by 0.7: m is 1.4, then 1.26."""
    layout = cases.layout_of("fp32")
    slot = cases.slot(layout, (2, 3), 0)._replace(gradient=torch.full((2, 3), 2.0))
    found = [torch.zeros(2, 3, dtype=torch.bfloat16)]
    momentum([slot], layout, cases.control(1, 1), found, PinnedStaging(), nesterov=nesterov)
    assert torch.equal(found[0], torch.full((2, 3), expected[0]).bfloat16())
    torch.testing.assert_close(slot.first, torch.full((2, 3), 1.4))
    momentum(
        [slot._replace(gradient=torch.zeros(2, 3))], layout, cases.control(2, 1), found, PinnedStaging(), nesterov=False
    )
    assert torch.equal(found[0], torch.full((2, 3), expected[1]).bfloat16())


@pytest.mark.parametrize("scaling", ["group", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_stored_gradient(dtype, scaling):
    """Each code is the nearest to value / scale, by PyTorch's own cast, and the scale a power of two that just fits."""
    torch.manual_seed(0)
    gradient = cases.wide((5, 300))
    codes, scale = cases.empty(dtype, scaling, (5, 300))
    store_gradient(gradient, codes, scale, scaling)
    factor = torch.exp2(scale.double() - 127).repeat_interleave(128, dim=1)[:, :300] if scaling == "group" else None
    factor = torch.exp2(scale.double() - 127) if factor is None else factor
    assert torch.equal(codes.float(), (gradient / factor).float().to(dtype).float())
    largest = (gradient / factor).abs().max()
    assert torch.finfo(dtype).max / 2 < largest <= torch.finfo(dtype).max
    assert torch.equal(load_gradient(codes, scale), (codes.double() * factor).float())


@pytest.mark.parametrize(("dtype", "infinite"), [(torch.float8_e4m3fn, torch.nan), (torch.float8_e5m2, torch.inf)])
def test_a_stored_gradient_that_is_not_finite_is_seen(dtype, infinite):
    gradient = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan]])
    codes, scale = cases.empty(dtype, "group", (1, 4))
    store_gradient(gradient, codes, scale, "group")
    expected = torch.tensor([[1.0, infinite, -infinite, torch.nan]])
    torch.testing.assert_close(load_gradient(codes, scale), expected, equal_nan=True)
    assert not squares([codes], PinnedStaging(), [scale]).isfinite()


@pytest.mark.parametrize(
    ("codes", "scale", "scaling"),
    [
        (torch.float8_e4m3fn, (2, 2), "none"),
        (torch.float8_e4m3fn, (2, 1), "group"),
        (torch.float8_e4m3fn, (2, 2), "tensor"),
        (torch.bfloat16, (2, 2), "group"),
    ],
)
def test_a_gradient_that_cannot_be_stored_so(codes, scale, scaling):
    with pytest.raises(ConfigError, match="store_gradient"):
        store_gradient(torch.ones(2, 200), torch.zeros(2, 200).to(codes), torch.zeros(scale).to(torch.uint8), scaling)


def test_an_empty_tensor_has_scales_too():
    slot = cases.slot(cases.layout_of("fp8-lm"), (0, 8), 0)
    assert slot.master_scale.tolist() == [[1]]


def test_squares():
    tensors = [torch.tensor([3.0, 4.0]), torch.ones(2, 2).bfloat16(), torch.zeros(0)]
    assert squares(tensors, PinnedStaging()).tolist() == [25.0, 4.0, 0.0]
    with pytest.raises(ValueError, match="no tensors"):
        squares([], PinnedStaging())
