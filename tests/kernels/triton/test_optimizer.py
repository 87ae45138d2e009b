"""The fused step is the reference's, bit for bit: codes, scales, remainders and counters."""

import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.optimizer import reference
from octavo.kernels.runtime.transfers import PinnedStaging

fast = pytest.importorskip("octavo.kernels.optimizer.triton")
sys.path.insert(0, str(Path(__file__).parents[1]))
import optimizer_cases as cases  # noqa: E402


@pytest.fixture(autouse=True)
def few_steps(monkeypatch, device):
    """The interpreter would walk over what is not there."""
    if device == "cpu":
        monkeypatch.setattr(fast, "STEPS", 2)
        monkeypatch.setattr(fast, "ROW_STEPS", 2)


def both(layout, shapes, device, steps=2, **changed):
    """Step the same tensors by kernel and reference; return them, and what both counted."""
    torch.manual_seed(0)
    here = [cases.slot(layout, shape, row) for row, shape in enumerate(shapes)]
    there = [cases.copy(slot, device) for slot in here]
    uploads, counted = PinnedStaging(), []
    for step in range(1, steps + 1):
        here = [cases.with_gradient(slot, layout) for slot in here]
        there = [
            slot._replace(gradient=other.gradient.to(device), gradient_scale=_on(other.gradient_scale, device))
            for slot, other in zip(there, here, strict=True)
        ]
        ours = cases.control(step, len(shapes), **changed)
        theirs = cases.control(step, len(shapes), device, **changed)
        for slot in here:
            reference.update([slot], layout, ours)
        fast.update(there, layout, theirs, uploads)
        counted.append((int(ours.clamped), int(theirs.clamped)))
    return here, there, counted


def _on(tensor, device):
    return None if tensor is None else tensor.to(device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [cases.EVEN, cases.RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_adamw(kind, shapes, device):
    here, there, counted = both(cases.layout_of(kind), shapes, device)
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[]] * len(shapes)
    assert all(a == b for a, b in counted) and counted[1][0] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["adam", "lion"])
@pytest.mark.parametrize("kind", ["exact", "fp8", "fp8-min"])
def test_other_rules_dtypes_and_rounding(kind, rule, dtype, device):
    layout = cases.layout_of(kind, rule, dtype, stochastic=False)
    here, there, _ = both(layout, [(3, 200)], device)
    assert cases.different(here[0], there[0]) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-8])
@pytest.mark.parametrize("kind", ["fp32", "exact", "fp8"])
def test_gradients_of_any_size(kind, eps, device):
    """Around 2^-100 and 2^-50, where operands and roots become small, around the least divisor, and at the ends."""
    layout = cases.layout_of(kind)
    torch.manual_seed(0)
    powers = torch.cat([torch.arange(-149, 64), torch.linspace(-101, -99, 21), torch.linspace(-72, -48, 22)])
    here = cases.slot(layout, (2, 256), 0)
    there = cases.copy(here, device)
    for step in (1, 2, 3):
        g = torch.exp2(powers)[torch.randperm(256).expand(2, 256)] * torch.tensor([[1.0], [-1.3]])
        reference.update([here._replace(gradient=g)], layout, cases.control(step, 1, eps=eps, largest_update=10.0))
        control = cases.control(step, 1, device, eps=eps, largest_update=10.0)
        fast.update([there._replace(gradient=g.to(device))], layout, control, PinnedStaging())
        assert cases.different(here, there._replace(gradient=there.gradient)) == []


@pytest.mark.parametrize("kind", ["fp32", "fp32 master apart", "exact", "fp8", "fp8-min", "fp8-min, bf16 weight"])
def test_an_update_that_is_given(kind, device):
    layout = cases.layout_of(kind, "given", torch.bfloat16)
    here, there, counted = both(layout, [(3, 256), (2, 100)], device, largest_update=1e-3)
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[], []]
    assert counted[1][0] == counted[1][1] > 0


@pytest.mark.parametrize("shape", [(5, 40), (5, 200), (3, 384), (2, 640), (1, 2304), (1, 4199), (1, 8400)])
def test_rows_of_every_width(shape, device):
    """Several rows a program, one, in one chunk and in more, by more warps."""
    layout = cases.layout_of("fp8, fp8 weight")
    here, there, _ = both(layout, [shape, (2, 128)], device, steps=1, lr=0.3)  # every row's scale is another then
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[], []]


def test_shapes_of_programs():
    found = [fast.Shape.of_rows(cols)[:4] for cols in (1, 129, 257, 385, 513, 1024, 1025, 8192, 8193, 16384)]
    assert found == [
        (4, 4, 4, 1), (4, 4, 2, 1), (4, 4, 1, 1), (4, 4, 1, 1), (4, 4, 1, 2), (4, 4, 1, 2), (8, 8, 1, 2),
        (32, 32, 1, 2), (32, 32, 1, 3), (32, 32, 1, 4),
    ]  # fmt: skip
    assert fast.Shape.of_rows(129)._replace(steps=1).programs(5, 129) == 3
    assert fast.Shape.of_rows(129)._replace(steps=2).programs(5, 129) == 2
    assert fast.Shape.flat()._replace(groups=8, steps=2).programs(5, 256) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [[(3, 256)], [(3, 200)]], ids=["even", "ragged"])
