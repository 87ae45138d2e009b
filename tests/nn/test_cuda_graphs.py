"""FP8 layers in CUDA graphs, captured by hand or by the compiler; checkpointed; and never waiting for the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import kernels
from octavo.conversion import convert
from octavo.conversion.policy import Policy
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Block, FeedForward, rotary_tables
from octavo.nn import Linear
from octavo.nn.fused import FusedMLP

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCH, TOKENS, DIM = 2, 128, 256
CONFIG = ModelConfig(vocab=256, dim=DIM, layers=1, heads=4, kv_heads=2, ffn=512, sequence=TOKENS)
WEIGHTS = 7
"""Of a block: wq, wk, wv, wo, w1, w2, w3."""
SAME = 1e-2
"""Of two runs of the same kernels, whose sums may be in another order. Codes of other weights are 100 times as far."""

every_recipe = pytest.mark.parametrize("recipe", ["folded", "rotated", "tensorwise", "block"])
every_model = pytest.mark.parametrize("name", ["linear", "mlp", "block"])


class OneBlock(nn.Module):
    """A Llama's block with its rotary tables: attention that shares an input, an MLP, norms that hand on codes."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(CONFIG)
        cos, sin = rotary_tables(CONFIG.head_dim, TOKENS, CONFIG.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, self.cos, self.sin)
        return y


def made(name: str, recipe: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    if name == "linear":
        layers = Linear(DIM, 512, recipe=recipe), nn.GELU(), Linear(512, DIM, bias=False, recipe=recipe)
        return nn.Sequential(*layers).to(DEVICE, dtype)
    model = (OneBlock() if name == "block" else nn.Sequential(FeedForward(CONFIG))).to(DEVICE, dtype)
    convert(model, recipe, policy=Policy(min_gain=0.0))
    assert any(isinstance(module, FusedMLP) for module in model.modules())
    assert name == "mlp" or model.block.attention.wq.shared is model.block.attention.wv.shared is not None
    return model


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, DIM, generator=generator).to(DEVICE, dtype).requires_grad_()


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def loss_of(y: Tensor, target: Tensor | None = None) -> Tensor:
    return (y.float() if target is None else y.float() - target).square().mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


