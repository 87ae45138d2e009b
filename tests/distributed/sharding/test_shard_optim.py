"""`octavo.optim` on sharded parameters, in every tier, against one process; FP8 weights among them."""

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import FP32, full_state, llama, step_alone, step_sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from octavo.distributed import shard
from octavo.errors import ConfigError
from octavo.optim import TIERS, AdamW, Muon
from octavo.optim.matrix_all_to_all import (
    ShardLayout,
    gather_full,
    gather_over,
    scatter_full,
    scatter_over,
    shard_layouts,
)
from octavo.tensor import FP8Tensor, local

STEPS = 2
SETTINGS = {"lr": 1e-2, "clip": 0.5, "rounding": "nearest"}


def with_fp8_weights(model):
    """Make the weights of FP8 layers FP8 tensors."""
    for layer in model.modules():
        if hasattr(layer, "recipe"):
            layer.weight = nn.Parameter(FP8Tensor.from_tensor(layer.weight.detach()))
    return model


def train(rank, count, states, dtype=torch.float32, fp8_weights=False, rule=AdamW, mesh=None, **settings):
    """Return losses, gradient norms and final weights of a sharded run and of one process."""
    model, alone = (llama(dtype=dtype, layers=1) for _ in range(2))
    if fp8_weights:
        model, alone = with_fp8_weights(model), with_fp8_weights(alone)
    shard(model, mesh, mp_policy=FP32)
    settings = {**SETTINGS, "states": states, **settings}
    optimizers = [rule(net.named_parameters(), **settings) for net in (model, alone)]
    pairs, norms = [], []
    for step in range(STEPS):
        pairs.append(
            (step_sharded(model, optimizers[0], step, rank, count), step_alone(alone, optimizers[1], step, count))
        )
        norms.append(tuple(o.grad_norm.item() for o in optimizers))
    masters = [[v.full_tensor() if hasattr(v, "full_tensor") else v for v in o.master_weights()] for o in optimizers]
    error = max((a - b).abs().max().item() for a, b in zip(*masters, strict=True))
    bytes = [o.report()["total"] for o in optimizers]
    state, expected = full_state(model), alone.state_dict()
    plain = all(type(v) is torch.Tensor and v.dtype == dtype and v.shape == expected[k].shape for k, v in state.items())
    return {"pairs": pairs, "norms": norms, "error": error, "bytes": bytes, "plain": plain}


def not_finite(rank, count):
    """Return the state after a step in which only one rank has an infinity."""
    model = llama(layers=1)
    shard(model, mp_policy=FP32)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    before = [local(p).clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 0:
        local(next(iter(model.parameters())).grad)[0] = torch.inf
    optimizer.step()
    same = all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return same, optimizer.skipped.item()


def random_bits(rank, count):
    """Return first moments of rows that are equal on all ranks, rounded stochastically."""
    net = nn.Sequential(nn.Linear(256, 32 * count, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).repeat(count, 1))
    shard(net, mp_policy=FP32)
    optimizer = AdamW(net.parameters(), lr=1e-2, states="fp8")
    net(torch.ones(2, 256)).square().sum().backward()
    optimizer.step()
    return optimizer.state[net[0].weight]["exp_avg"].float()


def released(rank, count):
    """Return whether parameters that are stepped as their gradients come are those of one step at the end."""
    models = [llama(layers=1) for _ in range(2)]
    for model, release in zip(models, (True, False), strict=True):
        shard(model, mp_policy=FP32)
        optimizer = AdamW(model.named_parameters(), lr=1e-2, states="fp8", rounding="nearest", release=release)
        for step in range(2):
            step_sharded(model, optimizer, step, rank, count)
    states = [full_state(model) for model in models]
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def owners(rank, count, heights=(5, 64, 3, 5, 0)):
    """Return whether matrices, some with rows on the first rank alone, are made whole, and come back as they were."""
    found = []
    for height in heights:
        how = ShardLayout(dist.group.WORLD, height)
        whole = torch.arange(5 * height * 7, dtype=torch.float32).view(
            5, height, 7
        )  # 5 matrices: some ranks have 2, one has none
        parts = torch.zeros(5, how.each, 7)
        own = whole[:, rank * how.each : (rank + 1) * how.each]
        parts[:, : own.shape[1]] = own
        mine = gather_over(parts, how)
        first = rank * mine.shape[0]
        expected = torch.zeros_like(mine)
        expected[: len(whole[first : first + mine.shape[0]])] = whole[first : first + mine.shape[0]]
        back = scatter_over(mine, how, 5)  # on all ranks, whatever came of the first
        found.append(torch.equal(mine, expected) and torch.equal(back, parts))
    return found


def two_cuts(rank, count):
    """Return for matrices that are cut twice whether each is made whole on one rank, and comes back as it was."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]):
        whole = torch.arange(1, 5 * 8 * 12 + 1, dtype=torch.float32).view(5, 8, 12)
        spread = [distribute_tensor(one, mesh, placements, src_data_rank=None) for one in whole]
        cuts = shard_layouts(spread[0])
        parts = torch.stack([local(one) for one in spread])
        mine = gather_full(parts, cuts)
        owned = torch.zeros(len(whole))
        for one in mine[mine.flatten(1).any(1)]:
            owned += (whole == one).flatten(1).all(1)
        dist.all_reduce(owned)
        found.append(owned.tolist() == [1] * 5 and torch.equal(scatter_full(mine, cuts, 5), parts))
    return found


def uneven_muon(rank, count):
    """Return the error of unevenly sharded rows against one process, and the message for uneven columns."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 8), nn.Linear(8, 3, bias=False))

    net, alone = build(), build()
    shard(net, blocks=[], mp_policy=FP32)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for n in (net, alone):
        optimizer = Muon(n.named_parameters(), lr=0.1, states="fp32", matrices=lambda name, p: p.dim() == 2)
        for _ in range(STEPS):
            n(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    error = max((a - b).abs().max().item() for a, b in zip(full_state(net).values(), alone.parameters(), strict=True))
    mesh = init_device_mesh("cpu", (count,))
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 5), mesh, [Shard(1)]))
    return error, ranks.refusal(ConfigError, lambda: Muon([("hidden", columns)]))


