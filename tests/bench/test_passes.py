"""What the tables say a recipe costs is what a linear layer does: passes are watched, and what is kept is weighed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import spec_of
from octavo.nn.functional import Quantizer, linear
from octavo.recipes import Fprop, Operand, Recipe, Wgrad, load, names
from octavo_bench.passes import Pass, Shape, kept_bytes, kept_weight_bytes, operand_of, passes

SHAPE = Shape(m=40, n=272, k=144)
M, N, K = SHAPE
MIXED = [
    load({"base": "folded", "name": "bf16 dgrad", "dgrad": {"precision": "bf16"}}),
    load({"base": "rowwise", "name": "bf16 fprop", "fprop": {"precision": "bf16"}}),
    load({"base": "block", "name": "stochastic", "wgrad": {"grad_output": {"rounding": "stochastic"}}}),
    load({"base": "delayed", "name": "bf16 wgrad, delayed", "wgrad": {"precision": "bf16"}}),
]
every_recipe = pytest.mark.parametrize("recipe", [*map(load, names()), *MIXED], ids=lambda recipe: recipe.name)


def run(recipe: Recipe) -> None:
    """Make a forward and a backward of a linear layer."""
    forward(recipe, torch.randn(N, K, requires_grad=True)).backward(torch.randn(M, N, dtype=torch.bfloat16))


def forward(recipe: Recipe, weight: Tensor, needs_x: bool = True) -> Tensor:
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=needs_x)
    stored = torch.ones(2, 2) if recipe.has_stored_scales else None
    return linear(x, weight, None, Quantizer(recipe, torch.bfloat16, stored))


@every_recipe
def test_what_is_kept_for_backward(recipe):
    def kept(needs_x: bool) -> tuple[int, bool]:
        """Return the bytes kept, and whether the weight itself is kept, of which there is no copy."""
        saved: list[Tensor] = []
        weight = torch.randn(N, K, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
            forward(recipe, weight, needs_x)
        copies = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
        return sum(tensor.nbytes for tensor in copies), len(copies) < len(saved)

    of_weight = kept_weight_bytes(recipe, SHAPE)
    assert kept(needs_x=False) == (kept_bytes(recipe, SHAPE), False)
    assert kept(needs_x=True) == (kept_bytes(recipe, SHAPE) + of_weight, of_weight == 0)


Seen = tuple[str, str, tuple[str, ...]]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Return the list that every pass of a linear layer is then entered in: how, matrix, and what is made."""
    seen: list[Seen] = []
    matrix = {(M, K): "input", (K, M): "input", (N, K): "weight", (K, N): "weight", (M, N): "grad_output"}
    of: dict[str, Any] = {
        name: getattr(kernels, name)
        for name in (
            "quantize_matrix",
            "quantize_pair",
            "quantize_rows_twice",
            "quantize_with_scale",
            "quantize_stack",
            "transpose_quantized",
            "transpose_folded",
        )
    }

    def made(*targets: QuantSpec | None) -> tuple[str, ...]:
        return tuple(str(target) for target in targets if target is not None)

    def quantize_matrix(x, target):
        seen.append(("quantise", matrix.get(tuple(x.shape), "grad_output"), made(target)))
        return of["quantize_matrix"](x, target)

    def quantize_pair(sources, rows, columns, *folds):
        seen.append(("quantise", matrix[tuple(sources[0].shape)], made(rows, columns)))
        return of["quantize_pair"](sources, rows, columns, *folds)

    def quantize_rows_twice(matrices, first, second, keeps_codes, weights=False):
        seen.append(("quantise", matrix[tuple(matrices[0].shape)], made(first, second)))
        return of["quantize_rows_twice"](matrices, first, second, keeps_codes, weights)

    def quantize_with_scale(sources, scale_ref, rows, columns):
        seen.append(("quantise", matrix[tuple(sources[0].shape)], made(rows, columns)))
        return of["quantize_with_scale"](sources, scale_ref, rows, columns)

    def quantize_stack(weights, target):
        assert [tuple(weight.shape) for weight in weights] == [(N, K)]
        seen.append(("quantise", "weight", made(target)))
        return of["quantize_stack"](weights, target)

    def transpose_quantized(source, after):
        seen.append(("transpose", matrix[tuple(source.codes.shape)], ()))
        return of["transpose_quantized"](source, after)

    def transpose_folded(codes, after):
        seen.append(("transpose", matrix[tuple(codes.shape)], ()))
        return of["transpose_folded"](codes, after)

    for spy in (
        quantize_matrix,
        quantize_pair,
        quantize_rows_twice,
        quantize_with_scale,
        quantize_stack,
        transpose_quantized,
        transpose_folded,
    ):
        monkeypatch.setattr(kernels, spy.__name__, spy)
    return seen


