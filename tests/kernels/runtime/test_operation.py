"""Operations: schemas follow from annotations, eager and compiled code agree, and a compiler may look inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec, quantize, record, rotary
from octavo.kernels.quant_spec import empty
from octavo.kernels.runtime import dispatch
from octavo.kernels.runtime import operation as module
from octavo.kernels.runtime.operation import operation
from octavo.numerics import PER_ROW, Granularity, Quantized

ROW = QuantSpec("e4m3", "row", "power_of_two")
Results = tuple[Tensor, Quantized | None, Tensor | None]


def fake(x: Tensor, others: Sequence[Quantized], spec: QuantSpec | None, factor: float, twice: bool) -> Results:
    return x.new_empty(x.shape), spec and empty(spec, x.shape[0], x.shape[1], x.device), None


def results(x: Tensor, others: Any, spec: QuantSpec | None, factor: float, twice: bool) -> list[Any]:
    return [True, spec, False]


def run(x: Tensor, others: Sequence[Quantized], spec: QuantSpec | None, factor: float, twice: bool = False) -> Results:
    """Return the sum of x and the values of the others, times a factor, and x quantised."""
    total = x * factor
    for other in others:
        total = total + other.codes.float() * other.scale
    codes = None
    if spec is not None:
        codes = Quantized(x.to(spec.fmt.dtype), torch.ones_like(x[:, :1]), spec.tile)
    return total * 2 if twice else total, codes, None


opaque_toy = operation(name="opaque_toy", fake=fake, results=results)(run)
open_toy = operation(name="open_toy", fake=fake, results=results, in_graph=lambda *arguments: not arguments[4])(run)


class Inner(NamedTuple):
    fold: Tensor | None
    scale: Tensor


class Options(NamedTuple):
    dtype: torch.dtype
    matrices: tuple[Quantized, ...]
    inner: Inner | None
    size: tuple[int, int]
    kind: Literal["a", "b"] = "a"


X, CODES = torch.ones(3, 4), quantize(torch.ones(3, 4), *ROW)
VALUES: dict[str, tuple[Any, str, list[Any]]] = {
    "tensor": (Tensor, "Tensor v", [X]),
    "absent tensor": (Tensor | None, "Tensor? v", [X, None]),
    "tensors": (Sequence[Tensor], "Tensor[] v", [[X, X], []]),
    "codes": (Quantized, "Tensor v_codes, Tensor v_scale, str v_granularity", [CODES]),
    "absent codes": (Quantized | None, "Tensor? v_codes, Tensor? v_scale, str? v_granularity", [CODES, None]),
    "either": (Tensor | Quantized, "Tensor v, Tensor? v_scale, str? v_granularity", [X, CODES]),
    "neither": (Tensor | Quantized | None, "Tensor? v, Tensor? v_scale, str? v_granularity", [X, CODES, None]),
    "lists": (list[Quantized], "Tensor[] v_codes, Tensor[] v_scale, str[] v_granularity", [[CODES, CODES], []]),
    "target": (QuantSpec | None, "str? v", [ROW, QuantSpec("int8", "1x32", "float32", "stochastic", -16), None]),
    "granularity": (Granularity, "str v", [PER_ROW, Granularity(3, None)]),
    "numbers": (tuple[int, float, bool], "SymInt v_0, float v_1, bool v_2", [(-7, 1e-5, True)]),
    "flags": (list[bool], "bool[] v", [[True, False], []]),
    "words": (str, "str v", ["two words|and a bar", ""]),
    "dtype": (torch.dtype, "ScalarType v", [torch.bfloat16]),
    "structure": (
        Options,
        "ScalarType v_dtype, Tensor[] v_matrices_codes, Tensor[] v_matrices_scale, str[] v_matrices_granularity, "
        "Tensor? v_inner_fold, Tensor? v_inner_scale, SymInt v_size_0, SymInt v_size_1, str v_kind",
        [
            Options(torch.float16, (CODES, CODES), Inner(None, X), (1, 2), "b"),
            Options(torch.float16, (), Inner(X, X), (1, 2)),
            Options(torch.float16, (CODES,), None, (1, 2)),
        ],
    ),
}


@pytest.mark.parametrize(("annotation", "schema", "values"), VALUES.values(), ids=VALUES)
def test_arguments_come_out_as_they_went_in(annotation: Any, schema: str, values: list[Any]) -> None:
    codec = module._codec_of(annotation)
    assert ", ".join(f"{kind} v{suffix}" for suffix, kind in codec.flat) == schema
    for value in values:
        flat = module._encode(value, codec.layout)
        again = iter(flat)
        assert len(flat) == len(codec.flat) and same(codec.decode(again), value) and not [*again]


def same(got: Any, want: Any) -> bool:
    if isinstance(want, tuple | list):
        return type(got) is type(want) and len(got) == len(want) and all(map(same, got, want))
    return got is want if isinstance(want, Tensor) else type(got) is type(want) and bool(got == want)


@pytest.mark.parametrize("annotation", [object, dict[str, Tensor], Tensor | int, Quantized | Tensor])
def test_what_no_operator_can_take_is_refused_where_it_is_defined(annotation: Any) -> None:
    def function(x: Tensor, y: Any) -> Tensor:
        return x

    function.__annotations__["y"] = annotation
    with pytest.raises(TypeError, match="argument"):
        operation(fake=lambda x, _: x)(function)


def test_arguments_may_be_named_and_have_defaults() -> None:
    expected = run(X, [], None, 0.5)[0]
    assert torch.equal(opaque_toy(X, others=[], spec=None, factor=0.5)[0], expected)
    with pytest.raises(TypeError, match="others, spec, factor, twice: one is missing"):
        opaque_toy(X, [], None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no argument 'x'"):
        opaque_toy(X, [], None, 0.5, x=X)  # type: ignore[misc]


def test_a_reference_runs_where_triton_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the function of the same name in `triton.py`, unless it does not support the arguments."""
    from octavo.kernels.rotary import reference

    asked: list[Any] = []
    toy: Any = operation(
        name="dispatched_toy",
        reference=reference.rotate,
        unsupported=lambda x, *_: "too short" if len(x) < 2 else None,
        ledger=lambda *arguments: f"toy {arguments[3]}",
        fake=lambda x, *_: x,
    )(reference.rotate)
    monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x, label, refused: asked.append((label, refused)))
    x, table = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 2)
    for operands in ((x, table, table, True), (x.repeat(2, 1, 1, 1), table, table, False)):
        assert torch.equal(toy(*operands), reference.rotate(*operands))
    assert asked == [("toy True", "too short"), ("toy False", None)]


