"""Muon against PyTorch's, the rule of each parameter, and its state in files and in PyTorch's optimizers."""

import copy
import json

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from octavo.errors import CheckpointError, ConfigError
from octavo.optim import TIERS, Muon, flatten, keep_none, unflatten
from octavo.optim.muon import CHUNK, orthogonalise
from octavo.tensor import FP8Tensor


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.up, self.also, self.down = nn.Linear(64, 160), nn.Linear(64, 160), nn.Linear(160, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.to(dtype)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(torch.tanh(self.up(x)) * self.also(x)))


def backward(net, seed):
    ids = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), (ids * 7 + 3).flatten() % 32)
    loss.backward()
    return loss.detach()


def train(net, optimizers, steps, first=0):
    for step in range(first, first + steps):
        net.zero_grad()
        loss = backward(net, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return float(loss.detach())


def pytorchs(net, adamw_lr=3e-4, **settings):
    """Return PyTorch's two optimizers for what Muon has in one."""
    matrices = [net.up.weight, net.also.weight, net.down.weight]
    chosen = {id(p) for p in matrices}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=settings.get("weight_decay", 0.1))
    return torch.optim.Muon(matrices, **settings), adamw


def theirs_of(batch, *, coefficients, steps, eps):
    return torch.stack([_zeropower_via_newtonschulz(one, coefficients, steps, eps) for one in batch])


@torch.no_grad()
def distance(one, other, start):
    moved = torch.cat([(p - q).flatten() for p, q in zip(other.parameters(), start.parameters(), strict=True)])
    apart = torch.cat([(p - q).flatten() for p, q in zip(other.parameters(), one.parameters(), strict=True)])
    return float(apart.norm() / moved.norm())


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (128, 128), (1, 300), (300, 1)])
def test_the_iteration_is_pytorchs_for_every_matrix_of_a_batch(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    theirs = theirs_of(x, coefficients=(3.4445, -4.775, 2.0315), steps=5, eps=1e-7)
    ours = orthogonalise(x.bfloat16())
    assert ours.is_contiguous()
    assert (ours.float() - theirs.float()).norm() < 2e-2 * theirs.float().norm()  # the order of BF16 roundings
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    cosine = (ours.double() * (u @ v)).sum((1, 2)) / ours.double().norm(dim=(1, 2)) / (u @ v).norm(dim=(1, 2))
    assert (cosine > 0.95).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("smooth", "apart"), [(True, 1e-3), (False, 5e-2)], ids=["smooth", "whole"])
