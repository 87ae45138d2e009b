"""Weights and states of sharded layers, in every tier: bitwise parts of whole ones, also through checkpoints."""

import tempfile
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import FP32, batch, full_state, loss_of
from sharded import llama as one_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from octavo.conversion import Policy
from octavo.distributed import load, save, shard, tensor_parallel
from octavo.errors import CheckpointError
from octavo.optim import TIERS, AdamW, Muon
from octavo.optim.states import keep_none
from octavo.tensor import FP8Tensor, local

COLUMNS, ROWS = "layers.0.attention.wq.weight", "layers.0.feed_forward.w2.weight"
"""A weight that is cut by its outputs, and one that is cut by its inputs."""
CASES = {f"{tier} {weights}": (tier, weights) for tier in TIERS if tier != "fp32" for weights in ("bfloat16", "fp8")}
BY_ROWS = [case for case in CASES if not case.startswith("fp8-lm")]
"""Their scales belong to rows, or to groups of them: a weight that is cut by rows is stepped as the whole one."""
TRAINED = ["fp8 fp8", "fp8-min fp8", "fp8-lm bfloat16"]
GRADIENTS = "gradients of one byte"
SAVED = ["fp8 fp8", "fp8-lm bfloat16"]


def llama(weights):
    policy = Policy(weights="fp8" if weights == "fp8" else "unchanged")
    return one_llama(dtype=torch.bfloat16, policy=policy, layers=1, kv_heads=2, ffn=256)  # 128 inputs a rank


def build(case, mesh, shards=True, **settings):
    """Return a model that is cut over `tensor` and, if so, sharded over `data`, and its optimizer."""
    tier, weights = CASES[case]
    model = llama(weights)
    tensor_parallel(model, mesh["tensor"])
    if shards:
        shard(model, mesh["data"], mp_policy=FP32)
    return model, AdamW(model.named_parameters(), lr=1e-2, states=tier, **settings)


def step(model, optimizer, number):
    loss = loss_of(model, *batch(number, 2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def bits(tensor):
    """Return what a tensor consists of, plain."""
    tensor = local(tensor.detach())
    return [t.view(torch.uint8) for t in (tensor.quantized[:2] if isinstance(tensor, FP8Tensor) else [tensor])]


def everything(model, optimizer):
    """Return all that this rank has of a run, by name."""
    kept = {n: {"": p, **optimizer.state[p]} for n, p in model.named_parameters()}
    return {
        f"{n} {k} {i}": t
        for n, state in kept.items()
        for k, v in state.items()
        for i, t in enumerate(bits(v.reshape(-1) if v.dim() == 0 else v))
    }


def unlike(a, b):
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])
    )


def as_cut(rank, mesh):
    """Return whether parts of FP8 weights are the codes and scales of whole ones, and state dicts hold their values."""
    model, _ = build("fp8 fp8", mesh, shards=False)
    alone = llama("fp8")
    whole = {name: p.quantized for name, p in alone.named_parameters() if isinstance(p, FP8Tensor)}
    expected = {
        COLUMNS: (whole[COLUMNS].codes.chunk(2, 0)[rank], whole[COLUMNS].scale.chunk(2, 0)[rank]),
        ROWS: (whole[ROWS].codes.chunk(2, 1)[rank], whole[ROWS].scale),
    }
    parts = {name: bits(model.get_parameter(name)) for name in expected}
    same = [torch.equal(parts[n][i], expected[n][i].contiguous().view(torch.uint8)) for n in expected for i in (0, 1)]
    state = full_state(model)
    values = {n: p.dequantize() if isinstance(p, FP8Tensor) else p for n, p in alone.state_dict().items()}
    before = bits(model.get_parameter(ROWS))[0].clone()
    model.load_state_dict(model.state_dict())  # quantised again, to the same values
    again = full_state(model)
    plain = all(type(v) is torch.Tensor for v in state.values())
    return {
        "same": same,
        "plain": plain and not unlike(state, values),
        "loaded": not unlike(again, values) and before.shape == bits(model.get_parameter(ROWS))[0].shape,
        "moved": model.get_parameter(ROWS).to_local().codes.is_contiguous(),
    }


