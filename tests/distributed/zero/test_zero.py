"""`GreedyZeRO` against the optimizer inside on one process: the same bits, whatever the ranks, tiers and gradients.

One set of four processes computes everything that the tests below look at; two ranks are a group of them.
"""

import copy
import io
import itertools

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.distributed import GreedyZeRO, merge_state_dicts
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.nn.telemetry import Telemetry
from octavo.optim import convert
from octavo.tensor import FP8Tensor

WORLDS = (2, 4)
STEPS = 3
SHAPES = {"embed": (50, 64), "w": (96, 64), "v": (64, 96), "norm": (64,), "tiny": (1,), "empty": (0, 8)}
CASES = {
    "fp32": {"states": "fp32", "dtype": torch.float32},
    "exact, clipped": {"states": "exact", "clip": 0.05},
    "fp8": {"states": "fp8", "keep": octavo.optim.keep_none},
    "fp8-lm": {"states": "fp8-lm", "clip": 0.05},
    "fp8 weights": {"states": "fp8", "fp8": True, "clip": 0.05},
    "fp8-min, nearest": {"states": "fp8-min", "fp8": True, "rounding": "nearest"},
    "lion": {"rule": "Lion", "states": "fp8"},
    "muon": {"rule": "Muon", "states": "fp8", "clip": 0.05},
}


def parameters(dtype=torch.bfloat16, fp8=False) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator).to(dtype)
        made[name] = nn.Parameter(FP8Tensor.from_tensor(value) if fp8 and name in ("w", "v") else value)
    made["frozen"] = nn.Parameter(torch.ones(40, 40, dtype=dtype), requires_grad=False)
    return made


