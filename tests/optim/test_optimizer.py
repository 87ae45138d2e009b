"""The optimizers as PyTorch sees them: updates, clipping, skipped steps, released gradients, state dicts, bad input."""

import copy
import io
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from network import backward, model
from safetensors.torch import load, save
from torch import nn

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.kernels.storage import Storage
from octavo.nn.functional import linear
from octavo.optim import TIERS, Adam, AdamW, Lion, Muon, bytes_per_parameter, convert, flatten, keep_none, unflatten
from octavo.optim.settings import largest_update
from octavo.optim.tensors import value_of
from octavo.recipes import load as load_recipe
from octavo.tensor import FP8Tensor


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_fp32_states_are_pytorchs(ours, theirs, decay):
    a, b = model(), model()
    train(a, ours(a.parameters(), lr=1e-3, weight_decay=decay, states="fp32"), 20)
    train(b, theirs(b.parameters(), lr=1e-3, weight_decay=decay), 20)
    for mine, other in zip(weights(a), weights(b), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-15])
@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_small_gradients_move_weights_as_in_pytorch_whatever_eps(ours, theirs, eps):
    sizes = torch.tensor([10.0**-k for k in range(4, 18)])[:, None]
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.zeros(14, 64)) for _ in range(2))
    mine, other = ours([a], eps=eps, weight_decay=0.0, states="fp32"), theirs([b], eps=eps, weight_decay=0.0)
    for _ in range(5):
        a.grad = sizes * torch.randn(14, 64)
        b.grad = a.grad.clone()
        mine.step()
        other.step()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("eps", [0.0, 1e-20])
def test_gradients_whose_squares_underflow_move_nothing_far(states, eps):
    weight = nn.Parameter(torch.zeros(2, 4096))
    optimizer = AdamW([weight], lr=1.0, eps=eps, weight_decay=0.0, states=states)
    for power in (-22.0, -25.0, -30.0, -45.0):
        for _ in range(3):
            weight.grad = torch.full_like(weight, 10.0**power)
            optimizer.step()
    assert float(weight.detach().abs().max()) < 6.0 and int(optimizer.clamped) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("states", TIERS)
def test_gradients_whose_squares_overflow_are_not_the_last_that_move_a_weight(states, device):
    """The square of 1e20 is no FP32 number. An infinite second moment would never decay."""
    weight = nn.Parameter(torch.ones(32, 32, device=device))
    optimizer = AdamW([weight], lr=2.0**-6, weight_decay=0.0, states=states, keep=keep_none)
    moved = []
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 1e20)
        optimizer.step()
        moved.append(bool((weight < before).all()))
    assert all(moved) and all(t.float().isfinite().all() for t in optimizer.state[weight].values())


def test_fp32_moments_are_not_bounded_by_max_update():
    weight = nn.Parameter(torch.zeros(64, 128))
    bounded = nn.Parameter(torch.zeros(64, 128))
    groups = [{"params": [weight], "states": "fp32"}, {"params": [bounded], "states": "fp8"}]
    optimizer = AdamW(groups, lr=1.0, weight_decay=0.0, max_update=0.25)
    for parameter in (weight, bounded):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert weight.detach().sub(-1.0).abs().max() < 1e-6
    assert int(optimizer.clamped) == bounded.numel() and (bounded == -0.25).all()


@pytest.mark.parametrize("rounded", ["first", "second"])
def test_one_moment_that_is_not_fp32_is_enough_for_the_bound(rounded):
    states = replace(TIERS["fp32"], name="mixed", **{rounded: getattr(TIERS["fp8"], rounded)})
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = AdamW([weight], lr=1.0, weight_decay=0.0, max_update=0.25, states=states, keep=keep_none)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert int(optimizer.clamped) == weight.numel() and (weight == -0.25).all()


def test_lion_is_its_own_definition():
    a, b = model(), model()
    train(a, Lion(a.parameters(), lr=1e-3, weight_decay=0.1, states="fp32"), 5)
    momentum = [torch.zeros_like(p, dtype=torch.float64) for p in b.parameters()]
    value = [p.detach().double() for p in b.parameters()]
    for step in range(5):
        b.zero_grad()
        for p, v in zip(b.parameters(), value, strict=True):
            p.data = v.float()
        backward(b, step)
        for i, p in enumerate(b.parameters()):
            g = p.grad.double()
            value[i] = value[i] * (1 - 1e-4) - 1e-3 * torch.sign(0.9 * momentum[i] + 0.1 * g)
            momentum[i] = 0.99 * momentum[i] + 0.01 * g
    for p, v in zip(a.parameters(), value, strict=True):
        torch.testing.assert_close(p.detach().double(), v, rtol=0, atol=2e-7)


