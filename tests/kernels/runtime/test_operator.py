"""Operators of structures: what goes in comes out, eager and compiled code agree, and a compiler may look inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec, quantize, record
from octavo.kernels.quant_spec import empty
from octavo.kernels.runtime import operator
from octavo.kernels.runtime.operator import call, define_packed, pack, unpack
from octavo.numerics import Quantized

ROW = QuantSpec("e4m3", "row", "power_of_two")


def run(x: Tensor, others: Sequence[Any], spec: QuantSpec | None, factor: float, twice: bool) -> list[Any]:
    """Return the sum of x and the values of the others, times a factor, and x quantised."""
    total = x * factor
    for other in others:
        total = total + (other.codes.float() * other.scale if isinstance(other, Quantized) else other)
    codes = None
    if spec is not None:
        codes = Quantized(x.to(spec.fmt.dtype), torch.ones_like(x[:, :1]), spec.tile)
    return [total * 2 if twice else total, codes, None]


def shape(x: Tensor, others: Sequence[Any], spec: QuantSpec | None, factor: float, twice: bool) -> list[Any]:
    return [x.new_empty(x.shape), spec and empty(spec, x.shape[0], x.shape[1], x.device), None]


define_packed("opaque_toy", run, shape)
define_packed("open_toy", run, shape, in_graph=lambda x, others, spec, factor, twice: not twice)


def toy(name: str, x: Tensor, others: Sequence[Any], spec: QuantSpec | None, twice: bool = False) -> Any:
    return call(name, run, (x, others, spec, 0.5, twice), [True, spec, False])


def test_arguments_come_out_as_they_went_in() -> None:
    x, codes = torch.randn(3, 4), quantize(torch.randn(3, 4), *ROW)
    arguments = (x, (codes, x, None), [], ROW, torch.bfloat16, True, -7, 1e-5, "two words", ((1, (2,)), "")), None
    found = unpack(*pack(arguments))
    (first, (second, third, nothing), none, *rest), last = found
    assert first is third is x and second.codes is codes.codes and second.granularity == codes.granularity
    assert nothing is None is last and none == []
    assert rest == [ROW, torch.bfloat16, True, -7, 1e-5, "two words", [[1, [2]], ""]]


@pytest.mark.parametrize("name", ["opaque_toy", "open_toy"])
@pytest.mark.parametrize("spec", [ROW, None])
def test_compiled_code_gives_what_eager_code_gives(name: str, spec: QuantSpec | None) -> None:
    torch._dynamo.reset()
    x, codes = torch.randn(3, 4), quantize(torch.randn(3, 4), *ROW)
    compiled = torch.compile(lambda x, c, s: toy(name, x, (Quantized(c, s, ROW.tile), x), spec), fullgraph=True)
    for got, want in zip(compiled(x, *codes[:2]), toy(name, x, (codes, x), spec), strict=True):
        if isinstance(want, Quantized):
            assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8)) and got[2] == want[2]
        else:
            assert got is want is None or torch.equal(got, want)
    arguments = pack((x, (codes, x), spec, 0.5, False))
    torch.library.opcheck(getattr(torch.ops.octavo, name), arguments, test_utils="test_faketensor")


def test_a_compiler_looks_inside_where_it_may() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph.code)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    def compiled(name: str, twice: bool) -> str:
        torch._dynamo.reset()
        torch.compile(lambda x: toy(name, x, [x], None, twice)[0], backend=aot_autograd(fw_compiler=backend))(
            torch.ones(2, 2)
        )
        return graphs[-1]

    assert "octavo.opaque_toy" in compiled("opaque_toy", False)
    assert "octavo" not in compiled("open_toy", False) and "octavo.open_toy" in compiled("open_toy", True)
    with record():
        assert "octavo.open_toy" in compiled("open_toy", False)


@pytest.mark.parametrize("change", ["accumulator.py", "granularity.py", "OCTAVO_TRITON"])
def test_the_key_of_compiled_code_knows_what_it_was_compiled_from(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes the key of the graph before operators are decomposed."""
    from torch._dynamo.backends.common import aot_autograd

    def compiled() -> tuple[list[str], Tensor]:
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph.code)
            return aot_autograd(fw_compiler=lambda graph, _: graph)(graph, inputs)

        torch._dynamo.reset()
        total = torch.compile(lambda x: toy("open_toy", x, [x], None)[0], backend=backend)(torch.ones(2, 2))
        return graphs, total

    before, total = compiled()
    assert before == compiled()[0] and "octavo.open_toy" in before[0]
    if change == "OCTAVO_TRITON":
        monkeypatch.setattr(operator, "is_triton_off", lambda: True)
    else:
        operator._digest_of_sources.cache_clear()
        whole = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: whole(path) + b"#" * (path.name == change))
    try:
        after, again = compiled()
    finally:
        operator._digest_of_sources.cache_clear()
    assert after != before and torch.equal(again, total)
