"""Offloaded blocks: bitwise equal results, each tensor copied once, prefetch of one block."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.conversion import offloading as subject
from octavo.conversion.offloading import OffloadedBlock
from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.gpt import GPT
from octavo.lab.models.llama import FeedForward
from octavo_bench.workloads import Stack

CONFIG = ModelConfig(vocab=64, dim=64, heads=4, kv_heads=2, layers=4, sequence=16, ffn=96)
FP8 = octavo.Policy(activation_inputs="fp8", attention_output="fp8", norm_inputs="fp8")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class MLPs(nn.Module):
    """Blocks that are quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(CONFIG) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def model_of(policy=None, recipe=None) -> nn.Module:
    torch.manual_seed(1)
    model = Stack(CONFIG).bfloat16()
    if policy is not None:
        octavo.convert(model, recipe, policy=policy)
    return model.to(DEVICE)


def results(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(2, 16, 64, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def seen(monkeypatch):
    """The order in which slots go, are read and come back, as (what, place of the call, dtype)."""
    order, calls = [], []
    kind = subject._OffloadedTensor
    start, prefetch, get = kind.__init__, kind.prefetch, kind.get

    def starting(slot, call, x):
        start(slot, call, x)
        if call not in calls:
            calls.append(call)
        order.append(("out", calls.index(call), x.dtype))

    def coming(slot):
        if slot.back is None:
            order.append(("in", calls.index(slot.call), slot.host.dtype))
        prefetch(slot)

    monkeypatch.setattr(subject._OffloadedTensor, "__init__", starting)

    def getting(slot):
        order.append(("read", calls.index(slot.call), slot.host.dtype))
        return get(slot)

    monkeypatch.setattr(subject._OffloadedTensor, "get", getting)
    monkeypatch.setattr(subject._OffloadedTensor, "prefetch", coming)
    return order


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("policy", "recipe"),
    [(None, None), (octavo.Policy(min_gain=0), "rotated"), (FP8, "folded")],
    ids=["bf16", "rotated", "fp8"],
)
@pytest.mark.parametrize("keep", [None, "products", "nothing"])
def test_results_are_the_same_to_the_bit(policy, recipe, keep):
    model = model_of(policy, recipe)
    want = results(model)
    if keep is not None:
        octavo.recompute(model, keep)
    done = octavo.offload(model, min_bytes=64)
    for _ in range(2):
        assert same(results(model), want)
    assert done.moved > 0 and not done._leaving


def test_compiled_blocks():
    model = MLPs().bfloat16().to(DEVICE)
    octavo.convert(model, policy=octavo.Policy(activation_inputs="fp8"))
    want = results(model)
    done = octavo.offload(model, min_bytes=64)
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    assert same(results(model), want) and done.moved > 0
    torch._dynamo.reset()


def test_a_whole_model_that_is_compiled_says_what_to_do():
    model = MLPs().bfloat16().to(DEVICE)
    octavo.offload(model, min_bytes=64)
    with pytest.raises(Exception, match="compile the blocks one by one"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 16, 64).bfloat16().to(DEVICE))
    torch._dynamo.reset()


def test_views_with_gaps():
    model = GPT(ModelConfig(architecture="gpt", vocab=64, dim=64, heads=4, layers=3, sequence=16)).to(DEVICE)
    tokens = torch.randint(64, (2, 16), device=DEVICE)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens, tokens).backward()
        return [p.grad for p in model.parameters()]

    want = gradients()
    octavo.offload(model, min_bytes=1)
    assert same(gradients(), want)


def test_one_block_comes_back_ahead_of_the_one_at_work(seen):
    octavo.offload(model := model_of(FP8), min_bytes=64, keep_last=1)
    results(model)
    turns = [(what, call) for what, call, _ in seen]
    back = [("read", 2), ("in", 2), ("in", 1), ("read", 1), ("in", 0), ("read", 0)]
    assert list(dict.fromkeys(turns)) == [("out", 0), ("out", 1), ("out", 2), *back]
    assert turns.count(("out", 0)) == turns.count(("in", 0))
    kinds = {dtype for _, _, dtype in seen}
    assert torch.float8_e4m3fn in kinds


def test_what_has_gone_is_let_go_two_blocks_later(monkeypatch):
    slots, start = {}, subject._OffloadedTensor.__init__

    def starting(slot, call, x):
        start(slot, call, x)
        slots.setdefault(call, []).append(slot)

    monkeypatch.setattr(subject._OffloadedTensor, "__init__", starting)
    done = octavo.offload(model := model_of(FP8), min_bytes=1)
    y = model(torch.randn(2, 16, 64).bfloat16().to(DEVICE).requires_grad_())
    held = [[slot.source is not None for slot in of_one] for of_one in slots.values()]
    assert not any(held[0]) and all(held[1]) and all(held[2])  # the last two may be on their way
    y.sum().backward()
    assert not done._leaving and not any(slot.source is not None for of_one in slots.values() for slot in of_one)