@pytest.mark.parametrize("states", TIERS)
def test_a_model_learns_as_with_fp32(states):
    a, b = model(torch.bfloat16), model()
    optimizer = AdamW(a.parameters(), lr=1e-3, states=states)
    train(a, optimizer, 30)
    train(b, torch.optim.AdamW(b.parameters(), lr=1e-3), 30)
    losses = backward(a, 99), backward(b, 99)
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=0.02)
    assert int(optimizer.skipped) == int(optimizer.clamped) == 0


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("states", TIERS)
def test_bytes_are_counted_in_the_tensors(states, weight):
    value = torch.randn(32, 256)
    if weight == torch.float8_e4m3fn:
        parameter = nn.Parameter(FP8Tensor.from_tensor(value.bfloat16()))
    else:
        parameter = nn.Parameter(value.to(weight))
    parameter.grad = torch.zeros_like(value, dtype=parameter.dtype)
    optimizer = AdamW([parameter], states=states, keep=keep_none)
    optimizer.step()
    said = bytes_per_parameter(states, weight=weight, gradient=parameter.dtype, shape=(32, 256))
    assert optimizer.report() == pytest.approx({"master": 0.0, **said})


def test_clipping_is_that_of_pytorch():
    a, b = model(), model()
    ours = AdamW(a.parameters(), lr=1e-3, states="fp32", clip=0.05)
    theirs = torch.optim.AdamW(b.parameters(), lr=1e-3)
    for step in range(5):
        ours.zero_grad(), theirs.zero_grad()
        backward(a, step, 10.0), backward(b, step, 10.0)
        norm = nn.utils.clip_grad_norm_(b.parameters(), 0.05)
        ours.step(), theirs.step()
        assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-5) and norm > 0.05
    for mine, other in zip(weights(a), weights(b), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_groups_are_clipped_before_all():
    a, b = model(), model()
    groups = [{"params": list(a[0].parameters()), "clip": 0.01}, {"params": list(a[2].parameters())}]
    ours = Adam(groups, lr=1e-3, betas=(0.0, 0.999), eps=1.0, states="fp32", clip=0.1)
    theirs = torch.optim.Adam(b.parameters(), lr=1e-3, betas=(0.0, 0.999), eps=1.0)
    backward(a, 0, 10.0), backward(b, 0, 10.0)
    nn.utils.clip_grad_norm_(b[0].parameters(), 0.01)
    nn.utils.clip_grad_norm_(b.parameters(), 0.1)
    ours.step(), theirs.step()
    for mine, other in zip(weights(a), weights(b), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("states", ["fp8", "fp8-lm", "fp32"])
def test_a_step_without_finite_gradients_is_left_out(states, bad):
    net = model()
    optimizer = AdamW(net.parameters(), states=states)
    train(net, optimizer, 2)
    before = weights(net), copy.deepcopy(optimizer.state_dict()["state"])
    net[2].bias.grad[3] = bad
    optimizer.step()
    assert int(optimizer.skipped) == 1
    assert same(weights(net), before[0])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[k].view(-1).view(torch.uint8), v.view(-1).view(torch.uint8))
                   for k, v in before[1][number].items())  # fmt: skip


def test_it_takes_what_a_gradient_scaler_tells():
    a, b = model(), model()
    one, other = (AdamW(net.parameters(), states="fp8", clip=0.05) for net in (a, b))
    backward(a, 0, 1024.0), backward(b, 0)
    one.grad_scale, one.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    one.step(), other.step()
    assert same(weights(a), weights(b))
    one.found_inf = torch.tensor(1.0)
    one.step()
    assert same(weights(a), weights(b)) and int(one.skipped) == 1


def test_released_gradients_make_the_same_step():
    a, b = model(torch.bfloat16), model(torch.bfloat16)
    one, other = AdamW(a.parameters(), release=True), AdamW(b.parameters())
    for step in range(3):
        backward(a, step), backward(b, step)
        assert all(p.grad is None for p in a.parameters())
        one.step(), other.step()
        other.zero_grad()
    assert same(weights(a), weights(b))
    with pytest.raises(ConfigError, match="release"):
        AdamW(a.parameters(), release=True, clip=1.0)


@pytest.mark.parametrize("states", TIERS)
def test_a_saved_state_goes_on_bit_for_bit(states):
    a = model(torch.bfloat16)
    one = AdamW(a.named_parameters(), lr=1e-3, states=states, seed=7)
    train(a, one, 4)
    b = copy.deepcopy(a)
    other = AdamW(b.named_parameters(), lr=1.0, states=states)
    tensors, rest = flatten(one.state_dict())
    other.load_state_dict(unflatten(load(save(tensors)), json.loads(json.dumps(rest))))
    train(a, one, 3, first=4), train(b, other, 3, first=4)
    assert same(weights(a), weights(b))


