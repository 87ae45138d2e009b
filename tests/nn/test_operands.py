"""Inputs and weights that PyTorch refuses: every kind of layer does too, where a cast or an empty sum hid them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.errors import ConfigError
from octavo.kernels.runtime import ledger
from octavo.nn import Conv1d, Conv2d, GroupedLinear, Linear
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.functional import linear
from octavo.nn.fused import FusedMLP
from octavo.nn.matmul import matmul
from octavo.nn.operands import autocast_dtype, dtype_note
from octavo.recipes import load

POLICY = octavo.Policy(min_gain=0.0, min_features=16)
ENDS = torch.tensor([2, 4], dtype=torch.int32)
REFUSED = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def converted(model: nn.Module) -> nn.Module:
    octavo.convert(model, "folded", policy=POLICY)
    assert any(isinstance(module, Linear) for module in model.modules())
    return model


def mlp() -> nn.Module:
    model = converted(MLP())
    assert isinstance(model, FusedMLP)
    return model


LINEAR: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "linear": lambda: Linear(64, 32),
    "in BF16": lambda: Linear(64, 32, recipe="bf16"),
    "with stored scales": lambda: Linear(64, 32, recipe="delayed"),
    "shared": lambda: converted(Pair()),
    "mlp": mlp,
    "function": lambda: lambda x: linear(x, torch.ones(32, 64), None, load("folded")),
    "grouped": lambda: lambda x: GroupedLinear(2, 64, 32)(x, ENDS * (x.shape[0] // 4)),
    "matmul": lambda: lambda x: matmul(x, torch.ones(64, 32), load("folded")),
    "head": lambda: lambda x: linear_cross_entropy(x, torch.ones(80, 64), torch.zeros(len(x)).long(), recipe="folded"),
}
CONVOLUTIONS = {
    "conv1d": lambda: lambda x: Conv1d(4, 8, 3)(x.view(1, 4, 64)),
    "conv2d": lambda: lambda x: Conv2d(4, 8, 3)(x.view(1, 4, 8, 8)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
@pytest.mark.parametrize("kind", LINEAR | CONVOLUTIONS)
def test_inputs_that_are_no_real_numbers(kind, dtype):
    layer = (LINEAR | CONVOLUTIONS)[kind]()
    layer(torch.ones(4, 64))
    with pytest.raises(ConfigError, match=f"is {dtype}: FP8 products take"):
        layer(torch.ones(4, 64).to(dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(0, 63), (4, 63), (0, 65), (2, 0, 63), (0,), (63,), ()], ids=str)
@pytest.mark.parametrize("kind", list(LINEAR)[:6])
def test_inputs_of_another_width(kind, shape):
    with pytest.raises(ConfigError, match="its last dimension must be 64"):
        LINEAR[kind]()(torch.ones(shape))


@pytest.mark.parametrize("kind", ["grouped", "matmul", "head"])
def test_nothing_of_another_width(kind):
    with pytest.raises((ConfigError, RuntimeError)):
        LINEAR[kind]()(torch.ones(0, 63))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_real_numbers_of_the_right_width(kind, dtype):
    for rows in (4, 0):
        if kind != "head" or rows:
            assert LINEAR[kind]()(torch.ones(rows, 64, dtype=dtype)).dtype == (
                torch.float32 if kind == "head" else dtype
            )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32], ids=str)
def test_weights_that_are_no_real_numbers(dtype):
    x = torch.ones(4, 64)
    for call in (
        lambda: linear(x, torch.ones(32, 64).to(dtype), None, load("folded")),
        lambda: matmul(x, torch.ones(64, 32).to(dtype), load("folded")),
        lambda: linear_cross_entropy(x, torch.ones(80, 64).to(dtype), torch.zeros(4).long(), recipe="folded"),
    ):
        with pytest.raises(ConfigError, match=f"is {dtype}"):
            call()


def test_complex_layers_are_left_to_pytorch():
    model, twin = Pair(torch.complex64), Pair(torch.complex64)
    twin.load_state_dict(model.state_dict())
    plan = octavo.convert(model, "folded", policy=POLICY)
    assert plan.fp8_layers == 0
    assert plan.layers[0].reason == "its weight is torch.complex64, no real floating-point number"
    x = torch.randn(4, 64, dtype=torch.complex64)
    assert torch.equal(model(x), twin(x))


def test_weights_that_were_packed_into_bytes_are_left_alone():
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2048, 1, dtype=torch.uint8), requires_grad=False)
    assert octavo.plan(nn.Sequential(layer), policy=POLICY).fp8_layers == 0


def test_compiled_code_refuses_them_too():
    layer = torch.compile(Linear(64, 32), backend="eager")
    with pytest.raises(Exception, match="its last dimension must be 64"):
        layer(torch.ones(0, 63))
    torch._dynamo.reset()


# --- dtypes that cost accuracy or time --------------------------------------------------------------------------------


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(ledger, "_warned", set())
    return lambda: [record.getMessage() for record in caplog.records if record.name == "octavo"]


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if kind not in ("function", "matmul")])
def test_fp16_is_said_once(kind, said):
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            LINEAR[kind]()(torch.ones(4, 64))
        LINEAR[kind]()(torch.ones(4, 64))
    assert said() == []
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            LINEAR[kind]()(torch.ones(4, 64))
        LINEAR[kind]()(torch.ones(4, 64, dtype=torch.float16))
    assert len(said()) == 1 and "FP16: results above 65504" in said()[0]


def test_compiled_code_says_it_too(said):
    layer = torch.compile(Linear(64, 32), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        layer(torch.ones(4, 64, dtype=torch.float16))
    assert len(said()) == 1
    torch._dynamo.reset()


def test_fp32_is_said_on_a_gpu():
    note = dtype_note(torch.float32, "cuda")
    assert "twice the memory and time of BF16" in note and 'states="exact"' in note, "BF16 weights need masters"
    assert dtype_note(torch.float32, "cpu") is dtype_note(torch.bfloat16, "cuda") is None


@pytest.mark.gpu
def test_fp32_is_said_once_on_a_gpu(said):
    layer = Linear(64, 32, device="cuda")
    for _ in range(2):
        layer(torch.ones(16, 64, device="cuda"))
    assert len(said()) == 1 and "return FP32" in said()[0]


def on_meta(*shape: int) -> Tensor:
    return torch.randn(shape, device="meta", requires_grad=True)


def converted_on_meta(model: nn.Module) -> nn.Module:
    octavo.convert(model, policy=POLICY)
    return model.to("meta")


META: dict[str, Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "linear": lambda: (Linear(64, 40, device="meta"), [on_meta(3, 64)]),
    "shared": lambda: (converted_on_meta(Pair()), [on_meta(3, 64)]),
    "mlp": lambda: (converted_on_meta(MLP()), [on_meta(3, 64)]),
    "block": lambda: (Linear(64, 40, device="meta", recipe="block"), [on_meta(3, 64)]),
    "conv": lambda: (Conv2d(16, 24, 3, device="meta"), [on_meta(2, 16, 8, 8)]),
    "grouped": lambda: (GroupedLinear(2, 32, 16, device="meta"), [on_meta(4, 32), ENDS.to("meta")]),
    "matmul": lambda: (lambda a, b: matmul(a, b, load("folded")), [on_meta(2, 3, 32), on_meta(2, 32, 16)]),
    "cross entropy": lambda: (
        linear_cross_entropy,
        [on_meta(3, 64), on_meta(50, 64), torch.zeros(3, dtype=torch.int64, device="meta")],
    ),
}


@pytest.mark.parametrize("kind", META)
def test_on_the_meta_device_layers_give_shapes(kind: str) -> None:
    run, given = META[kind]()
    y = run(*given)
    y.sum().backward()
    assert y.is_meta and all(x.grad is not None and x.grad.shape == x.shape for x in given if x.requires_grad)


def test_autocast_of_a_device_that_has_none() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x if autocast_dtype(x.device.type) is None else x * 2

    assert autocast_dtype("meta") is None is autocast_dtype("cpu")
    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") == torch.bfloat16 and autocast_dtype("meta") is None
        assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