def forward_and_backward(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The output; gradients are new tensors, so that those of a captured graph are where each replay writes."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    y = (model if run is None else run)(x)
    loss_of(y).backward()
    return y


def captured(step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """A graph of one call, after three that run, and what that call returned: each replay writes there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def twin_of(model: nn.Module, name: str, recipe: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of the same weights that no graph knows."""
    twin = made(name, recipe, dtype)
    twin.load_state_dict(model.state_dict())
    return twin


def change_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)


# --- captured by hand ------------------------------------------------------------------------------------------------


@every_recipe
@every_model
def test_a_captured_step_quantises_the_weights_it_finds(name, recipe):
    model, x = made(name, recipe), inputs()
    graph, y = captured(lambda: forward_and_backward(model, x))
    graph.replay()
    before = y.clone()
    for _ in range(2):
        change_weights(model)
        graph.replay()
        got = [y.clone(), *gradients(model, x)]
        twin, leaf = twin_of(model, name, recipe), inputs()
        expected = [forward_and_backward(twin, leaf).detach(), *gradients(twin, leaf)]
        assert all(apart(one, other) < SAME for one, other in zip(got, expected, strict=True))
        assert apart(got[0], before) > 0.1


@every_recipe
def test_what_pytorch_graphs_for_a_user_sees_new_weights(recipe):
    """`make_graphed_callables`, as documented: forward and backward are a graph each."""
    model = made("block", recipe)
    graphed = torch.cuda.make_graphed_callables(model, (inputs(),))
    for _ in range(2):
        change_weights(model)
        x = inputs()
        got = [forward_and_backward(model, x, graphed).detach(), *gradients(model, x)]
        twin, leaf = twin_of(model, "block", recipe), inputs()
        expected = [forward_and_backward(twin, leaf).detach(), *gradients(twin, leaf)]
        assert all(apart(one, other) < SAME for one, other in zip(got, expected, strict=True))


def train(step: Callable[[], Tensor], after: Callable[[], None], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = step()
        after()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("inside", [True, False], ids=["optimizer inside", "optimizer outside"])
@every_model
def test_training_by_replays_is_training(name, inside):
    target = 0.5 * inputs(torch.float32).detach().roll(1, dims=1)
    traces = []
    for by_replays in (False, True):
        model, x = made(name, "folded", torch.float32), inputs(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)

        def step(model=model, x=x, optimizer=optimizer) -> Tensor:
            model.zero_grad(set_to_none=True)
            loss = loss_of(model(x), target)
            loss.backward()
            if inside:
                optimizer.step()
            return loss

        def after(optimizer=optimizer) -> None:
            if not inside:
                optimizer.step()

        if by_replays:
            graph, loss = captured(step)

            def replay(graph=graph, loss=loss) -> Tensor:
                graph.replay()
                return loss

            traces.append(train(replay, after, 20))
        else:
            for _ in range(3):  # as many as `captured` runs
                step()
            traces.append(train(step, after, 20))
    assert traces[1] == pytest.approx(traces[0], rel=0.05)
    assert traces[1][-1] < 0.8 * traces[1][0]


@every_model
def test_between_replays_eager_code_sees_the_weights_as_they_are(name):
    # No version counter and no optimizer's hook tell of a step that a graph makes.
    model, x = made(name, "folded", torch.float32), inputs(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def step() -> Tensor:
        y = forward_and_backward(model, x)
        optimizer.step()
        return y

    graph, _ = captured(step)
    for _ in range(3):
        for _ in range(20):
            graph.replay()
        with torch.no_grad():
            assert apart(model(x), twin_of(model, name, "folded", torch.float32)(x)) < 1e-3


# --- captured by the compiler ----------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[Any]:
    """The compiler's counters, from zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@every_recipe
@every_model
def test_compiled_with_cuda_graphs_trains_as_without(name, recipe, compiler):
    # Nothing has run in eager mode before: all codes are made where the compiler manages the memory.
    target = 0.5 * inputs(torch.float32).detach().roll(1, dims=1)
    traces = []
    for mode in ("default", "reduce-overhead"):
        model, x = made(name, recipe, torch.float32), inputs(torch.float32).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
        run = torch.compile(model, mode=mode, fullgraph=True)

        def step(model=model, x=x, run=run) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad(set_to_none=True)
            loss = loss_of(run(x), target)
            loss.backward()
            return loss

        traces.append(train(step, optimizer.step, 20))
    if torch._inductor.config.graph_partition:  # what is no graph stands between graphs
        assert compiler["inductor"]["cudagraph_skips"] == 0
    assert traces[1] == pytest.approx(traces[0], rel=0.05)
    assert traces[1][-1] < 0.8 * traces[1][0]


# --- checkpointing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@every_recipe
def test_checkpointing_gives_the_same_gradients(recipe, use_reentrant):
    model, x = made("block", recipe), inputs()
    with kernels.record() as plain:
        forward_and_backward(model, x)
    expected = gradients(model, x)
    with kernels.record() as ledger:
        forward_and_backward(model, x, lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    got = gradients(model, x)
    assert all(apart(one, other) < SAME for one, other in zip(got, expected, strict=True))
    assert (plain.weights, ledger.weights) == (WEIGHTS, 2 * WEIGHTS)  # in forward, and in its recomputation
    assert plain.gemms.total() < ledger.gemms.total() < 2 * plain.gemms.total() and not ledger.fallbacks


# --- no waiting ------------------------------------------------------------------------------------------------------


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_waiting_would_be_seen():
    x = torch.ones(4, device=DEVICE)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_recipe
def test_a_step_never_waits_for_the_gpu(recipe, compiled, compiler):
    model, x = made("block", recipe), inputs()
    run = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        forward_and_backward(model, x, run)
        optimizer.step()

    for _ in range(3):
        step()
    with kernels.record():  # compiled code is specialised on a ledger, and a compiler may wait
        step()
    with waiting_is_an_error():
        step()
        with kernels.record() as ledger:
            step()
            step()
    assert ledger.weights >= 2 * WEIGHTS and not ledger.fallbacks