@pytest.mark.parametrize("states", TIERS)
def test_pytorch_reads_an_export_and_is_read(states):
    a = model()
    ours = AdamW(a.parameters(), lr=3e-4, states=states, keep=keep_none, rounding="nearest")
    train(a, ours, 4)
    theirs = torch.optim.AdamW(a.parameters(), lr=1.0)
    theirs.load_state_dict(ours.export_state_dict())
    assert theirs.param_groups[0]["lr"] == 3e-4
    again = AdamW(a.parameters(), states=states, keep=keep_none)
    again.import_state_dict(theirs.state_dict())
    once, twice = (optimizer.export_state_dict()["state"] for optimizer in (ours, again))
    for number, values in once.items():
        assert {name: torch.equal(value, twice[number][name]) for name, value in values.items()} == dict.fromkeys(
            ("step", "exp_avg", "exp_avg_sq"), True
        )
    backward(a, 9)
    theirs.step()


@pytest.mark.parametrize("states", TIERS)
def test_states_are_converted_in_mid_run(states):
    net = model(torch.bfloat16)
    optimizer = AdamW(net.parameters(), lr=1e-3, states="exact", keep=keep_none)
    train(net, optimizer, 4)
    before = optimizer.master_weights()
    optimizer.convert_states(states)
    lost = {"fp32": 0, "exact": 0, "fp8": 2.0**-16, "fp8-lm": 2.0**-11, "fp8-min": 2.0**-8}[states]
    for one, other in zip(before, optimizer.master_weights(), strict=True):
        assert ((one - other).abs() <= lost * one.abs() + (1e-8 if lost else 0)).all()
    assert float(optimizer.state[net[0].weight]["step"]) == 4
    train(net, optimizer, 2, first=4)
    with pytest.raises(ConfigError, match="Did you mean 'exact'"):
        optimizer.convert_states("exakt")


def test_a_state_of_another_tier_shape_or_model_is_refused():
    net = model()
    optimizer = AdamW(net.parameters(), states="fp8")
    train(net, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    exact = AdamW(model().parameters(), states="exact")
    with pytest.raises(CheckpointError, match="another tier"):
        exact.load_state_dict(before)
    with pytest.raises(CheckpointError, match=r"\[160, 96\] there and \[160, 95\] here"):
        AdamW([nn.Parameter(torch.zeros(160, 95)), *list(net.parameters())[1:]], states="fp8").load_state_dict(before)
    with pytest.raises(CheckpointError, match="another model"):
        AdamW([net[0].weight], states="fp8").load_state_dict(before)
    with pytest.raises(CheckpointError, match="rule"):
        Adam(net.parameters(), states="fp8").load_state_dict(before)


def move_weights(optimizer):
    for entry in optimizer.entries():
        entry.parameter.data = entry.parameter.data.clone()


@pytest.mark.parametrize("change", [
    move_weights,
    lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    lambda optimizer: setattr(optimizer, "max_update", 0.1),
    lambda optimizer: setattr(optimizer, "rounding", "nearest"),
], ids=["weights", "states", "bound", "rounding"])  # fmt: skip
def test_what_has_changed_between_steps_is_seen(change):
    """As an optimizer sees it that has made no step before."""
    a = model(torch.bfloat16)
    one = AdamW(a.named_parameters(), lr=1e-3, seed=7)
    train(a, one, 1)
    b = copy.deepcopy(a)
    other = AdamW(b.named_parameters(), lr=1e-3)
    other.load_state_dict(one.state_dict())
    change(one), change(other)
    train(a, one, 2, first=1), train(b, other, 2, first=1)
    assert same(weights(a), weights(b)) and int(one.clamped) == int(other.clamped)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert all(torch.equal(t.float(), other.state[q][name].float()) for name, t in one.state[p].items())


def test_small_tensors_and_embeddings_are_kept_exactly():
    net = nn.ModuleDict({"embed": nn.Embedding(64, 128), "linear": nn.Linear(128, 64), "norm": nn.LayerNorm(128)})
    optimizer = AdamW(net.named_parameters())
    tiers = {e.name: optimizer.states_of(e).name for e in optimizer.entries()}
    assert tiers.pop("embed.weight") == "exact" and tiers.pop("linear.weight") == "fp8"
    assert set(tiers.values()) == {"fp32"}
    group = {"params": list(net["embed"].parameters()), "states": "fp8-min"}
    assert {AdamW([group]).states_of(e).name for e in AdamW([group]).entries()} == {"fp8-min"}


def test_it_is_an_optimizer_of_pytorch():
    net = model()
    net[0].bias.requires_grad_(False)
    optimizer = AdamW(net[0].parameters(), lr=1e-3)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 1e-4})
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    fired = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    frozen, version = net[0].bias.clone(), net[0].weight._version
    loss = optimizer.step(lambda: backward(net, 0))
    scheduler.step()
    assert float(loss) > 0 and fired == [1]
    assert torch.equal(frozen, net[0].bias) and not optimizer.state[net[0].bias]
    assert net[0].weight._version > version


