"""The quantise contract: the specification's codes, laid out as a GEMM reads them."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError
from octavo.kernels.quantize import LONGEST_NORM
from octavo.kernels.runtime import dispatch, operation
from octavo.numerics import format_named, granularity_named
from octavo.numerics import quantize as specified

GRANULARITIES = ["tensor", "row", "column", "1x128", "128x128", "1x32", "128x1"]


def uint8(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.covering(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scaling", ["power_of_two", "float32", "engine"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_codes_are_those_of_the_specification_and_contiguous(fmt, granularity, scaling, rounding, transposed):
    x = torch.randn(130, 140)
    x = x.t() if transposed else x
    quantized = kernels.quantize(x, fmt, granularity, scaling, rounding, seed=3)
    expected = specified(x, format_named(fmt), granularity_named(granularity), scaling, rounding, 3)
    assert torch.equal(uint8(quantized.codes), uint8(expected.codes.contiguous()))
    assert torch.equal(quantized.scale, expected.scale)
    assert quantized.granularity == expected.granularity
    assert quantized.codes.is_contiguous()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_transpose_moves_bytes_and_rounds_nothing(granularity):
    quantized = kernels.quantize(torch.randn(70, 130), "e4m3", granularity)
    transposed = kernels.contiguous(quantized.t())
    assert transposed.codes.is_contiguous()
    assert torch.equal(uint8(transposed.codes), uint8(quantized.codes.t().contiguous()))
    assert torch.equal(transposed.scale, quantized.scale.t())


def test_unknown_names():
    x = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="unknown format 'e4m4'"):
        kernels.quantize(x, "e4m4", "row")
    with pytest.raises(ConfigError, match="unknown granularity 'rows'"):
        kernels.quantize(x, "e4m3", "rows")
    with pytest.raises(ConfigError, match="unknown scaling 'pow2'"):
        kernels.quantize(x, "e4m3", "row", "pow2")
    with pytest.raises(ConfigError, match="takes a matrix"):
        kernels.quantize(x[0], "e4m3", "row")


@pytest.mark.parametrize("longer", [0, 1])
def test_a_normed_row_too_long_for_triton_is_a_recorded_fallback(longer, monkeypatch):
    """On a GPU: `uses_triton` asks for the reason there, and records it."""
    asked = []
    monkeypatch.setattr(operation, "runs_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x, operation, refused: asked.append(refused))
    x = torch.randn(2, LONGEST_NORM + longer)
    norm, target = (torch.rand(2), torch.rand(x.shape[1])), kernels.QuantSpec("e4m3", "row", "power_of_two")
    codes, scale = kernels.quantize_normed(x, norm, target, target)
    expected = kernels.quantize(x * norm[0][:, None] * norm[1], *target[:3])
    assert torch.equal(uint8(codes.codes), uint8(expected.codes)) and torch.equal(codes.scale, expected.scale)
    assert torch.equal(scale, expected.scale)
    assert asked[:1] == ([f"rows of {LONGEST_NORM + 1} elements are longer than {LONGEST_NORM}"] if longer else [None])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_compiled_code_on_a_cpu_has_one_operator_and_the_same_codes(granularity, transposed):
    """Traced, the specification is some twenty nodes per tensor, and half the time to compile a block."""
    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd

    targets = []

    def backend(graph, _inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if "octavo" in str(node.target))
        return graph

    def codes(x):
        return kernels.quantize(x, "e4m3", granularity)[:2]

    x = torch.randn(130, 140)
    x = x.t() if transposed else x
    compiled = torch.compile(codes, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for own, expected in zip(compiled(x), codes(x), strict=True):
        assert torch.equal(own.float(), expected.float()) and own.stride() == expected.stride()
    assert targets == ["octavo.quantize_pair.default"]
    torch._dynamo.reset()
