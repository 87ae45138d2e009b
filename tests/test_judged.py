"""What tests do without: verdicts judged anew (`distributed/judged.py`)."""

import judged
import pytest
from torch import nn

from octavo.conversion import mlps
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import FeedForward
from octavo.nn import probe

CONFIG = ModelConfig(vocab=64, dim=32, layers=1, heads=2, kv_heads=2, sequence=8)
calls: list[nn.Module] = []


def judge(module: nn.Module) -> str:
    calls.append(module)
    return type(module).__name__


def count(*modules: nn.Module) -> int:
    """Return how many of these modules, each of a model of its own, are judged."""
    calls.clear()
    for module in modules:
        assert judged.judge_once(judge)(module) == type(module).__name__
    return len(calls)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "_verdicts", {})


def test_conversions_go_through_it() -> None:
    assert probe.judge_once is mlps.judge_once is judged.judge_once


def test_a_module_of_octavos_models_is_judged_once() -> None:
    assert count(FeedForward(CONFIG), FeedForward(CONFIG)) == 1


def test_other_shapes_settings_sharing_and_code_are_judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, named, tied, holding = FeedForward(CONFIG, 64), *(FeedForward(CONFIG) for _ in range(3))
    named.scale = 2.0
    tied.w3 = tied.w1
    holding.held = [1.0]  # its items may change
    assert count(FeedForward(CONFIG), wide, named, tied, holding, holding) == 6
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: x)
    assert count(FeedForward(CONFIG)) == 1


def test_a_module_of_anyone_else_is_judged_anew() -> None:
    class Mine(FeedForward):
        pass

    assert count(Mine(CONFIG), Mine(CONFIG), nn.Linear(2, 2), nn.Linear(2, 2)) == 4
