"""A GEMM and the backward of an activation as one: what it computes, and where it is refused."""

import importlib

import pytest
import torch

from octavo import kernels
from octavo.kernels import gemm_activation
from octavo.kernels.activation import Factors, Targets, activation_backward
from octavo.kernels.gemm_activation import gemm_activation_backward, unfused_reason
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import PER_ROW, Quantized

gemm = importlib.import_module("octavo.kernels.gemm")
ROW = QuantSpec("e4m3", "row", "power_of_two")
COLUMN = QuantSpec("e4m3", "column", "power_of_two")
TARGETS = Targets(ROW, ROW, COLUMN)


def case(m=24, f=48, k=80):
    g = kernels.quantize_matrix(torch.randn(m, k).bfloat16(), ROW)
    w = Quantized(kernels.quantize_matrix(torch.randn(f, k), ROW).codes, torch.ones(f, 1), PER_ROW)
    gate, up = (torch.randn(m, f).bfloat16() for _ in range(2))
    return g, w, gate, up, Factors(torch.full((1, 2 * f), 0.5), torch.full((m, 1), 2.0), torch.full((m, 1), 0.25))


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_the_one_after_the_other(autocast, monkeypatch):
    monkeypatch.setattr(gemm, "KERNELS", gemm.KERNELS[-1:])  # the vendor's may add up in another order
    g, w, gate, up, factors = case()
    dh = kernels.gemm(g, w, torch.bfloat16)
    expected = activation_backward("silu", dh, gate, up, TARGETS, factors)
    with torch.autocast("cpu", enabled=autocast), kernels.record() as ledger:
        got = gemm_activation_backward(g, w, "slow", "silu", gate, up, TARGETS, factors)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale)
        assert a.granularity == b.granularity
    assert ledger.gemms == {"reference": 1}
    fake = gemm_activation._gemm_activation_backward.fake(g, w, "slow", "silu", gate, up, TARGETS, factors)
    assert [x.codes.shape for x in fake] == [x.codes.shape for x in got]


def reason(*, targets=TARGETS, **changed):
    g, _, gate, up, factors = case()
    arguments = {"g": g, "gate": gate, "up": up, "targets": targets, "factors": factors} | changed
    return unfused_reason(**arguments)


def test_where_it_is_refused(monkeypatch):
    g, _, gate, _, factors = case()
    assert "fewer than" in reason()
    monkeypatch.setattr(gemm_activation, "LEAST", 0)
    assert reason() == "Triton kernels run on NVIDIA GPUs, this is cpu"
    assert "no gate" in reason(up=None) and "codes" in reason(gate=g)
    assert "E4M3" in reason(g=g._replace(codes=g.codes.float().to(torch.float8_e5m2)))
    assert "one scale per row" in reason(targets=TARGETS._replace(columns=QuantSpec("e4m3", "1x128", "power_of_two")))
    assert "h is searched" in reason(factors=factors._replace(hidden=None))
    assert "16 bytes" in reason(gate=gate[:, :44], up=gate[:, :44])
    with kernels.gemm_by("slow"):
        assert "gemm_by" in reason()
    monkeypatch.setattr(gemm_activation, "is_off", lambda: True)
    assert "OCTAVO_EPILOGUES" in reason()


def test_a_hopper_that_is_planned_for_has_it(monkeypatch):
    from octavo.kernels.runtime import dispatch

    monkeypatch.setattr(gemm_activation, "LEAST", 0)
    monkeypatch.setattr(gemm_activation, "triton_unsupported_reason", lambda device: None)
    with dispatch.planning_for("h200"):
        assert reason() is None
    with dispatch.planning_for("l40s"):
        assert "Ada" in reason()