def test_fp32_states_are_pytorchs(monkeypatch, smooth, apart, adjust, nesterov):
    if smooth:  # the iteration makes percents of the last bits of BF16: with another one, the rest is seen to be equal
        monkeypatch.setattr("octavo.optim.muon.orthogonalise", lambda x, **_: x / x.norm(dim=(1, 2), keepdim=True))
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda x, *_: x.bfloat16() / x.norm())
    a, b, start = Net(), Net(), Net()
    settings = {"weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = Muon(a.named_parameters(), lr=0.01, adamw={"lr": 3e-4}, states="fp32", **settings)
    train(a, [ours], 10)
    train(b, pytorchs(b, lr=0.01, **settings), 10)
    assert distance(a, b, start) < apart
    for mine, other in zip(a.named_parameters(), b.parameters(), strict=True):
        if "weight" not in mine[0] or mine[0].startswith(("embed", "head")):
            torch.testing.assert_close(mine[1], other, rtol=1e-3, atol=1e-3)


def test_who_steps_what():
    net = Net()
    optimizer = Muon(net.named_parameters())
    by_muon = {e.name for e in optimizer.entries() if optimizer.rule_of(e) == "muon"}
    assert by_muon == {"up.weight", "also.weight", "down.weight"}
    assert [group["rule"] for group in optimizer.param_groups] == ["muon", "adamw"]
    own = Muon(net.named_parameters(), matrices=lambda name, parameter: name == "embed.weight")
    assert {e.name for e in own.entries() if own.rule_of(e) == "muon"} == {"embed.weight"}
    groups = [{"params": [net.up.weight], "rule": "muon", "lr": 0.5}, {"params": [net.head.weight], "rule": "adamw"}]
    named = Muon(groups, lr=1e-3)
    assert [(group["rule"], group["lr"]) for group in named.param_groups] == [("muon", 0.5), ("adamw", 1e-3)]
    train(net, [optimizer], 1)
    assert set(optimizer.state[net.up.weight]) == {"step", "exp_avg", "exp_avg_scale"}  # FP32 weight: its own master
    assert set(optimizer.state[net.embed.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("states", TIERS)
def test_every_tier_learns(states):
    a, b = Net(torch.bfloat16), Net()
    optimizer = Muon(a.named_parameters(), lr=3e-3, states=states, keep=keep_none)
    loss = train(a, [optimizer], 20)
    reference = train(b, pytorchs(b, lr=3e-3, adamw_lr=3e-3, adjust_lr_fn="match_rms_adamw"), 20)
    assert loss == pytest.approx(reference, rel=0.05)
    assert int(optimizer.skipped) == int(optimizer.clamped) == 0


@pytest.mark.parametrize("states", TIERS)
def test_fp8_weights_are_the_codes_of_their_master(states):
    value = torch.randn(64, 160).bfloat16()
    weight = nn.Parameter(FP8Tensor.from_tensor(value))
    start = weight.detach().dequantize(torch.float32)
    optimizer = Muon([("weight", weight)], lr=0.1, weight_decay=0.0, states=states, keep=keep_none)
    gradient = torch.randn(64, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
    (master,) = optimizer.master_weights()
    ratio = 0.2 * 160**0.5
    expected = start - 2 * 0.1 * ratio * orthogonalise(gradient[None].clone())[0].float()
    assert (master - expected).norm() < 0.02 * (expected - start).norm()
    codes = FP8Tensor.from_tensor(master).dequantize(torch.float32)
    assert (weight.detach().dequantize(torch.float32) - codes).norm() < 0.01 * codes.norm()


def test_matrices_of_one_shape_are_one_batch_of_limited_size(monkeypatch):
    a, b = Net(), Net()
    train(a, [Muon(a.named_parameters(), states="fp8")], 3)
    monkeypatch.setattr("octavo.optim.muon.CHUNK", 1)
    train(b, [Muon(b.named_parameters(), states="fp8")], 3)
    assert CHUNK > 1 and distance(a, b, Net()) < 0.01


def test_a_step_that_is_skipped_changes_nothing():
    net = Net()
    optimizer = Muon(net.named_parameters(), states="fp8", keep=keep_none)
    train(net, [optimizer], 2)
    before = [p.detach().clone() for p in net.parameters()], copy.deepcopy(optimizer.state_dict()["state"])
    backward(net, 3)
    net.down.weight.grad[0, 0] = torch.inf
    optimizer.step()
    assert int(optimizer.skipped) == 1
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before[0], strict=True))
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value.float(), before[1][number][name].float()) for name, value in state.items())


