"""What `octavo.observed` counts: the right layer and role, the right numbers, and nothing left behind."""

from __future__ import annotations

import copy
import json

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import kernels
from octavo.errors import ConfigError
from octavo.kernels import QuantSpec
from octavo.lab.models import ModelConfig, build
from octavo.nn import Conv1d, Conv2d, GroupedLinear, Linear
from octavo.nn.observe import Fault, Observed, count_lost
from octavo.numerics import PER_TENSOR, Quantized
from octavo.numerics.quantize import to_codes
from octavo.recipes import STORED_SCALE_ROLES, load

TOKENS = torch.arange(16).view(2, 8)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def llama(recipe: str = "folded", **options: object) -> nn.Module:
    model = build(ModelConfig(vocab=32, dim=32, layers=2, heads=2, ffn=64, sequence=8), seed=0)
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0, **options))  # type: ignore[arg-type]
    return model


def train_step(model: nn.Module) -> Tensor:
    loss: Tensor = model(TOKENS).float().square().mean()
    loss.backward()
    return loss.detach()


def row(report: octavo.nn.observe.Observation, layer: str, role: str) -> Observed:
    return next(r for r in report.rows() if (r.layer, r.role) == (layer, role))


def poison(value: float, token: tuple[int, int]):
    def hook(_module: nn.Module, _args: object, y: Tensor) -> Tensor:
        return y.index_put(tuple(torch.tensor(i) for i in (*token, 2)), torch.tensor(value))

    return hook


