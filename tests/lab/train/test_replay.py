from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from alone import join_alone
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import octavo
from octavo import kernels
from octavo.conversion import Policy, convert, disabled
from octavo.distributed import shard, tensor_parallel
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.sample import WIDTH, is_idle, mark_idle
from octavo.lab.models import ModelConfig, build
from octavo.lab.train.config import LoopConfig, OptimizerConfig, ParallelConfig, RunConfig
from octavo.lab.train.evaluate import heldout_losses
from octavo.lab.train.parallel import SINGLE_PROCESS, Launch
from octavo.lab.train.replay import WARM, Captured, Graphs, Replay, _stored
from octavo.lab.train.setup import replays
from octavo.lab.train.train_state import TrainState
from octavo.nn.telemetry import Telemetry

CONFIG = ModelConfig(vocab=32, dim=64, layers=1, heads=2, ffn=128, sequence=8)  # large enough for FP8 gradients
TWO = dataclasses.replace(SINGLE_PROCESS, launch=Launch(ranks=2))
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
            with kernels.runtime.ledger.apart():  # a graph launches kernels, and no operator that would count them
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
        try:
            work()
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        except RuntimeError:
            raise RuntimeError("failed due to a previous error during capture")  # noqa: B904  # as PyTorch says last


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


def test_calls_before_a_capture_launch_what_an_idle_step_leaves_out() -> None:
    model, rows, found = torch.nn.Linear(2, 2), torch.zeros(1, WIDTH), []
    optimizer = torch.optim.SGD(model.parameters())

    def passes(x: Tensor) -> Tensor:
        found.append(is_idle(rows))
        loss = model(x).sum()
        loss.backward()
        return loss

    mark_idle(rows, True)
    graphs = GraphsOnCPU()
    replay = graphs.replay(passes, model, list(model.parameters()), optimizer)
    for calls in range(WARM + 1):
        graphs.refusal = "none is captured any more" if calls == WARM else ""
        replay(torch.ones(1, 2))
        optimizer.zero_grad()
    assert found == [False] * WARM + [True]


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


def test_a_model_that_ended_before_the_run_gives_its_graph_and_its_memory_back() -> None:
    graphs = GraphsOnCPU()
    first, second = lane(graphs), lane(graphs)
    for own in (first, second):
        trained(own, WARM + 1)
    ended = weakref.ref(second)
    second.drop_graph()
    assert not second.replay and len(graphs._replays) == 1
    gc.disable()  # while steps run on a GPU, what existed before is hidden from the collector
    try:
        del second, own
        assert ended() is None
    finally:
        gc.enable()
    assert first.replay is not None and first.replay.held


def test_a_refused_capture_is_told_and_training_goes_on() -> None:
    own, other = lane(), lane(RefusesToCapture())
    assert trained(other, WARM + 2) == trained(own, WARM + 2)
    assert other.replay is not None
    assert other.replay.refusal == "RuntimeError: operation not permitted when stream is capturing"


