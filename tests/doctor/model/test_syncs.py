"""Lines that make the host wait, counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.doctor.check import make
from octavo.doctor.model.syncs import judge, syncs, told_of_waits
from octavo.doctor.subjects import Trial

Try = Callable[..., Trial]


class Fake:
    """What PyTorch does on a GPU under `set_sync_debug_mode("warn")`, without one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode: object = 0
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def item(self, x: Tensor) -> float:
        """Wait, and warn of it."""
        if self.mode == "warn":
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at ...)", UserWarning, stacklevel=1
            )
        return float(x)


def test_a_wait_is_counted_with_its_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    with told_of_waits() as places:
        for _ in range(3):
            fake.item(torch.ones(()))
        warnings.warn("something else", UserWarning, stacklevel=1)
    fake.item(torch.ones(()))  # outside: nobody listens
    finding = judge(places)
    assert finding.verdict == "warning" and finding.numbers["waits"] == 3, finding
    assert finding.rows[0]["place"].startswith(__file__) and finding.rows[0]["waits"] == 3
    assert "doctor/model/test_syncs.py"[7:] in finding.seen and "warnings.warn" in finding.seen
    assert fake.mode == 0


def test_the_mode_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    shown = warnings.showwarning
    with pytest.raises(RuntimeError), told_of_waits():
        raise RuntimeError
    assert fake.mode == 0 and warnings.showwarning is shown


def test_a_step_without_waits_is_well(attempt: Try) -> None:
    finding = judge(Counter())
    assert finding.verdict == "ok", finding
    finding = make(syncs, attempt()).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_an_item_in_a_forward_is_found_on_a_gpu(attempt: Try) -> None:
    def waits(x: Tensor) -> Tensor:
        return x + 0 * x.sum().item()

    result = make(syncs, attempt(device="cuda", wrong=waits))
    assert result.finding.verdict == "warning", result
    assert result.finding.rows[0]["code"] == "return x + 0 * x.sum().item()"
    assert ".item()" in result.remedy


@pytest.mark.gpu
def test_octavos_own_layers_wait_nowhere(attempt: Try) -> None:
    result = make(syncs, attempt(device="cuda"))
    assert result.finding.verdict == "ok", result.finding.rows
