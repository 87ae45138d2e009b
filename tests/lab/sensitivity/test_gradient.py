"""Against copies of the model that are converted one layer and one GEMM at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import octavo
from octavo.lab.sensitivity.gradient import cosine, cosines
from octavo.lab.sensitivity.precision_switch import switchable


def whole_gradient(model, batches, loss) -> Tensor:
    model.eval()
    for batch in batches:
        loss(model, batch).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def converted(model, name, recipe):
    twin = copy.deepcopy(model)
    if recipe is not None:
        octavo.convert(twin, {"base": "bf16", "modules": {name: recipe}}, policy=octavo.Policy(fuse=False))
    return twin


BF16 = {"precision": "bf16"}
PAIRS = [
    ("tensorwise", "fprop", None, {"dgrad": BF16, "wgrad": BF16}),
    ("tensorwise", "dgrad", None, {"fprop": BF16, "wgrad": BF16}),
    ("tensorwise", "wgrad", None, {"fprop": BF16, "dgrad": BF16}),
    ("folded", "dgrad", {"dgrad": BF16, "wgrad": BF16}, {"wgrad": BF16}),
    ("folded", "wgrad", {"dgrad": BF16, "wgrad": BF16}, {"dgrad": BF16}),
]


@pytest.mark.parametrize(("recipe", "gemm", "before", "after"), PAIRS)
def test_cosines(case, recipe, gemm, before, after):
    model, batches, loss = case
    expected = {}
    for name in ("second", "last"):
        pair = [None if change is None else {"base": recipe, **change} for change in (before, after)]
        a, b = (whole_gradient(converted(model, name, each), batches[:2], loss) for each in pair)
        expected[name] = 1 - float(a @ b / (a.norm() * b.norm()))
    with switchable(model, recipe, None, 24, None) as switch:
        found = cosines(switch, batches[:2], loss, lambda doing, passes: None)
    for name, turned in expected.items():
        assert 1e-9 < turned < 0.1
        assert 1 - found[name][gemm] == pytest.approx(turned, rel=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cosine():
    a, b = (
        {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([4.0])},
        {"x": torch.tensor([0.0, 5.0]), "y": torch.ones(1)},
    )
    assert cosine(a, a) == pytest.approx(1) and cosine(a, b) == pytest.approx(4 / 5 / 26**0.5)
    assert cosine({"x": torch.zeros(2)}, {"x": torch.zeros(2)}) == 1
