"""The fused step is the reference's, bit for bit: codes, scales, remainders and counters."""

import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.reference import optimizer as reference
from octavo.kernels.uploads import Uploads

fast = pytest.importorskip("octavo.kernels.triton.optimizer")
sys.path.insert(0, str(Path(__file__).parents[1]))
import optimizer_cases as cases  # noqa: E402


def both(layout, shapes, device, steps=2, **changed):
    """Step the same tensors by both twins; return them, and what both counted."""
    torch.manual_seed(0)
    here = [cases.slot(layout, shape, row) for row, shape in enumerate(shapes)]
    there = [cases.copy(slot, device) for slot in here]
    uploads, counted = Uploads(), []
    for step in range(1, steps + 1):
        gradients = [cases.gradient(layout, shape) for shape in shapes]
        here = [slot._replace(gradient=g) for slot, g in zip(here, gradients, strict=True)]
        there = [slot._replace(gradient=g.to(device)) for slot, g in zip(there, gradients, strict=True)]
        ours = cases.control(step, len(shapes), **changed)
        theirs = cases.control(step, len(shapes), device, **changed)
        for slot in here:
            reference.update(slot, layout, ours)
        fast.update(there, layout, theirs, uploads)
        counted.append((int(ours.clamped), int(theirs.clamped)))
    return here, there, counted


@pytest.mark.parametrize("shapes", [cases.EVEN, cases.RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_adamw(kind, shapes, device):
    here, there, counted = both(cases.layout_of(kind), shapes, device)
    assert [cases.different(a, b) for a, b in zip(here, there, strict=True)] == [[]] * len(shapes)
    assert all(a == b for a, b in counted) and counted[1][0] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["adam", "lion"])
@pytest.mark.parametrize("kind", ["exact", "fp8", "fp8-min"])
def test_other_rules_dtypes_and_rounding(kind, rule, dtype, device):
    layout = cases.layout_of(kind, rule, dtype, stochastic=False)
    here, there, _ = both(layout, [(3, 200)], device)
    assert cases.different(here[0], there[0]) == []


@pytest.mark.parametrize("kind", ["fp8-lm", "fp8-min", "fp8"])
def test_a_step_that_is_skipped_changes_nothing(kind, device):
    layout = cases.layout_of(kind)
    slot = cases.slot(layout, (3, 200), 0, device)._replace(gradient=torch.full((3, 200), torch.nan, device=device))
    control = cases.control(1, 1, device)
    control.skip.fill_(1)
    stepped = cases.copy(slot, device)
    fast.update([stepped], layout, control, Uploads())
    assert cases.different(slot._replace(gradient=None), stepped._replace(gradient=None)) == []
    assert int(control.clamped) == 0


def test_nothing_to_step(device):
    layout = cases.layout_of("fp8")
    fast.update([cases.slot(layout, (0, 8), 0, device)], layout, cases.control(1, 1, device), Uploads())


def test_squares_are_those_of_fp64(device):
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5000), torch.randn(7).bfloat16(), torch.randn(9, 9).half(), torch.zeros(0), torch.ones(2)]
    found = fast.squares([t.to(device) for t in tensors], Uploads())
    expected = torch.stack([t.double().square().sum() for t in tensors])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-14, atol=0)
