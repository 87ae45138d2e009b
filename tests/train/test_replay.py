from __future__ import annotations

import dataclasses
import itertools
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
from octavo.train.evaluate import heldout_losses
from octavo.train.parallel import SINGLE_PROCESS, Launch
from octavo.train.replay import WARM, Captured, Graphs, _stored
from octavo.train.setup import replays
from octavo.train.train_state import TrainState

CONFIG = ModelConfig(vocab=32, dim=64, layers=1, heads=2, ffn=128, sequence=8)  # large enough for FP8 gradients
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class GraphsOnCPU(Graphs):
    """Captures for the CPU, which run at once what they are to replay."""

    def __init__(self, room: int = 1) -> None:
        super().__init__()
        self.asked, self.room = 0, room

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        self.asked += 1
        own = next(replay for replay in self._replays if replay._passes is None and replay._calls >= WARM)
        loss = work()
        kept, stored = [(p, p.grad) for p in own._parameters], _stored(own._optimizer)

        def replay() -> None:
            with kernels.ledger.apart():  # a graph launches kernels, and no operator that would count them
                own._optimizer.zero_grad(set_to_none=True)
                loss.copy_(work())
            for parameter, gradient in kept:
                if gradient is not None and parameter.grad is not None:
                    gradient.copy_(parameter.grad)
            for number, codes in _stored(own._optimizer).items():
                for there, here in zip(stored[number], codes, strict=True):
                    there.copy_(here)
            own._optimizer.zero_grad(set_to_none=True)  # a graph writes memory, and knows of no parameters

        return Captured(replay, loss, held=1)

    def free(self, held: int) -> int:
        return self.room


class RefusesToCapture(Graphs):
    def capture(self, work: Callable[[], Tensor]) -> Captured:
        work()
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def lane(graphs: Graphs | None = None, *, recipe: str = "folded", device: str = "cpu", **settings: Any) -> TrainState:
    model = build(CONFIG, seed=0).to(device)
    convert(model, recipe, policy=Policy(min_gain=0.0))
    return TrainState("fp8", model, OptimizerConfig(**settings), graphs=graphs)


def batch(step: int, rows: int = 4, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(step)).to(device)
    return ids[:, :-1], ids[:, 1:]


def trained(own: TrainState, steps: int, accumulate: int = 1) -> list[float]:
    batches = [batch(number, device=own.device.type) for number in range(steps)]
    return [float(own.step(*pair, step=n, lr=1e-2, accumulate=accumulate).loss) for n, pair in enumerate(batches)]


def graphs_on(device: str) -> Graphs:
    return GraphsOnCPU() if device == "cpu" else Graphs()


@on_both
@pytest.mark.parametrize(
    ("recipe", "accumulate", "gradients"),
    [*itertools.product(["folded"], [1, 2], ["wide", "fp8"]), ("block", 2, "fp8"), ("delayed", 2, "wide")],
)
def test_replayed_steps_are_those_that_are_launched_one_by_one(
    recipe: str, accumulate: int, gradients: str, device: str
) -> None:
    settings: dict[str, Any] = {"recipe": recipe, "device": device, "states": "fp8", "gradients": gradients}
    by_kernel, by_graph = lane(**settings), lane(graphs_on(device), **settings)
    with kernels.record() as plain:
        expected = trained(by_kernel, WARM + 5, accumulate)
    with kernels.record() as counted:
        found = trained(by_graph, WARM + 5, accumulate)
    assert by_graph.replay is not None and by_graph.replay.held > 0 and not by_graph.replay.refusal
    assert found == expected
    for name, parameter in by_kernel.parameters.items():
        assert torch.equal(by_graph.parameters[name], parameter), name
    assert counted.gemms == plain.gemms and counted.gemms.total() > 0


def test_it_is_captured_once_after_a_few_steps() -> None:
    graphs = GraphsOnCPU()
    own = lane(graphs)
    trained(own, WARM)
    assert graphs.asked == 0
    trained(own, 5)
    assert graphs.asked == 1


@pytest.mark.parametrize("change", ["batch", "precision", "recipe", "telemetry"])
def test_it_is_captured_anew_where_something_about_it_changes(change: str) -> None:
    graphs = GraphsOnCPU()
    own = lane(graphs)
    trained(own, WARM + 1)
    if change == "batch":
        own.step(*batch(0, rows=2), step=9, lr=1e-2)
    elif change == "precision":
        with disabled(own.model):
            own.step(*batch(0), step=9, lr=1e-2)
    elif change == "recipe":
        convert(own.model, "block", policy=Policy(min_gain=0.0))
    else:
        Telemetry(own.model)
    trained(own, WARM)
    assert graphs.asked == 1
    trained(own, 2)
    assert graphs.asked == 2


@pytest.mark.parametrize(("room", "expected"), [(1, 1), (0, 2)])
@pytest.mark.parametrize("other", ["probe", "evaluation"])
def test_graphs_make_room_for_other_work_where_there_is_none(other: str, room: int, expected: int) -> None:
    graphs = GraphsOnCPU(room)
    own = lane(graphs)
    trained(own, WARM + 1)
    if other == "probe":
        own.probe(*batch(0))
    else:
        heldout_losses(own, [batch(0)])
    trained(own, WARM + 1)
    assert graphs.asked == expected


@pytest.mark.parametrize("room", [0, 2])
def test_two_lanes_settle_on_graphs_of_both(room: int) -> None:
    graphs = GraphsOnCPU(room)
    first, second = lane(graphs), lane(graphs)
    for step in range(4 * WARM):
        if step == WARM + 2:
            convert(first.model, "block", policy=Policy(min_gain=0.0))  # one goes on kernel by kernel, the other waits
        for own in (first, second):
            own.step(*batch(step), step=step, lr=1e-2)
    assert first.replay is not None and second.replay is not None
    assert first.replay.held and second.replay.held
    assert graphs.asked == (4 if room == 0 else 3)  # of both; then of the first, and of the second if it was dropped


def test_a_refused_capture_is_told_and_training_goes_on() -> None:
    own, other = lane(), lane(RefusesToCapture())
    assert trained(other, WARM + 2) == trained(own, WARM + 2)
    assert other.replay is not None
    assert other.replay.refusal == "RuntimeError: operation not permitted when stream is capturing"


@on_both
def test_a_result_outlives_the_next_replay(device: str) -> None:
    own = lane(graphs_on(device), device=device)
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
        replays(asked("on"), CUDA, dataclasses.replace(SINGLE_PROCESS, launch=Launch(ranks=2)))