def test_memory_in_another_order():
    a = torch.randn(6, 5, 3, 3)
    one = nn.Parameter(a.clone().to(memory_format=torch.channels_last))
    other = nn.Parameter(a.clone())
    for parameter in (one, other):
        optimizer = AdamW([parameter], states="fp32")
        for step in range(2):
            parameter.grad = torch.full_like(parameter, step + 0.5) * torch.arange(3)
            optimizer.step()
    assert torch.equal(one, other)
    eight = AdamW([one], states="fp8", keep=keep_none)
    one.grad = torch.ones(6, 5, 3, 3)  # other strides than the parameter
    eight.step()
    assert eight.state[one]["exp_avg_scale"].shape == (6, 1)


def test_scales_in_another_order_are_refused():
    """The kernels take their address, and rows one after the other."""
    weight = nn.Parameter(torch.randn(6, 256))
    optimizer = AdamW([weight], states="fp8", keep=keep_none)
    weight.grad = torch.randn(6, 256)
    optimizer.step()
    state = optimizer.state[weight]
    state["exp_avg_scale"] = state["exp_avg_scale"].t().contiguous().t()
    with pytest.raises(UnsupportedError, match=r"'exp_avg_scale' .* memory order"):
        optimizer.step()


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_an_fp8_weight_in_another_order_is_refused(part):
    stored = FP8Tensor.from_tensor(torch.randn(128, 128))
    codes = stored.codes.t().contiguous().t() if part == "codes" else stored.codes
    scale = stored.scale.repeat(1, 2)[:, :1] if part == "scale" else stored.scale
    weight = nn.Parameter(FP8Tensor(codes, scale, stored.granularity, stored.dtype))
    with pytest.raises(ConfigError, match=rf"its {part} .* contiguous"):
        AdamW([weight])


def test_a_learning_rate_of_zero_after_a_tensor():
    net = model()
    optimizer = AdamW(net.parameters(), lr=torch.tensor(0.5))
    train(net, optimizer, 1)
    before = weights(net)
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, 1)
    assert same(weights(net), before)


def test_bad_input():
    w = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="no tier 'fp9'"):
        AdamW([w], states="fp9")
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -1.0}, {"clip": 0.0}):
        with pytest.raises(ConfigError):
            AdamW([w], **wrong)
    with pytest.raises(ConfigError, match="neither"):
        AdamW([w], rounding="nearst")
    with pytest.raises(ConfigError, match="float64"):
        AdamW([nn.Parameter(torch.zeros(4, dtype=torch.float64))])
    with pytest.raises(ConfigError, match="gaps in memory"):
        AdamW([nn.Parameter(torch.zeros(4, 8)[:, ::2])])
    with pytest.raises(ConfigError, match="row-wise scales"):
        AdamW([nn.Parameter(FP8Tensor.from_tensor(torch.zeros(4, 4), granularity="tensor"))])
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="dense"):
        AdamW(embedding.parameters()).step()
    AdamW([w]).step()  # no gradient at all


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW, Muon])
@pytest.mark.parametrize("states", ["fp32", "fp8", "fp8-lm"])
def test_a_captured_step_is_the_step(states, kind):
    """Clipping, a learning rate that is a tensor, and steps that are skipped, in a CUDA graph."""
    nets = [model(torch.bfloat16).cuda() for _ in range(2)]
    made = [kind(net.named_parameters(), torch.tensor(1e-3, device="cuda"), states=states, clip=0.5) for net in nets]
    for net, optimizer in zip(nets, made, strict=True):
        optimizer.found_inf = torch.zeros(1, device="cuda")
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made[0].step()
    for step in range(4):
        for net, optimizer in zip(nets, made, strict=True):
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (step + 1))
            optimizer.found_inf.fill_(step == 2)
            generator = torch.Generator("cuda").manual_seed(step)
            for p in net.parameters():
                p.grad.copy_(torch.randn(p.shape, device="cuda", generator=generator))
        graph.replay(), made[1].step()
        assert same(*map(weights, nets)) and float(made[0].grad_norm) == float(made[1].grad_norm) > 0.5
    assert [int(optimizer.skipped) for optimizer in made] == [1, 1]
    counts = [float(optimizer.state[net[0].weight]["step"]) for net, optimizer in zip(nets, made, strict=True)]
    assert counts == [4, 4]


# --- the bound of an update -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.999), (0.5, 0.99), (0.0, 0.0), (0.9, 0.8)], ids=str
)
def test_the_bound_is_no_less_than_exact_moments_reach(betas):
    """The worst gradients there are grow or fall as c_i / d_i: tried in float64, over 20,000 steps."""
    beta1, beta2 = betas
    i = torch.arange(5000, dtype=torch.float64)
    c, d = (1 - beta1) * beta1**i, (1 - beta2) * beta2**i
    c, d = c[d > 1e-250], d[d > 1e-250]
    g = c / d
    reached = float((c * g).sum() / (d * g * g).sum().sqrt())
    bound = largest_update(betas)
    assert bound >= 10 and bound >= reached * 0.999
    assert bound == 10 or bound == math.inf or bound < reached * 1.02