def four_ranks(rank, count):
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {
        "muon": train(rank, count, "fp32", rule=Muon),
        "hsdp": train(rank, count, "fp32", rule=Muon, mesh=hsdp),
        "uneven": uneven_muon(rank, count),
        "owners": owners(rank, count),
        "two cuts": two_cuts(rank, count),
    }


def two_ranks(rank, count):
    found = {"fp8 float32": train(rank, count, "fp8", torch.float32)}
    found["muon fp8"] = train(rank, count, "fp8", torch.float32, rule=Muon)
    found["muon exact bfloat16"] = train(rank, count, "exact", torch.bfloat16, rule=Muon)
    found["muon fp8-min fp8"] = train(rank, count, "fp8-min", fp8_weights=True, rule=Muon)
    for states in TIERS:
        found[f"{states} bfloat16"] = train(rank, count, states, torch.bfloat16)
        found[f"{states} fp8"] = train(rank, count, states, fp8_weights=True)
    return {
        **found,
        "inf": not_finite(rank, count),
        "bits": random_bits(rank, count),
        "released": released(rank, count),
    }


EXACT = [
    "fp8 float32",
    "muon fp8",
    "muon exact bfloat16",
    "muon fp8-min fp8",
    *(f"{states} {weight}" for states in TIERS if states != "fp8-lm" for weight in ("bfloat16", "fp8")),
]
"""Tiers with row scales; `fp8-lm` has one scale per tensor, and hence one per shard."""


@pytest.fixture(scope="module")
def two():
    return ranks.run(two_ranks, 2)


@pytest.fixture(scope="module")
def four():
    return ranks.run(four_ranks, 4)


@pytest.mark.parametrize("case", EXACT)
def test_a_sharded_step_is_that_of_one_process(two, case):
    found = two[0][case]
    assert found["pairs"][0][0] == found["pairs"][0][1] and found["error"] == 0
    assert all(sharded == alone for sharded, alone in found["pairs"])
    assert all(sharded == pytest.approx(alone, rel=1e-6) for sharded, alone in found["norms"])


@pytest.mark.parametrize("weight", ["bfloat16", "fp8"])
def test_one_scale_a_tensor_is_one_a_shard(two, weight):
    found = two[0][f"fp8-lm {weight}"]
    for sharded, alone in found["pairs"]:
        assert sharded == pytest.approx(alone, rel=0.02)


def test_bytes_are_those_of_the_shard(two):
    for case in EXACT:
        sharded, alone = two[0][case]["bytes"]
        assert sharded == pytest.approx(alone, rel=0.03)


def test_a_state_dict_is_plain(two):
    assert all(found["plain"] for name, found in two[0].items() if name.startswith("fp8-min"))


def test_an_infinity_on_one_rank_skips_the_step_on_all(two):
    assert [tuple(found["inf"]) for found in two] == [(True, 1), (True, 1)]


def test_ranks_draw_other_bits(two):
    first, second = (found["bits"] for found in two)
    assert not torch.equal(first, second) and torch.allclose(first, second, rtol=0.2, atol=1e-3)


def test_gradients_can_be_released(two):
    assert all(found["released"] for found in two)


@pytest.mark.parametrize("case", ["muon", "hsdp"])
def test_muon_on_four_ranks_differs_by_the_order_of_sums(four, case):
    found = four[0][case]
    assert all(sharded == pytest.approx(alone, rel=1e-4) for sharded, alone in found["pairs"])
    assert 0 < found["error"] < 2e-3  # of updates of up to 0.02: the iteration computes in BF16


def test_matrices_are_made_whole_and_sent_back(four):
    assert all(found["owners"] == [True] * 5 for found in four)


def test_matrices_that_are_cut_twice_are_made_whole_and_sent_back(four):
    assert all(found["two cuts"] == [True] * 4 for found in four)


def test_rows_of_matrices_need_not_divide(four):
    errors, refusals = zip(*(found["uneven"] for found in four), strict=True)
    assert max(errors) < 1e-6 and "not sharded evenly" in refusals[0]
