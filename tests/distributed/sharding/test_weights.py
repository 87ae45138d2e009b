"""Codes that a rank sends for the weights of a block: quantised together in each gather, of the values they have then.

One process is enough: the process group of `octavo_bench.ranks` gathers copies of this rank's data.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from alone import join_alone
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import octavo
from octavo import kernels
from octavo.distributed import shard
from octavo.distributed.sharding.weights import GatherSpec, Memory, UnitCodes, WeightShard
from octavo.kernels import QuantSpec
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama

RANKS = 4
SHAPE = ModelConfig(vocab=96, dim=64, layers=3, heads=2, kv_heads=1, ffn=160, sequence=16)
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    join_alone(RANKS)
    yield
    dist.destroy_process_group()


def sharded(device: str, recipe: str = "folded", **options: object) -> Llama:
    with torch.device(device):
        model = Llama(SHAPE)
        model.reset_parameters(torch.Generator(device).manual_seed(0))
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0))
    shard(model, init_device_mesh(device, (RANKS,)), **options)  # type: ignore[arg-type]
    return model


def step(model: Llama, optimizer: torch.optim.Optimizer, number: int) -> None:
    device = next(model.parameters()).device
    tokens = torch.randint(0, SHAPE.vocab, (2, 17), generator=torch.Generator().manual_seed(number)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Llama) -> dict[str, Tensor]:
    """Return the values of the shards of FP8 weights."""
    shards = {name: parameter.to_local() for name, parameter in model.layers.named_parameters()}  # type: ignore[attr-defined]
    return {name: one.wrapped.detach().clone() for name, one in shards.items() if hasattr(one, "wrapped")}


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@on_both
@pytest.mark.parametrize("reduce", [None, "bf16", "fp8-block"])
def test_what_is_gathered_is_the_whole_weight_quantised(device: str, reduce: str | None) -> None:
    model = sharded(device, reduce=reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
        held = values(model)
        assert len(held) == 7 * SHAPE.layers
        for unit in units(model):
            unit.unshard()
        for name, parameter in model.layers.named_parameters():
            if name in held:
                whole = kernels.quantize(held[name].repeat(RANKS, 1), "e4m3", "row")
                assert torch.equal(parameter.codes.view(torch.uint8), whole.codes.view(torch.uint8))  # type: ignore[attr-defined]
                assert torch.equal(parameter.scale, whole.scale)  # type: ignore[attr-defined]
        for unit in units(model):
            unit.reshard()


@pytest.mark.gpu
def test_a_gather_quantises_a_block_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.distributed.sharding import weights

    gc.collect()  # models of other tests
    model = sharded("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    made: list[int] = []
    plain = weights.quantize_scattered_rows
    memory: set[int] = set()

    def counted(shards: list[Tensor], *others: object) -> weights.ScatteredRows:
        result = plain(shards, *others)
        made.append(len(shards))
        memory.add(result.quantized.codes.data_ptr())
        return result

    monkeypatch.setattr(weights, "quantize_scattered_rows", counted)
    monkeypatch.setattr(kernels, "quantize", None)  # none is quantised by itself
    optimizer.step()
    for _ in range(2):
        for unit in units(model):
            unit.unshard()
        assert sorted(made) == sorted([6, 1] * SHAPE.layers)
        assert len(memory) == 2  # one block after the other writes to it
        made.clear()
        for unit in units(model):
            unit.reshard()


@on_both
def test_a_shard_that_its_unit_does_not_know_is_quantised_by_itself(device: str) -> None:
    memory: Memory = {}
    values = torch.randn(16, 32, device=device)
    spec = GatherSpec(len(values), len(values), QuantSpec("e4m3", "row", "power_of_two"), False, UnitCodes(memory))
    codes, scale = WeightShard(values, spec).fsdp_pre_all_gather(init_device_mesh(device, (RANKS,)))[0]
    whole = kernels.quantize(values, "e4m3", "row")
    assert torch.equal(codes.view(torch.uint8), whole.codes.view(torch.uint8)) and torch.equal(scale, whole.scale)
    assert not memory


@on_both
def test_a_write_between_steps_is_gathered(device: str) -> None:
    model = sharded(device)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    name, other = (f"layers.1.attention.{own}.weight" for own in ("wq", "wk"))
    held = values(model)[other.removeprefix("layers.")]
    with torch.no_grad():
        model.get_parameter(name).to_local().fill_(0.5)  # type: ignore[attr-defined]
    units(model.layers[1])[0].unshard()
    assert model.get_parameter(name).dequantize().eq(0.5).all()
    whole = kernels.quantize(held.repeat(RANKS, 1), "e4m3", "row")
    assert torch.equal(model.get_parameter(other).codes.view(torch.uint8), whole.codes.view(torch.uint8))  # type: ignore[attr-defined]


def locals_of(model: nn.Module) -> list[Tensor]:
    """Return the memory of the shards, as an optimizer of one's own has it."""
    shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return [getattr(one, "wrapped", one).detach() for one in shards]