@pytest.mark.parametrize("states", ["fp8", "exact"])
def test_updates_that_exact_moments_reach_are_not_clamped(states):
    """A gradient after 300 of next to nothing: with betas (0, 0.999) one may move a weight by 31 learning rates."""
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = AdamW([weight], lr=1e-3, betas=(0.0, 0.999), weight_decay=0.0, eps=1e-12, states=states)
    for step in range(301):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, float(step == 300 or step < 1) * (1e-3 if step < 1 else 1.0))
        optimizer.step()
    moved = (weight.detach() - before).abs().mean() / 1e-3
    assert 14 < moved < 18 and int(optimizer.clamped) == 0
    optimizer.max_update = 5.0
    weight.grad = torch.full_like(weight, 100.0)
    optimizer.step()
    assert int(optimizer.clamped) == weight.numel()


def test_betas_that_are_changed_change_the_bound():
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = AdamW([weight], lr=1e-3, betas=(0.9, 0.999), states="fp8", weight_decay=0.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)
    for step in range(300):
        weight.grad = torch.full_like(weight, float(step == 299))
        optimizer.step()
    assert int(optimizer.clamped) == 0 and float(weight.abs().mean()) > 0.011


# --- what changes between steps ---------------------------------------------------------------------------------------


def replaced(net, optimizer):
    """As accelerate does where FSDP2 has replaced parameters."""
    for module in net:
        for name, parameter in list(module.named_parameters()):
            fresh = nn.Parameter(2 * parameter.detach())
            fresh.grad = parameter.grad
            setattr(module, name, fresh)
    optimizer.param_groups[0]["params"] = list(net.parameters())


def replaced_in_place(net, optimizer):
    before = optimizer.param_groups[0]["params"]
    replaced(net, optimizer)
    before[:] = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = before


def taken_out(net, optimizer):
    del optimizer.param_groups[0]["params"][1]


def moved_to_another_group(net, optimizer):
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.1})


@pytest.mark.parametrize("change", [replaced, replaced_in_place, taken_out, moved_to_another_group])
def test_other_parameters_in_its_groups_are_stepped(change):
    found = []
    for cls in (torch.optim.AdamW, partial(AdamW, states="fp32")):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        net.load_state_dict({name: torch.linspace(-1, 1, p.numel()).view_as(p) for name, p in net.state_dict().items()})
        optimizer = cls(net.parameters(), lr=1e-2)
        for step in range(4):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad = torch.full_like(parameter, 1.0 + number + step)
            if step == 2:
                change(net, optimizer)
            optimizer.step()
        found.append([p.detach() for p in net.parameters()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"gradients": "fp8"}, {"release": True}], ids=str)
def test_other_parameters_are_refused_where_hooks_take_gradients(settings):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = AdamW(net.parameters(), **settings)
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(UnsupportedError, match="Make a new optimizer"):
        optimizer.step()


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "fp8"], ids=str)
def test_weights_written_between_steps_are_stepped_from(dtype, states):
    """A master kept apart would bring the old ones back. Where nothing was written it stays."""
    value = torch.randn(16, 256)
    weight = nn.Parameter(FP8Tensor.from_tensor(value) if dtype == "fp8" else value.to(dtype))
    optimizer = AdamW([weight], lr=1e-4, states=states, keep=keep_none, weight_decay=0.0)
    (entry,) = optimizer.entries()

    def step():
        weight.grad = torch.ones(16, 256).to(weight.dtype)
        optimizer.step()
        return optimizer.master_weights()[0]

    def write(value):
        with torch.no_grad():
            weight.copy_(value)

    before = step()
    write(value_of(weight))
    after = step()
    if optimizer.layout_of(entry).master == Storage("fp32"):
        torch.testing.assert_close(after, before - 1e-4, rtol=1e-6, atol=1e-5)
    written = value_of(weight)
    written[3] = 2.0
    write(written)
    master, half = step()[3], 2**-4 if dtype == "fp8" else 2**-8  # of a code: what a remainder may add
    torch.testing.assert_close(master, torch.full((256,), 2 - 1e-4), rtol=half, atol=1e-4)
    torch.testing.assert_close(value_of(weight)[3], torch.full((256,), 2.0), rtol=2 * half, atol=0.0)


def _stepped(weight, **settings):
    optimizer = AdamW([weight], states="fp8-lm", keep=keep_none, weight_decay=0.0, **{"lr": 1e-4, **settings})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def _export_and_import(optimizer, weight):
    optimizer.import_state_dict(optimizer.export_state_dict())


def _load_in_another(optimizer, weight):
    _step_from(optimizer.state_dict(), weight)


