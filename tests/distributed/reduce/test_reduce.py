"""Every reduction against an FP64 sum and an oracle of its rounding, on 1 to 4 ranks; as hooks of DDP and FSDP2.

One set of four processes computes everything that the tests below look at. Smaller worlds are groups of its ranks.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from octavo.distributed import REDUCTIONS, Scheme, reduction, set_reduction
from octavo.distributed.reduce import FLAT
from octavo.distributed.reduce.fp8_lm import FP8LM, ring_sum
from octavo.distributed.reduce.scheme import TwoLevel
from octavo.errors import ConfigError
from octavo.kernels.wire.message import message_bytes
from octavo.numerics import E4M3, TILE_1x128, dequantize, quantize, sqnr_db

WORLDS = (1, 2, 3, 4)
COUNTS = (0, 1, 37, 1003)
DTYPES = (torch.float32, torch.bfloat16)
GROWTH = 2.0 ** (1 / 1000)
"""Of FP8-LM's mu in a step: it doubles over 1,000 (arXiv 2310.18313, section 2.1)."""
SNR = {"fp32": 120, "bf16": 45, "bf16-plain": 42, "fp8-block": 27, "fp8-lm": 21, "two-level": 27}
"""dB of a mean over 4 ranks at the least. It is of normal data, in FP32."""