@pytest.mark.parametrize("states", TIERS)
def test_a_saved_state_goes_on_bit_for_bit(states):
    a = Net(torch.bfloat16)
    one = Muon(a.named_parameters(), lr=1e-3, states=states, seed=7, keep=keep_none)
    train(a, [one], 3)
    b = copy.deepcopy(a)
    other = Muon(b.named_parameters(), lr=1.0, states=states, keep=keep_none)
    tensors, rest = flatten(one.state_dict())
    other.load_state_dict(unflatten(load(save(tensors)), json.loads(json.dumps(rest))))
    train(a, [one], 2, first=3), train(b, [other], 2, first=3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("states", ["fp32", "fp8", "fp8-lm"])
def test_pytorchs_muon_reads_an_export_and_is_read(states):
    net = Net()
    ours = Muon(net.named_parameters(), lr=3e-3, states=states, keep=keep_none, rounding="nearest")
    train(net, [ours], 3)
    exported = ours.export_state_dict()
    muon, adamw = pytorchs(net, lr=1.0)
    muon.load_state_dict(exported["muon"]), adamw.load_state_dict(exported["adamw"])
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 3e-3
    again = Muon(net.named_parameters(), states=states, keep=keep_none)
    again.import_state_dict({"muon": muon.state_dict(), "adamw": adamw.state_dict()})
    for rule in ("muon", "adamw"):
        once, twice = exported[rule]["state"], again.export_state_dict()[rule]["state"]
        assert all(torch.equal(v, twice[n][k]) for n, values in once.items() for k, v in values.items())
    assert set(exported["muon"]["state"][0]) == {"momentum_buffer"}
    backward(net, 9)
    muon.step(), adamw.step()
    with pytest.raises(CheckpointError, match="muon and adamw"):
        again.import_state_dict(muon.state_dict())


def test_states_are_converted_in_mid_run():
    net = Net(torch.bfloat16)
    optimizer = Muon(net.named_parameters(), states="exact", keep=keep_none)
    train(net, [optimizer], 2)
    before = optimizer.export_state_dict()["muon"]["state"][0]["momentum_buffer"]
    optimizer.convert_states("fp8")
    after = optimizer.export_state_dict()["muon"]["state"][0]["momentum_buffer"]
    assert 0 < (before - after).norm() < 0.05 * before.norm()
    train(net, [optimizer], 1, first=2)


def test_a_scheduler_moves_both_rates_and_a_tensor_is_one():
    net = Net()
    rate = torch.tensor(1e-3)
    optimizer = Muon(net.named_parameters(), lr=rate, adamw={"lr": 1e-4})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-5])
    train(net, [optimizer], 1)
    scheduler.step()


def test_released_gradients_make_the_same_step():
    a, b = Net(), Net()
    one, other = Muon(a.named_parameters(), release=True), Muon(b.named_parameters())
    for step in range(2):
        backward(a, step), backward(b, step)
        assert all(p.grad is None for p in a.parameters())
        one.step(), other.step()
        other.zero_grad()
    assert distance(a, b, Net()) < 0.01


def test_a_copy_goes_on_bit_for_bit():
    net = Net(torch.bfloat16)
    optimizer = Muon(net.named_parameters(), lr=1e-3, states="fp8", keep=keep_none)
    train(net, [optimizer], 2)
    other, copied = copy.deepcopy((net, optimizer))
    train(net, [optimizer], 2, first=2), train(other, [copied], 2, first=2)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    copied.add_param_group({"params": [("more", nn.Parameter(torch.zeros(8, 8)))]})


def test_bad_input():
    net = Net()
    named = list(net.named_parameters())
    with pytest.raises(ConfigError, match=r"pass model\.named_parameters"):
        Muon(net.parameters())
    with pytest.raises(ConfigError, match="about 50 times AdamW's"):
        Muon(named, adjust_lr_fn="original")
    with pytest.raises(ConfigError, match="is not a matrix"):
        Muon(named, matrices=lambda name, parameter: True)
    with pytest.raises(ConfigError, match="neither muon nor adamw"):
        Muon([{"params": [net.up.weight], "rule": "sgd"}])
    for wrong in (
        {"momentum": 1.0}, {"ns_steps": 0}, {"ns_coefficients": (1.0, 2.0)}, {"adjust_lr_fn": "matched"}, {"lr": -1.0},
        {"adamw": {"rate": 1.0}}, {"weight_decay": -1.0}, {"adamw": {"betas": (0.9, 1.0)}},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Muon(named, **wrong)
    for unknown in ({"fused": True}, {"ns_step": 3}, {"betas": (0.9, 0.95)}):
        with pytest.raises(ConfigError, match="there is no setting"):
            Muon(named, **unknown)
    with pytest.raises(ConfigError, match="Did you mean 'ns_steps'"):
        Muon([{"params": named, "ns_step": 3}])
    shared = {"betas": (0.9, 0.9), "momentum": 0.9, "use_muon": True, "max_momentum": 0.95}
    Muon([{"params": named, **shared}])


def test_no_gradient_and_no_eps_is_no_update():
    """0 / 0 would make the weight NaN, and a norm of 0 whose elements are not would make it infinite."""
    weight = nn.Parameter(torch.ones(8, 16))
    optimizer = Muon([("hidden", weight)], lr=0.1, weight_decay=0.0, eps=0.0)
    for size in (0.0, 1e-40, 1e-25):
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
        assert (weight - 1).abs().max() < 0.1