@torch.no_grad()
def averages_swapped(model: nn.Module) -> Iterator[None]:
    kept = [own.clone() for own in locals_of(model)]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.9)
    yield
    for own, value in zip(locals_of(model), kept, strict=True):
        own.copy_(value)
    yield


def clamped_after_a_step(model: nn.Module) -> Iterator[None]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=False).step()
    yield
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)
    yield


def stepped_by_hand(model: nn.Module) -> Iterator[None]:
    for parameter in model.parameters():
        parameter.data -= 0.1 * torch.ones_like(parameter)
    yield


def numpy_alias(model: nn.Module) -> Iterator[None]:
    for own in locals_of(model):
        own.numpy().__imul__(3)
    yield


def by_fused_function(model: nn.Module) -> Iterator[None]:
    ps = locals_of(model)
    grads, ms, vs = ([torch.full_like(p, value) for p in ps] for value in (0.1, 0.0, 0.0))
    moments = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    options = {"lr": 0.1, "weight_decay": 0.1, "amsgrad": False, "maximize": False} | moments
    yield torch._fused_adamw_(ps, grads, ms, vs, [], [torch.ones(()) for _ in ps], **options)


def all_reduced(model: nn.Module) -> Iterator[None]:
    for own in locals_of(model):
        dist.all_reduce(own)  # the ranks are copies: it multiplies by their number
        own.mul_(2)
    yield


def loaded(model: nn.Module) -> Iterator[None]:
    yield model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


WAYS = [averages_swapped, clamped_after_a_step, stepped_by_hand, numpy_alias, by_fused_function, all_reduced, loaded]


@pytest.mark.parametrize(
    ("way", "recipe"), [*((way, "folded") for way in WAYS), (numpy_alias, "tensorwise"), (numpy_alias, "block")]
)
def test_a_write_to_a_shard_is_seen_by_the_next_forward(
    way: Callable[[nn.Module], Iterator[None]], recipe: str
) -> None:
    model = sharded("cpu", recipe)
    before = loss(model)
    changed = False
    for _ in way(model):
        fresh = sharded("cpu", recipe)
        for own, value in zip(locals_of(fresh), locals_of(model), strict=True):
            own.copy_(value)
        found = loss(model)
        assert found == loss(fresh)
        changed = changed or found != before
    assert changed, "nothing was written"


def loss(model: nn.Module) -> float:
    """Return the loss of a forward, whose backward has the weights put back."""
    tokens = torch.randint(0, SHAPE.vocab, (2, 17), generator=torch.Generator().manual_seed(9))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens[:, :-1], tokens[:, 1:])
    found.backward()
    model.zero_grad()
    return float(found.detach())


@pytest.mark.parametrize("recipe", ["folded", "tensorwise"])
def test_a_gather_that_ends_with_an_error_leaves_no_codes_behind(recipe: str) -> None:
    model = sharded("cpu", recipe)
    named = model.layers[1].named_parameters()
    shards = [p._local_tensor for name, p in named if "norm" not in name]  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (RANKS,))
    shards[0].fsdp_pre_all_gather(mesh)
    assert shards[1].pending is not None
    for own in locals_of(model):
        own.mul_(3)
    fresh = sharded("cpu", recipe)
    for own, value in zip(locals_of(fresh), locals_of(model), strict=True):
        own.copy_(value)
    assert loss(model) == loss(fresh)


@pytest.mark.parametrize("recipe", ["folded", "tensorwise"])
def test_a_model_that_is_dropped_is_freed(recipe: str) -> None:
    model = sharded("cpu", recipe)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    held = weakref.ref(model.get_parameter("layers.0.attention.wq.weight").to_local().wrapped)  # type: ignore[attr-defined]
    del model
    gc.collect()
    assert held() is None


def test_weights_are_gathered_while_the_block_before_them_computes() -> None:
    model = sharded("cpu")
    gathered: list[int] = []
    for number, block in enumerate(model.layers):
        assert isinstance(block, FSDPModule)
        parameters = block._get_fsdp_state()._fsdp_param_group
        plain = parameters.unshard
        parameters.unshard = lambda *a, number=number, plain=plain, **k: (gathered.append(number), plain(*a, **k))[1]
        block.register_forward_hook(lambda *_, number=number: gathered.append(-number))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    computed = gathered.index(-1)
    assert gathered.index(2) < computed
