from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.doctor.examination import examination
from octavo.lab.evaluation.run import EvalSettings
from octavo.lab.evaluation.served import evaluate_served
from octavo.lab.monitor.system import versions
from octavo.lab.pilot.run import Settings, run_pilot
from octavo.lab.train import device as devices
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.device import WARM_UP_STEPS, describe, gc_frozen, resolve, use
from octavo.lab.train.opening import open_run
from octavo.lab.train.setup import set_up


def test_names() -> None:
    assert resolve("cpu") == torch.device("cpu")
    assert resolve("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert describe(torch.device("cpu"))
    assert {"octavo", "python", "torch"} <= versions().keys()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "", "cuda:99"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.device"):
        resolve(name)


@pytest.mark.parametrize(("name", "current"), [("cpu", []), ("cuda", [0]), ("cuda:1", [1])])
def test_a_gpu_in_use_is_the_current_one(monkeypatch: pytest.MonkeyPatch, name: str, current: list[int]) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(device.index))
    assert use(name) == resolve(name)
    assert made == current


def on(name: str) -> RunConfig:
    return assemble(load_preset("tiny", cuda=False), ("test", {"run": {"device": name}}))


@pytest.mark.parametrize(
    "command",
    [
        lambda: set_up(on("cuda:1")),
        lambda: open_run(on("cuda:1"), new=True).states(),
        lambda: run_pilot(cast(Any, None), Settings(device="cuda:1")),
        lambda: examination(device="cuda:1"),
        lambda: evaluate_served(Path(), EvalSettings(device="cuda:1")),
    ],
    ids=["train", "eval", "pilot", "doctor", "eval of an export"],
)
def test_what_a_command_computes_on_is_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch, command: Callable[[], object]
) -> None:
    class Used(Exception):
        pass

    def used(name: str) -> torch.device:
        raise Used(name)

    monkeypatch.setattr(devices, "use", used)
    with pytest.raises(Used, match="cuda:1"):
        command()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """The suite freezes what its collection has left."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize(("device", "frozen"), [("cpu", False), ("cuda", True)])
def test_objects_are_frozen_after_warm_up_until_the_end(device: str, frozen: bool) -> None:
    with pytest.raises(KeyError), gc_frozen(torch.device(device)) as after_step:
        for _ in range(WARM_UP_STEPS - 1):
            after_step()
        assert gc.get_freeze_count() == 0
        after_step()
        assert (gc.get_freeze_count() > 0) is frozen
        raise KeyError  # a run that fails
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_collector_that_was_frozen_before_stays_frozen(device: str) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with gc_frozen(torch.device(device)) as after_step:
        for _ in range(WARM_UP_STEPS):
            after_step()
    assert 0 < gc.get_freeze_count() <= before