def set_gradients(named: dict[str, nn.Parameter], step: int, rank: int = 0, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for name, parameter in named.items():
        value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = value if parameter.requires_grad and name not in without else None


def optimizer_of(
    named: dict[str, nn.Parameter], rule="AdamW", dtype=None, fp8=False, **settings
) -> octavo.optim.Optimizer:
    groups = [list(named.items())[::2], list(named.items())[1::2]]
    return getattr(octavo.optim, rule)(
        [{"params": groups[0]}, {"params": groups[1], "lr": 3e-3, "clip": 0.5}], lr=1e-2, weight_decay=0.1, **settings
    )


def start(case: str) -> tuple[dict[str, nn.Parameter], octavo.optim.Optimizer]:
    settings = CASES[case]
    named = parameters(settings.get("dtype", torch.bfloat16), settings.get("fp8", False))
    return named, optimizer_of(named, **settings)


def bits(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    held = {}
    for name, parameter in named.items():
        parts = (parameter.codes, parameter.scale) if isinstance(parameter, FP8Tensor) else (parameter.detach(),)
        held |= {f"{name}.{index}": part.clone().view(torch.uint8) for index, part in enumerate(parts)}
    return held


def one_process(case: str, gradients) -> tuple[dict[str, torch.Tensor], octavo.optim.Optimizer]:
    named, optimizer = start(case)
    for step in range(STEPS):
        gradients(named, step)
        optimizer.step()
    return bits(named), optimizer


# --- what the ranks do -----------------------------------------------------------------------------------------------


def measure(rank: int, world: int) -> dict[str, object]:
    groups = {size: dist.new_group(list(range(size))) for size in WORLDS}
    found: dict[str, object] = {}
    for size, group in groups.items():
        if rank < size:
            for case in CASES:
                found[f"{case} {size}"] = same_gradients(case, group)
            found[f"own {size}"] = own_gradients(rank, group)
            found[f"pieces {size}"] = own_gradients(rank, group, bucket_mb=1e-4 * size)
            found[f"not finite {size}"] = not_finite(rank, group)
            found[f"few {size}"] = few_tensors(rank, group)
            found[f"absent {size}"] = absent(rank, group)
    found["schemes"] = {name: own_gradients(rank, groups[4], name)["bits"] for name in ("fp32", "fp8-block", "fp8-lm")}
    found["saved"] = saved(rank, groups[4])
    found["ddp"] = after_ddp(rank)
    found["group added"] = added(rank, groups[4])
    found["by GradScaler"] = by_grad_scaler()
    found["errors"] = errors(rank)
    return found


def same_gradients(case: str, group: dist.ProcessGroup) -> dict[str, object]:
    named, optimizer = start(case)
    zero = GreedyZeRO(optimizer, group, reduction="fp32" if case == "fp32" else "bf16")
    for step in range(STEPS):
        set_gradients(named, step)
        zero.step()
    held = sorted(entry.name for entry in optimizer.entries() if optimizer.state.get(entry.parameter))
    return {
        "bits": bits(named),
        "held": held,
        "owned": sorted(optimizer.entries()[number].name for number in zero.assignment.of(zero.rank)),
        "norm": optimizer.grad_norm,
        "gradients": [name for name, parameter in named.items() if parameter.grad is not None],
        "state": zero.state_dict(),
        "sent": zero.sent,
    }


def own_gradients(rank: int, group: dist.ProcessGroup, reduction="bf16", **settings) -> dict[str, object]:
    named, optimizer = start("exact, clipped")
    zero = GreedyZeRO(optimizer, group, reduction=reduction, **settings)
    for step in range(STEPS):
        set_gradients(named, step, rank)
        zero.step()
        zero.zero_grad()
    return {"bits": bits(named), "sent": zero.sent}


def not_finite(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """One value on one rank: no rank steps. Then a step of which one rank has no tensor."""
    named, optimizer = start("fp8")
    zero = GreedyZeRO(optimizer, group)
    set_gradients(named, 0, rank)
    if rank == 1:
        named["w"].grad[3, 3] = torch.inf
    zero.step()
    first = {"bits": bits(named), "skipped": int(optimizer.skipped)}
    set_gradients(named, 1)
    zero.step()
    return {**first, "after": bits(named), "in all": int(optimizer.skipped)}


def few_tensors(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """One tensor: all ranks but one have none, and take part all the same."""
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = octavo.optim.AdamW([weight], lr=0.1, clip=1.0)
    zero = GreedyZeRO(optimizer, group)
    weight.grad = torch.full((2, 3), float(rank))
    zero.step()
    return {"weight": weight.detach(), "norm": optimizer.grad_norm, "loads": zero.assignment.loads}


def absent(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """`w` has a gradient on the last rank only, `norm` on none."""
    named, optimizer = start("fp8")
    zero = GreedyZeRO(optimizer, group)
    for step in range(STEPS):
        last = rank == group.size() - 1
        set_gradients(named, step, without=("norm",) if last else ("norm", "w"))
        zero.step()
    numbers = {entry.name: entry.number for entry in optimizer.entries()}
    return {"bits": bits(named), "stepped": numbers["norm"] in zero.state_dict()["state"]}


def saved(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    named, optimizer = start("fp8 weights")
    zero = GreedyZeRO(optimizer, group)
    set_gradients(named, 0)
    zero.step()
    part, whole, elsewhere = zero.state_dict(), zero.full_state_dict(), zero.full_state_dict(to=2)
    continued = []
    for state in (part, merge_state_dicts(gather(part, group))):
        others, again = start("fp8 weights")
        with torch.no_grad():
            for name, parameter in others.items():
                parameter.copy_(named[name])
        resumed = GreedyZeRO(again, group)
        resumed.load_state_dict(state)
        set_gradients(others, 1)
        resumed.step()
        continued.append(bits(others))
    return {"part": part, "whole": whole, "elsewhere": elsewhere, "continued": continued}


def gather(part, group: dist.ProcessGroup) -> list[object]:
    """Return the parts of all ranks, as files would bring them: objects of PyTorch's own collectives hold no FP8."""
    written, parts = io.BytesIO(), [b""] * group.size()
    torch.save(part, written)
    dist.all_gather_object(parts, written.getvalue(), group=group)
    return [torch.load(io.BytesIO(read)) for read in parts]


def after_ddp(rank: int) -> dict[str, object]:
    """A model under DDP, with a scheduler and a closure; and the same with ranks that reduce themselves."""
    found = {}
    for way in ("ddp", "zero"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))
        inside = octavo.optim.AdamW(model.named_parameters(), lr=0.01, states="fp32")
        zero = GreedyZeRO(inside, reduction=None if way == "ddp" else "fp32")
        schedule = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.5)
        called = DistributedDataParallel(model) if way == "ddp" else model

        def closure(zero=zero, called=called):
            zero.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
            loss = called(x).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(4):
            losses.append(float(zero.step(closure)))
            schedule.step()
        weights = [p.detach() for p in model.parameters()]
        found[way] = {"losses": losses, "lr": inside.param_groups[0]["lr"], "weights": weights}
    return found


def added(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    named = parameters()
    first, second = dict(list(named.items())[:3]), dict(list(named.items())[3:])
    inside = octavo.optim.AdamW(list(first.items()), states="fp32")
    zero = GreedyZeRO(inside, group)
    before = zero.assignment.owners
    zero.add_param_group({"params": list(second.items()), "lr": 0.5})
    set_gradients(named, 0)
    zero.step()
    kept = before == zero.assignment.owners[: len(before)]
    return {"bits": bits(named), "kept": kept, "groups": len(zero.param_groups)}


def step_scaled(optimizer, named: dict[str, nn.Parameter], overflows: bool = False) -> None:
    """Step by a GradScaler, with equal gradients on all ranks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    set_gradients(named, 0)
    for parameter in named.values():
        if parameter.grad is not None:
            parameter.grad.mul_(torch.inf if overflows else 4.0)
    scaler.step(optimizer)
    optimizer.zero_grad()


def by_grad_scaler() -> list[dict[str, torch.Tensor]]:
    """Return the weights of a wrapped and of a plain optimizer, whose second step overflows."""
    found = []
    for wraps in (False, True):
        named = parameters()
        optimizer = octavo.optim.AdamW(named.items(), lr=1e-2)
        stepped = GreedyZeRO(optimizer, reduction=None) if wraps else optimizer
        for overflows in (False, True, False):
            step_scaled(stepped, named, overflows)
        found.append(bits(named))
    return found


def errors(rank: int) -> list[str]:
    scaled = {"w": nn.Parameter(torch.ones(4, 4))}
    weight = nn.Parameter(torch.ones(4, 4))
    stepped = octavo.optim.AdamW([nn.Parameter(torch.ones(4))])
    stepped.param_groups[0]["params"][0].grad = torch.ones(4)
    stepped.step()
    zero = GreedyZeRO(octavo.optim.AdamW([weight]))
    part = zero.state_dict()
    weight.grad = torch.ones(4, 4).to_sparse()
    calls = [
        (ConfigError, lambda: GreedyZeRO(torch.optim.AdamW([weight]))),
        (ConfigError, lambda: GreedyZeRO(stepped)),
        (ConfigError, lambda: GreedyZeRO(octavo.optim.AdamW([weight], release=True))),
        (ConfigError, lambda: GreedyZeRO(octavo.optim.AdamW([weight], gradients="fp8"))),
        (ConfigError, lambda: GreedyZeRO(octavo.optim.AdamW([weight]), bucket_mb=0)),
        (UnsupportedError, zero.step),
        (UnsupportedError, lambda: step_scaled(GreedyZeRO(octavo.optim.AdamW(scaled.values())), scaled)),
        (UnsupportedError, lambda: copy.deepcopy(zero)),
        (CheckpointError, lambda: zero.load_state_dict({**part, "rank": (rank + 1) % 4})),
        (CheckpointError, lambda: zero.load_state_dict({**part, "ranks": 8})),
    ]
    return [ranks.refusal(kind, call) for kind, call in calls]


# --- what is expected of it ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict[str, object]]:
    return ranks.run(measure, 4)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_state(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[number].keys() == other[number].keys()
        and all(torch.equal(one[number][name].float(), t.float()) for name, t in state.items())
        for number, state in other.items()
    )


worlds = pytest.mark.parametrize("size", WORLDS)


@worlds
@pytest.mark.parametrize("case", CASES)
def test_weights_and_states_are_those_of_one_process(case, size, results):
    expected, optimizer = one_process(case, set_gradients)
    found = [results[rank][f"{case} {size}"] for rank in range(size)]
    assert all(equal(part["bits"], expected) for part in found)
    assert all(torch.equal(part["norm"], optimizer.grad_norm) for part in found)
    merged, alone = merge_state_dicts([part["state"] for part in found[::-1]]), optimizer.state_dict()
    assert same_state(merged["state"], alone["state"])
    assert merged["param_groups"] == alone["param_groups"] and merged.keys() == alone.keys()


@worlds
@pytest.mark.parametrize("case", CASES)
def test_a_state_is_on_its_owner_only(case, size, results):
    trained = sorted(SHAPES)
    found = [results[rank][f"{case} {size}"] for rank in range(size)]
    assert sorted(name for part in found for name in part["held"]) == trained
    assert sorted(name for part in found for name in part["gradients"]) == trained
    for part in found:
        assert set(part["held"]) <= set(part["owned"])


def mean_gradients(size: int, dtype=torch.bfloat16):
    """Set the means of the ranks' gradients: BF16 on the wire, added in FP32 in the order of ranks."""

    def gradients(named, step):
        totals: dict[str, torch.Tensor] = {}
        for rank in range(size):
            set_gradients(named, step, rank)
            for name, parameter in named.items():
                if parameter.grad is not None:
                    totals[name] = totals.get(name, 0) + parameter.grad.float()
        for name, total in totals.items():
            named[name].grad = (total / size).to(dtype)

    return gradients


@worlds
@pytest.mark.parametrize("key", ["own", "pieces"])
def test_gradients_of_ranks_are_averaged(key, size, results):
    expected, _ = one_process("exact, clipped", mean_gradients(size))
    assert all(equal(results[rank][f"{key} {size}"]["bits"], expected) for rank in range(size))


def test_ranks_agree_with_every_scheme(results):
    for name in ("fp32", "fp8-block", "fp8-lm"):
        first, *others = [results[rank]["schemes"][name] for rank in range(4)]
        assert all(equal(first, other) for other in others)
    assert equal(results[0]["schemes"]["fp32"], results[0]["own 4"]["bits"])
    assert not equal(results[0]["schemes"]["fp8-block"], results[0]["own 4"]["bits"])


@worlds
def test_a_value_that_is_not_finite_on_one_rank_stops_all(size, results):
    untouched, _ = start("fp8")
    named, optimizer = start("fp8")
    set_gradients(named, 0)
    named["w"].grad[3, 3] = torch.inf
    optimizer.step()
    set_gradients(named, 1)
    optimizer.step()
    for rank in range(size):
        found = results[rank][f"not finite {size}"]
        assert equal(found["bits"], bits(untouched)) and found["skipped"] == 1
        assert equal(found["after"], bits(named)) and found["in all"] == 1


@worlds
def test_a_rank_without_tensors_takes_part(size, results):
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    weight.grad = torch.full((2, 3), (size - 1) / 2)
    optimizer = octavo.optim.AdamW([weight], lr=0.1, clip=1.0)
    optimizer.step()
    found = [results[rank][f"few {size}"] for rank in range(size)]
    assert found[0]["loads"] == (6 * 8, *[0] * (size - 1))
    for part in found:
        assert torch.equal(part["weight"], weight) and torch.equal(part["norm"], optimizer.grad_norm)


@worlds
def test_a_parameter_without_gradient_is_not_stepped_and_one_of_a_single_rank_is(size, results):
    def gradients(named, step):
        set_gradients(named, step, without=("norm",))
        named["w"].grad = (named["w"].grad.float() / size).bfloat16()

    expected, _ = one_process("fp8", gradients)
    for rank in range(size):
        found = results[rank][f"absent {size}"]
        assert equal(found["bits"], expected) and not found["stepped"]


def test_states_come_back_in_parts_and_as_a_whole(results):
    named, optimizer = start("fp8 weights")
    set_gradients(named, 0)
    optimizer.step()
    alone = copy.deepcopy(optimizer.state_dict())
    set_gradients(named, 1)
    optimizer.step()
    found = [results[rank]["saved"] for rank in range(4)]
    assert [part["whole"] is None for part in found] == [False, True, True, True]
    assert [part["elsewhere"] is None for part in found] == [True, True, False, True]
    for whole in (found[0]["whole"], found[2]["elsewhere"], merge_state_dicts([part["part"] for part in found])):
        assert same_state(whole["state"], alone["state"]) and whole.keys() == alone.keys()
        start("fp8 weights")[1].load_state_dict(whole)  # one process takes it
    for part, way in itertools.product(found, (0, 1)):
        assert equal(part["continued"][way], bits(named))


def test_parts_that_do_not_make_a_whole_are_an_error(results):
    parts = [results[rank]["saved"]["part"] for rank in range(4)]
    for wrong in (parts[:3], [*parts[:3], parts[2]], [], [parts[0] | {"ranks": 1}, parts[1]]):
        with pytest.raises(CheckpointError, match="one part per rank is needed"):
            merge_state_dicts(wrong)


def test_under_ddp_nothing_is_reduced_again(results):
    for rank in range(4):
        ddp, zero = results[rank]["ddp"]["ddp"], results[rank]["ddp"]["zero"]
        assert ddp["lr"] == zero["lr"] == pytest.approx(0.01 / 16) and ddp["losses"][-1] < ddp["losses"][0]
        assert ddp["losses"] == pytest.approx(zero["losses"], rel=1e-4)
        for mine, first in zip(ddp["weights"], results[0]["ddp"]["ddp"]["weights"], strict=True):
            assert torch.equal(mine, first)


def test_a_group_that_is_added_is_assigned(results):
    named = parameters()
    items = list(named.items())
    optimizer = octavo.optim.AdamW(items[:3], states="fp32")
    optimizer.add_param_group({"params": items[3:], "lr": 0.5})
    set_gradients(named, 0)
    optimizer.step()
    for rank in range(4):
        found = results[rank]["group added"]
        assert equal(found["bits"], bits(named)) and found["kept"] and found["groups"] == 2


def test_weights_travel_as_they_are_stored(results):
    """FP8: one byte per value and 4 per row, besides BF16 parameters; to each of 3 ranks, and the mask of gradients."""
    sent = sum(results[rank]["fp8 weights 4"]["sent"] for rank in range(4))
    values = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    weights = sum(size + 4 * SHAPES[n][0] if n in ("w", "v") else 2 * size for n, size in values.items())
    least = STEPS * 3 * (weights + 2 * sum(values.values()))
    assert least <= sent < 1.5 * least  # the rest is padding: the ranks' parts are not equal


def test_a_grad_scaler_steps_all_ranks_or_none(results):
    assert all(equal(*result["by GradScaler"]) for result in results)


def test_errors_say_what_to_do(results):
    words = ("octavo.optim", "states already", "release=True", "release=True", "bucket_mb")
    words += ("sparse=False", "GradScaler", "copied", "merge_state_dicts", "merge_state_dicts")
    for said, word in zip(results[0]["errors"], words, strict=True):
        assert word in said
    with pytest.raises(ConfigError, match="init_process_group"):
        GreedyZeRO(octavo.optim.AdamW([nn.Parameter(torch.ones(2))]))


def _telemetry(rank: int, ranks: int, kind: str) -> tuple[int, list[int], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(
        octavo.nn.Linear(16, 16, dtype=torch.bfloat16), octavo.nn.Linear(16, 16, dtype=torch.bfloat16)
    )
    telemetry = Telemetry(model, group=dist.new_group())
    parameters = list(model.named_parameters())
    if kind == "greedy":
        optimizer = GreedyZeRO(octavo.optim.AdamW(parameters, lr=1e-3))
    else:
        optimizer = ZeroRedundancyOptimizer([p for _, p in parameters], torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        model(torch.randn(16, 16, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    telemetry.wait()
    taken = list(iter(telemetry.snapshot, None))
    roles = [row.role in ("input", "weight") for row in telemetry.rows]
    return telemetry.done, [step for step, _ in taken], all(not np.isnan(values[roles, 0]).any() for _, values in taken)


@pytest.mark.parametrize("kind", ["greedy", "pytorch"])
def test_telemetry_counts_a_step_of_all_ranks_once(kind):
    assert ranks.run(_telemetry, 2, kind) == [(3, [1, 2, 3], True)] * 2


def _reordered(rank: int, ranks: int, whole: dict) -> list[str]:
    """Return the names of this rank's parameters whose moments are not those of a single process."""
    zero = GreedyZeRO(octavo.optim.AdamW(list(reversed(parameters().items())), states="fp8"))
    zero.load_state_dict(whole)
    names = whole["param_groups"][0]["param_names"]
    mine = [entry for entry in zero.optimizer.entries() if zero.assignment.owners[entry.number] == rank]
    states = {entry.name: zero.optimizer.state[entry.parameter] for entry in mine if entry.parameter.requires_grad}
    saved = {name: convert.with_stored_names(whole["state"][names.index(name)]) for name in states}
    return [n for n, state in states.items() if not same_state({0: state}, {0: saved[n]})] + [str(len(states))]


def test_a_whole_state_is_matched_by_names():
    named = parameters()
    optimizer = octavo.optim.AdamW(list(named.items()), states="fp8")
    set_gradients(named, 0)
    optimizer.step()
    found = ranks.run(_reordered, 2, optimizer.state_dict())
    assert all(len(names) == 1 for names in found) and sum(int(names[0]) for names in found) == len(SHAPES)
