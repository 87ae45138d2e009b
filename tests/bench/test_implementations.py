"""Every recipe is timed, and the head of a whole model only where that is said."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from octavo import optim, recipes
from octavo.nn import Linear
from octavo.nn.fused import FusedMLP
from octavo_bench.implementations import BF16, implementations, precisions
from octavo_bench.rates import PRECISIONS
from octavo_bench.workloads import WORKLOADS, build


def test_bf16_comes_first_and_every_recipe_is_there() -> None:
    known = implementations()
    assert next(iter(known)) == BF16
    assert {f"octavo {name}" for name in set(recipes.names()) - {BF16, "static", "mxfp8"}} <= set(known)
    assert "octavo static" not in known and "octavo mxfp8" not in known
    assert not known["octavo folded (eager)"].compile and known["octavo folded"].compile


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bf16", (BF16, BF16, BF16)),
        ("folded", ("row slow", "row slow", "row slow")),
        ("tensorwise", ("tensor slow", "tensor slow", "tensor slow")),
        ("block", ("block", "block", "block")),
        (
            {"name": "x", "fprop": {"accumulate": "fast"}, "wgrad": {"precision": "bf16"}},
            ("row fast", "row slow", BF16),
        ),
    ],
)
def test_each_gemm_has_the_precision_of_its_recipe(recipe: recipes.RecipeLike, expected: tuple[str, ...]) -> None:
    assert precisions(recipes.load(recipe)) == expected


def test_every_precision_has_a_rate() -> None:
    named = {precision for implementation in implementations(head=True).values() for precision in implementation.gemms}
    assert named <= {BF16, *PRECISIONS}


def test_inputs_of_activations_stay_in_bf16_unless_it_is_said() -> None:
    known = implementations()
    for name, kept in (("octavo folded", "bf16"), ("octavo folded + fp8 activation inputs", "fp8")):
        model = build(WORKLOADS["tiny"], known[name], "cpu", compile=False).model
        found = {module.mlp_activation_inputs for module in model.modules() if isinstance(module, FusedMLP)}
        assert found == {kept}


def test_every_second_block_may_stay_in_bf16() -> None:
    half = implementations(head=True)["octavo folded (every second block in BF16)"]
    model = build(WORKLOADS["tiny-model"], half, "cpu", compile=False).model
    converted = {name.split(".")[1] for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert converted == {"0"} and not half.has_floor


def test_the_head_stays_in_bf16_unless_it_is_said() -> None:
    known = implementations(head=True)
    assert "octavo folded + fp8 head" not in implementations()
    heads = [
        build(WORKLOADS["tiny-model"], known[name], "cpu", compile=False).model.get_submodule("lm_head")
        for name in ("octavo folded", "octavo folded + fp8 head")
    ]
    assert [isinstance(head, Linear) for head in heads] == [False, True]
    assert all(isinstance(head, nn.Linear) for head in heads)


def test_a_fastest_row_updates_by_the_optimizer_of_octavo() -> None:
    known, fast = implementations(head=True), "octavo folded_fast + fp8 head"
    for name, is_own in ((fast, False), (f"{fast}, octavo.optim", True)):
        training = build(WORKLOADS["tiny-model"], known[name], "cpu", compile=False)
        head = training.model.get_parameter("lm_head.weight")
        before = head.clone()
        training.step()
        update = inspect.getclosurevars(training.update).nonlocals
        assert isinstance(update["optimizer"], optim.Optimizer) is is_own
        assert not torch.equal(before, head)
