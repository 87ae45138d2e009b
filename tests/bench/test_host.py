from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import skip_own_guards
from octavo.errors import UnsupportedError
from octavo_bench import host


def event(name: str, start: float, end: float, *, on_gpu: bool = True) -> Any:
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_it_refuses_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="there is none here"):
        next(host.bench_host())


def test_kernels_copies_and_compiled_pieces_are_counted_apart() -> None:
    found = host._launches(
        [
            event("gemm", 0, 1000),
            event("gemm", 500, 2000),
            event("Memcpy DtoD (Device -> Device)", 3000, 4000),
            event("Torch-Compiled Region: 0/0", 0, 9000, on_gpu=False),
            event("aten::mm", 0, 9000, on_gpu=False),
        ]
    )
    assert (found.kernels, found.copies, found.pieces, found.busy_ms) == (2, 1, 1, 3.0)
    assert found.names["gemm"] == 2


def test_own_guards_are_skipped_in_the_mode_of_that_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    stack = SimpleNamespace(compile=lambda options: given.append(options))
    monkeypatch.setattr(host, "Stack", lambda implementation, device: stack)
    for mode in (*host.MODES, host.SKIPPED):
        host._stack(host.implementations()["octavo folded"], mode)
    assert given == [None, {"guard_filter_fn": skip_own_guards}]


def test_all_weights_change_in_place_and_all_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIM": 64, "FFN": 128, "HEADS": 2, "HEAD_DIM": 32, "BLOCKS": 2, "TOKENS": 32}.items():
        monkeypatch.setattr(host, name, value)
    losses = {}
    for name in ("bf16", "octavo folded"):
        stack = host.Stack(host.implementations()[name], "cpu")
        before = [(weight._version, weight.clone()) for weight in stack.parameters]
        stack.change_weights()
        for (version, value), weight in zip(before, stack.parameters, strict=True):
            assert weight._version > version and torch.equal(weight, value)
        stack.step()
        assert all(weight.grad is not None for weight in stack.parameters)
        assert stack.x.grad is not None
        losses[name] = float(stack.x.grad.float().norm())
    assert losses["octavo folded"] == pytest.approx(losses["bf16"], rel=0.05)


def test_a_failed_mode_has_its_error_in_the_table() -> None:
    row = {"implementation": "bf16", "mode": "eager", "ms_per_block": 1.5, "launches_per_block": 88.0}
    failed = {"implementation": "octavo folded", "mode": "compiled", "error": "RuntimeError: no"}
    table = host.KIND.markdown([row, failed])
    assert "| bf16 | eager | 1.50 | 88.0 |" in table
    assert "| octavo folded | compiled | failed: RuntimeError: no |  |" in table