# Faults


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block", "delayed"])
def test_a_bad_token_is_found_where_it_is_seen_first(recipe: str, value: float) -> None:
    model = llama(recipe)
    model.layers[0].ffn_norm.register_forward_hook(poison(value, (0, 5)))
    with torch.no_grad(), octavo.observed(model) as report:
        model(TOKENS)
    faults = report.faults()
    assert faults[0] == Fault("layers.0.feed_forward.w1", "input", 1)
    assert faults[1] == Fault("layers.0.feed_forward.w3", "input", 1)
    assert faults[2] == Fault("layers.0.feed_forward.w2", "input", 64)  # the row of that token: all of it, and no other
    assert faults[3] == Fault("layers.1.attention.wq", "input", 32)
    assert "layers.1.feed_forward.w2" in {fault.layer for fault in faults[4:]}
    assert not any(fault.layer.startswith("layers.0.attention") for fault in faults)
    assert {fault.role for fault in faults} == {"input"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block"])
def test_only_the_row_of_a_bad_token_is_bad(recipe: str, value: float) -> None:
    """After the last attention, which alone may take it to other tokens."""
    model, clean = llama(recipe), llama(recipe)
    model.layers[1].ffn_norm.register_forward_hook(poison(value, (0, 5)))
    with torch.no_grad(), octavo.observed(model) as report:
        logits, expected = model(TOKENS).flatten(0, 1), clean(TOKENS).flatten(0, 1)
    others = torch.arange(16) != 5
    assert not logits[5].isfinite().any() and torch.equal(logits[others], expected[others])
    seen = [(f.layer.removeprefix("layers.1.feed_forward."), f.non_finite) for f in report.faults()]
    assert seen[:3] == [("w1", 1), ("w3", 1), ("w2", 64)]


def test_a_bad_gradient_is_found_going_backward() -> None:
    model = llama()

    def spoil(_module: nn.Module, _args: object, y: Tensor) -> Tensor:
        z = y.clone()
        z.register_hook(lambda dy: dy.index_put(tuple(torch.tensor(i) for i in (1, 3, 5)), torch.tensor(torch.nan)))
        return z

    model.layers[1].feed_forward.register_forward_hook(spoil)
    with octavo.observed(model) as report:
        train_step(model)
    faults = report.faults()
    assert faults[0] == Fault("layers.1.feed_forward.w2", "grad_output", 1)
    assert {fault.role for fault in faults} == {"grad_output"}
    assert {(f.layer, f.non_finite) for f in faults[1:3]} == {(f"layers.1.feed_forward.w{i}", 64) for i in (1, 3)}
    assert "layers.0.attention.wq" in {fault.layer for fault in faults}


def test_the_first_fault_is_the_first_in_time_not_in_the_model() -> None:
    first, second = Linear(32, 32), Linear(32, 32)
    model = nn.Sequential(first, second)
    x = torch.randn(8, 32)
    with octavo.observed(model) as report, torch.no_grad():
        model(x)
        assert report.faults() == []
        second.weight[3, 4] = torch.nan
        model(x)
        first.weight[1, 1] = torch.inf
        model(x)
    assert [(f.layer, f.role) for f in report.faults()] == [("1", "weight"), ("0", "weight"), ("1", "input")]
    assert report.rows()[0].non_finite == max(r.non_finite for r in report.rows())


@pytest.mark.parametrize("recipe", ["delayed", "just_in_time"])
def test_an_observed_evaluation_leaves_stored_scales_as_they_are(recipe: str) -> None:
    model = llama(recipe)
    train_step(model)
    stored = {
        name: layer.scaling_slot.scale_and_amax.data
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
    }
    assert stored
    before = {name: values.clone() for name, values in stored.items()}
    model.layers[0].ffn_norm.register_forward_hook(lambda module, args, y: 100 * y)  # larger than any amax so far
    with torch.no_grad(), octavo.observed(model) as report:
        model.eval()(TOKENS)
    assert row(report, "layers.0.feed_forward.w1", "input").elements > 0
    assert all(torch.equal(stored[name], values) for name, values in before.items())


# Counts


def counted(x: np.ndarray, fmt: str, axis: int | None, scale: float | None = None) -> tuple[int, int, int, float]:
    """Return (non-finite, saturated, flushed, amax) of FP32 values, with power-of-two scales unless one is given."""
    finite = np.isfinite(x)
    largest = np.where(finite, np.abs(x), 0).max(axis=axis, keepdims=True)
    scales = np.exp2(np.ceil(np.log2(largest / LARGEST[fmt]))) if scale is None else np.float32(scale)
    scaled = np.where(finite, x, 0) / scales
    step = 32 if fmt == "e4m3" else 2.0**13
    saturated = np.abs(scaled) > LARGEST[fmt] + step / 2
    twin = ml_dtypes.float8_e4m3fn if fmt == "e4m3" else ml_dtypes.float8_e5m2
    codes = scaled.clip(-LARGEST[fmt], LARGEST[fmt]).astype(twin).astype(np.float32)
    flushed = (codes == 0) & finite & (x != 0)
    return int((~finite).sum()), int(saturated.sum()), int(flushed.sum()), float(largest.max())


def wide(rows: int, cols: int, seed: int) -> Tensor:
    """Return values over so many binades that some are flushed in every row."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, cols, generator=generator)
    return normal * torch.exp2(-24 * torch.rand(rows, cols, generator=generator))


@pytest.mark.parametrize("recipe", ["rowwise", "folded"])
def test_counts_are_those_of_numpy(recipe: str) -> None:
    layer = Linear(48, 32, bias=False, recipe=recipe)
    x, dy, weight = wide(16, 48, 0), wide(16, 32, 1), wide(32, 48, 2)
    layer.weight.data.copy_(weight)
    x[2, 3], dy[4, 5] = torch.inf, torch.nan
    with octavo.observed(layer) as report:
        for _ in range(2):
            layer(x.view(4, 4, 48).requires_grad_()).backward(dy.view(4, 4, 32))
    fold = np.ones((1, 32), np.float32)
    if load(recipe).dgrad.weight.is_folded:
        fold = np.exp2(np.ceil(np.log2(np.abs(weight.numpy()).max(1) / 448)))[None]
    format_of_gradient = load(recipe).dgrad.grad_output.format
    expected = {
        "input": counted(x.detach().numpy(), "e4m3", 1),
        "weight": counted(weight.numpy(), "e4m3", 1),
        "grad_output": counted(dy.numpy() * fold, format_of_gradient, 1)[:3] + counted(dy.numpy(), "e4m3", 1)[3:],
    }
    for role, (non_finite, saturated, flushed, amax) in expected.items():
        assert flushed > 0
        assert row(report, "", role)[3:] == (
            2 * (x.numel() if role == "input" else dy.numel() if role == "grad_output" else weight.numel()),
            2 * non_finite, 2 * saturated, 2 * flushed, amax,
        )  # fmt: skip


def test_rotated_codes_are_compared_with_rotated_values() -> None:
    """No INT8 code saturates, a NaN counts once, and a gradient is multiplied by the scales of the second set."""
    x, dy, weight = wide(16, 64, 0), wide(16, 32, 1), wide(32, 64, 2)
    x[:, 3], x[2, 5] = 100.0, torch.nan
    reports = {}
    for recipe in ("rotated", "folded"):
        layer = Linear(64, 32, bias=False, recipe=recipe)
        layer.weight.data.copy_(weight)
        with octavo.observed(layer) as reports[recipe]:
            layer(x.clone().requires_grad_()).backward(dy)
    for role in ("input", "weight"):
        seen = row(reports["rotated"], "", role)
        assert (seen.saturated, seen.non_finite) == (0, int(role == "input"))
    assert row(reports["rotated"], "", "grad_output") == row(reports["folded"], "", "grad_output")
    assert row(reports["folded"], "", "grad_output").flushed > 0


def test_without_a_gradient_of_the_input_wgrads_operand_is_counted() -> None:
    layer = Linear(48, 32, bias=False, recipe="folded")
    x, dy = wide(16, 48, 0), wide(16, 32, 1)
    with octavo.observed(layer) as report:
        layer(x).backward(dy)
    fold = np.exp2(np.ceil(np.log2(np.abs(x.numpy()).max(1) / 448)))[:, None]
    assert row(report, "", "grad_output").flushed == counted((dy.numpy() * fold).T, "e4m3", 1)[2] > 0


def test_a_kept_scale_that_is_too_small_is_seen() -> None:
    layer = Linear(48, 32, bias=False, recipe="delayed")
    scales = {"input": 2.0**-8, "grad_output": 2.0**-15}
    for number, role in enumerate(STORED_SCALE_ROLES):
        layer.scaling_slot.scale_and_amax[number, 0] = scales[role]
    x, dy = torch.randn(16, 48), torch.randn(16, 32)
    before = layer.scaling_slot.scale_and_amax.clone()
    with octavo.observed(layer) as report:
        y = layer(x.requires_grad_())
        y.backward(dy)
    gradient = layer.recipe.dgrad.grad_output.format
    expected = counted(x.detach().numpy(), "e4m3", None, scales["input"])
    assert row(report, "", "input")[4:] == expected and expected[1] > 0
    assert row(report, "", "grad_output")[4:] == counted(dy.numpy(), gradient, None, scales["grad_output"])
    assert torch.equal(layer.scaling_slot.scale_and_amax[:, 0], before[:, 0])
    shares = [r.saturated / r.elements for r in report.rows()]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] == 0


@pytest.mark.parametrize(
    ("cls", "shape", "taps"), [(Conv1d, (2, 16, 9), 3), (Conv2d, (2, 16, 9, 9), 9), (Conv2d, (16, 9, 9), 9)]
)
def test_convolutions_count_patches(cls: type[Conv1d | Conv2d], shape: tuple[int, ...], taps: int) -> None:
    layer = cls(16, 32, 3, padding=1)
    x = torch.randn(shape)
    x.view(-1)[4 if cls is Conv1d else 4 * 9 + 4] = torch.nan  # a pixel in the middle: of every patch around it
    with octavo.observed(layer) as report:
        y = layer(x.requires_grad_())
        y.sum().backward()
    assert row(report, "", "input").elements == taps * x.numel()
    assert row(report, "", "weight").elements == layer.weight.numel()
    assert row(report, "", "grad_output").elements == y.numel()
    assert report.faults() == [Fault("", "input", taps)]


@pytest.mark.parametrize("recipe", [n for n in octavo.recipes.names() if load(n).is_fp8 and n != "static"])
def test_every_recipe_is_counted(recipe: str) -> None:
    model = llama(recipe)
    with octavo.observed(model) as report:
        train_step(model)
    layers = {name for name, module in model.named_modules() if isinstance(module, Linear) and module.recipe.is_fp8}
    assert layers and {r.layer for r in report.rows()} == layers
    assert report.faults() == [] and all(r.amax > 0 and r.saturated == 0 for r in report.rows())


# Nothing is disturbed


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["folded", "delayed"])
def test_results_stay_and_nothing_is_left(recipe: str, fuse: bool) -> None:
    plain, watched = llama(recipe, fuse=fuse), llama(recipe, fuse=fuse)
    assert torch.equal(plain(TOKENS), watched(TOKENS))
    for module in plain.modules() if fuse else ():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda *_: None)  # any hook inside makes an MLP compute layer by layer
    names = list(watched.state_dict())
    with octavo.observed(watched):
        assert torch.equal(train_step(watched), train_step(plain))
    for (name, a), b in zip(plain.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert list(watched.state_dict()) == names
    for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    books = octavo.scales(plain), octavo.scales(watched)
    assert books == (None, None) or torch.equal(books[0].scale_and_amax, books[1].scale_and_amax)


def test_what_runs_after_the_block_is_not_counted() -> None:
    layer = Linear(32, 32)
    with octavo.observed(layer) as report:
        y = layer(torch.randn(4, 32))
    before = report.rows()
    y.sum().backward()
    layer(torch.randn(4, 32))
    assert report.rows() == before and {r.role for r in before} == {"input", "weight"}


def test_hooks_go_when_the_block_fails() -> None:
    layer = Linear(32, 32)
    with pytest.raises(ZeroDivisionError), octavo.observed(layer):
        raise ZeroDivisionError
    assert not layer._forward_hooks


def test_compiled_code_is_run_eagerly_and_counted() -> None:
    layer, compilations = Linear(32, 32), []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend)
    x = torch.randn(4, 32)
    y = compiled(x)  # compiled before anybody looks
    before = len(compilations)
    with octavo.observed(layer) as report:
        assert torch.equal(compiled(x), y)
    assert row(report, "", "input").elements == x.numel()
    compiled(x)
    assert len(compilations) == before > 0  # nothing was compiled for the block, and what was there serves again


def test_the_gradient_is_that_of_the_layer_itself() -> None:
    layer = Linear(32, 32)
    layer.register_forward_hook(lambda _layer, _args, y: 2 * y)
    with octavo.observed(layer) as report:
        layer(torch.randn(4, 32)).sum().backward()
    assert row(report, "", "grad_output").amax == 2


def test_inference_and_training_share_a_block() -> None:
    layer = Linear(32, 32)
    with torch.inference_mode():
        block = octavo.observed(layer)
        report = block.__enter__()
        layer(torch.randn(4, 32))
    layer(torch.randn(4, 32)).sum().backward()
    block.__exit__(None, None, None)
    assert row(report, "", "input").elements == 2 * 4 * 32


def test_disabled_and_empty_layers() -> None:
    layer = Linear(32, 32)
    with octavo.observed(layer) as report, octavo.disabled(layer):
        layer(torch.randn(4, 32))
    assert report.rows() == []
    with octavo.observed(layer) as report:
        layer(torch.empty(0, 32)).sum().backward()
    assert row(report, "", "weight").elements == 32 * 32


# Every element, against lists written by hand

TENSOR = QuantSpec("e4m3", "tensor", "power_of_two")


def with_scale(x: Tensor, scale: float, fmt: str) -> Quantized:
    """Codes by a scale that is not of x: only so can a value be past the largest code."""
    target = TENSOR._replace(format=fmt)
    return Quantized(to_codes(x / scale, target.fmt), torch.full((1, 1), scale), PER_TENSOR)


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize(
    ("fmt", "tiny", "cut"), [("e4m3", 2.0**-10, 464.0), ("e5m2", 2.0**-17, 61440.0)], ids=["e4m3", "e5m2"]
)
def test_each_kind_at_its_bounds(fmt: str, tiny: float, cut: float, scale: float) -> None:
    above = 1 + 2.0**-20
    flushed = [tiny, -tiny, tiny / 2, -1e-20]
    saturated = [cut * above, -cut * above, 10 * cut]
    neither = [0.0, -0.0, tiny * above, -tiny * above, 1.0, cut, -cut]
    broken = [float("nan"), float("inf"), -float("inf"), float("nan"), float("nan")]
    x = torch.tensor([flushed + saturated + neither + broken]) * scale
    assert count_lost(x, with_scale(x, scale, fmt)).tolist() == [4, 3, 5]


def test_of_an_empty_matrix_nothing_is_lost() -> None:
    x = torch.zeros(0, 5)
    assert count_lost(x, kernels.quantize(x, "e4m3", "row")).tolist() == [0, 0, 0]


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", "1x128", "128x128", "1x32"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_scale_of_ones_own_saturates_nothing_and_flushes_the_smallest(granularity: str, fmt: str) -> None:
    x = torch.randn(70, 300) * torch.exp2(torch.randint(-30, 3, (70, 300)).float())
    quantized = kernels.quantize(x, fmt, granularity)
    flushed = int((quantized.codes.float() == 0).sum())
    assert count_lost(x, quantized).tolist() == [flushed, 0, 0] and flushed > 100


# The report


def test_the_report_is_a_table_and_json() -> None:
    model = nn.ModuleDict({"expert": GroupedLinear(2, 32, 32), "a": Linear(32, 32), "b": Linear(32, 32)})
    with octavo.observed(model) as report:
        model["a"](torch.full((4, 32), torch.nan)).sum()
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["layer", "role"] and lines[1].split()[:2] == ["a", "input"]
    assert lines[-2:] == ["1 of 2 layers ran", "not counted: expert"]
    found = json.loads(report.to_json())
    assert found["rows"][0] == report.rows()[0]._asdict() and found["not_counted"] == ["expert"]
    assert copy.copy(report).faults() == [Fault("a", "input", 128)]


def test_a_model_without_fp8_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Convert it first"), octavo.observed(nn.Linear(4, 4)):
        pass