@pytest.mark.parametrize("scaling", ["group", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients_that_are_codes(dtype, scaling, shapes, device):
    here, there, _ = both(cases.layout_of("fp8", "adamw", dtype, scaling=scaling), shapes, device, steps=1)
    assert cases.different(here[0], there[0]) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [[(3, 256)], [(3, 200), (2, 128)]], ids=["even", "ragged"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "exact", "fp8-lm", "fp8"])
def test_momentum(kind, nesterov, shapes, device):
    torch.manual_seed(0)
    layout = cases.layout_of(kind, "adamw", torch.bfloat16)
    here = [cases.slot(layout, shape, row) for row, shape in enumerate(shapes)]
    there = [cases.copy(slot, device) for slot in here]
    ours = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    theirs = [update.clone().to(device) for update in ours]
    uploads = PinnedStaging()
    for step in (1, 2):
        here = [cases.with_gradient(slot, layout) for slot in here]
        there = [slot._replace(gradient=own.gradient.to(device)) for slot, own in zip(there, here, strict=True)]
        for slot, update in zip(here, ours, strict=True):
            reference.momentum([slot], layout, cases.control(step, len(shapes)), [update], None, nesterov)
        fast.momentum(there, layout, cases.control(step, len(shapes), device), theirs, uploads, nesterov)
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[]] * len(shapes)
    assert all(torch.equal(a, b.cpu()) and a.any() for a, b in zip(ours, theirs, strict=True))


ONE_OR_QUAD = pytest.mark.parametrize("columns", [slice(3, 4), slice(4, 8)], ids=["one", "quad"])
"""Values that are not finite: one, or all that a lane reduces before the others."""


@ONE_OR_QUAD
@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["exact", "fp8", "fp8-min, bf16 weight", "fp8, fp8 weight", "fp8-lm, fp8 weight"])
def test_a_gradient_that_is_not_finite_makes_a_weight_that_is_none(kind, value, columns, device):
    """Where nobody searches for overflows: it is not held at a bound, and its neighbours stay what they would be."""
    layout = cases.layout_of(kind)
    here = cases.with_gradient(cases.slot(layout, (2, 256), 0), layout)
    here.gradient[0, columns] = value
    there = cases.copy(here, device)
    reference.update([here], layout, cases.control(1, 1))
    fast.update([there], layout, cases.control(1, 1, device), PinnedStaging())
    assert {"weight", "weight_scale", "master"}.isdisjoint(cases.different(here, there))
    lost = there.weight.float().isnan()
    assert lost[0, columns].all() and lost.sum() == lost[0, columns].numel()


@pytest.mark.covering(1)
@ONE_OR_QUAD
@pytest.mark.parametrize("kind", ["fp8, fp8 weight", "fp8-lm"])
def test_a_moment_that_is_no_number_stays_none(kind, columns, device):
    """The code of NaN is read as NaN, and not as what the next code of the format would be."""
    layout = cases.layout_of(kind)
    here = cases.with_gradient(cases.slot(layout, (2, 256), 0), layout)
    here.first.view(torch.uint8)[0, columns] = 0x7F
    there = cases.copy(here, device)
    reference.update([here], layout, cases.control(1, 1))
    fast.update([there], layout, cases.control(1, 1, device), PinnedStaging())
    assert cases.different(here, there) == []
    lost = there.weight.float().isnan()
    assert lost[0, columns].all() and lost.sum() == lost[0, columns].numel()
    assert there.first.float().isnan().equal(lost)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(3, 256), (3, 200)])
@pytest.mark.parametrize("kind", ["fp8-lm", "fp8, fp8 weight"])
def test_one_scale_a_tensor_with_every_choice(kind, shape, device):
    """A first pass that has to read a weight: its decay is in the gradient, or its scales are those of rows."""
    layout = cases.layout_of(kind, "adam")._replace(first=cases.storage("e4m3", "tensor"))
    made = cases.slot(layout, shape, 0)
    made = made._replace(first_scale=torch.ones(1, 1, dtype=torch.uint8))
    here = cases.with_gradient(made, layout)
    there = cases.copy(here, device)
    reference.update([here], layout, cases.control(1, 1, weight_decay=30.0))
    fast.update([there], layout, cases.control(1, 1, device, weight_decay=30.0), PinnedStaging())
    assert cases.different(here, there) == []


@pytest.mark.parametrize("kind", ["fp8", "fp8, fp8 weight"])
def test_a_weight_that_was_set_to_zero_is_zero(kind, device):
    """Its remainder is still there, and may be negative."""
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, (2, 256), 0, device)
    assert (slot.master < 0).any()
    slot.weight.zero_()
    slot = slot._replace(gradient=torch.zeros(2, 256, device=device))
    here = cases.copy(slot)
    reference.update([here], layout, cases.control(1, 1))
    fast.update([slot], layout, cases.control(1, 1, device), PinnedStaging())
    assert cases.different(here, slot) == [] and slot.weight.float().isfinite().all()


@pytest.mark.parametrize("kind", ["fp8-lm", "fp8-min", "fp8"])
def test_a_step_that_is_skipped_changes_nothing(kind, device):
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, (3, 200), 0, device)._replace(gradient=torch.full((3, 200), torch.nan, device=device))
    control = cases.control(1, 1, device)
    control.skip.fill_(1)
    stepped = cases.copy(slot, device)
    fast.update([stepped], layout, control, PinnedStaging())
    assert cases.different(slot._replace(gradient=None), stepped._replace(gradient=None)) == []
    assert int(control.clamped) == 0


@pytest.mark.parametrize("shapes", [[(0, 8)], [(0, 8), (3, 200), (0, 8)]], ids=["alone", "beside others"])
def test_a_parameter_without_elements_is_stepped_over(shapes, device):
    here, there, counted = both(cases.layout_of("fp8"), shapes, device)
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[]] * len(shapes)
    assert all(a == b for a, b in counted) and [len(slot.weight) for slot in there] == [rows for rows, _ in shapes]