def test_the_example_of_the_guide_is_the_code() -> None:
    root = Path(__file__).parents[3]
    lines = (root / "CONTRIBUTING.md").read_text().splitlines()
    first = lines.index(next(line for line in lines if line.startswith("    @operation(")))
    example = "\n".join(line[4:] for line in lines[first : first + 2])
    assert f"\n{example}\n" in (root / "src/octavo/kernels/rotary/__init__.py").read_text()
    arguments = "Tensor x, Tensor cos, Tensor sin, bool conjugate"
    assert f"octavo::rotate({arguments}, *, " in str(rotary._rotate.operator._schema)


@pytest.mark.parametrize("name", ["opaque_toy", "open_toy"])
@pytest.mark.parametrize("spec", [ROW, None])
def test_compiled_code_gives_what_eager_code_gives(name: str, spec: QuantSpec | None) -> None:
    torch._dynamo.reset()
    toy, x, codes = module._operations[name], torch.randn(3, 4), quantize(torch.randn(3, 4), *ROW)
    compiled = torch.compile(
        lambda x, c, s: toy(x, [Quantized(c, s, ROW.tile)], spec, 0.5, twice=False), fullgraph=True
    )
    for got, want in zip(compiled(x, *codes[:2]), toy(x, [codes], spec, 0.5), strict=True):
        if isinstance(want, Quantized):
            assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8)) and got[2] == want[2]
        else:
            assert got is want is None or torch.equal(got, want)
    arguments = toy.encode(x, [codes], spec, 0.5, False)
    torch.library.opcheck(toy.operator, arguments, test_utils="test_faketensor")


def test_a_compiler_looks_inside_where_it_may() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph.code)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    def compiled(name: str, twice: bool) -> str:
        torch._dynamo.reset()
        toy = module._operations[name]
        torch.compile(lambda x: toy(x, [], None, 0.5, twice)[0], backend=aot_autograd(fw_compiler=backend))(
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
        total = torch.compile(lambda x: open_toy(x, [], None, 0.5)[0], backend=backend)(torch.ones(2, 2))
        return graphs, total

    before, total = compiled()
    assert before == compiled()[0] and "octavo.open_toy" in before[0]
    if change == "OCTAVO_TRITON":
        monkeypatch.setattr(module, "is_triton_off", lambda: True)
    else:
        module._digest_of_sources.cache_clear()
        whole = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: whole(path) + b"#" * (path.name == change))
    try:
        after, again = compiled()
    finally:
        module._digest_of_sources.cache_clear()
    assert after != before and torch.equal(again, total)