def foreseen(recipe: Recipe, one: Pass) -> Seen:
    operands = [operand_of(recipe, name) for name in one.made]
    twice = one.matrix != "grad_output" and recipe.second(one.matrix) is not None
    made = tuple(str(spec_of(operand.as_rows if twice else operand)) for operand in operands)
    return one.how, one.matrix, made if one.how == "quantise" else ()


@every_recipe
def test_the_passes_are_those_that_run(recipe, monkeypatch):
    seen = watch(monkeypatch)
    run(recipe)
    expected = [foreseen(recipe, one) for one in passes(recipe, SHAPE) if one.how != "cast"]
    assert Counter(seen) == Counter(expected)


def read_of(recipe: Recipe, name: str) -> float:
    """Return the bytes read for each element of the matrix, to make an operand."""
    one = next(one for one in passes(recipe, SHAPE) if name in one.made)
    rows, cols = SHAPE.of(one.matrix)
    return one.read / (rows * cols)


@pytest.mark.parametrize(
    ("recipe", "operand", "read"),
    [
        ("folded", "fprop.input", 2),  # a row at a time
        ("folded", "fprop.weight", 4),
        ("folded", "wgrad.grad_output", 4),  # the maxima of columns first
        ("rowwise", "wgrad.input", 4),
        ("rowwise", "dgrad.weight", 8),
        ("rowwise_bf16_wgrad", "fprop.input", 2),
        ("tensorwise", "fprop.input", 4),  # the maximum of all first
        ("tensorwise", "fprop.weight", 8),
        ("delayed", "fprop.input", 2),  # known before
        ("static", "wgrad.grad_output", 2),
        ("just_in_time", "fprop.input", 4),  # its own maximum decides
        ("block", "fprop.input", 2),
        ("block", "wgrad.grad_output", 2),
        ("mxfp8", "dgrad.grad_output", 2),
        ("bf16", "fprop.weight", 4),
    ],
)
def test_reads(recipe, operand, read):
    assert read_of(load(recipe), operand) == read


def test_written_bytes_count_codes_and_scales():
    made = {
        name: size for one in passes(load("block"), SHAPE) for name, size in zip(one.made, one.written, strict=True)
    }
    assert made["fprop.input"] == M * K + 4 * M * 2
    assert made["wgrad.input"] == K * M + 4 * K
    assert made["fprop.weight"] == N * K + 4 * 3 * 2
    folded = {
        name: size for one in passes(load("folded"), SHAPE) for name, size in zip(one.made, one.written, strict=True)
    }
    assert folded["wgrad.input"] == K * M + 4  # its scales have gone elsewhere


def test_each_operand_in_fp8_is_made_once():
    for recipe in map(load, names()):
        made = Counter(name for one in passes(recipe, SHAPE) for name in one.made)
        # codes of a second set are made by row in forward, and transposed in backward
        assert set(made.values()) <= ({1, 2} if recipe.second("input") else {1})
        assert {f"{gemm}.{role}" for gemm, *_ in recipe.gemms() for role in roles(gemm)} <= set(made)


def roles(gemm: str) -> tuple[str, str]:
    return {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}[gemm]


def test_a_recipe_of_ones_own_is_counted_too():
    tile = Operand(granularity="1x32", format="e5m2")
    recipe = Recipe(name="mine", fprop=Fprop(input=tile), wgrad=replace(Wgrad(), precision="bf16"))
    assert kept_bytes(recipe, SHAPE) == 2 * M * K
    assert read_of(recipe, "fprop.input") == 2