def _step_from(state_dict, weight, write=None):
    optimizer = AdamW([weight], states="fp8-lm", keep=keep_none, weight_decay=0.0)
    optimizer.load_state_dict(state_dict)
    optimizer.param_groups[0]["lr"] = 0.0
    if write is not None:
        with torch.no_grad():
            weight.fill_(write)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize(
    "read",
    [
        lambda optimizer, weight: optimizer.convert_states("fp32"),
        lambda optimizer, weight: optimizer.master_weights(),
        _export_and_import,
        _load_in_another,
    ],
    ids=["convert_states", "master_weights", "import_state_dict", "state_dict"],
)
def test_masters_are_read_as_of_the_last_write_to_their_weights(read):
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = _stepped(weight)
    with torch.no_grad():
        weight.fill_(2.0)
    read(optimizer, weight)
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    assert torch.equal(optimizer.master_weights()[0], torch.full((16, 256), 2.0))


@pytest.mark.parametrize("states", TIERS)
def test_weights_whose_data_is_assigned_are_stepped_from(states):
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = AdamW([weight], lr=0.0, states=states, keep=keep_none, weight_decay=0.0)
    for value in (1.0, 2.0, 3.0):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        for each in (-1.0, value):  # the second may take the memory of the first
            weight.data = torch.full_like(weight, each)
        assert torch.equal(optimizer.master_weights()[0], torch.full((16, 256), value))
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 3.0))


def test_an_assignment_in_the_memory_of_the_former_weight_is_seen():
    memory = bytearray(16 * 256 * 2)

    def at_one_address(value):
        tensor = torch.frombuffer(memory, dtype=torch.bfloat16).view(16, 256)
        return tensor.fill_(value)

    weight = nn.Parameter(at_one_address(1.0))
    optimizer = _stepped(weight, lr=0.0)
    address = weight.data_ptr()
    weight.data = at_one_address(2.0)
    assert weight.data_ptr() == address
    assert torch.equal(optimizer.master_weights()[0], torch.full((16, 256), 2.0))


def test_weights_that_only_move_keep_their_masters():
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = _stepped(weight)
    before = optimizer.master_weights()[0]
    weight.data = weight.data.clone()
    assert torch.equal(optimizer.master_weights()[0], before) and not torch.equal(before, before.bfloat16().float())


def test_weights_written_after_their_optimizer_was_loaded_are_stepped_from():
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    _step_from(_stepped(weight).state_dict(), weight, write=2.0)
    assert torch.equal(weight, torch.full_like(weight, 2.0))


def test_weights_written_after_their_states_were_dropped_are_stepped_from():
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = _stepped(weight, lr=0.0)
    optimizer.state.clear()
    with torch.no_grad():
        weight.fill_(2.0)
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 2.0))


def test_states_converted_to_a_tier_without_masters_follow_no_writes(monkeypatch):
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = _stepped(weight)
    optimizer.convert_states("fp8")
    monkeypatch.setattr(convert, "follow_weight", lambda *_: pytest.fail("a weight without a master was followed"))
    optimizer.step()


def _two_of_which_one_has_stepped(**settings):
    net = nn.ParameterList([torch.randn(16, 256).bfloat16() for _ in range(2)])
    optimizer = AdamW(net.parameters(), states="fp8-lm", keep=keep_none, **settings)
    net[0].grad = torch.ones_like(net[0])
    optimizer.step()
    return net, optimizer


def _step_the_other(net, optimizer):
    optimizer.zero_grad()
    net[1].grad = torch.ones_like(net[1])
    optimizer.step()


def test_a_loaded_dict_replaces_all_states():
    net, optimizer = _two_of_which_one_has_stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    _step_the_other(net, optimizer)
    optimizer.load_state_dict(saved)
    assert list(optimizer.state) == [net[0]]
    with torch.no_grad():
        net[1].fill_(2.0)
    assert torch.equal(optimizer.master_weights()[1], torch.full((16, 256), 2.0))


def test_an_imported_dict_replaces_all_states():
    net, optimizer = _two_of_which_one_has_stepped()
    saved = copy.deepcopy(optimizer.export_state_dict())
    _step_the_other(net, optimizer)
    optimizer.import_state_dict(saved)
    assert list(optimizer.state) == [net[0]]
    with torch.no_grad():
        net[1].fill_(2.0)
    assert torch.equal(optimizer.master_weights()[1], torch.full((16, 256), 2.0))


def test_parameters_without_states_are_saved_and_loaded_without():
    net, optimizer = _two_of_which_one_has_stepped()
    optimizer.master_weights()  # PyTorch's `state` is a defaultdict: looking makes an entry
    optimizer.state[net[1]]
    other = AdamW(net.parameters(), states="fp8-lm", keep=keep_none)
    other.load_state_dict(optimizer.state_dict())
    other.import_state_dict(optimizer.export_state_dict())
    theirs = torch.optim.AdamW(net.parameters())
    theirs.load_state_dict(optimizer.export_state_dict())
    theirs.state[net[1]]
    other.import_state_dict(theirs.state_dict())
    assert list(other.state) == [net[0]]


every_move = pytest.mark.parametrize("move", [
    lambda one, other: other.load_state_dict(one.state_dict()),
    lambda one, other: other.import_state_dict(one.export_state_dict()),
    lambda one, other: other.import_state_dict(torch.optim.AdamW.state_dict(one)),
], ids=["load", "import", "import_torch"])  # fmt: skip