def gradient(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return (torch.randn(count, generator=generator) * 1e-3).to(dtype)


def means(world: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(gradient(rank, count, dtype).double() for rank in range(world)) / world


# --- what the ranks do -----------------------------------------------------------------------------------------------


def measure(rank: int, world: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    groups = {size: dist.new_group(list(range(size))) for size in WORLDS}
    found: dict[str, object] = {}
    for name, size in itertools.product(FLAT, WORLDS):
        if rank < size:
            found[f"{name} {size}"] = all_cases(lambda name=name: reduction(name), rank, groups[size])
    found["two-level 4"] = all_cases(lambda: reduction("two-level", mesh), rank, dist.group.WORLD)
    schemes = {name: reduction(name, mesh if name == "two-level" else None) for name in REDUCTIONS}
    for name, scheme in schemes.items():
        found[f"{name} broken"] = broken(scheme, rank)
        found[f"{name} tensors"] = list_of_tensors(scheme, rank)
        found[f"{name} ddp"] = by_ddp(reduction(name, mesh if name == "two-level" else None), rank)
        found[f"{name} fsdp"] = by_fsdp(reduction(name, mesh if name == "two-level" else None), rank)
        found[f"{name} fsdp, sums"] = by_fsdp(reduction(name, mesh if name == "two-level" else None), rank, sums=True)
    found["mu"] = mu_of_steps(rank)
    found["mu at the threshold"] = [mu_after_saturation(count) for count in (1, 3)]
    found["mu of equal gradients"] = [mu_of_equal_gradients(scattered) for scattered in (False, True)]
    found["mu of a resumed run"] = mu_of_a_resumed_run()
    found["zeros"] = zeros()
    found["levels"] = sent_by_level(reduction("two-level", mesh), rank)
    found["states by level"] = states_by_level(TwoLevel(mesh, inner=FP8LM(), outer=FP8LM()))
    found["errors"] = errors(mesh, groups[2], rank)
    return found


def all_cases(make, rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    found = {}
    size = group.size()
    for count, dtype in itertools.product(COUNTS, DTYPES):
        whole = gradient(rank, count, dtype)
        make().all_reduce(whole, group)
        each = -(-count // size)
        padded = torch.zeros(each * size, dtype=dtype)
        padded[:count] = gradient(rank, count, dtype)
        part = torch.empty(each)
        scheme = make()
        scheme.reduce_scatter(part, padded, group, mean=False)
        found[f"all {count} {dtype}"], found[f"part {count} {dtype}"] = whole, part
        found[f"sent {count} {dtype}"] = scheme.sent
    return found


def broken(scheme: Scheme, rank: int) -> torch.Tensor:
    values = gradient(rank, 300)
    if rank == 1:
        values[5], values[131] = torch.nan, torch.inf
    if rank == 3:
        values[299] = -torch.inf
    scheme.all_reduce(values, dist.group.WORLD)
    return values


def list_of_tensors(scheme: Scheme, rank: int) -> dict[str, torch.Tensor]:
    tensors = {
        "weight": gradient(rank, 600).view(20, 30).t(),
        "half": gradient(rank, 70, torch.bfloat16),
        "bias": gradient(rank, 9) * 1000,
        "none": torch.empty(0, 4),
    }
    scheme.all_reduce_tensors(tensors, dist.group.WORLD)
    return tensors


def small_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 7))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return model(torch.randn(16, 24, generator=generator)).square().mean()


def by_ddp(scheme: Scheme, rank: int) -> dict[str, object]:
    model = DistributedDataParallel(small_model())
    assert set_reduction(model, scheme) is scheme
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        loss_of(model, rank).backward()
    gradients = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return {"gradients": gradients, "state": scheme.state_dict()}


def by_fsdp(scheme: Scheme, rank: int, sums: bool = False) -> dict[str, object]:
    model, policy = small_model(), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (4,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in (model[0], model[2], model) if sums else ():
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    set_reduction(model, scheme)
    loss_of(model, rank).backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return {"gradients": gradients, "state": scheme.state_dict()}


def mu_of_steps(rank: int) -> list[float]:
    scheme, found = FP8LM(), []
    for step in range(6):
        values = gradient(rank, 100)
        if rank == 0:
            values[:2] = 1.75  # amax: with mu = 1 its code is the largest
        scheme.mu["w"] = torch.tensor(1.0) if step == 3 else scheme.mu.get("w", torch.tensor(0.25))
        scheme.all_reduce(values, dist.group.WORLD, parts={"w": 100})
        found.append(float(scheme.mu["w"]))
    return found


def mu_after_saturation(count: int) -> float:
    """Return mu after a step in which so many of 200,000 codes have been the largest there is."""
    scheme, values = FP8LM(), torch.full((200_000,), 1e-3)
    values[:count] = 1.75
    scheme.mu["w"] = torch.tensor(1.0)
    for _ in range(2):
        scheme.all_reduce(values.clone(), dist.group.WORLD, parts={"w": 200_000})
    return float(scheme.mu["w"])


def mu_of_equal_gradients(scattered: bool) -> list[float]:
    """Return mu of three steps in which no rank's codes saturate, and their sums do at first."""
    scheme, found = FP8LM(), []
    for _ in range(3):
        values = torch.full((400,), 1.75)
        if scattered:
            scheme.reduce_scatter(torch.empty(100), values, dist.group.WORLD, name="w")
        else:
            scheme.all_reduce(values, dist.group.WORLD, parts={"w": 400})
        found.append(float(scheme.mu["w"]))
    return found


def mu_of_a_resumed_run() -> list[float]:
    """Return mu after two steps, and with the state of rank 0 in between, on whose part no sum saturates."""
    first, other = FP8LM(), FP8LM()
    values = torch.cat([torch.full((100,), 1e-3), torch.full((300,), 1.75)])
    first.reduce_scatter(torch.empty(100), values.clone(), dist.group.WORLD, name="w")
    saved = [first.state_dict()]
    dist.broadcast_object_list(saved, 0)
    other.load_state_dict(saved[0])
    for scheme in (first, other):
        scheme.reduce_scatter(torch.empty(100), values.clone(), dist.group.WORLD, name="w")
    return [float(scheme.mu["w"]) for scheme in (first, other)]


def zeros() -> torch.Tensor:
    scheme, values = FP8LM(), torch.zeros(40)
    scheme.mu["gradient"] = torch.tensor(2.0**16)  # as far as steps of zeros let it grow
    scheme.all_reduce(values, dist.group.WORLD)
    return values


def sent_by_level(scheme: Scheme, rank: int) -> dict[str, int]:
    scheme.reduce_scatter(torch.empty(1024), torch.ones(4096), dist.group.WORLD)
    return {"inner": scheme.inner.sent, "outer": scheme.outer.sent, "all": scheme.sent}


def states_by_level(scheme: Scheme) -> list[str]:
    for name in ("a", "b"):
        scheme.all_reduce(torch.ones(64), dist.group.WORLD, parts={name: 40, f"{name}2": 24})
    return [name for name in scheme.state_dict() if name.endswith(".mu")]


def errors(mesh, pair: dist.ProcessGroup, rank: int) -> list[str]:
    calls = [
        lambda: reduction("fp8-block").reduce_scatter(torch.empty(2), torch.empty(9), dist.group.WORLD),
        lambda: reduction("fp8-block").all_reduce(torch.empty(2, 2), dist.group.WORLD),
        lambda: reduction("fp8-block").all_reduce(torch.empty(4), dist.group.WORLD, parts={"a": 3}),
        lambda: set_reduction(nn.Linear(2, 2), "bf16"),
    ]
    if rank < 2:
        calls.append(lambda: reduction("two-level", mesh).all_reduce(torch.empty(8), pair))
    return [ranks.refusal(ConfigError, call) for call in calls]


# --- what is expected of it ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict[str, object]]:
    return ranks.run(measure, 4)


CASES = [(name, size) for name in FLAT for size in WORLDS] + [("two-level", 4)]
cases = pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name} of {size}" for name, size in CASES])


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_is_that_of_fp64_and_the_same_on_all_ranks(name, size, dtype, results):
    limit = min(SNR[name], 45) if dtype == torch.bfloat16 else SNR[name]
    for count in COUNTS:
        found = [results[rank][f"{name} {size}"][f"all {count} {dtype}"] for rank in range(size)]
        assert found[0].dtype == dtype and all(torch.equal(found[0], other) for other in found), count
        if count > 1:
            assert sqnr_db(means(size, count, dtype), found[0]) > limit - (3 if count < 100 else 0), count


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_make_the_sum(name, size, dtype, results):
    for count in COUNTS:
        parts = torch.cat([results[rank][f"{name} {size}"][f"part {count} {dtype}"] for rank in range(size)])
        assert parts.numel() >= count and not parts[count:].any(), count
        if count > 1:
            exact = means(size, count, dtype) * size
            assert sqnr_db(exact, parts[:count]) > SNR[name] - (3 if count < 100 else 0), count


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_rank_changes_nothing(name, results):
    if name != "two-level":
        for count in COUNTS:
            assert torch.equal(results[0][f"{name} 1"][f"all {count} torch.float32"], gradient(0, count))
            assert results[0][f"{name} 1"][f"sent {count} torch.float32"] == 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_are_rounded_once(size, results):
    """The oracle: each rank's part quantised by the specification, summed in FP64."""
    each = -(-1003 // size)
    sums = torch.zeros(size, each, dtype=torch.float64)
    for rank in range(size):
        padded = torch.zeros(each * size)
        padded[:1003] = gradient(rank, 1003)
        sums += dequantize(quantize(padded.view(size, each), E4M3, TILE_1x128)).double()
    found = torch.stack([results[rank][f"fp8-block {size}"]["part 1003 torch.float32"] for rank in range(size)])
    torch.testing.assert_close(found.double(), sums, rtol=3e-7, atol=1e-12)


def test_a_ring_rounds_at_every_hop():
    """The oracle: ml_dtypes' E4M3 and numpy's FP16, hop by hop, as far as both are finite."""
    torch.manual_seed(1)
    codes = (torch.randn(4, 500) * 100).clamp(-448, 448).to(E4M3.dtype)
    codes[:, 0] = torch.tensor([448.0, 448, 448, 448]).to(E4M3.dtype)
    codes[:, 1] = torch.tensor([448.0, 0.001953125, 0, 0]).to(E4M3.dtype)
    values = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    for rank in range(4):
        total = values[(rank + 1) % 4]
        for hop in (2, 3, 4):
            added = total.astype(np.float16) + values[(rank + hop) % 4].astype(np.float16)
            total = np.clip(added, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(ring_sum(codes, rank).view(torch.uint8).numpy(), total.view(np.uint8))
    assert float(ring_sum(codes, 0)[0]) == 448


@pytest.mark.parametrize(("size", "decibels"), [(2, 3), (4, 5)])
def test_sums_in_fp8_are_worse(size, decibels, results):
    found = {
        name: torch.cat([results[rank][f"{name} {size}"]["part 1003 torch.float32"] for rank in range(size)])[:1003]
        for name in ("fp8-block", "fp8-lm")
    }
    errors = {name: sqnr_db(means(size, 1003) * size, value) for name, value in found.items()}
    assert errors["fp8-block"] > errors["fp8-lm"] + decibels


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_not_finite_arrives_everywhere(name, results):
    for rank in range(4):
        found = results[rank][f"{name} broken"]
        assert (~found.isfinite()).nonzero().flatten().tolist() == [5, 131, 299]
        others = torch.ones(300, dtype=torch.bool)
        others[[5, 131, 299]] = False
        assert sqnr_db(means(4, 300)[others], found[others]) > SNR[name]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_list_of_tensors(name, results):
    found = results[2][f"{name} tensors"]
    assert sqnr_db(means(4, 600).view(20, 30).t(), found["weight"]) > SNR[name]
    assert sqnr_db(means(4, 70, torch.bfloat16), found["half"]) > min(SNR[name], 42) - 2
    # Values of a thousand times the size beside the others, in the same group of 128.
    assert sqnr_db(means(4, 9) * 1000, found["bias"]) > SNR[name] - 4
    assert found["none"].shape == (0, 4)


def test_bytes_on_the_wire(results):
    sent = {name: results[0][f"{name} 4"]["sent 1003 torch.float32"] for name in FLAT}
    each = 251  # ceil(1003 / 4)
    assert sent["fp32"] == 3 * 4 * each and sent["bf16"] == sent["bf16-plain"] == 3 * 2 * each
    assert sent["fp8-block"] == 3 * message_bytes(each) < 0.53 * sent["bf16"] + 48
    assert sent["fp8-lm"] == 3 * each + 2 * 8 * 3 // 4  # and two numbers of every rank


def test_only_what_a_host_has_summed_leaves_it(results):
    assert results[0]["levels"] == {"inner": 4096 * 2 // 2, "outer": message_bytes(1024), "all": 4096 + 1040}


def test_mu_is_halved_after_saturation_and_else_grows(results):
    expected = [0.25 * GROWTH, 0.25 * GROWTH**2, 0.25 * GROWTH**3, GROWTH]  # the last one saturates
    expected += [0.5 * GROWTH, 0.5 * GROWTH**2]
    for rank in range(4):
        assert results[rank]["mu"] == pytest.approx(expected, rel=1e-6)


def test_mu_is_halved_from_one_code_in_100_000(results):
    for rank in range(4):
        assert results[rank]["mu at the threshold"] == pytest.approx([GROWTH**2, GROWTH / 2], rel=1e-6)


@pytest.mark.parametrize("scattered", [False, True])
def test_mu_is_halved_where_the_sum_saturates(scattered, results):
    """It starts at 1 / sqrt(ranks). Sums of four equal gradients are twice what E4M3 can say, then exactly that."""
    expected = [0.5 * GROWTH, 0.25 * GROWTH, 0.125 * GROWTH]
    for rank in range(4):
        assert results[rank]["mu of equal gradients"][scattered] == pytest.approx(expected, rel=1e-6)


def test_mu_goes_on_from_the_state_of_any_rank(results):
    for rank in range(4):
        first, other = results[rank]["mu of a resumed run"]
        assert first == other == pytest.approx(0.25 * GROWTH)


def test_a_gradient_of_zeros_stays_zero(results):
    assert torch.equal(results[0]["zeros"], torch.zeros(40))


def mean_gradients() -> dict[str, torch.Tensor]:
    model = small_model().double()
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(16, 24, generator=generator)
        (model(x.double()).square().mean() / 4).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("engine", "factor"), [("ddp", 1), ("fsdp", 1), ("fsdp, sums", 4)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_engines_of_pytorch(engine, factor, name, results):
    expected = {key: value * factor for key, value in mean_gradients().items()}
    for rank in range(4):
        found = results[rank][f"{name} {engine}"]["gradients"]
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert sqnr_db(value, found[key]) > SNR[name] - 6, key


def test_states_have_the_names_of_tensors(results):
    names = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    keys = {f"{name}.{which}" for name in names for which in ("mu", "saturated")}
    assert set(results[0]["fp8-lm ddp"]["state"]) == keys
    state = results[0]["fp8-lm fsdp"]["state"]
    assert set(state) == {f"{unit}.weight.{which}" for unit in ("0", "2") for which in ("mu", "saturated")}
    own = [results[rank]["fp8-lm fsdp"]["state"]["0.weight.mu"] for rank in range(4)]
    assert all(torch.equal(own[0], mu) for mu in own)
    scheme = FP8LM()
    scheme.load_state_dict(state)
    assert scheme.state_dict() == state and results[0]["bf16 ddp"]["state"] == {}


def test_both_levels_have_a_state_per_gradient(results):
    assert results[0]["states by level"] == ["inner.a.mu", "inner.b.mu", "outer.a.mu", "outer.b.mu"]


def test_errors_say_what_to_do(results):
    words = ("pad the gradient", "must be flat", "parts of 3 values", "call fully_shard", "over all ranks of its mesh")
    said = results[0]["errors"]
    assert len(said) == 5 and all(word in text for word, text in zip(words, said, strict=True))


def test_names_and_states_are_checked():
    with pytest.raises(ConfigError, match="Did you mean 'fp8-block'"):
        reduction("fp8-blok")
    with pytest.raises(ConfigError, match="pass mesh="):
        reduction("two-level")
    with pytest.raises(ConfigError, match="is neither"):
        reduction("fp8-lm").load_state_dict({"w.nu": torch.tensor(1.0)})
    with pytest.raises(ConfigError, match="has no state"):
        reduction("bf16").load_state_dict({"w.mu": torch.tensor(1.0)})
