"""Operations as on a GPU: each calls its Triton kernels with what they take, and returns what its reference does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import activation, batch, experts, grouped, patches, rotary
from octavo.kernels.activation import Targets
from octavo.kernels.patches.window import Window
from octavo.kernels.runtime import dispatch, operation

pytest.importorskip("triton")
quantize, with_scale = (
    importlib.import_module(f"octavo.kernels.{name}") for name in ("quantize", "quantize_with_scale")
)
ROW, TENSOR = (kernels.QuantSpec("e4m3", granularity, "power_of_two") for granularity in ("row", "tensor"))
NINTH = Window((3, 3), padding=(1, 1))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


X, GATE, UP = drawn(16, 128), drawn(16, 128) * 2, drawn(16, 128) + 1
CODES, WEIGHTS = kernels.quantize(X, *ROW), [drawn(rows, 128) for rows in (8, 12, 4, 8)]
STACK, NORM = kernels.quantize_stack(WEIGHTS[:3], ROW), (torch.linspace(1, 2, 16), torch.linspace(-1, 1, 128))
ENDS, PLACE = torch.tensor([4, 16], dtype=torch.int32), torch.arange(31, -1, -1, dtype=torch.int32).view(16, 2)

CASES: dict[str, Callable[[], Any]] = {
    "transpose": lambda: kernels.transpose(CODES.codes),
    "transpose_folded": lambda: kernels.transpose_folded(CODES.codes, X),
    "rotate": lambda: rotary.rotate(drawn(2, 4, 2, 8), drawn(4, 4), drawn(4, 4), conjugate=True),
    "activation": lambda: activation.activate("relu2", GATE, UP, ROW, keeps_inputs=True, second=ROW),
    "activation_backward": lambda: activation.activation_backward("relu2", X, GATE, UP, Targets(ROW, None, ROW)),
    "activation_backward_plain": lambda: activation.activation_backward_plain("relu2", X.float(), GATE.float(), None),
    "quantize_normed": lambda: kernels.quantize_normed(X, NORM, ROW, ROW),
    "quantize_stack": lambda: kernels.quantize_stack(WEIGHTS[:3], ROW),
    "quantize_rows_twice": lambda: kernels.quantize_rows_twice(WEIGHTS, ROW, ROW, keeps_codes=True),
    "requantize_transposed": lambda: kernels.requantize_transposed(WEIGHTS[:3], STACK.scale, ROW, X),
    "quantize_with_scale": lambda: with_scale.quantize_with_scale(
        [X], with_scale.ScaleRef(torch.zeros(1, 2), 0), TENSOR, TENSOR
    ),
    "quantize_tokens": lambda: experts.quantize_tokens(X, PLACE, ROW),
    "combine_rows": lambda: experts.combine(X.repeat(2, 1), PLACE),
    "quantize_groups": lambda: grouped.quantize_groups(X, ENDS, ROW, ROW),
    "transpose_groups": lambda: grouped.transpose_groups(CODES.codes, ENDS),
    "quantize_patches": lambda: patches.quantize_patches(drawn(1, 4, 4, 16), NINTH, ROW, None),
    "fold_patches": lambda: patches.fold(drawn(16, 144), NINTH, (1, 4, 4, 16)),
    "quantize_batch": lambda: batch.quantize_batch(drawn(2, 16, 32), ROW, ROW),
    "transpose_batch": lambda: batch.transpose_batch(CODES.codes[None]),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted; other tests run them on the GPU")
@pytest.mark.parametrize("name", CASES)
def test_an_operation_reaches_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in operation._operations
    expected, files = CASES[name](), []

    def implementation(kind: str, folder: str, known: Any = dispatch.implementation) -> Any:
        files.append(kind)
        return known(kind, folder)

    for module in (dispatch, quantize):
        monkeypatch.setattr(module, "implementation", implementation)
    for module in (operation, quantize, activation):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x, label, refused=None: refused is None)
    found = CASES[name]()
    assert {*files} in ({"triton"}, {"triton_weights"}) and same(found, expected)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    if isinstance(expected, Tensor):
        return torch.equal(bytes_of(found), bytes_of(expected)) and layout_of(found) == layout_of(expected)
    return bool(found == expected)


def layout_of(x: Tensor) -> list[int]:
    """Return the strides of dimensions that have any."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def test_the_file_of_a_targets_kernels() -> None:
    group = kernels.QuantSpec("e4m3", "1x32", "power_of_two")
    assert quantize._triton_kernel(ROW, None, 0) == ("triton", None)
    assert quantize._triton_kernel(group, None, 0) == ("triton_groups", None)
    assert quantize._triton_kernel(ROW, TENSOR._replace(rotation=16), 0)[1] is not None
