"""Whether Triton or the reference runs, and where Triton launches."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from octavo.kernels import record
from octavo.kernels.runtime import dispatch
from octavo.kernels.runtime.devices import ARCHITECTURES, H100, H200, architecture_of, mode_of


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    dispatch._triton_unsupported_reason.cache_clear()
    dispatch.is_triton_off.cache_clear()
    yield
    dispatch._triton_unsupported_reason.cache_clear()
    dispatch.is_triton_off.cache_clear()


def test_a_cpu_runs_the_reference_and_that_is_no_fallback():
    with record() as ledger:
        assert not dispatch.uses_triton(torch.zeros(1), "quantize", "refused")
    assert not ledger.fallbacks
    assert "cpu" in dispatch.triton_unsupported_reason(torch.device("cpu"))


def on_gpu(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), **attributes)


@pytest.mark.parametrize(
    ("capability", "switch", "found", "reason"),
    [
        ((9, 0), None, True, None),
        ((9, 0), "1", True, None),
        ((9, 0), "0", True, "OCTAVO_TRITON=0"),
        ((9, 0), None, False, "not installed"),
        ((8, 0), None, True, "no FP8 tensor cores"),
    ],
)
def test_why_a_gpu_runs_no_triton(monkeypatch, capability, switch, found, reason):
    monkeypatch.setattr(dispatch, "architecture", lambda device: architecture_of("cuda", capability))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found or None)
    monkeypatch.delenv("OCTAVO_TRITON", raising=False)
    if switch is not None:
        monkeypatch.setenv("OCTAVO_TRITON", switch)
    with record() as ledger:
        assert dispatch.uses_triton(on_gpu(), "quantize") == (reason is None)
    assert len(ledger.fallbacks) == (reason is not None)
    assert all(reason in line and line.startswith("quantize ran as reference") for line in ledger.fallbacks)


@pytest.fixture
def simulated(monkeypatch):
    """What PyTorch reports of a GPU that is not here."""

    def report(capability, name="", hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", hip)
        dispatch._own_architecture.cache_clear()
        dispatch._own_rates.cache_clear()

    yield report
    dispatch._own_architecture.cache_clear()
    dispatch._own_rates.cache_clear()


@pytest.mark.parametrize(
    ("capability", "hip", "name"),
    [
        ((7, 5), None, "Ampere and older"),
        ((8, 6), None, "Ampere and older"),
        ((8, 9), None, "Ada"),
        ((9, 0), None, "Hopper"),
        ((10, 3), None, "Blackwell"),
        ((11, 0), None, "Blackwell"),
        ((12, 1), None, "Blackwell, consumer"),
        ((9, 0), "7.0", "before CDNA 3"),
        ((9, 4), "7.0", "CDNA 3"),
        ((9, 5), "7.0", "CDNA 4"),
        ((12, 0), "7.0", "other AMD"),
    ],
)
def test_the_architecture_is_that_of_backend_and_capability(simulated, capability, hip, name):
    simulated(capability, hip=hip)
    assert dispatch.architecture(torch.device("cuda", 0)).name == name


@pytest.mark.parametrize(("device", "name"), [("cpu", "CPU"), ("xpu", "Intel GPU"), ("mps", "mps")])
def test_other_devices_have_an_architecture(device, name):
    found = dispatch.architecture(torch.device(device))
    assert found.name == name and bool(found.refused) == (device != "cpu")


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H20", None),
        ("", None),
    ],
)
def test_a_gpu_has_its_own_rates_or_none(simulated, name, rates):
    simulated((9, 0), name)
    assert dispatch.rates(torch.device("cuda", 0)) == rates
    assert dispatch.rates(torch.device("cpu")) is None


def test_what_was_planned_for_does_not_stay(simulated):
    simulated((8, 0))
    device = torch.device("cuda", 0)
    assert "no FP8" in dispatch.triton_unsupported_reason(device)
    with dispatch.planning_for("h200"):
        assert dispatch.triton_unsupported_reason(device) is None and dispatch.rates(device) == H200
    assert "no FP8" in dispatch.triton_unsupported_reason(device)


def test_only_what_was_run_is_called_measured():
    assert [each.name for each in ARCHITECTURES if each.measured] == ["CPU", "Hopper"]


@pytest.mark.parametrize(
    ("granularities", "mode"),
    [("tensor tensor", "tensor"), ("row column", "row"), ("row tensor", "row"), ("1x128 128x128", "block"),
     ("1x32 1x32", "mx"), ("1x128 row", "block")],
)  # fmt: skip
def test_the_mode_of_a_product(granularities, mode):
    assert mode_of(granularities.split()) == mode


def test_what_a_kernel_refuses_is_a_fallback(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_unsupported_reason", lambda device: None)
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
        made += activation.activate("silu", gate, up, row).hidden[:2]
        backward = activation.activation_backward("silu", x, gate, up, activation.Targets(row, row, row))
        made += [tensor for quantized in backward for tensor in quantized[:2]]
        made += activation.activation_backward_plain("silu", x, gate, up)
        normed = norm.normalise(x, None, None, 1e-5, target=row)
        made += [normed.y, *normed.quantized[:2], norm.normalise_backward(gate, x, None, None, None, normed.rstd)[0]]
        made += [rotary.rotate(x.view(10, 13, 8, 32), angles.cos(), angles.sin())]
        return [*made, cross_entropy.cross_entropy_(logits, targets), logits]

    with torch.cuda.device(0), record() as ledger:
        here, there = results("cuda:0"), results("cuda:1")
        assert torch.cuda.current_device() == 0
    assert not ledger.fallbacks
    for one, other in zip(here, there, strict=True):
        assert other.device == torch.device("cuda", 1) and one.dtype == other.dtype
        assert torch.equal(one.cpu().float(), other.cpu().float())