def stepped(case, rank, mesh):
    """Return what differs, of two weights, from a step of this rank's part by itself, and of rows of the whole one."""
    model, cut = build(case, mesh, shards=False, rounding="nearest", keep=keep_none)
    own = {n: nn.Parameter(local(model.get_parameter(n)).detach().clone()) for n in (COLUMNS, ROWS)}
    whole = {n: p for n, p in llama(CASES[case][1]).named_parameters() if n in own}
    alone, of_whole = (
        AdamW(p.items(), lr=1e-2, states=CASES[case][0], rounding="nearest", keep=keep_none) for p in (own, whole)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for name, dim in ((COLUMNS, 0), (ROWS, 1)):
            parameter = model.get_parameter(name)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            part = gradient.chunk(2, dim)[rank].contiguous()
            parameter.grad = DTensor.from_local(part, mesh["tensor"], parameter.placements, run_check=False)
            own[name].grad, whole[name].grad = part.clone(), gradient
        for optimizer in (cut, alone, of_whole):
            optimizer.step()
    found = {
        name: [
            *bits(parameter),
            *(
                t.reshape(-1).view(torch.uint8)
                for key, t in sorted(optimizer.state[parameter].items())
                if key != "step"
            ),
        ]
        for name, parameter, optimizer in (
            *((f"cut {n}", model.get_parameter(n), cut) for n in own),
            *((f"own {n}", own[n], alone) for n in own),
        )
    }
    rows = [t.chunk(2)[rank] for t in bits(whole[COLUMNS])]
    return {
        "own": [all(map(torch.equal, found[f"cut {n}"], found[f"own {n}"])) for n in own],
        "whole": all(map(torch.equal, bits(model.get_parameter(COLUMNS)), rows)),
    }


def trained(case, mesh, **settings):
    """Return losses of steps, cut and of one process, and what ranks differ in of what all of them have."""
    model, optimizer = build(case, mesh, shards=False, keep=keep_none, **settings)
    alone = llama(CASES[case][1])
    by_one = AdamW(alone.named_parameters(), lr=1e-2, states=CASES[case][0], keep=keep_none, **settings)
    losses, norms = [], []
    for number in range(2):
        losses.append((step(model, optimizer, number), step(alone, by_one, number)))
        norms.append((optimizer.grad_norm.item(), by_one.grad_norm.item()))
    apart = []
    for name, parameter in model.named_parameters():
        if parameter.placements[0].is_replicate():
            for key, tensor in {"weight": parameter, **optimizer.state[parameter]}.items():
                mine = bits(tensor.reshape(1) if tensor.dim() == 0 else tensor)[0].contiguous()
                first = mine.clone()
                dist.broadcast(first, 0)
                apart += [] if torch.equal(mine, first) else [f"{name} {key}"]
    return {"losses": losses, "norms": norms, "apart": apart}


def scales(case, mesh):
    """Return of both weights the shape of the scale of first moments, and whether it scales the codes of its part."""
    model, optimizer = build(case, mesh)
    step(model, optimizer, 0)
    numbers = {entry.name: entry.number for entry in optimizer.entries()}
    state, values = optimizer.state_dict()["state"], optimizer.export_state_dict()["state"]
    found = {}
    for name in (COLUMNS, ROWS):
        codes, scale, value = (
            t.full_tensor()
            for t in (
                *(state[numbers[name]][k] for k in ("exp_avg_codes", "exp_avg_scale")),
                values[numbers[name]]["exp_avg"],
            )
        )
        each = [size // parts for size, parts in zip(codes.shape, scale.shape, strict=True)]
        by = (scale.float() - 127).exp2().repeat_interleave(each[0], 0).repeat_interleave(each[1], 1)
        found[name] = tuple(scale.shape), torch.equal(codes.view(torch.float8_e4m3fn).float() * by, value)
    return found


def by_muon(rank, mesh, shards):
    """Return how far matrices that Muon steps in parts are from whole ones, at most, and how far these have gone."""
    model, alone = llama("fp8"), llama("fp8")
    tensor_parallel(model, mesh["tensor"])
    if shards:
        shard(model, mesh["data"], mp_policy=FP32)
    optimizers = [Muon(net.named_parameters(), lr=1e-2, states="exact", rounding="nearest") for net in (model, alone)]
    started = {name: value.float() for name, value in full_state(model).items()}
    generator = torch.Generator().manual_seed(1)
    own = {name: parameter for name, parameter in model.named_parameters() if name.startswith("layers")}
    for _ in range(2):
        for name, parameter in own.items():
            if parameter.dim() == 2:
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                alone.get_parameter(name).grad = gradient
                dim = 1 if name.split(".")[-2] in ("wo", "w2") else 0
                part = gradient.chunk(2, dim)[rank % 2].chunk(2 if shards else 1, 0)[rank // 2].contiguous()
                parameter.grad = DTensor.from_local(
                    part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
    masters = [
        {
            e.name: m.full_tensor() if isinstance(m, DTensor) else m
            for e, m in zip(o.entries(), o.master_weights(), strict=True)
        }
        for o in optimizers
    ]
    stepped = [name for name, parameter in own.items() if parameter.dim() == 2]
    return {
        "apart": max((masters[0][n] - masters[1][n]).abs().max().item() for n in stepped),
        "gone": min((masters[1][n] - started[n]).abs().max().item() for n in stepped),
        "count": len(stepped),
    }


def few_rows(mesh):
    """Return the shape of a scale of all of a part, where ranks have two rows and one."""
    rows = nn.Parameter(distribute_tensor(torch.ones(3, 256), mesh["tensor"], [Shard(0)]))
    optimizer = AdamW([rows], states="fp8-lm", keep=keep_none)
    rows.grad = torch.ones_like(rows)
    optimizer.step()
    return tuple(optimizer.state_dict()["state"][0]["exp_avg_scale"].shape)


def written(case, mesh, folder, shards):
    """Return what a run that goes on from its checkpoint has otherwise than the one that wrote it."""
    place = Path(folder) / case
    model, optimizer = build(case, mesh, shards)
    for number in range(2):
        step(model, optimizer, number)
    save(place, model, optimizer, step=2)
    kept = {name: t.clone() for name, t in everything(model, optimizer).items()}
    again, other = build(case, mesh, shards)
    step(again, other, 9)  # it has been somewhere else
    extra = load(place, again, other)
    read = unlike(kept, everything(again, other))
    losses = [[step(*run, number) for number in (2, 3)] for run in ((model, optimizer), (again, other))]
    return {
        "extra": extra,
        "read": read,
        "losses": losses,
        "end": unlike(everything(model, optimizer), everything(again, other)),
        "values": full_state(model),
    }


def read_on_more(case, mesh, folder):
    """Return what ranks that share parts once more make of a checkpoint: values, or what they say."""
    model, optimizer = build(case, mesh)
    try:
        load(Path(folder) / case, model, optimizer)
    except CheckpointError as error:
        return str(error)
    for number in (2, 3):
        step(model, optimizer, number)
    return full_state(model)


def otherwise(folder):
    """Return the message for a tensor-parallel checkpoint loaded by ranks that shard rows only."""
    said = []
    for case in SAVED:
        model = llama(CASES[case][1])
        shard(model, mp_policy=FP32)
        optimizer = AdamW(model.named_parameters(), states=CASES[case][0])
        said.append(ranks.refusal(CheckpointError, lambda m=model, o=optimizer, c=case: load(Path(folder) / c, m, o)))
    return said


def two_ranks(rank, count, folder):
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("data", "tensor"))
    return {
        "cut": as_cut(rank, mesh),
        "few": few_rows(mesh),
        "muon": by_muon(rank, mesh, shards=False),
        "stepped": {case: stepped(case, rank, mesh) for case in CASES},
        "trained": {case: trained(case, mesh) for case in TRAINED}
        | {GRADIENTS: trained("fp8 fp8", mesh, gradients="fp8", clip=1.0)},
        "written": {case: written(case, mesh, folder, shards=case != "fp8 fp8") for case in SAVED},
        "otherwise": otherwise(folder),
    }


def four_ranks(rank, count, two, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return {
        "muon": by_muon(rank, mesh, shards=True),
        "scales": {case: scales(case, mesh) for case in SAVED},
        "read": {case: read_on_more(case, mesh, two) for case in SAVED},
        "written": {case: written(case, mesh, folder, shards=True) for case in SAVED},
    }


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def on_two(folder):
    return ranks.run(two_ranks, 2, str(folder / "two"))


@pytest.fixture(scope="module")
def on_four(on_two, folder):
    return ranks.run(four_ranks, 4, str(folder / "two"), str(folder / "four"))


def test_an_fp8_weight_is_cut_into_its_own_codes(on_two):
    for found in (result["cut"] for result in on_two):
        assert found["same"] == [True] * 4
        assert found["plain"] and found["loaded"] and found["moved"]


@pytest.mark.parametrize("case", CASES)
def test_a_part_is_stepped_as_a_weight_of_its_own(on_two, case):
    assert all(result["stepped"][case]["own"] == [True, True] for result in on_two)


@pytest.mark.parametrize("case", BY_ROWS)
def test_rows_are_stepped_as_those_of_the_whole_where_scales_are_of_rows(on_two, case):
    assert all(result["stepped"][case]["whole"] for result in on_two)


@pytest.mark.parametrize("case", [*TRAINED, GRADIENTS])
def test_training_is_near_that_of_one_process_and_what_all_have_is_the_same(on_two, case):
    for result in on_two:
        assert not result["trained"][case]["apart"]
        for cut, alone in result["trained"][case]["losses"]:
            assert cut == pytest.approx(alone, rel=0.02)
        norm, expected = result["trained"][case]["norms"][0]  # later ones have been rounded by other random bits
        assert norm == pytest.approx(expected, rel=0.02)
        assert result["trained"][case]["norms"] == on_two[0]["trained"][case]["norms"]


@pytest.mark.parametrize("count", [2, 4])
def test_muon_steps_whole_matrices(on_two, on_four, count):
    for found in (result["muon"] for result in {2: on_two, 4: on_four}[count]):
        assert found["count"] == 7
        assert found["apart"] < 1e-5 < 5e-3 < found["gone"]


def test_a_scale_lies_where_its_part_does(on_four):
    for found in (result["scales"] for result in on_four):
        assert found["fp8-lm bfloat16"] == {COLUMNS: ((4, 1), True), ROWS: ((2, 2), True)}
        assert found["fp8 fp8"] == {COLUMNS: ((64, 1), True), ROWS: ((64, 2), True)}


def test_ranks_agree_about_scales_of_parts_of_a_single_row(on_two):
    assert [result["few"] for result in on_two] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("count", [2, 4])
def test_a_checkpoint_is_gone_on_from_to_the_bit(on_two, on_four, count, case):
    for result in {2: on_two, 4: on_four}[count]:
        found = result["written"][case]
        assert found["extra"] == {"step": 2}
        assert not found["read"] and not found["end"]
        assert found["losses"][0] == found["losses"][1]


@pytest.mark.parametrize("case", SAVED)
def test_ranks_that_share_parts_read_scales_of_rows_and_no_others(on_two, on_four, case):
    for result in on_four:
        if case.startswith("fp8-lm"):
            assert "sharded over" in result["read"][case]
            continue
        for name, value in on_two[0]["written"][case]["values"].items():
            error = (result["read"][case][name].float() - value.float()).norm() / value.float().norm()
            assert error < 0.02, name  # other random bits round


def test_another_cut_does_not_read_it(on_two):
    assert all("does not fit" in said for result in on_two for said in result["otherwise"])
