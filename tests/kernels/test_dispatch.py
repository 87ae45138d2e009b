"""Which twin runs, and where Triton launches."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from octavo.kernels import dispatch, record


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    dispatch.why_not.cache_clear()
    yield
    dispatch.why_not.cache_clear()


def test_a_cpu_runs_the_reference_and_that_is_no_fallback():
    with record() as ledger:
        assert not dispatch.uses_triton(torch.zeros(1), "quantize", "refused")
    assert not ledger.fallbacks
    assert "cpu" in dispatch.why_not(torch.device("cpu"))


def on_gpu(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), **attributes)


@pytest.mark.parametrize(
    ("capability", "switch", "found", "reason"),
    [
        ((9, 0), None, True, None),
        ((9, 0), "1", True, None),
        ((9, 0), "0", True, "OCTAVO_TRITON=0"),
        ((9, 0), None, False, "not installed"),
        ((8, 0), None, True, "8.0 has no FP8"),
    ],
)
def test_why_a_gpu_runs_no_triton(monkeypatch, capability, switch, found, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found or None)
    monkeypatch.delenv("OCTAVO_TRITON", raising=False)
    if switch is not None:
        monkeypatch.setenv("OCTAVO_TRITON", switch)
    with record() as ledger:
        assert dispatch.uses_triton(on_gpu(), "quantize") == (reason is None)
    assert len(ledger.fallbacks) == (reason is not None)
    assert all(reason in line and line.startswith("quantize ran as reference") for line in ledger.fallbacks)


def test_what_a_kernel_refuses_is_a_fallback(monkeypatch):
    monkeypatch.setattr(dispatch, "why_not", lambda device: None)
    with record() as ledger:
        assert not dispatch.uses_triton(on_gpu(), "quantize", "its tiles straddle")
    assert ledger.fallbacks == ["quantize ran as reference: its tiles straddle"]


@pytest.mark.parametrize(("device", "entered"), [("cuda:1", [1]), ("cuda:0", []), ("cpu", [])])
def test_a_device_is_made_current_only_if_it_is_not(monkeypatch, device, entered):
    made = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            made.append(self.index)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with dispatch.launches_on(torch.device(device)):
        pass
    assert made == entered


@pytest.mark.gpu
def test_every_contract_works_on_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from octavo import kernels
    from octavo.kernels import activation, cross_entropy, norm, rotary

    row = kernels.QuantSpec("e4m3", "row", "power_of_two")

    def results(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, gate, up = (torch.randn(130, 256).bfloat16().to(device) for _ in range(3))
        angles = torch.randn(13, 16).to(device)
        logits, targets = x.clone(), torch.arange(130, device=device)
        both = kernels.quantize_pair([x], row, row)
        made = [*both[0][:2], *both[1][:2], kernels.transpose(both[0].codes)]
        made += activation.activation("silu", gate, up, row)[:2]
        backward = activation.activation_backward("silu", x, gate, up, activation.Targets(row, row, row))
        made += [tensor for quantized in backward for tensor in quantized[:2]]
        made += activation.activation_backward_plain("silu", x, gate, up)
        normed = norm.rms_norm(x, None, 1e-5, target=row)
        made += [normed.y, *normed.quantized[:2], norm.rms_norm_backward(gate, x, None, normed.rstd)[0]]
        made += [rotary.rotate(x.view(10, 13, 8, 32), angles.cos(), angles.sin())]
        return [*made, cross_entropy.cross_entropy_(logits, targets), logits]

    with torch.cuda.device(0), record() as ledger:
        here, there = results("cuda:0"), results("cuda:1")
        assert torch.cuda.current_device() == 0
    assert not ledger.fallbacks
    for one, other in zip(here, there, strict=True):
        assert other.device == torch.device("cuda", 1) and one.dtype == other.dtype
        assert torch.equal(one.cpu().float(), other.cpu().float())
