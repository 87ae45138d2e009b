import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import Policy, convert, kernels, recipes
from octavo.kernels import sample
from octavo.kernels.gemm.triton import described
from octavo.kernels.runtime import dispatch, tape
from octavo.kernels.sample import PHASE, WIDTH, SampleInput
from octavo.nn import functional
from octavo.nn.functional import Quantizer, linears
from octavo.recipes import load

SIDE = torch.ones(3)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record on a CPU what is recorded on a GPU, under the same conditions."""
    monkeypatch.setattr(tape, "_is_launched_here", lambda x: True)
    tape._recordings.clear()
    yield
    tape._recordings.clear()


def views(options: tuple[Any, ...], x: Tensor, y: Tensor | None) -> tape.Result:
    a, b = x.split([1, x.shape[0] - 1])
    made = torch.zeros(x.shape[1], dtype=x.dtype)
    made += a.reshape(-1).detach() * options[0]
    joined = torch.cat([a, b.flip(0), made.view(1, -1)])
    return (joined.t(), x), (None if y is None else y @ joined.t(), None)


def in_place(options: tuple[Any, ...], x: Tensor) -> tape.Result:
    out = torch.empty_like(x)
    out.copy_(x).mul_(2)
    return (out.view(torch.int32), out), ()


def random(options: tuple[Any, ...], x: Tensor) -> tape.Result:
    return (x + torch.randint(2**20, (), device=x.device),), ()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(views, [(4, 6), (2, 6)]), (views, [(4, 6), None]), (in_place, [(3, 8)]), (random, [(5,)])],
)
def test_a_replay_does_what_the_function_does(function: Any, inputs: Sequence[tuple[int, ...] | None]) -> None:
    def draw(seed: int) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        return [None if shape is None else torch.randn(shape, generator=generator) for shape in inputs]

    recorded, recording = tape.record(function, (3.0,), draw(1))
    assert recording is not None
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = function((3.0,), *draw(seed))
        torch.manual_seed(seed)
        found = recording.replay(draw(seed), 0)
        assert_equal(found, expected)
    assert len(recorded) == len(expected)


def assert_equal(found: tape.Result, expected: tape.Result) -> None:
    for group, like in zip(found, expected, strict=True):
        for x, y in zip(group, like, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
                assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_a_view_that_the_function_detaches_is_detached_in_a_replay() -> None:
    def cropped(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        return (x.add(1)[:2].detach(),), ()

    _, recording = tape.record(cropped, (), [torch.zeros(4)])
    assert recording is not None
    replay = recording.replay

    class Cropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            (y,), _ = replay([x], 0)
            assert y is not None
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return torch.cat([dy, torch.zeros_like(dy)])

    x = torch.ones(4, requires_grad=True)
    y: Tensor = Cropped.apply(x)  # type: ignore[no-untyped-call]
    y.mul_(3)  # autograd refuses it on a view that an autograd function made
    y.sum().backward()
    assert y.tolist() == [6, 6] and x.grad is not None and x.grad.tolist() == [3, 3, 0, 0]


def test_an_in_place_operator_writes_to_the_input_of_the_replay() -> None:
    def add(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        return (x.add_(1),), ()

    _, recording = tape.record(add, (), [torch.zeros(3)])
    assert recording is not None
    x = torch.zeros(3)
    (result,), _ = recording.replay([x], 0)
    assert result is x and x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "function",
    [
        lambda options, x: ((x + SIDE,), ()),
        lambda options, x: ((x * float(x.sum()),), ()),
        lambda options, x: ((SIDE,), ()),
        lambda options, x: ((torch.from_numpy(x.numpy()) + 1,), ()),
        lambda options, x: ((torch.add(x, 1, out=torch.empty(3)),), ()),
    ],
    ids=[
        "a tensor from elsewhere",
        "a value",
        "a result from elsewhere",
        "memory by another way",
        "a tensor by keyword",
    ],
)
def test_what_a_replay_could_not_do_again_is_not_recorded(function: Callable[..., tape.Result]) -> None:
    results, recording = tape.record(function, (), [torch.ones(3)])
    assert recording is None
    assert results[0][0] is not None


def test_one_tensor_passed_twice_is_not_recorded() -> None:
    x = torch.ones(2, 2)
    assert tape.record(lambda options, x, y: ((x @ y,), ()), (), [x, x])[1] is None
    assert tape.record(lambda options, x, y: ((x @ y,), ()), (), [x, x.clone()])[1] is not None


def test_a_launch_that_triton_compiles_or_hooks_is_not_recorded() -> None:
    def launches(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        recorder = tape.recorder_here()
        assert recorder is not None
        recorder.refuse()
        return (x + 1,), ()

    assert tape.record(launches, (), [torch.ones(1)])[1] is None
    assert tape.recorder_here() is None


def test_a_descriptor_is_made_again_of_the_tensor_that_a_replay_has_there() -> None:
    def kernel(*arguments: Any) -> None:
        x, y = arguments[-2:]
        assert (x.shape, x.strides, x.block_shape, y.block_shape) == ([32, 16], [16, 1], [16, 16], [8, 16])
        y.base.copy_(2 * x.base)

    def launches(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        out = torch.empty(32, 16)
        arguments = described(x, 16, 16), described(out, 8, 16)
        kernel(*arguments)
        recorder = tape.recorder_here()
        assert recorder is not None
        recorder.launch((kernel, "function", "metadata"), (7, 1, 1), arguments)
        return (out,), ()

    first = torch.ones(32, 16)
    forgotten = weakref.ref(first)
    _, recording = tape.record(launches, (), [first])
    assert recording is not None
    del first
    gc.collect()
    assert forgotten() is None
    for value in (3.0, 5.0):
        (out,), _ = recording.replay([torch.full((32, 16), value)], 42)
        assert torch.equal(out, torch.full((32, 16), 2 * value))


class Block(nn.Module):
    """A norm and a gated MLP, which are fused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 512), nn.Linear(width, 512), nn.Linear(512, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("part", "width", "recipe"),
    [
        *itertools.product([nn.Linear], [256, 2048], ["rotated", "rotated_fast", "folded", "rowwise", "tensorwise"]),
        *itertools.product([Block], [256], ["rotated", "folded"]),
    ],
)
def test_all_of_a_model_is_replayed_on_a_gpu_with_the_bits_of_its_run(
    part: Callable[..., nn.Module], width: int, recipe: str
) -> None:
    tape._recordings.clear()
    arguments = (width, width, False) if part is nn.Linear else (width,)
    model = nn.Sequential(part(*arguments), part(*arguments)).to("cuda", torch.bfloat16)
    convert(model, recipe, policy=Policy(min_gain=0))
    xs = [torch.randn(512, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    results = []
    for x in (*xs, *xs):
        model.zero_grad()
        y = model(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        results.append([y, *gradients])
    kinds = [recording if isinstance(recording, str) else "recorded" for recording in tape._recordings.values()]
    assert len(kinds) >= 2 * (1 + (part is Block)) and set(kinds) == {"recorded"}, kinds
    for before, after in zip(results[:4], results[4:], strict=True):
        assert all(map(torch.equal, before, after))


def test_a_launch_is_recorded_with_its_tensors_and_the_stream_of_the_replay() -> None:
    seen: list[tuple[Any, ...]] = []

    def kernel(*arguments: Any) -> None:
        seen.append(arguments)
        arguments[-1].fill_(arguments[-2])

    def launches(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        out = torch.empty(3)
        recorder = tape.recorder_here()
        assert recorder is not None
        recorder.launch((kernel, "function", "metadata"), (7, 1, 1), (x, 5.0, out))
        return (out,), ()

    _, recording = tape.record(launches, (), [torch.ones(1)])
    assert recording is not None
    x = torch.zeros(1)
    (out,), _ = recording.replay([x], 42)
    assert out is not None and out.tolist() == [5, 5, 5]
    assert seen[0][:9] == (7, 1, 1, 42, "function", "metadata", None, None, None) and seen[0][9] is x


def test_what_no_later_step_reads_is_let_go() -> None:
    def chain(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        y = x + 1
        z = y * 2
        return (z - 1,), ()

    _, recording = tape.record(chain, (), [torch.ones(1)])
    assert recording is not None
    made = [step.outputs for step in recording.steps]
    assert [step.finished[:1] for step in recording.steps[1:]] == [(made[0],), (made[1],)]
    assert not any(made[2] in step.finished for step in recording.steps)


@pytest.mark.usefixtures("on_cpu")
def test_a_signature_is_run_then_recorded_then_replayed() -> None:
    calls: list[tuple[Any, ...]] = []

    def double(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        calls.append(options)
        return (x * options[0],), ()

    def run(factor: float, x: Tensor) -> Tensor:
        (y,), _ = tape.replay(double, (factor,), [x])
        assert y is not None
        return y

    for count in (1, 2, 2, 2):
        assert run(2, torch.full((2, 3), float(count))).unique().tolist() == [2 * count]
        assert len(calls) == count
    for x, factor in [
        (torch.ones(3, 2).t(), 2.0),
        (torch.ones(2, 3).double(), 2.0),
        (torch.ones(7)[1:].view(2, 3), 2.0),
        (torch.ones(2, 3), 3.0),
    ]:
        assert run(factor, x).unique().tolist() == [factor]
    assert len(calls) == 6
    with torch.autocast("cpu", torch.bfloat16):
        run(2, torch.ones(2, 3))
    assert len(calls) == 7


@pytest.mark.usefixtures("on_cpu")
def test_the_number_of_signatures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "CAPACITY", 3)
    for size in range(1, 9):
        tape.replay(lambda options, x: ((x + 1,), ()), (), [torch.ones(size)])
    assert len(tape._recordings) == 3


class Calls:
    """A function for `tape.replay`, x times a factor, that counts its runs; a replay is none."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, options: tuple[Any, ...], x: Tensor) -> tape.Result:
        self.number += 1
        return (x * options[0],), ()

    def runs(self, x: Tensor, factor: float = 2.0) -> bool:
        """Return whether the function runs for x; check the result."""
        before = self.number
        (y,), _ = tape.replay(self, (factor,), [x])
        assert y is not None and torch.equal(y.as_subclass(Tensor), x.as_subclass(Tensor) * factor)
        return self.number > before


class Subclass(Tensor):
    """A tensor that may have another memory layout."""


class Watching(TorchDispatchMode):
    """A mode that sees every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LOOKING_ON: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a ledger": kernels.record,
    "planning": lambda: dispatch.planning_for("h200"),
    "forecasting": dispatch.fake_mode,
    "a mode": Watching,
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("block", LOOKING_ON.values(), ids=LOOKING_ON)
def test_nothing_is_recorded_or_replayed_where_somebody_looks_on(
    block: Callable[[], AbstractContextManager[Any]],
) -> None:
    function, x = Calls(), torch.ones(3)
    with block():
        assert all(function.runs(x) for _ in range(3)) and not tape._recordings
    assert [function.runs(x) for _ in range(3)] == [True, True, False]
    with block():
        assert function.runs(x)
    assert not function.runs(x)


@pytest.mark.usefixtures("on_cpu")
def test_launches_that_a_profiler_hooks_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    function, x = Calls(), torch.ones(3)
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=None))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    assert [function.runs(x) for _ in range(3)] == [True, True, False]
    knobs.runtime.launch_enter_hook = SimpleNamespace(calls=[print])
    assert function.runs(x)
    knobs.runtime.launch_enter_hook = SimpleNamespace(calls=[])
    assert not function.runs(x)


@pytest.mark.usefixtures("on_cpu")
def test_only_plain_tensors_on_the_current_gpu_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    function, x = Calls(), torch.ones(3)
    assert all(function.runs(x.as_subclass(Subclass)) for _ in range(3)) and not tape._recordings
    (y,), _ = tape.replay(lambda options, *none: ((torch.ones(1),), ()), (), [None])
    assert y is not None and not tape._recordings
    monkeypatch.undo()
    assert all(function.runs(x) for _ in range(3)) and not tape._recordings  # a CPU: the reference
    other = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "_has_one_gpu", lambda: False)
    assert not tape._is_launched_here(other)  # type: ignore[arg-type]
    other.get_device = lambda: 0
    assert tape._is_launched_here(other)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("recorded_by", ["", "exact"], ids=["recorded outside", "recorded inside"])
def test_an_accumulator_has_recordings_of_its_own(recorded_by: str) -> None:
    """A replay in a block computes by its accumulator, and one after it by none."""
    a, b = (kernels.quantize(torch.rand(8, 512) + 1, "e4m3", "row") for _ in range(2))

    def multiply(options: tuple[Any, ...], *tensors: Tensor) -> tape.Result:
        left, right = a._replace(codes=tensors[0], scale=tensors[1]), b._replace(codes=tensors[2], scale=tensors[3])
        return (kernels.gemm(left, right, torch.float32, "fast"),), ()

    def by(name: str, *, replayed: bool) -> Tensor:
        with kernels.gemm_by(name) if name else nullcontext():
            arguments: list[Tensor | None] = [*a[:2], *b[:2]]
            (y,), _ = (tape.replay if replayed else lambda f, o, t: f(o, *t))(multiply, (), arguments)
        assert y is not None
        return y

    names = ["", "exact", "hopper", "hopper-slow"]
    expected = {name: by(name, replayed=False) for name in names}
    assert not torch.equal(expected["hopper"], expected["exact"])
    for _ in range(3):
        by(recorded_by, replayed=True)
    for _ in range(3):
        for name in names:
            assert torch.equal(by(name, replayed=True), expected[name]), name


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_has_the_accumulator_of_its_block_forward_and_backward(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(512, 32))
    convert(model, "folded_fast", policy=Policy(min_gain=0))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x, dy = torch.rand(16, 512) + 1, torch.rand(16, 32)

    def step(name: str, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with kernels.gemm_by(name) if name else nullcontext():
            y = forward(leaf)
            dx, *grads = torch.autograd.grad(y, [leaf, *model.parameters()], dy)
        return [y, dx, *grads]

    names = ["", "exact", "hopper", "slow"]
    with kernels.record():  # nothing is replayed
        expected = {name: step(name, model) for name in names}
    assert not torch.equal(expected["hopper"][0], expected["exact"][0])
    for name in names * 3:
        for ours, theirs in zip(step(name, run), expected[name], strict=True):
            assert torch.equal(ours, theirs), name
    recorded = [each for each in tape._recordings.values() if isinstance(each, tape.Recording)]
    assert len(recorded) == (0 if compiled else 2 * 3)  # Hopper's emulation reads values, so that it runs each time
    torch._dynamo.reset()


@pytest.mark.usefixtures("on_cpu")
def test_a_replay_under_autocast_has_the_dtypes_of_the_run() -> None:
    def in_fp32(options: tuple[Any, ...], x: Tensor, y: Tensor) -> tape.Result:
        low = x @ y
        with torch.autocast("cpu", enabled=False):  # as the reference GEMM does
            return (low, x @ y), ()

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            x, y = torch.randn(4, 8), torch.randn(8, 4)
            (low, high), _ = tape.replay(in_fp32, (), [x, y])
            assert low is not None and torch.equal(low, x.bfloat16() @ y.bfloat16())
            assert high is not None and high.dtype == torch.float32
            assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(high, x @ y)


class Factor:
    """An option that is compared by identity, as recipes are."""

    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.usefixtures("on_cpu")
def test_a_recording_keeps_its_options_so_that_no_other_object_takes_their_identity() -> None:
    def times(options: tuple[Any, ...], x: Tensor) -> tape.Result:
        return (x * options[0].value,), ()

    for number in range(1, 6):
        factor = Factor(float(number))
        for _ in range(3):
            (y,), _ = tape.replay(times, (factor,), [torch.ones(2)])
            assert y is not None and y.tolist() == [number] * 2
        left = weakref.ref(factor)
        del factor
        assert left() is not None
    tape._recordings.clear()
    assert left() is None


@pytest.mark.usefixtures("on_cpu")
def test_a_call_that_skips_its_samples_is_not_recorded() -> None:
    """A telemetry buffer may be idle between a forward and its backward: later steps sample again."""
    one, target = torch.ones(1, 1), kernels.QuantSpec("e4m3", "tensor", "float32")

    def sampled(options: tuple[Any, ...], x: Tensor, row: Tensor) -> tape.Result:
        y = x * 2
        sample.sample(SampleInput(y.detach(), one, target), row)
        return (y,), ()

    row, x = torch.full((WIDTH,), float("nan")), torch.ones(4, 4)
    row[PHASE] = 0
    sample.mark_idle(row, True)
    for _ in range(4):
        tape.replay(sampled, (), [x, row])
    assert "unrecordable" not in tape._recordings.values() and bool(row[0].isnan())
    sample.mark_idle(row, False)
    tape.replay(sampled, (), [x, row])
    assert row[0] == 2


RECIPES = ["folded", "tensorwise", "rowwise", "block", "delayed"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_replayed_has_the_bits_of_the_layer_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "compute_dtype", lambda x: torch.bfloat16)
    quantizer = Quantizer(load(name), torch.bfloat16)
    assert_replays(lambda x, *weights: linears(x, weights, [None] * len(weights), quantizer), widths=(64, 32))


@pytest.mark.usefixtures("on_cpu")
def test_a_model_replayed_has_the_bits_of_the_model_run() -> None:
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    convert(model, "folded", policy=Policy(min_gain=0))
    assert_replays(lambda x, *weights: [model(x) @ weights[0].t()], widths=(32,))


def assert_replays(forward: Callable[..., list[Tensor]], widths: Sequence[int]) -> None:
    """Compare runs with recordings to one before there were any."""

    def step(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(48, 64, generator=generator).bfloat16().requires_grad_()
        weights = [torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in widths]
        outputs = forward(x, *weights)
        torch.autograd.backward(outputs, [torch.randn(y.shape, generator=generator).bfloat16() for y in outputs])
        return [*outputs, *(tensor.grad for tensor in (x, *weights) if tensor.grad is not None)]

    expected = [step(seed) for seed in range(1)]
    tape._recordings.clear()
    for seed in (2, 3):
        step(seed)
    assert any(isinstance(found, tape.Recording) for found in tape._recordings.values())
    for found, like in zip(step(0), expected[0], strict=True):
        assert torch.equal(found, like)


def test_every_kernel_that_is_launched_by_name_tells_the_recorder() -> None:
    import importlib
    import pkgutil

    import octavo.kernels as package

    modules = [info.name for info in pkgutil.walk_packages(package.__path__, "octavo.kernels.")]
    triton = [name for name in modules if ".triton" in name]
    assert len(triton) > 20
    for name_of_module in triton:
        module = importlib.import_module(name_of_module)
        for name, found in vars(module).items():
            if name.endswith("_kernel") or name.isupper():
                assert type(found).__name__ != "JITFunction", f"{name_of_module}.{name} is launched past `Kernel`"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RECIPES, "folded_fast", "current"])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_recorded_steps_have_the_bits_of_steps_that_are_counted(name: str, autocast: bool) -> None:
    if name not in recipes.names():
        pytest.skip(f"there is no recipe {name}")

    def train(is_counted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.RMSNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 64))
        model = model.to("cuda", torch.float32 if autocast else torch.bfloat16)
        convert(model, name, policy=Policy(min_gain=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for step in range(6):
            x = torch.randn(128, 256, device="cuda", dtype=next(model.parameters()).dtype)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            if is_counted and step == 0:
                with kernels.record():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    tape._recordings.clear()
    found = train(False)
    assert any(isinstance(each, tape.Recording) for each in tape._recordings.values())
    with kernels.record() as ledger:
        expected = train(True)
    assert ledger.gemms.total() > 0
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