@every_move
def test_what_is_loaded_is_not_shared(move):
    net, other = model(), model()
    one = AdamW(net.parameters(), lr=torch.tensor(1e-3), betas=[0.9, 0.99], states="fp32")
    two = AdamW(other.parameters(), states="fp32")
    train(net, one, 1)
    move(one, two)
    one.param_groups[0]["lr"].fill_(0.5)
    one.param_groups[0]["betas"][0] = 0.5
    for state in one.state.values():
        for tensor in state.values():
            tensor.fill_(7.0)
    (group,) = two.param_groups
    assert float(group["lr"]) == pytest.approx(1e-3) and tuple(group["betas"]) == (0.9, 0.99)
    assert all(not (tensor == 7.0).any() for state in two.state.values() for tensor in state.values())


@every_move
def test_a_tensor_of_a_group_keeps_its_memory(move):
    net, other = model(), model()
    one = AdamW(net.parameters(), lr=1e-3, states="fp32")
    two = AdamW(other.parameters(), lr=torch.tensor(0.5), states="fp32")
    train(net, one, 1)
    lr = two.param_groups[0]["lr"]
    move(one, two)
    assert two.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(1e-3)


@pytest.mark.parametrize("states", ["fp32", "exact"])
def test_a_contiguous_state_is_loaded_into_a_parameter_in_another_order(states):
    weight = nn.Parameter(torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last))
    optimizer = AdamW([weight], states=states, keep=keep_none)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {name: tensor.contiguous() for name, tensor in saved["state"][0].items()}
    optimizer.load_state_dict(saved)
    before = optimizer.state[weight]["exp_avg"].clone()
    optimizer.step()
    assert not torch.equal(optimizer.state[weight]["exp_avg"], before)  # what is stepped is what is stored


def test_the_dicts_of_groups_are_left_as_they_are():
    net = model()
    groups = [{"params": list(net.parameters())}]
    tiers = []
    for _ in range(2):
        optimizer = AdamW(groups, states="fp8")
        tiers.append([optimizer.states_of(entry).name for entry in optimizer.entries()])
    assert tiers[0] == tiers[1] and set(tiers[0]) == {"fp32", "fp8"}
    assert set(groups[0]) == {"params"}
    over_groups = AdamW(optimizer.param_groups, states="fp8")
    assert [over_groups.states_of(entry).name for entry in over_groups.entries()] == tiers[0]