def test_captured_code_is_specialised_as_what_ran_before() -> None:
    seen: list[bool] = []
    model = build(CONFIG, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        seen.append(kernels.runtime.ledger.is_open())
        return passes_of(model)(tokens, targets)

    replay = GraphsOnCPU().replay(passes, model, list(model.parameters()), optimizer)
    for number in range(WARM + 1):
        replay(*batch(number))
        optimizer.zero_grad()
    assert seen and not any(seen)
    seen.clear()
    with kernels.record():  # compiled code is another then
        for number in range(WARM + 1):
            replay(*batch(number))
            optimizer.zero_grad()
    assert sum(seen[:WARM]) == WARM


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
    with pytest.raises(ConfigError, match=r"run\.graph: 'on', but the run is on a CPU"):
        replays(asked("on"), CPU)
    for settings, reason in (({"pipeline": 2}, "parallel.pipeline"), ({"zero": "greedy"}, "parallel.zero")):
        parallel = ParallelConfig(**settings)
        with pytest.raises(ConfigError, match=reason):
            replays(asked("on"), CUDA, dataclasses.replace(TWO, parallel=parallel))


def test_sharded_steps_are_replayed_where_that_is_asked_for() -> None:
    assert not replays(asked("auto"), CUDA, TWO)
    assert replays(asked("on"), CUDA, TWO)


# --- sharded by FSDP2 ------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank of two, whose collectives copy its own data: a CUDA graph of one GPU captures them."""
    join_alone(2)
    yield
    dist.destroy_process_group()


def sharded(device: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(CONFIG, seed=0).to(device)
    convert(model, "folded", policy=Policy(min_gain=0.0))
    shard(model, init_device_mesh(device, (dist.get_world_size(),)), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def passes_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def passes(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss: Tensor = model(inputs, targets)
        loss.backward()
        return loss

    return passes


def trained_and_evaluated(
    passes: Callable[[Tensor, Tensor], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> list[float]:
    """Losses of steps, each followed by that of held-out text: FSDP2 leaves gathered what an evaluation has read."""
    losses = []
    for number in range(WARM + 4):
        losses.append(float(passes(*batch(number, device=device)).detach()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            losses.append(float(model(*batch(99, device=device))))
    return losses


def losses_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str, graphs: GraphsOnCPU | None
) -> list[float]:
    """Losses of passes launched kernel by kernel, or replayed: by `octavo.graph` on a GPU, by `graphs` elsewhere."""
    passes = passes_of(model)
    if graphs is None:
        return trained_and_evaluated(passes, model, optimizer, device)
    on_cpu = device == "cpu"
    parameters = list(model.parameters())
    replay = graphs.replay(passes, model, parameters, optimizer) if on_cpu else octavo.graph(passes, model, optimizer)
    losses = trained_and_evaluated(replay, model, optimizer, device)
    assert replay.held > 0 and not replay.refusal
    replay.forget()
    return losses


class NothingGathered(GraphsOnCPU):
    """A graph has gathers of its own, and FSDP2 must not take what it has gathered for current after a replay."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        model = self._replays[0]._model

        def checked() -> Tensor:
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            return work()

        return super().capture(checked)


@on_both
@pytest.mark.parametrize(("reduce", "reshard"), [(None, None), ("fp8-block", False)], ids=["gathered twice", "once"])
def test_replayed_steps_of_a_sharded_model_are_those_that_are_launched(
    alone: None, reduce: str | None, reshard: bool | None, device: str
) -> None:
    found = []
    for by_graph in (False, True):
        model, optimizer = sharded(device, reduce=reduce, reshard_after_forward=reshard)
        for block in model.get_submodule("layers").children() if device == "cuda" and reduce is None else ():
            block.compile(fullgraph=True)  # the other case is eager
        found.append(losses_of(model, optimizer, device, NothingGathered() if by_graph else None))
    assert found[0] == found[1]


def test_a_sharded_model_that_cannot_be_captured_is_an_error(alone: None) -> None:
    model, optimizer = sharded("cpu")
    passes = RefusesToCapture().replay(passes_of(model), model, list(model.parameters()), optimizer)
    with pytest.raises(UnsupportedError, match="cannot be captured: RuntimeError: operation not permitted when stream"):
        trained_and_evaluated(passes, model, optimizer, "cpu")
    optimizer.zero_grad()
    passes.forget()
    for number in range(WARM + 1):  # launched kernel by kernel, its streams would not wait for each other
        with pytest.raises(UnsupportedError, match=r"cannot be captured.*build it again"):
            passes(*batch(number))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["by_rows", "fp8-lm"])
def test_what_differs_from_step_to_step_is_not_captured(alone: None, case: str) -> None:
    model = build(CONFIG, seed=0).to("cuda")
    mesh = init_device_mesh("cuda", (2,))
    shard(model, mesh, **({"reduce": case} if case == "fp8-lm" else {"by_rows": [model.tok_embeddings]}))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match=r"fp8-lm|by_rows"):
        trained_and_evaluated(octavo.graph(passes_of(model), model, optimizer), model, optimizer, "cuda")


def on_two_ranks(rank: int, ranks: int, layout: str, device: str) -> list[list[float]]:
    """Losses launched kernel by kernel, and by graph."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl" if device == "cuda" else "gloo"), device)
    found = []
    for by_graph in (False, True):
        model = build(CONFIG, seed=0).to(device)
        convert(model, "folded", policy=Policy(min_gain=0.0))
        if layout == "data":
            shard(model, mesh, reduce="bf16")
        else:
            tensor_parallel(model, mesh)
        for block in model.get_submodule("layers").children() if device == "cuda" else ():
            block.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append(losses_of(model, optimizer, device, GraphsOnCPU() if by_graph else None))
    return found


on_two_gpus = [pytest.param(layout, "cuda", marks=pytest.mark.gpu) for layout in ("data", "tensor")]


@pytest.mark.parametrize(("layout", "device"), [("tensor", "cpu"), *on_two_gpus])
def test_two_ranks_replay_what_they_would_launch(layout: str, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for launched, replayed in run(on_two_ranks, 2, layout, device):
        assert launched == replayed


# --- for a user ------------------------------------------------------------------------------------------------------


def test_a_model_on_a_cpu_has_no_graph() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="the model is not on one"):
        octavo.graph(lambda x: model(x).sum(), model, torch.optim.SGD(model.parameters()))


def test_gradients_that_a_replay_would_overwrite_are_an_error() -> None:
    own = lane(GraphsOnCPU())
    assert own.replay is not None
    own.replay(*batch(0), 1)
    with pytest.raises(ConfigError, match=r"optimizer.zero_grad\(\) after each step"):
        own.replay(*batch(1), 1)


def test_it_is_captured_and_replayed_on_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]
    seen: list[torch.device] = []

    @contextmanager
    def launches_on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Watched(GraphsOnCPU):
        def capture(self, work: Callable[[], Tensor]) -> Captured:
            seen.append(current[-1])
            graph = super().capture(work)

            def replay() -> None:
                seen.append(current[-1])
                graph.replay()

            return graph._replace(replay=replay)

    monkeypatch.setattr("octavo.lab.train.replay.launches_on", launches_on)
    trained(lane(Watched()), WARM + 2)
    assert seen == [torch.device("cpu")] * 3  # one capture and two replays


class Capture(NamedTuple):
    """Arguments of `torch.cuda.graph`."""

    graph: object
    pool: object = None
    stream: object = None
    capture_error_mode: str = ""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    """Let work run while it is captured, and return what it is captured with."""
    found: list[Capture] = []

    @contextmanager
    def graph(*arguments: Any, **options: Any) -> Iterator[None]:
        found.append(Capture(*arguments, **options))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    return found


def test_each_run_captures_on_a_stream_of_its_own(captures: list[Capture]) -> None:
    """PyTorch's stream for captures is one per process, of the GPU that it captured on first."""

    def refused() -> Tensor:
        raise RuntimeError("operation not permitted")

    for own in (Graphs(), Graphs()):
        own.capture(lambda: torch.zeros(()))
        with pytest.raises(RuntimeError, match="not permitted"):
            own.capture(refused)  # twice: the refused one, and an empty one
    used = [capture.stream for capture in captures]
    first, second = used[0], used[3]
    assert used == [first] * 3 + [second] * 3 and None not in used and first is not second


def test_no_garbage_is_collected_during_a_capture(captures: list[Capture]) -> None:
    """It may hold a graph, and destroying one during the capture of another aborts the process."""
    seen: list[bool] = []

    class Node:
        """Garbage: part of a reference cycle."""

        def __init__(self) -> None:
            self.itself = self

    def watched(result: Tensor | None) -> Tensor:
        seen.append(gc.isenabled() or left() is not None)
        if result is None:
            raise RuntimeError("operation not permitted")
        return result

    for is_enabled in (True, False):
        left = weakref.ref(Node())
        (gc.enable if is_enabled else gc.disable)()
        try:
            Graphs().capture(lambda: watched(torch.zeros(())))
            assert gc.isenabled() == is_enabled
            with pytest.raises(RuntimeError, match="not permitted"):
                Graphs().capture(lambda: watched(None))
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()
    assert seen == [False] * 4 and len(captures) == 6


def test_graphs_share_a_pool_while_one_of_them_is_there(captures: list[Capture]) -> None:
    """PyTorch refuses the pool of graphs that are gone."""
    graphs = Graphs()
    own, other = lane(graphs).replay, lane(graphs).replay
    assert own is not None and other is not None

    def capture(replay: Replay) -> object:
        for number in range(WARM + 1):
            replay(*batch(number), 1)
            replay._optimizer.zero_grad()
        return captures[-1].pool

    first = capture(own)
    assert capture(other) is first
    own.forget()
    assert capture(own) is first
    own.forget()
    other.forget()
    assert capture(own) is not first
    assert len(captures) == 4


def test_a_user_is_warned_where_nothing_is_captured() -> None:
    own = lane(RefusesToCapture(warns=True))
    with pytest.warns(UserWarning, match="launched one by one.*not permitted") as seen:
        trained(own, WARM + 1)
    assert len(seen) == 1


@pytest.mark.gpu
def test_a_user_replays_a_function_of_any_arguments() -> None:
    found = []
    for by_graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def passes(x: Tensor, factor: float, model: nn.Module = model) -> Tensor:
            loss = (model(x) * factor).square().mean()
            loss.backward()
            return loss

        step = octavo.graph(passes, model, optimizer) if by_graph else passes
        for number in range(2 * WARM + 4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).cuda()
            found.append(float(step(x, 1.0 if number < WARM + 2 else 2.0).detach()))  # captured twice
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(step, Replay):
            assert step.is_captured and not step.refusal
    assert found[: len(found) // 2] == found[len(found) // 2 :]