def test_each_storage_goes_once_and_parameters_stay(seen):
    model = model_of(FP8, "folded")
    done = octavo.offload(model, blocks="layers.0", min_bytes=1, keep_last=0)
    results(model)
    tokens = 2 * 16
    sizes = [dtype for what, _, dtype in seen if what == "out"]
    # norms (2), attention's input, wo's with attention's own, the MLP's, gate and up: in codes, each once
    assert sizes.count(torch.float8_e4m3fn) == 7
    assert sizes.count(torch.bfloat16) == 3  # q, k, v
    of_weights = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert done.moved < tokens * 64 * 16 + of_weights


class WrittenTo(nn.Module):
    """Saves a tensor, writes to it, and saves it again."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        first = h.sin()
        h.mul_(2)
        return first + h.sin()


def test_a_tensor_that_is_written_to_between_two_saves_goes_twice():
    model = nn.Sequential(nn.ModuleList([WrittenTo()]))
    block = model[0][0]
    octavo.offload(model, blocks="0.0", min_bytes=1, keep_last=0)
    x = torch.randn(8, requires_grad=True)
    block(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() + 2 * (2 * x.detach()).cos())


def test_what_is_small_stays(seen):
    octavo.offload(model := model_of(FP8), min_bytes=2 * 16 * 64)
    results(model)
    assert seen and all(dtype != torch.float32 for _, _, dtype in seen)  # scales and statistics
    octavo.offload(other := model_of(), min_bytes=2**20)
    before = len(seen)
    results(other)
    assert len(seen) == before


def test_nothing_moves_without_gradients(seen):
    octavo.offload(model := model_of(), min_bytes=1)
    with torch.no_grad():
        model(torch.randn(2, 16, 64).bfloat16().to(DEVICE))
    assert not seen


def test_the_host_is_free_again_when_the_graph_is_gone():
    model = model_of()
    done = octavo.offload(model, min_bytes=1)
    results(model)
    gc.collect()
    assert done._last is not None and done._last() is None


def test_several_forwards_before_a_backward_and_twice_the_same_graph():
    model = model_of(FP8)

    def twice(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        x, z = (torch.randn(2, 16, 64).bfloat16().to(DEVICE).requires_grad_() for _ in range(2))
        a, b = model(x).float().square().sum(), model(z).float().square().sum()
        a.backward(retain_graph=True)
        b.backward()
        a.backward()
        return [x.grad, z.grad, *(p.grad for p in model.parameters())]

    want = twice(model)
    octavo.offload(model, min_bytes=1)
    assert same(twice(model), want)


def test_names_stay_and_it_comes_off():
    model = model_of()
    names, before = list(model.state_dict()), type(model.layers[0])
    done = octavo.offload(model, min_bytes=1)
    assert done.blocks == ["layers.0", "layers.1", "layers.2"] and type(model.layers[3]) is before
    assert isinstance(model.layers[0], OffloadedBlock) and list(model.state_dict()) == names
    results(model)
    assert "3 blocks: saved tensors" in str(done)
    assert type(copy.deepcopy(model).layers[0]) is before
    assert type(pickle.loads(pickle.dumps(model)).layers[0]) is before
    with pytest.raises(ConfigError, match="already"):
        octavo.offload(model)
    recomputed = octavo.recompute(model, "nothing")
    with pytest.raises(ConfigError, match="in reverse order"):
        done.remove()
    recomputed.remove()
    done.remove()
    assert type(model.layers[0]) is before and "offload" not in vars(model.layers[0])


@pytest.mark.parametrize("recomputed_first", [True, False])
def test_copies_and_files_of_blocks_that_are_recomputed_too(recomputed_first):
    model = model_of(FP8)
    want, before = results(model), type(model.layers[0])
    for wrapped in (octavo.recompute, octavo.offload) if recomputed_first else (octavo.offload, octavo.recompute):
        wrapped(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layers[0]) is before and not {"offload", "checkpoint_contexts"} & set(vars(other.layers[0]))
        assert same(results(other), want) and same(results(model), want)


@pytest.mark.parametrize("keep", [None, "products", "nothing"])
def test_an_input_that_is_expanded_comes_back_expanded(keep):
    model = model_of(octavo.Policy())
    x = torch.randn(2, 1, 64).bfloat16().to(DEVICE).expand(2, 16, 64)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    want = gradients()
    if keep is not None:
        octavo.recompute(model, keep)
    done = octavo.offload(model, min_bytes=1)
    assert same(gradients(), want)
    done.moved = 0
    call = done.begin(set(), False)
    slot = call.pack(x)
    assert done.moved == 2 * 64 * 2  # each value once
    assert torch.equal(back := slot.get(), x) and back.stride() == x.stride()


@pytest.mark.parametrize("options", [{"min_bytes": -1}, {"keep_last": -1}, {"blocks": "nowhere.*"}])
def test_bad_arguments(options):
    with pytest.raises(ConfigError):
        octavo.offload(model_of(), **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_the_gpu_holds_two_blocks_at_most():
    config = ModelConfig(vocab=64, dim=1024, heads=8, layers=12, sequence=1024, ffn=4096)

    def peak(offloaded: bool) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = Stack(config).bfloat16().cuda()
        octavo.convert(model)
        if offloaded:
            octavo.offload(model)
        x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
        return torch.cuda.max_memory_allocated(), x.grad.clone()

    (much, want), (little, got) = peak(False), peak(True)
    assert torch.equal(want, got) and little < 0.6 * much