def _pickled(both):
    with io.BytesIO() as file:
        torch.save(both, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("settings", [
    {"states": "fp8"}, {"states": "fp8-lm"}, {"states": "fp8", "gradients": "fp8"}, {"states": "fp8", "release": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(duplicate, dtype, settings):
    net = model(dtype)
    optimizer = AdamW(net.named_parameters(), lr=1e-3, seed=7, keep=keep_none, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it replaces `step`, here only
    train(net, optimizer, 2)
    with torch.no_grad():
        net[0].weight.mul_(2.0)
    other, copied = duplicate((net, optimizer))
    assert all(p is q for p, q in zip(copied.param_groups[0]["params"], other.parameters(), strict=True))
    train(net, optimizer, 2, first=2), train(other, copied, 2, first=2)
    assert same(weights(net), weights(other)) and not same(weights(net), weights(model(dtype)))
    with torch.no_grad():
        for each in (net, other):
            each[0].weight.fill_(0.5)
    train(net, optimizer, 1), train(other, copied, 1)
    assert same(weights(net), weights(other))
    assert copied.state_dict()["seed"] == 7 and schedule.last_epoch == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "fp8"])
def test_a_step_between_forward_and_backward_is_an_error(dtype):
    value = torch.randn(32, 32)
    weight = nn.Parameter(FP8Tensor.from_tensor(value.bfloat16()) if dtype == "fp8" else value.to(dtype))
    optimizer = AdamW([weight], lr=0.1)
    x = torch.randn(4, 32, dtype=weight.dtype, requires_grad=True)
    y = linear(x, weight, None, load_recipe("rowwise" if dtype == torch.float32 else "folded"))
    weight.grad = torch.ones(32, 32, dtype=weight.dtype)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_copy_between_backward_and_step_has_the_stored_gradients():
    net = model()
    optimizer = AdamW(net.parameters(), gradients="fp8", keep=keep_none)
    backward(net, 0)
    other, copied = copy.deepcopy((net, optimizer))
    optimizer.step(), copied.step()
    assert same(weights(net), weights(other))


def test_an_optimizer_that_steps_for_zero_is_not_copied():
    optimizer = AdamW(model().parameters())
    optimizer.over_ranks = lambda squares: squares
    with pytest.raises(UnsupportedError, match="GreedyZeRO"):
        copy.deepcopy(optimizer)


def _convert(dtype):
    def change(weight, optimizer):
        weight.data = weight.data.to(dtype)

    return change


def _transpose(weight, optimizer):
    weight.data = weight.data.T.contiguous().T


def _reshape(weight, optimizer):
    weight.data = weight.data[:8].clone()


def _set_the_tier(weight, optimizer):
    optimizer.param_groups[0]["states"] = "exact"


@pytest.mark.parametrize("read", [
    lambda optimizer: optimizer.step(),
    lambda optimizer: optimizer.master_weights(),
    lambda optimizer: optimizer.export_state_dict(),
    lambda optimizer: optimizer.convert_states("fp8-min"),
], ids=["step", "master_weights", "export", "convert"])  # fmt: skip
@pytest.mark.parametrize(
    "change", [_convert(torch.float32), _convert(torch.float16), _transpose, _reshape, _set_the_tier]
)
@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_a_parameter_that_no_longer_fits_its_state_is_named(states, change, read):
    weight = nn.Parameter(torch.randn(16, 256).bfloat16())
    optimizer = AdamW([("mine", weight)], states=states, keep=keep_none)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = None
    change(weight, optimizer)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UnsupportedError, match="parameter 'mine': its state has"):
        read(optimizer)


def test_a_parameter_of_a_dtype_that_no_kernel_steps_is_named():
    weight = nn.Parameter(torch.randn(16, 256))
    optimizer = AdamW([("mine", weight)], states="fp32")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.data, weight.grad = weight.data.double(), None
    with pytest.raises(ConfigError, match=r"parameter 'mine': the dtype torch\.float64"):
        optimizer.master_weights()


@pytest.mark.parametrize(("setting", "said"), [
    ({"fused": True}, "fused"), ({"foreach": None}, "fused"), ({"capturable": True}, "captured"),
    ({"maximize": True}, "parameter group"), ({"amsgrad": False}, "does not implement"),
    ({"differentiable": False}, "does not implement"), ({"decoupled_weight_decay": True}, "Adam adds"),
    ({"weight_decy": 0.1}, "Did you mean 'weight_decay'"), ({"stats": "fp8"}, "Did you mean 'states'"),
    ({"qqq": 1}, "Settings: lr, betas"),
], ids=str)  # fmt: skip
def test_settings_that_there_are_not_are_named(setting, said):
    with pytest.raises(ConfigError, match=f"there is no setting '{next(iter(setting))}'") as error:
        AdamW(model().parameters(), **setting)
    assert said in str(error.value)


@pytest.mark.parametrize(("kind", "setting", "said"), [
    (AdamW, {"weight_decy": 0.1}, "'weight_decay'"), (AdamW, {"lrr": 1}, "'lr'"), (AdamW, {"LR": 1}, "'lr'"),
    (AdamW, {"beta": (0.9, 0.9)}, "'betas'"), (AdamW, {"state": "fp8"}, "'states'"), (Lion, {"eps": 1e-8}, "'lion'"),
    (AdamW, {"momentum": 0.9}, "'adamw'"), (Adam, {"nesterov": True}, "'adam'"),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, "Adam adds"),
], ids=str)  # fmt: skip
def test_keys_of_a_group_that_are_meant_as_settings_are_refused(kind, setting, said):
    with pytest.raises(ConfigError, match=said):
        kind([{"params": model().parameters(), **setting}])


def test_keys_of_others_in_a_group_are_kept():
    others = (
        "initial_lr",
        "name",
        "max_momentum",
        "base_momentum",
        "max_lr",
        "min_lr",
        "swa_lr",
        "lr_scale",
        "lr_mult",
    )
    others += ("weight_decay_mult", "wd_mult", "layer_decay", "use_muon", "layer", "no_decay", "group_name", "tag")
    (group,) = AdamW([{"params": model().parameters(), **dict.fromkeys(others, 1.0)}]).param_groups
    assert all(group[name] == 1.0 for name in others)
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        theirs = kind(model().named_parameters())
        torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, 10)
        assert AdamW(theirs.param_groups).param_groups[0]["max_lr"] == 0.1
    AdamW(AdamW(model().parameters()).param_groups)


@pytest.mark.parametrize("setting", [{"rounding": "nearest"}, {"release": True}, {"amsgrad": True}, {"rule": "lion"}])
def test_settings_that_a_group_cannot_have_are_refused(setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}"):
        AdamW([{"params": [nn.Parameter(torch.zeros(4, 4))], **setting}])
    AdamW([{"params": [nn.Parameter(torch.zeros(4, 4))], "amsgrad": False, "foreach": True, "name": "mine"}])


def test_a_state_of_amsgrad_is_refused():
    weight = nn.Parameter(torch.randn(8, 8))
    theirs = torch.optim.AdamW([weight], amsgrad=True)
    weight.grad = torch.randn(8, 8)
    theirs.step()
    with pytest.raises(CheckpointError, match="amsgrad"):
        AdamW([weight]).import_state_dict(theirs.state_dict())
