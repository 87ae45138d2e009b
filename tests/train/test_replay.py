from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.conversion import Policy, convert, disabled
from octavo.errors import ConfigError
from octavo.models import ModelConfig, build
from octavo.nn.telemetry import Telemetry
from octavo.train.config import LoopConfig, OptimizerConfig, RunConfig
from octavo.train.lane import Lane
from octavo.train.parallel import ALONE, Launch
from octavo.train.replay import WARM, Replay, _stored
from octavo.train.setup import replays

CONFIG = ModelConfig(vocab=32, dim=64, layers=1, heads=2, ffn=128, sequence=8)  # large enough for FP8 gradients
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def lane(*, graph: bool, recipe: str = "folded", device: str = "cpu", **settings: Any) -> Lane:
    model = build(CONFIG, seed=0).to(device)
    convert(model, recipe, policy=Policy(min_gain=0.0))
    made = Lane("fp8", model, OptimizerConfig(**settings), graph=graph)
    if graph and device == "cpu":
        made.replay = Replay(made._train, made.model, made._trained, made.optimizer, **on_cpu(made))
    return made


def batch(step: int, rows: int = 4, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(step)).to(device)
    return ids[:, :-1], ids[:, 1:]


def on_cpu(own: Lane) -> dict[str, Any]:
    """A capture for the CPU, which runs at once what it is to replay: it says how often it was asked."""

    def capture(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        capture.asked += 1  # type: ignore[attr-defined]
        loss = work()
        kept, stored = [(p, p.grad) for p in own._trained], _stored(own.optimizer)

        def replay() -> None:
            own.optimizer.zero_grad(set_to_none=True)
            loss.copy_(work())
            for parameter, gradient in kept:
                if gradient is not None and parameter.grad is not None:
                    gradient.copy_(parameter.grad)
            for number, codes in _stored(own.optimizer).items():
                for there, here in zip(stored[number], codes, strict=True):
                    there.copy_(here)
            own.optimizer.zero_grad(set_to_none=True)  # a graph writes memory, and knows of no parameters

        def counting_replay() -> None:
            with kernels.ledger.apart():  # a graph launches kernels, and no operator that would count them
                replay()

        return counting_replay, loss

    capture.asked = 0  # type: ignore[attr-defined]
    return {"capture": capture}


def trained(own: Lane, steps: int, accumulate: int = 1) -> list[float]:
    batches = [batch(number, device=own.device.type) for number in range(steps)]
    return [float(own.step(*pair, step=n, lr=1e-2, accumulate=accumulate).loss) for n, pair in enumerate(batches)]


def captures(own: Lane) -> int:
    assert own.replay is not None
    return int(own.replay._how.asked)  # type: ignore[attr-defined]


@on_both
@pytest.mark.parametrize("gradients", ["wide", "fp8"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", ["folded", "block", "delayed"])
def test_replayed_steps_are_those_that_are_launched_one_by_one(
    recipe: str, accumulate: int, gradients: str, device: str
) -> None:
    settings: dict[str, Any] = {"recipe": recipe, "device": device, "states": "fp8", "gradients": gradients}
    by_kernel, by_graph = (lane(graph=graph, **settings) for graph in (False, True))
    with kernels.record() as plain:
        expected = trained(by_kernel, WARM + 5, accumulate)
    with kernels.record() as counted:
        found = trained(by_graph, WARM + 5, accumulate)
    assert by_graph.replay is not None and by_graph.replay._graph is not None and not by_graph.replay.refusal
    assert found == expected
    for name, parameter in by_kernel.parameters.items():
        assert torch.equal(by_graph.parameters[name], parameter), name
    assert counted.gemms == plain.gemms and counted.gemms.total() > 0


def test_it_is_captured_once_after_a_few_steps() -> None:
    own = lane(graph=True)
    trained(own, WARM)
    assert captures(own) == 0
    trained(own, 5)
    assert captures(own) == 1


@pytest.mark.parametrize("change", ["batch", "precision", "recipe", "telemetry", "probe"])
def test_it_is_captured_anew_where_something_about_it_changes(change: str) -> None:
    own = lane(graph=True)
    trained(own, WARM + 1)
    if change == "batch":
        own.step(*batch(0, rows=2), step=9, lr=1e-2)
    elif change == "precision":
        with disabled(own.model):
            own.step(*batch(0), step=9, lr=1e-2)
    elif change == "recipe":
        convert(own.model, "block", policy=Policy(min_gain=0.0))
    elif change == "telemetry":
        Telemetry(own.model)
    else:
        own.probe(*batch(0))
    trained(own, WARM)
    assert captures(own) == 1
    trained(own, 2)
    assert captures(own) == 2


def test_a_refused_capture_is_told_and_training_goes_on() -> None:
    def refuses(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        work()
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    own, other = lane(graph=False), lane(graph=True)
    other.replay = Replay(other._train, other.model, other._trained, other.optimizer, capture=refuses)
    assert trained(other, WARM + 2) == trained(own, WARM + 2)
    assert other.replay.refusal == "RuntimeError: operation not permitted when stream is capturing"


@on_both
def test_a_result_outlives_the_next_replay(device: str) -> None:
    own = lane(graph=True, device=device)
    trained(own, WARM + 1)
    first = own.step(*batch(1, device=device), step=5, lr=0.1).loss
    before = float(first)
    own.step(*batch(2, device=device), step=6, lr=0.1)
    assert float(first) == before


def asked(graph: str) -> RunConfig:
    run = LoopConfig(graph=graph)  # type: ignore[arg-type]
    return RunConfig(model=dataclasses.replace(CONFIG, sequence=256), run=run)


@pytest.mark.parametrize(
    ("graph", "device", "expected"),
    [("auto", CUDA, True), ("on", CUDA, True), ("off", CUDA, False), ("auto", CPU, False)],
)
def test_when_a_run_is_replayed(graph: str, device: torch.device, expected: bool) -> None:
    assert replays(asked(graph), device) is expected


def test_asking_for_a_graph_where_there_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.graph: 'on' needs one GPU, but the run is on a CPU"):
        replays(asked("on"), CPU)
    with pytest.raises(ConfigError, match="2 ranks share the run"):
        replays(asked("on"), CUDA, dataclasses.replace(ALONE, launch=Launch(ranks=2)))
